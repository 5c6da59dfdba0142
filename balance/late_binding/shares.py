"""The shares of ranks as words in the store that ``torch.distributed`` was set up with. (Needs torch.)"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections import deque
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store

from odc.balance.checks import FloatArray
from odc.balance.data.iteration import report_learned, wait_for_rank
from odc.balance.data.place import Place, Together
from odc.balance.late_binding.estimates import LearnedEstimates, Times
from odc.balance.late_binding.outlook import Share
from odc.balance.partition.differencing import Parts

MOST_LOOKED_AT = 32
"""Ranks that one looks at, those behind it in their order: each look is a round trip to the store."""

_num_loaders = itertools.count()


class Shares:
    """The shares of all ranks in the minibatches of one loader, in the store of ``torch.distributed``.

    Args:
        place: of this process among those that have different samples.
        identity: what the loaders of all ranks have in common.
        store: of all ranks, a connection of this loader's own.
        together: ranks that compute the same microbatches. The first one of them begins and takes; the others are told
            by it. None: each is at a place of its own.
        speeds, microbatch_cost, learns_speeds: what plans begin to count with, see :class:`LearnedEstimates`.

    Raises:
        ValueError: another process has a loader at this place.
    """

    def __init__(
        self,
        place: Place,
        identity: str,
        store: Store,
        speeds: FloatArray | None = None,
        together: Together | None = None,
        microbatch_cost: float = 0.0,
        *,
        learns_speeds: bool = False,
    ) -> None:
        self.rank = place.rank
        self._together = together or Together([place.rank], 0, f"{place.ranks}")
        self.leads = self._together.index == 0
        """Whether this rank is not told what to run by another one."""
        self.others = [(place.rank + step) % place.world_size for step in range(1, place.world_size)][:MOST_LOOKED_AT]
        digest = hashlib.sha256(f"{identity} {self._together.whole}".encode()).hexdigest()[:16]
        self._store = PrefixStore(digest, store)
        if self._store.add(f"place/{place.rank}/{self._together.index}", 1) > 1:
            raise ValueError(
                f"late_binding=True: two processes have a loader at rank {place.rank}. Give each its own rank; where "
                "ranks compute together, give mesh=, the data-parallel dimensions of the mesh of all ranks"
            )
        self.times = Times()
        self.estimates = LearnedEstimates(
            place.rank,
            place.world_size,
            self._store,
            speeds,
            microbatch_cost,
            report_learned,
            learns_speeds=learns_speeds,
        )
        self.num_taken = 0
        """Samples that this rank, or the one that leads, has taken from others."""
        self._expected = ""
        self._key = ""
        self._word = b""
        self._is_known = False
        """Whether the word is in the store: it is when the first microbatch is begun."""
        self._begun: deque[str] = deque()
        self._takers: dict[str, list[int]] = {}
        self._doubted: list[str] = []
        self._num_told = 0
        self._told: deque[tuple[str, int]] = deque()
        """Of the last minibatches: the name of this rank's word, and how many microbatches were told beside it."""

    def expect(self, key: str) -> None:
        """The minibatch ``key`` is next, and the one before it is over: nobody takes anything more from it."""
        if self._key and self.leads:
            while Share.decode(self._word).microbatches and not self._put([], 0.0):
                pass  # others were faster
            if takers := Share.decode(self._word).takers:
                self._takers.setdefault(_minibatch(self._key), []).extend(takers)
        self._forget()
        if _epoch(key) != _epoch(self._expected):
            self._takers.clear()  # of an earlier epoch nothing is begun anew
        self._key, self._expected = "", key

    def _forget(self) -> None:
        """Delete what nobody reads any more, here where no other rank waits for it."""
        while self._told and self._store.add(f"{self._told[0][0]}/heard", 0) == len(self._together.ranks) - 1:
            name, num_told = self._told.popleft()
            for what in (*range(num_told), "heard"):
                self._store.delete_key(f"{name}/{what}")
        # Who has begun a minibatch looks at no word of the one before the last.
        while len(self._begun) > 2:
            self._store.delete_key(self._begun.popleft())

    def open(self, key: str, microbatches: Parts) -> None:
        """Tell of this rank's share of the minibatch ``key``.

        Raises:
            RuntimeError: this rank had begun the last minibatch before, and those that took some of it then have not
                begun it anew.
        """
        self._require(key)
        if self._key == key:
            raise RuntimeError(
                "the microbatches of this minibatch were iterated before: with late_binding=True each is bound to this "
                "rank when it is asked for, once"
            )
        if not self.leads:
            self._key, self._num_told = key, 0
            return
        if any(not self._store.compare_set(name, "", "") for name in self._doubted):
            raise RuntimeError(
                f"rank {self.rank} has begun a minibatch of this loader twice, others once: they had taken samples "
                "from it the first time, and those have counted twice in the last step. To look at a minibatch on one "
                "rank, use another loader"
            )
        self._key = key
        self._doubted = [self._name(rank) for rank in self._takers.get(_minibatch(key), [])]
        self._word = Share(microbatches, 0.0, time.time(), self.times.rate, []).encode()
        self._is_known = False
        self._begun.append(self._name(self.rank))
        self._num_told = 0

    def mine(self, key: str) -> Share:
        """What is left of this rank's share."""
        self._require(key)
        return Share.decode(self._word)

    def of_others(self) -> dict[int, Share]:
        """Of the ranks that have begun this minibatch."""
        names = [self._name(rank) for rank in self.others]
        if self._store.check(names):  # one round trip, and one for all words
            words = self._store.multi_get(names)
        else:
            words = [self._store.compare_set(name, "", "") for name in names]
        return {rank: Share.decode(word) for rank, word in zip(self.others, words, strict=True) if word}

    def begin(self, parts: Parts, cost: float) -> bool:
        """Begin the first of ``parts``, which are what was left of :meth:`mine`; False: others have taken some of it
        meanwhile."""
        return self._put(parts[1:], cost)

    def take(self, rank: int, share: Share, part: list[int]) -> bool:
        """Take samples from the last microbatch of a rank; False: its share is another one meanwhile."""
        *before, last = share.microbatches
        left = [sample for sample in last if sample not in part]
        by = replace(
            share, microbatches=[*before, left] if left else before, takers=[*share.takers, self.rank]
        ).encode()
        if self._replaced(rank, share.encode(), by) != by:
            return False
        self.num_taken += len(part)
        return True

    def tell(self, part: list[int]) -> None:
        """Have those that compute together with this rank run these samples next; none: nothing comes any more."""
        if len(self._together.ranks) == 1:
            return
        self._store.set(f"{self._name(self.rank)}/{self._num_told}", json.dumps(part))
        self._num_told += 1
        if not part:
            self._told.append((self._name(self.rank), self._num_told))

    def hear(self) -> list[int]:
        """What the rank that leads has told. Waits for it.

        Raises:
            OdcError: it, or another one, has failed meanwhile.
        """
        self._require(self._key)
        name, leader = f"{self._name(self.rank)}/{self._num_told}", self._together.ranks[0]

        def is_there() -> bool:
            try:
                return bool(self._store.check([name]))
            except RuntimeError:  # the process that has the store is gone: who looks for ranks has a better account
                return False

        wait_for_rank(is_there, f"the choice of a microbatch, which rank {leader} makes for those beside it", leader)
        self._num_told += 1
        part: list[int] = json.loads(self._store.get(name))
        if not part:
            self._store.add(f"{self._name(self.rank)}/heard", 1)
        return part

    def is_through(self, cost: float = 0.0) -> None:
        """Nothing is left of this rank's share; ``cost`` of what it has begun is under way."""
        self._put([], cost)

    def _require(self, key: str) -> None:
        if key != self._expected:
            raise RuntimeError("this minibatch is over, since the next one was asked for: its microbatches are no more")

    def _put(self, microbatches: Parts, running: float) -> bool:
        """Replace this rank's share; False: by then it was another one, which is known now."""
        old = Share.decode(self._word)
        new = Share(microbatches, running, time.time(), self.times.rate, old.takers).encode()
        if self._is_known and old.microbatches:
            self._word = self._replaced(self.rank, self._word, new)
        else:  # nobody else has anything to replace
            self._store.set(self._name(self.rank), new.decode())
            self._word, self._is_known = new, True
        return self._word == new

    def _replaced(self, rank: int, word: bytes, by: bytes) -> bytes:
        """What is there once ``by`` has taken the place of ``word``, or another word has before."""
        found: bytes = self._store.compare_set(self._name(rank), word.decode(), by.decode())
        return found

    def _name(self, rank: int) -> str:
        return f"{self._key}/{rank}"


def _minibatch(key: str) -> str:
    return key.partition("/")[0]


def _epoch(key: str) -> str:
    return key.partition(".")[0]


def together_on(mesh: DeviceMesh | None) -> Together | None:
    """The ranks that compute together with this one, by the mesh of a loader.

    Raises:
        ValueError: nobody knows which.
    """
    if mesh is None or not dist.is_initialized():
        return None
    found = Together.of(mesh)
    if found is None:
        raise ValueError(
            f"late_binding=True with a mesh of {mesh.size()} of {dist.get_world_size()} ranks, which is no part of one "
            "of all ranks: which ranks compute together is not known, and they would take different samples. Give the "
            "data-parallel dimensions of the mesh of all ranks, such as mesh['dp']"
        )
    return found


def own_store() -> Store:
    """The store of ``torch.distributed``, by a connection of its own: torch's may be taken, by a thread that waits.

    Its keys are those of one loader, which is the same one on each rank if all make theirs in the same order.

    Raises:
        RuntimeError: there is no process group.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "late_binding=True without a process group, in whose store ranks tell each other what they have left: call "
            "torch.distributed.init_process_group first"
        )
    connection: Any = _get_default_store()
    return PrefixStore(f"odc/late/{next(_num_loaders)}", connection.clone())
