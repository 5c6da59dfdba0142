"""The work queues of ranks as keys in ``torch.distributed``'s store. (Needs torch.)

[Note: Which loaders belong together] Samples may move between ranks only if both compute the same minibatch. But a rank
may inspect the minibatch with a second, equal loader, or have further loaders of other data. So a loader takes part
only after a backward has come between two of its microbatches, which shows that they are computed. Its name is the same
on all ranks without communication: what the loader reads, and after how many steps this iteration began. Loaders with
different names share nothing, and warn. If a rank has several loaders with the same name, only one of them takes part
in a step, since their samples could not be told apart.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
import uuid
from collections import deque
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store

from odc.balance.checks import FloatArray
from odc.balance.data.iteration import report_learned, trained, wait_for_rank
from odc.balance.data.place import Place, Together
from odc.balance.data.watched_store import WatchedStore
from odc.balance.late_binding.estimates import LearnedEstimates, Times
from odc.balance.late_binding.steal_policy import WorkQueue
from odc.balance.partition.differencing import Parts

logger = logging.getLogger("odc")

MOST_LOOKED_AT = 32
"""Ranks that one looks at, those behind it in their order: each look is a round trip to the store."""
_NOTHING = WorkQueue([], 0.0, 0.0, 0.0, [])


class WorkQueues:
    """The queues of all ranks in the minibatches of one loader, in the store of ``torch.distributed``. That is asked
    when a minibatch is planned or computed, not before.

    Args:
        place: of this process among those that have different samples.
        identity: what the loaders of all ranks have in common: what they read, and how they share it out.
        store: of all ranks, a connection of this loader's own.
        together: ranks that compute the same microbatches. The first one of them begins and takes; the others are told
            by it. None: each is at a place of its own.
        speeds, microbatch_cost, learns_speeds: what plans begin to count with, see :class:`LearnedEstimates`.
    """

    def __init__(
        self,
        place: Place,
        identity: str,
        store: Any,
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
        self._prefix, self._store = f"odc/late/{digest}", store
        self._loader = f"{os.getpid()}/{uuid.uuid4().hex[:8]}"
        self.times = Times()
        self.estimates = LearnedEstimates(
            place.rank,
            place.world_size,
            store,
            self._prefix,
            speeds,
            microbatch_cost,
            report_learned,
            learns_speeds=learns_speeds,
        )
        self.num_taken = 0
        """Samples that this rank, or the one that leads, has taken from others."""
        self._expected = 0, ""
        self._has_warned = False
        self._has_looked = False
        """Whether each of the others has a word in the store, if an empty one."""
        self._num_told = 0
        self._choices = "", 0
        """The minibatch of which choices were told or heard last, and how often in a row it had been begun again."""
        self._told: deque[tuple[str, int]] = deque()
        """Of the last minibatches: the name of their choices, and how many were told."""
        self._queue, self._word = _NOTHING, b""
        self._num_begun, self._takes = 0, True
        self._opened = self._before = trained()
        self.begin_pass()

    def begin_pass(self) -> None:
        """A pass over the data begins. Nothing is shared until the loader is seen to train."""
        self._close()
        self.binds = False
        """Whether samples may go to and from this rank: see [Note: Which loaders belong together]."""
        self._pass: int | None = None
        self._num_opened, self._second_step = 0, math.inf
        self._word = b""
        """What is in the store, if this loader has put it there in this pass."""

    def expect(self, minibatch: str) -> int:
        """This minibatch is next, and the one before it is over: nobody takes anything more from it. A number to ask
        for it by."""
        self._close()
        self._forget()
        self._expected = self._expected[0] + 1, minibatch
        return self._expected[0]

    def close(self) -> None:
        """Let go of the store until it is asked again."""
        if isinstance(self._store, WatchedStore):
            self._store.close()

    def _close(self) -> None:
        if not self._queue.minibatch:
            return
        if self.leads:
            while self._queue.microbatches and not self._put([], 0.0):
                pass  # others were faster
        if not self._num_begun:  # it has come to the end of the step with the others
            self.binds = self.binds or trained().minibatches > self._opened.minibatches
        self._queue = replace(self._queue, minibatch="")

    def _forget(self) -> None:
        """Delete what nobody reads any more, here where no other rank waits for it."""
        while self._told and self._store.add(f"{self._told[0][0]}/heard", 0) == len(self._together.ranks) - 1:
            name, num_told = self._told.popleft()
            for what in (*range(num_told), "heard"):
                self._store.delete_key(f"{name}/{what}")

    def open(self, number: int, microbatches: Parts) -> None:
        """Begin with this rank's queue of the minibatch that is expected by this number."""
        self._require(number)
        if self._queue.minibatch:
            raise RuntimeError(
                "the microbatches of this minibatch were iterated before: with late_binding=True each is bound to this "
                "rank when it is asked for, once"
            )
        done = trained()
        if self._num_opened and self._num_begun and not self.binds and done.backwards > self._opened.backwards:
            self._warn_of_reading_ahead()  # and computed them later
        self._opened = self._before = done
        self._pass = self._opened.minibatches if self._pass is None else self._pass
        self._num_opened, self._num_begun, self._num_told = self._num_opened + 1, 0, 0
        self._takes = True
        self._queue = replace(
            _NOTHING,
            microbatches=microbatches,
            minibatch=f"{self._pass}/{self._expected[1]}",
            step=self._opened.minibatches,
            loader=self._loader,
        )
        if self._num_opened == 2:
            self._second_step = self._queue.step
        elif self._second_step < self._queue.step and self.binds and self.leads:
            self._second_step = math.inf
            self._say_who_is_alone()

    @property
    def now(self) -> float:
        """Seconds since all ranks last met before this minibatch."""
        return time.monotonic() - self._opened.met_s

    def mine(self, number: int) -> WorkQueue:
        """What is left of this rank's queue."""
        self._require(number)
        return self._queue

    def of_others(self) -> dict[int, WorkQueue]:
        """Of the ranks that have begun this minibatch; none, where nothing may be taken."""
        if not (self.binds and self._takes):
            return {}
        return {rank: queue for rank, queue in self._words() if queue.minibatch == self._queue.minibatch}

    def _words(self) -> list[tuple[int, WorkQueue]]:
        names = [self._name(rank) for rank in self.others]
        if not self._has_looked:  # that leaves an empty word where there was none, and all can be asked for at once
            for name in names:
                self._store.compare_set(name, "", "")
        self._has_looked = True
        words = self._store.multi_get(names)
        return [
            (rank, WorkQueue.decode(word) if word else _NOTHING) for rank, word in zip(self.others, words, strict=True)
        ]

    def _say_who_is_alone(self) -> None:
        """All have begun the second minibatch of this pass, since they have ended a step with it."""
        found = self._words()
        alone = sorted(rank for rank, queue in found if queue.minibatch.partition("/")[0] != f"{self._pass}")
        if alone and self.rank == min(rank for rank in (self.rank, *(rank for rank, _ in found)) if rank not in alone):
            logger.warning(
                "odc: late binding goes on without ranks %s: no samples go to or from these. They train with a loader "
                "that has other arguments (samples, lengths, costs, seed, mesh), or began to iterate it at another "
                "step, or ask for microbatches ahead of computing them",
                alone,
            )

    def begin(self, parts: Parts, cost: float) -> bool:
        """Begin the first of ``parts``, which are what was left of :attr:`mine`; False: others have taken some of it
        meanwhile."""
        return self._put(parts[1:], cost)

    def steal(self, rank: int, queue: WorkQueue, part: list[int]) -> bool:
        """Steal samples from the last microbatch of a rank; False: its queue is another one meanwhile."""
        *before, last = queue.microbatches
        left = [sample for sample in last if sample not in part]
        by = replace(
            queue, microbatches=[*before, left] if left else before, thieves=[*queue.thieves, self.rank]
        ).encode()
        if self._store.compare_set(self._name(rank), queue.encode().decode(), by.decode()) != by:
            return False
        self.num_taken += len(part)
        self._queue = replace(self._queue, has_stolen=True)
        return True

    def handed_out(self, part: list[int]) -> None:
        """A microbatch of these samples is about to be computed; none: this rank is through."""
        self._num_begun += bool(part)
        self._before = trained()
        if self.leads and self.binds and len(self._together.ranks) > 1:
            self._store.set(self._next_choice(), json.dumps(part))
            if not part:
                self._told.append((self._told_name, self._num_told))

    def came_back(self) -> bool:
        """Another one is asked for. Whether the last one was computed; else this rank takes nothing: it would seem to
        be infinitely fast."""
        is_computed = trained().backwards > self._before.backwards
        self.binds = self.binds or is_computed
        if not is_computed:
            self._takes = False
            if self.binds:
                self._warn_of_reading_ahead()
        return is_computed

    def _warn_of_reading_ahead(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "odc: rank %d has asked for a microbatch before the last one had a backward: in such a minibatch late "
                "binding gives it no samples of others. Iterate minibatch.microbatches as you compute them, without a "
                "list and without reading ahead",
                self.rank,
            )

    def hear(self, number: int) -> list[int]:
        """What the rank that leads has told. Waits for it.

        Raises:
            OdcError: it, or another one, has failed meanwhile.
        """
        self._require(number)
        name, leader = self._next_choice(), self._together.ranks[0]
        what = f"the choice of a microbatch, which rank {leader} makes for those beside it"
        wait_for_rank(lambda: bool(self._store.check([name])), what, leader)
        part: list[int] = json.loads(self._store.get(name))
        if not part:
            self._store.add(f"{self._told_name}/heard", 1)
        return part

    def is_through(self, cost: float = 0.0) -> None:
        """Nothing is left of this rank's queue; ``cost`` of what it has begun is under way, or nothing."""
        self._queue = replace(self._queue, is_through=not cost)
        self._put([], cost)

    def _require(self, number: int) -> None:
        if number != self._expected[0]:
            raise RuntimeError("this minibatch is over, since the next one was asked for: its microbatches are no more")

    def _put(self, microbatches: Parts, running: float) -> bool:
        """Replace this rank's queue; False: by then it was another one, which is known now."""
        queue = replace(self._queue, microbatches=microbatches, running=running, since=self.now, rate=self.times.rate)
        if self.binds:
            name, new, last = self._name(self.rank), queue.encode(), self._word
            while (there := self._store.compare_set(name, last.decode(), new.decode())) != new:
                found, last = WorkQueue.decode(there), there
                if self._word and found.loader == self._loader:
                    self._word, self._queue = there, found
                    return False
                self._require_to_be_alone(found)
                if found.loader != self._loader and found.step > (self._pass or 0):
                    self._second_step = (
                        math.inf
                    )  # two loaders alike take turns, here and elsewhere: words are of either pass
            self._word = new
        self._queue = queue
        return True

    def _require_to_be_alone(self, other: WorkQueue) -> None:
        """Refuse to go on where another loader's word, or one of an earlier pass, is of a queue that still counts.

        Raises:
            RuntimeError: it is another process's, has taken the place of this loader's, or counts in this step.
        """
        process = other.loader.partition("/")[0]
        if process != self._loader.partition("/")[0]:
            raise RuntimeError(
                f"late_binding=True: the processes {os.getpid()} and {process} both have a loader at rank {self.rank}. "
                "Give each its own rank; where ranks compute together, give mesh=, the data-parallel dimensions of the "
                "mesh of all ranks"
            )
        is_replaced = bool(self._word) and bool(WorkQueue.decode(self._word).microbatches)
        is_alike = other.loader != self._loader and other.minibatch == self._queue.minibatch
        if is_replaced or (other.step == self._queue.step and (other.is_torn or is_alike)):
            raise RuntimeError(
                f"rank {self.rank} has begun a minibatch twice in one step, with two loaders alike or by iterating one "
                "again: samples that went to or from other ranks the first time would count twice or not at all, or in "
                "the other loader's loss. Go through the microbatches of one of them, then step; or give each its own "
                "seed"
            )

    def _name(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def _next_choice(self) -> str:
        """The name of a choice that is told or heard, which no other one has had that may still be there."""
        if not self._num_told:
            minibatch, num_again = self._choices
            self._choices = self._queue.minibatch, num_again + 1 if minibatch == self._queue.minibatch else 0
        self._num_told += 1
        return f"{self._told_name}/{self._num_told - 1}"

    @property
    def _told_name(self) -> str:
        minibatch, num_again = self._choices
        return f"{self._prefix}/{self.rank}/{minibatch}/{num_again}"


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


def own_store() -> WatchedStore:
    """The store of ``torch.distributed``, by a connection of its own: torch's may be taken, by a thread that waits.

    Raises:
        RuntimeError: there is no process group.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "late_binding=True without a process group, in whose store ranks tell each other what they have left: call "
            "torch.distributed.init_process_group first"
        )
    connection: Any = _get_default_store()
    return WatchedStore(connection.clone, "ranks tell each other what they have begun")
