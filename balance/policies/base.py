"""What a balancing policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from odc.balance.checks import MAX_PARTS, FloatArray, IntArray, as_cost, as_count, as_lengths, as_speeds, check_fit
from odc.balance.costs import CostModel, evaluate
from odc.balance.partition.differencing import Parts
from odc.balance.plan import Plan, PlannedMinibatch


@dataclass(frozen=True, eq=False)
class Job:
    """Samples to distribute, checked."""

    lengths: IntArray
    """Tokens of each sample, (num_samples,)."""

    costs: FloatArray
    """Cost of each sample, (num_samples,)."""

    world_size: int
    max_tokens: int
    microbatch_cost: float
    speeds: FloatArray | None

    @classmethod
    def create(
        cls,
        lengths: npt.ArrayLike,
        *,
        world_size: int,
        max_tokens: int,
        cost: CostModel,
        microbatch_cost: float = 0.0,
        speeds: npt.ArrayLike | None = None,
    ) -> Job:
        """Check the arguments of :meth:`Policy.plan` and work out the costs."""
        tokens = as_lengths(lengths)
        world_size = as_count(world_size, "world_size", maximum=MAX_PARTS)
        max_tokens = as_count(max_tokens, "max_tokens")
        rates = None if speeds is None else as_speeds(speeds, world_size)
        check_fit(tokens, max_tokens)
        fixed = as_cost(microbatch_cost, "microbatch_cost")
        # A cost that overflows is refused as infinite; no warning besides.
        with np.errstate(over="ignore", invalid="ignore"):
            costs = evaluate(cost, tokens)
        return cls(tokens, costs, world_size, max_tokens, fixed, rates)

    def of(self, samples: Sequence[int] | IntArray) -> Job:
        """The same for some of the samples."""
        chosen = np.asarray(samples, dtype=np.int64)
        return replace(self, lengths=self.lengths[chosen], costs=self.costs[chosen])


class Policy(ABC):
    """Decides which rank trains on which samples, and packs them. Stateless and deterministic.

    A rank's microbatches are ordered by cost, the costliest first, unless the policy says otherwise. If all ranks have
    the same number of microbatches, no other order has a smaller makespan under collectives.

    Example:
        >>> class RoundRobin(Policy):
        ...     name = "round-robin"
        ...     equal_counts = False  # ranks may get different numbers of microbatches: needs ODC
        ...     def assign(self, job):  # microbatches[rank], each of one sample
        ...         count, ranks = len(job.lengths), range(job.world_size)
        ...         return [[[i] for i in range(rank, count, job.world_size)] for rank in ranks]
        >>> RoundRobin().plan([9, 5, 4, 2, 1], world_size=2, max_tokens=10, cost=LinearCost()).num_microbatches
        (3, 2)
    """

    name: ClassVar[str]
    """The policy's name for :func:`~odc.balance.get_policy`."""

    equal_counts: ClassVar[bool] = True
    """Whether all ranks get the same number of microbatches, as collectives need."""

    two_level: ClassVar[bool] = False
    """Whether the policy divides a whole global batch before it cuts it into minibatches."""

    def plan(
        self,
        lengths: npt.ArrayLike,
        *,
        world_size: int,
        max_tokens: int,
        cost: CostModel,
        microbatch_cost: float = 0.0,
        speeds: npt.ArrayLike | None = None,
    ) -> Plan:
        """Plan one minibatch.

        Args:
            lengths: tokens of each sample of the global minibatch, integers of at least 1, at most 2**53 in all;
                may be empty.
            world_size: number of ranks.
            max_tokens: maximum tokens per microbatch, limited by memory.
            cost: cost model of a sample, see :mod:`odc.balance.costs`. Costs are 0 or at least 1e-140, at most 1e140 in
                all.
            microbatch_cost: fixed cost of every microbatch in addition to its samples, in the unit of ``cost``.
            speeds: speed of each rank, (world_size,), from 1e-9 to 1e9: rank r needs the time ``cost / speeds[r]``.
                Default: all equal. "none" and "local-sort" ignore them.

        Raises:
            ValueError: a sample is longer than ``max_tokens``, or an argument is out of range.
        """
        return self.plan_job(
            Job.create(
                lengths,
                world_size=world_size,
                max_tokens=max_tokens,
                cost=cost,
                microbatch_cost=microbatch_cost,
                speeds=speeds,
            )
        )

    def plan_batch(self, job: Job, minibatch_size: int, seed: int, first: int = 0) -> Iterator[PlannedMinibatch]:
        """Cut a global batch into minibatches of ``minibatch_size`` samples per rank, and plan each when it is yielded.

        Samples keep their order; the last minibatch may be smaller. Minibatches before number ``first`` are not
        planned. ``seed`` is used by policies that shuffle.
        """
        global_size = minibatch_size * job.world_size
        for start in range(first * global_size, job.lengths.size, global_size):
            samples = np.arange(start, min(start + global_size, job.lengths.size))
            yield PlannedMinibatch(samples, self.plan_job(job.of(samples)))

    @abstractmethod
    def assign(self, job: Job) -> Sequence[Parts]:
        """``microbatches[rank][m]`` as lists of sample indices; if each rank packs its own samples, a
        :class:`~odc.balance.plan.PackedOnDemand`."""

    def plan_job(self, job: Job) -> Plan:
        """Plan one minibatch whose arguments are checked and whose costs are worked out."""
        return self.to_plan(job, self.assign(job))

    def to_plan(self, job: Job, microbatches: Sequence[Parts]) -> Plan:
        """The plan of this policy with these microbatches."""
        speeds = None if job.speeds is None else tuple(job.speeds.tolist())
        return Plan(microbatches, job.lengths, job.costs, job.max_tokens, self.name, job.microbatch_cost, speeds)


def renumber(parts: Parts, samples: IntArray) -> Parts:
    """Turn positions within a rank's ``samples`` into samples."""
    return [samples[part].tolist() for part in parts]


def costliest_first(parts: Parts, costs: FloatArray) -> Parts:
    """In the order of cost, empty ones last: the least sum over positions of the maximum over ranks."""
    return sorted(parts, key=lambda part: (not part, -float(costs[part].sum())))
