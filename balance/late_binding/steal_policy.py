"""Work stealing within a minibatch: what a rank tells of its work queue, and which samples another one steals."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, dataclass, replace

import numpy as np

from odc.balance.checks import FloatArray, IntArray
from odc.balance.partition.differencing import Parts
from odc.balance.plan import PackedOnDemand, Plan
from odc.balance.policies.packing import best_fit_decreasing, pack

OVERDUE = 0.1
"""What is left of a microbatch that should be through already, of its whole time."""
LEAST_EXCESS = 0.02
"""Of a rank's queue: who will be late by less begins nothing in parts."""
LEAST_LEAD = 0.08
"""Of a rank's queue: by so much another rank has to be later for what it gives to join a microbatch of this one."""
CHEAP = 0.12
"""Of the samples of an average microbatch: where a further one costs less, samples are better taken later, when more
is known."""


@dataclass(frozen=True)
class WorkQueue:
    """What is left of a rank's part of a minibatch, as the other ranks read it in the store."""

    microbatches: Parts
    """Not begun; positions of samples in the minibatch."""
    running: float
    """Cost of what it had begun and was not through with at ``since``; 0: nothing."""
    since: float
    """When it began the last of that, in seconds since all ranks last met: those of two hosts have no clock in
    common."""
    rate: float
    """Cost per second that it was found to compute; 0: not known yet."""
    thieves: list[int]
    """Ranks that have stolen from this queue, one entry for each time; so no two words are alike."""
    has_stolen: bool = False
    """Whether this rank has stolen samples of others."""
    is_through: bool = False
    minibatch: str = ""
    """The pass over the data, and the minibatch of it."""
    step: int = 0
    """Minibatches of ODC that ended before it."""
    loader: str = ""
    """Process and loader whose queue it is."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @staticmethod
    def decode(word: bytes) -> WorkQueue:
        return WorkQueue(**json.loads(word))

    @property
    def is_torn(self) -> bool:
        """Whether samples have moved in a minibatch that this rank has left in the middle."""
        return not self.is_through and (self.has_stolen or bool(self.thieves))


def largest_first(plan: Plan) -> Plan:
    """The plan with the same samples on each rank, in the microbatches of :func:`pack_largest_first`."""
    return replace(plan, microbatches=pack_largest_first(queues_of(plan), plan.lengths, plan.costs, plan.max_tokens))


def queues_of(plan: Plan) -> Parts:
    """The samples of each rank."""
    queues = plan.microbatches
    return queues.ranks if isinstance(queues, PackedOnDemand) else [list(itertools.chain(*mine)) for mine in queues]


def pack_largest_first(ranks: Parts, lengths: IntArray, costs: FloatArray, max_tokens: int) -> PackedOnDemand:
    """Microbatches of which the first are as full as can be and the last one small: that is left to take when a rank
    turns out to be late. Not where that needs more microbatches.

    Args:
        ranks: the samples of each rank.
        lengths, costs: of all samples.
    """

    def packed(mine: list[int]) -> Parts:
        samples = np.array(mine, dtype=np.int64)
        fewest = pack(lengths[samples], costs[samples], max_tokens)
        filled = best_fit_decreasing(lengths[samples], max_tokens)
        parts: Parts = [samples[part].tolist() for part in (filled if len(filled) <= len(fewest) else fewest)]
        return sorted(parts, key=lambda part: -float(costs[part].sum()))

    return PackedOnDemand(ranks, packed)


@dataclass(frozen=True)
class StealPolicy:
    """When ranks will end a minibatch, as estimated at one moment, and what one of them should steal from another."""

    plan: Plan
    now: float
    """In seconds since all ranks last met."""
    rate: float
    """Of this rank; taken for those of which none is known."""
    busy: WorkQueue | None = None
    """Of this rank, if its device is not through with what it has begun last."""

    @property
    def start(self) -> float:
        """When this rank computes what it begins now."""
        return self.end(replace(self.busy, microbatches=[])) if self.busy and self.rate else self.now

    @property
    def mean_share(self) -> float:
        """Cost of the samples of a rank, on average."""
        return float(self.plan.costs.sum()) / self.plan.world_size

    def cost(self, part: list[int]) -> float:
        """Of a microbatch of these samples."""
        return float(self.plan.costs[part].sum()) + self.plan.microbatch_cost

    def running(self, part: list[int]) -> float:
        """Cost of what this rank is not through with once it has begun a microbatch of these samples."""
        return self.cost(part) + (self.start - self.now) * self.rate

    def rate_of(self, queue: WorkQueue) -> float:
        return queue.rate or self.rate

    def end(self, queue: WorkQueue) -> float:
        """When a rank will be through, if nothing is taken from it."""
        rate = self.rate_of(queue)
        left_s = max(queue.since + queue.running / rate - self.now, OVERDUE * queue.running / rate)
        return self.now + left_s + sum(map(self.cost, queue.microbatches)) / rate

    def may_split(self, parts: Parts) -> bool:
        """Whether it is worth a look at the others: something can be split, and little lies behind it."""
        first, *behind = parts
        return bool(self.rate) and len(first) > 1 and sum(map(self.cost, behind)) <= self.cost(first)

    def split(self, parts: Parts, others: list[WorkQueue]) -> Parts:
        """``parts`` of this rank, the first of them in two if others can then take the second half of it.

        It is if this rank will be later than the mean by more than what a further microbatch costs, and what it would
        not have begun is less than that.
        """
        first, *behind = parts
        left = sum(map(self.cost, behind))
        end = self.start + (self.cost(first) + left) / self.rate
        mean = (end + sum(map(self.end, others))) / (1 + len(others))
        excess = (end - mean) * self.rate
        if left >= excess or excess - left <= self.plan.microbatch_cost + LEAST_EXCESS * self.mean_share:
            return parts
        half = float(self.plan.costs[first].sum()) / 2
        least = self._cheapest(first)
        later = self._largest(first, min(excess - left, half)) or ([least] if self.plan.costs[least] <= half else [])
        now = [sample for sample in first if sample not in later]
        return [now, later, *behind] if now and later else parts

    def may_join(self, num_planned: int) -> bool:
        """Whether a further microbatch costs so much that samples had better join one that is begun anyway.

        Args:
            num_planned: microbatches of this rank.
        """
        return bool(self.rate) and self.plan.microbatch_cost * num_planned >= CHEAP * self.mean_share

    def join(self, part: list[int], queue: WorkQueue) -> list[int]:
        """What this rank should steal of another one's last microbatch into ``part``, the last of its own, so that both
        end as early as can be: of the samples for which there is room. None if that one is not much later."""
        if not queue.microbatches:
            return []
        room = self.plan.max_tokens - int(self.plan.lengths[part].sum())
        last = [sample for sample in queue.microbatches[-1] if self.plan.lengths[sample] <= room]
        mine, theirs = self.start + self.cost(part) / self.rate, self.end(queue)
        if not last or theirs - mine <= LEAST_LEAD * self.mean_share / self.rate:
            return []
        taken = self._largest(last, (theirs - mine) / (1 / self.rate + 1 / self.rate_of(queue)), room)
        if not taken and mine + float(self.plan.costs[least := self._cheapest(last)]) / self.rate < theirs:
            return [least]
        return taken

    def steal(self, queue: WorkQueue) -> list[int]:
        """What this rank should steal of another one's last microbatch, so that both end as early as can be; none if
        that one would be through earlier by itself."""
        if not self.rate or not queue.microbatches:
            return []
        last, rate, end = queue.microbatches[-1], self.rate_of(queue), self.end(queue)
        # Both end at the same time with this much.
        even = (end - self.start - self.plan.microbatch_cost / self.rate) / (1 / self.rate + 1 / rate)
        if taken := self._largest(last, even):
            return taken
        least = self._cheapest(last)
        return [least] if self.start + self.cost([least]) / self.rate < end else []

    def _cheapest(self, part: list[int]) -> int:
        return min(part, key=lambda sample: float(self.plan.costs[sample]))

    def _largest(self, part: list[int], most: float, room: float = math.inf) -> list[int]:
        """Samples that cost at most ``most`` in all, of at most ``room`` tokens, the costliest that fit first."""
        found = []
        for sample in sorted(part, key=lambda sample: -float(self.plan.costs[sample])):
            cost, length = float(self.plan.costs[sample]), int(self.plan.lengths[sample])
            if cost <= most and length <= room:
                found.append(sample)
                most, room = most - cost, room - length
        return found
