"""Late binding: samples that no rank has begun go to ranks that have nothing left. (Needs torch.)

A plan knows costs to some percent, and devices differ. So a rank that is through with its share looks who will be
late, and takes from the end of that one's share what evens them out. And a rank that will be late begins its last
microbatches in parts, so that there is something to take. Where all goes as planned nothing is taken or split.

What a rank has yet to begin stands in a word of the store that ``torch.distributed`` was set up with. Whoever begins or
takes samples puts another word in its place if it is still the one that was read (compare and set), so each sample is
begun once. The samples of a rank that dies are missed at the end of the minibatch, as without late binding.

Of ranks that compute together, one begins and takes, and leaves each choice in the store for the others.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store

from odc.balance.checks import FloatArray, IntArray
from odc.balance.data.estimates import LearnedEstimates, Times
from odc.balance.data.iteration import ranks_go_in_step, report_learned, sums_are_in_order, wait_for_rank
from odc.balance.data.place import Place, Together
from odc.balance.partition.differencing import Parts
from odc.balance.plan import PackedOnDemand, Plan, PlannedMinibatch
from odc.balance.policies.packing import first_fit_decreasing, pack

BatchT = TypeVar("BatchT")
BatchT_co = TypeVar("BatchT_co", covariant=True)

MOST_LOOKED_AT = 32
"""Ranks that one looks at, those behind it in their order: each look is a round trip to the store."""
OVERDUE = 0.1
"""What is left of a microbatch that should be through already, of its whole time."""
LEAST_EXCESS = 0.02
"""Of a rank's share: who will be late by less begins nothing in parts."""

_num_loaders = itertools.count()


@dataclass(frozen=True)
class Share:
    """What a rank tells of its part of a minibatch."""

    microbatches: Parts
    """Not begun; positions of samples in the minibatch."""
    running: float
    """Cost of what it has begun last; 0: it is through."""
    since: float
    """When it began that, in seconds of the wall clock."""
    rate: float
    """Cost per second that it was found to compute; 0: not known yet."""
    takers: list[int]
    """Ranks that have taken something from it, one for each time; so no two words are alike."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @staticmethod
    def decode(word: bytes) -> Share:
        return Share(**json.loads(word))


def falling(plan: Plan) -> Plan:
    """The plan with the same samples on each rank, in the microbatches of :func:`packed_falling`."""
    return replace(plan, microbatches=packed_falling(shares_of(plan), plan.lengths, plan.costs, plan.max_tokens))


def shares_of(plan: Plan) -> Parts:
    """The samples of each rank."""
    shares = plan.microbatches
    return shares.ranks if isinstance(shares, PackedOnDemand) else [list(itertools.chain(*mine)) for mine in shares]


def packed_falling(ranks: Parts, lengths: IntArray, costs: FloatArray, max_tokens: int) -> PackedOnDemand:
    """Microbatches of which the first are as full as can be and the last one small: that is left to take when a rank
    turns out to be late. Not where that needs more microbatches.

    Args:
        ranks: the samples of each rank.
        lengths, costs: of all samples.
    """

    def packed(mine: list[int]) -> Parts:
        samples = np.array(mine, dtype=np.int64)
        fewest = pack(lengths[samples], costs[samples], max_tokens)
        filled = first_fit_decreasing(lengths[samples], max_tokens)
        parts: Parts = [samples[part].tolist() for part in (filled if len(filled) <= len(fewest) else fewest)]
        return sorted(parts, key=lambda part: -float(costs[part].sum()))

    return PackedOnDemand(ranks, packed)


@dataclass(frozen=True)
class Outlook:
    """When ranks will be through with a minibatch, as seen at one moment, and what should go from one to another."""

    plan: Plan
    now: float
    """In seconds of the wall clock."""
    rate: float
    """Of this rank; taken for those of which none is known."""

    def cost(self, part: list[int]) -> float:
        """Of a microbatch of these samples."""
        return float(self.plan.costs[part].sum()) + self.plan.microbatch_cost

    def rate_of(self, share: Share) -> float:
        return share.rate or self.rate

    def end(self, share: Share) -> float:
        """When a rank will be through, if nothing is taken from it."""
        rate = self.rate_of(share)
        left_s = max(share.since + share.running / rate - self.now, OVERDUE * share.running / rate)
        return self.now + left_s + sum(map(self.cost, share.microbatches)) / rate

    def may_split(self, parts: Parts) -> bool:
        """Whether it is worth a look at the others: something can be split, and little lies behind it."""
        first, *behind = parts
        return bool(self.rate) and len(first) > 1 and sum(map(self.cost, behind)) <= self.cost(first)

    def split(self, parts: Parts, others: list[Share]) -> Parts:
        """``parts`` of this rank, the first of them in two if others can then take the second half of it.

        It is if this rank will be later than the mean by more than what a further microbatch costs, and what it would
        not have begun is less than that.
        """
        first, *behind = parts
        left = sum(map(self.cost, behind))
        end = self.now + (self.cost(first) + left) / self.rate
        mean = (end + sum(map(self.end, others))) / (1 + len(others))
        excess = (end - mean) * self.rate
        share = float(self.plan.costs.sum()) / self.plan.world_size
        if left >= excess or excess - left <= self.plan.microbatch_cost + LEAST_EXCESS * share:
            return parts
        half = float(self.plan.costs[first].sum()) / 2
        least = self._cheapest(first)
        later = self._largest(first, min(excess - left, half)) or ([least] if self.plan.costs[least] <= half else [])
        now = [sample for sample in first if sample not in later]
        return [now, later, *behind] if now and later else parts

    def take(self, share: Share) -> list[int]:
        """What this rank should take of another one's last microbatch, so that both end as early as can be; none if
        that one would be through earlier by itself."""
        if not self.rate or not share.microbatches:
            return []
        last, rate, end = share.microbatches[-1], self.rate_of(share), self.end(share)
        # Both end at the same time with this much.
        even = (end - self.now - self.plan.microbatch_cost / self.rate) / (1 / self.rate + 1 / rate)
        if taken := self._largest(last, even):
            return taken
        least = self._cheapest(last)
        return [least] if self.now + self.cost([least]) / self.rate < end else []

    def _cheapest(self, part: list[int]) -> int:
        return min(part, key=lambda sample: float(self.plan.costs[sample]))

    def _largest(self, part: list[int], most: float) -> list[int]:
        """Samples that cost at most ``most`` in all, the costliest that fit first."""
        found, left = [], most
        for sample in sorted(part, key=lambda sample: -float(self.plan.costs[sample])):
            if (cost := float(self.plan.costs[sample])) <= left:
                found.append(sample)
                left -= cost
        return found


class Shares:
    """The shares of all ranks in the minibatches of one loader, in the store of ``torch.distributed``.

    Args:
        place: of this process among those that have different samples.
        identity: what the loaders of all ranks have in common.
        store: of all ranks, a connection of this loader's own.
        together: ranks that compute the same microbatches. The first one of them begins and takes; the others are told
            by it. None: each is at a place of its own.
        speeds, microbatch_cost: what plans begin to count with, see :class:`LearnedEstimates`.

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
            place.rank, place.world_size, self._store, speeds, microbatch_cost, report_learned
        )
        self.num_taken = 0
        """Samples that this rank, or the one that leads, has taken from others."""
        self._expected = ""
        self._key = ""
        self._word = b""
        self._begun: deque[str] = deque()
        self._takers: dict[str, list[int]] = {}
        self._doubted: list[str] = []
        self._num_told = 0
        self._told: deque[tuple[str, int]] = deque()
        """Of the last minibatches: the name of this rank's word, and how many microbatches were told beside it."""

    def expect(self, key: str) -> None:
        """The minibatch ``key`` is next, and the one before it is over: nobody takes anything more from it."""
        if self._key and self.leads:
            while not self._put([], 0.0):
                pass  # others were faster
            if takers := Share.decode(self._word).takers:
                self._takers.setdefault(_minibatch(self._key), []).extend(takers)
        if _epoch(key) != _epoch(self._expected):
            self._takers.clear()  # of an earlier epoch nothing is begun anew
        self._key, self._expected = "", key

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
        self._store.set(self._name(self.rank), self._word.decode())
        self._begun.append(self._name(self.rank))
        self._num_told = 0
        while self._told and self._store.add(f"{self._told[0][0]}/heard", 0) == len(self._together.ranks) - 1:
            name, num_told = self._told.popleft()
            for what in (*range(num_told), "heard"):
                self._store.delete_key(f"{name}/{what}")
        # Who has begun this minibatch looks at no word of the one before the last.
        while len(self._begun) > 2:
            self._store.delete_key(self._begun.popleft())

    def mine(self, key: str) -> Share:
        """What is left of this rank's share."""
        self._require(key)
        return Share.decode(self._word)

    def of_others(self) -> dict[int, Share]:
        """Of the ranks that have begun this minibatch."""
        words = {rank: self._store.compare_set(self._name(rank), "", "") for rank in self.others}
        return {rank: Share.decode(word) for rank, word in words.items() if word}

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
        """Nothing is left of this rank's share; ``cost`` of what it has taken is under way."""
        self._put([], cost)

    def _require(self, key: str) -> None:
        if key != self._expected:
            raise RuntimeError("this minibatch is over, since the next one was asked for: its microbatches are no more")

    def _put(self, microbatches: Parts, running: float) -> bool:
        """Replace this rank's share; False: by then it was another one, which is known now."""
        new = Share(microbatches, running, time.time(), self.times.rate, Share.decode(self._word).takers).encode()
        self._word = self._replaced(self.rank, self._word, new)
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


def check_late_binding(comm: str) -> None:
    """Refuse minibatches that are bound late where that is not at work which they need.

    Raises:
        RuntimeError: gradients are added up in one order, or ranks have to go in step (``comm="auto"``).
    """
    if sums_are_in_order():
        raise RuntimeError(
            "late_binding=True with deterministic=True of ODC: which rank computes a sample depends on timing, and "
            "with it the order in which gradients are added. Leave one of them out"
        )
    if comm == "auto" and ranks_go_in_step():
        raise RuntimeError(
            "late_binding=True, and ODC is not at work in this process: ranks would have different numbers of "
            "microbatches, for which the collectives of FSDP or DDP would wait forever. Call odc.patch_fsdp(model) "
            "before the first minibatch, or start the script with `odc run`; or pass comm='odc' if your ranks "
            "communicate once per minibatch in another way"
        )


class MakesMicrobatches(Protocol[BatchT_co]):
    """Gives the microbatch of some samples."""

    def __getitem__(self, samples: list[int], /) -> BatchT_co: ...


class LateMicrobatches(Generic[BatchT]):
    """The microbatches of one rank and minibatch, each chosen when it is asked for: those of the plan, but for what
    others have taken; then what this rank takes. To be iterated once, and how many there will be nobody knows before.

    Args:
        shares: of all ranks.
        key: of the minibatch, the same on all ranks: epoch, a dot, its number, a slash, the iteration that it is of.
        planned: its plan, :func:`falling`.
        batches: gives the microbatches of this rank's share, in the order of the plan, which workers make ahead; None:
            nobody does.
        dataset: makes any other microbatch of what ``planned`` knows its samples by.
    """

    def __init__(
        self,
        shares: Shares,
        key: str,
        planned: PlannedMinibatch,
        batches: Iterator[BatchT] | None,
        dataset: MakesMicrobatches[BatchT],
    ) -> None:
        shares.expect(key)
        self._shares = shares
        self._key = key
        self._planned = planned
        self._batches = batches
        self._dataset = dataset
        self._unread = [] if batches is None else list(planned.plan.microbatches[shares.rank])
        self._change: Callable[[BatchT], Any] = _as_it_is

    def __iter__(self) -> Iterator[BatchT]:
        return self._run()

    def __len__(self) -> int:
        raise TypeError("with late_binding=True nobody knows the number of microbatches before they are through")

    def changed(self, change: Callable[[BatchT], BatchT]) -> LateMicrobatches[BatchT]:
        """The same, to be iterated in place of these, each changed when it is asked for."""
        found = copy.copy(self)
        found._change = lambda batch: change(self._change(batch))
        return found

    def close(self) -> None:
        """Read no more of it: what is made already is dropped."""
        self._shares.estimates.tell(self._shares.times)
        while self._unread:
            self._next_made()

    def _run(self) -> Iterator[BatchT]:
        shares, plan, times = self._shares, self._planned.plan, self._shares.times
        shares.open(self._key, plan.microbatches[shares.rank])
        if not shares.leads:
            yield from self._as_told()
            return
        while parts := shares.mine(self._key).microbatches:
            outlook = Outlook(plan, time.time(), times.rate)
            if outlook.may_split(parts):
                parts = outlook.split(parts, list(shares.of_others().values()))
            cost = outlook.cost(parts[0])
            if shares.begin(parts, cost):
                yield from self._timed(parts[0])
        while part := self._taken():
            shares.is_through(float(plan.costs[part].sum()) + plan.microbatch_cost)
            yield from self._timed(part)
        shares.is_through()
        shares.tell([])

    def _as_told(self) -> Iterator[BatchT]:
        own = {sample for part in self._planned.plan.microbatches[self._shares.rank] for sample in part}
        while part := self._shares.hear():
            self._shares.num_taken += len(set(part) - own)
            yield self._change(self._read(part))

    def _timed(self, part: list[int]) -> Iterator[BatchT]:
        self._shares.tell(part)
        batch = self._change(self._read(part))
        plan = self._planned.plan
        self._shares.times.begin(float(plan.costs[part].sum()), plan.microbatch_cost)
        yield batch
        self._shares.times.end()

    def _read(self, part: list[int]) -> BatchT:
        if part not in self._unread:
            return self._dataset[self._planned.samples[part].tolist()]
        while self._unread[0] != part:  # others have taken it, or some of it
            self._next_made()
        return self._next_made()

    def _next_made(self) -> BatchT:
        assert self._batches is not None
        del self._unread[0]
        return next(self._batches)

    def _taken(self) -> list[int]:
        """Samples that this rank, which has nothing left, has taken from another one; none: nothing is worth it."""
        shares = self._shares
        while shares.times.rate:
            outlook = Outlook(self._planned.plan, time.time(), shares.times.rate)
            found = shares.of_others()
            for rank in sorted(found, key=lambda rank: -outlook.end(found[rank])):
                if part := outlook.take(found[rank]):
                    if shares.take(rank, found[rank], part):
                        return part
                    break  # it has begun more meanwhile, or another rank was faster: look again
            else:
                return []
        return []


def _as_it_is(batch: BatchT) -> BatchT:
    return batch
