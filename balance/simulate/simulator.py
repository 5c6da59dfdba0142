"""Simulates policies on a whole dataset: bubble rates, samples per second, planning time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from odc.balance.checks import IntArray, as_count, as_speeds
from odc.balance.costs import CostModel
from odc.balance.data.sampler import MinibatchSampler
from odc.balance.partition.differencing import Parts
from odc.balance.plan import Comm, PlannedMinibatch
from odc.balance.policies.base import Job, Policy
from odc.balance.policies.packing import best_fit_decreasing
from odc.balance.random_numbers import random_generator
from odc.balance.simulate.machine import Machine, Stopwatch

_ROWS_OF = 1000
"""Samples that TRL packs together: what ``datasets`` maps at a time."""


@dataclass(frozen=True, eq=False)
class Scenario:
    """A dataset and its training settings; the fields are those of :class:`~odc.balance.MinibatchSampler`.

    Example:
        >>> cost = TransformerCost.from_config("qwen2.5-1.5b")
        >>> scenario = Scenario(even_lengths("longalign", 256), cost, world_size=8, minibatch_size=4)
        >>> baseline = scenario.plan("lb-micro").run("collective")
        >>> scenario.plan("lb-mini").run("odc").speedup(baseline) > 1.2
        True
    """

    lengths: npt.ArrayLike
    cost: CostModel
    world_size: int
    minibatch_size: int
    max_tokens: int | None = None
    batch_size: int | None = None
    microbatch_cost: float = 0.0
    speeds: tuple[float, ...] | None = None
    seed: int = 0
    group_by_length: bool = False

    def sampler(self, policy: str | Policy) -> MinibatchSampler:
        """The minibatches of one epoch. An incomplete last minibatch is dropped, as in the paper.

        Raises:
            ValueError: a field is out of range.
        """
        return MinibatchSampler(
            self.lengths,
            minibatch_size=self.minibatch_size,
            world_size=self.world_size,
            policy=policy,
            cost=self.cost,
            max_tokens=self.max_tokens,
            batch_size=self.batch_size,
            microbatch_cost=self.microbatch_cost,
            speeds=self.speeds,
            seed=self.seed,
            group_by_length=self.group_by_length,
        )

    def on_groups(self, size: int, cost: CostModel, max_tokens: int) -> Scenario:
        """The same minibatches for groups of ``size`` neighbouring ranks that compute together. A group counts as one
        rank of the plans, as fast as its slowest device.

        Args:
            size: a divisor of the number of ranks.
            cost: what a sample costs a group.
            max_tokens: what a microbatch of a group may hold.

        Raises:
            ValueError: groups of this size cannot be made, or a field is out of range.
        """
        if self.world_size % as_count(size, "size"):
            raise ValueError(f"size={size}: expected a divisor of world_size={self.world_size}")
        speeds = self.speeds
        if speeds is not None:
            speeds = tuple(as_speeds(speeds, self.world_size).reshape(-1, size).min(axis=1).tolist())
        return replace(
            self,
            cost=cost,
            world_size=self.world_size // size,
            minibatch_size=self.minibatch_size * size,
            max_tokens=max_tokens,
            batch_size=None if self.batch_size is None else self.batch_size * size,
            speeds=speeds,
        )

    def plan(self, policy: str | Policy, on_minibatch: Callable[[], object] | None = None) -> PlannedEpoch:
        """Plan one epoch; ``on_minibatch`` is called after each minibatch, for a progress bar."""
        sampler = self.sampler(policy)
        minibatches = []
        start = time.perf_counter()
        for minibatch in sampler:
            minibatches.append(minibatch)
            if on_minibatch:
                on_minibatch()
        return PlannedEpoch(self, sampler, minibatches, time.perf_counter() - start)


@dataclass(frozen=True, eq=False)
class PlannedEpoch:
    """All plans of one policy for one epoch of a scenario."""

    scenario: Scenario
    sampler: MinibatchSampler
    minibatches: Sequence[PlannedMinibatch]
    planning_s: float
    """Seconds that planning took."""

    @property
    def policy(self) -> Policy:
        return self.sampler.policy

    def run(self, comm: Comm, machine: Machine | None = None) -> Simulation:
        """Simulate the epoch on ``machine`` (default: exactly as the plans assume).

        Raises:
            ValueError: ``comm`` is neither "odc" nor "collective", or the machine has another number of ranks.
        """
        stopwatch = Stopwatch(self.scenario.cost, self.sampler.lengths, machine or Machine())
        elapsed = [stopwatch.time(minibatch.plan, minibatch.samples, comm) for minibatch in self.minibatches]
        return Simulation(
            policy=self.policy.name,
            comm=comm,
            world_size=self.sampler.world_size,
            num_samples=sum(minibatch.plan.num_samples for minibatch in self.minibatches),
            num_tokens=sum(int(minibatch.plan.lengths.sum()) for minibatch in self.minibatches),
            peak_tokens=max(minibatch.plan.peak_tokens for minibatch in self.minibatches),
            makespans=np.array([minibatch.makespan for minibatch in elapsed]),
            busy=sum(minibatch.busy for minibatch in elapsed),
            planning_s=self.planning_s / len(self.minibatches),
        )


@dataclass(frozen=True, eq=False)
class Simulation:
    """One epoch under one policy and one kind of communication. Times are in the unit of the cost model.

    Example:
        >>> scenario = Scenario(even_lengths("aime", 256), LinearCost(), world_size=8, minibatch_size=4)
        >>> epoch = scenario.plan("lb-mini")
        >>> epoch.run("odc").bubble_rate < epoch.run("collective").bubble_rate
        True
    """

    policy: str
    comm: Comm
    world_size: int
    num_samples: int
    num_tokens: int
    peak_tokens: int
    """Number of tokens of the largest microbatch."""

    makespans: npt.NDArray[np.float64] = field(repr=False)
    """Time of each minibatch, (num_minibatches,)."""

    busy: float
    """Total time in which ranks did not wait for each other, over all ranks."""

    planning_s: float
    """Seconds of planning per minibatch, on this machine."""

    @property
    def total(self) -> float:
        """Time of the epoch."""
        return float(self.makespans.sum())

    @property
    def bubble_rate(self) -> float:
        """Idle device time divided by total device time of the epoch, from 0 to 1 (paper appendix G)."""
        return max(0.0, 1 - self.busy / (self.world_size * self.total)) if self.total else 0.0

    @property
    def samples_per_time(self) -> float:
        """Samples per unit of time, all ranks together."""
        return self.num_samples / self.total if self.total else 0.0

    def speedup(self, baseline: Simulation) -> float:
        """Throughput divided by that of ``baseline``."""
        return self.samples_per_time / baseline.samples_per_time


class BestFitRows(Policy):
    """The packing of TRL (``packing=True``, its strategy "bfd"), to compare with: no policy for a loader.

    Samples are packed into rows of at most ``max_tokens`` once, 1000 at a time, and rows are drawn in place of samples:
    a row is a microbatch. So numbers of samples differ from step to step; rows per step are so many that they are about
    ``minibatch_size`` per rank.
    """

    name = "bfd"
    two_level = True

    def plan_batch(self, job: Job, minibatch_size: int, seed: int, first: int = 0) -> Iterator[PlannedMinibatch]:
        rows: list[IntArray] = []
        for start in range(0, job.lengths.size, _ROWS_OF):
            packed = best_fit_decreasing(job.lengths[start : start + _ROWS_OF], job.max_tokens)
            rows += [start + np.array(row) for row in packed]
        order = np.argsort(random_generator("rows", seed).random_raw(len(rows)), kind="stable").tolist()
        each = max(1, round(minibatch_size * len(rows) / job.lengths.size)) * job.world_size
        # At least one step: of few rows it is not full.
        for start in range(first * each, max(len(rows) - each, 0) + 1, each):
            drawn = [rows[number] for number in order[start : start + each]]
            samples = np.concatenate(drawn)
            bounds = np.cumsum([0, *map(len, drawn)]).tolist()
            numbered = [list(range(*ends)) for ends in itertools.pairwise(bounds)]
            numbered += [[] for _ in range(each - len(drawn))]
            ranks = [numbered[rank :: job.world_size] for rank in range(job.world_size)]
            yield PlannedMinibatch(samples, self.to_plan(job.of(samples), ranks))

    def assign(self, job: Job) -> list[Parts]:
        raise NotImplementedError  # rows are packed of a whole epoch, never of a minibatch
