"""Padded microbatches with equal cost on every rank in each step. Every rank knows the lengths in all pools.

Online dynamic batching aligns the number of groups, whose tokens are about equal. Their costs differ: the same number
of tokens costs more in a few long samples than in many short ones, and ranks wait for the difference in every step.
This module chooses the groups of a step by cost. One rank's oldest sample, grouped with its neighbours in length, sets
the cost of the step. Every other rank searches its whole pool for neighbours in length with the closest cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from odc.balance.checks import FloatArray, IntArray

_SEEDS, _ENDS = 4, 3
"""Oldest samples that may begin a step, and groups of each that are tried: more are slower, and hardly better."""
_ROUNDING = 1 + 1e-12


@dataclass
class PoolView:
    """What every rank knows of one rank's pool."""

    lengths: IntArray
    """Tokens of each sample, the oldest first, (num_samples,), at least 1 each."""

    costs: FloatArray
    """Of each sample by itself, (num_samples,)."""

    waited: IntArray
    """Steps that each has been in the pool, (num_samples,)."""


def plan_equal_steps(
    pools: Sequence[PoolView], max_tokens: int, keep: float, most_steps_waited: int
) -> list[list[list[int]]]:
    """Steps in each of which every rank has one group, all of about the same cost.

    A group is a run of samples of similar length, of at most ``max_tokens`` tokens when padded to its longest, and
    costs count x cost(longest). Of a few groups that contain an old sample the one is taken beside which the other
    ranks find the most work within its cost. A sample that has waited for too long must be in the next step.

    Args:
        pools: of every rank.
        keep: stop as soon as a pool that was not empty has only this part of its samples left: it takes a choice of
            samples to find equal costs. 0: go on until all pools are empty; those that are so first have empty groups.
        most_steps_waited: after so many steps a sample is too old.

    Returns:
        For each step and rank the samples of its group, as indices into its pool.
    """
    state = _Pools(pools, max_tokens)
    enough = [keep * size if keep and size else -1.0 for size in state.sizes]
    steps: list[list[list[int]]] = []
    while any(state.sizes) and all(size > least for size, least in zip(state.sizes, enough, strict=True)):
        steps.append(state.take(state.best(len(steps), most_steps_waited)))
    return steps


@dataclass
class _Runs:
    """A group on each rank: ``count`` samples that end with number ``end`` of the sorted pool; 0 where it is empty."""

    end: IntArray
    count: IntArray
    cost: float
    """Of the dearest one."""

    useful: float
    """Costs of all samples, without what padding adds."""


class _Pools:
    """The pools of all ranks, sorted by length, as tables with a row for each rank."""

    def __init__(self, pools: Sequence[PoolView], max_tokens: int) -> None:
        self._max_tokens = max_tokens
        # Of equal lengths the one that came first comes last, so that runs that are cut short keep it.
        self._order = [np.lexsort((-np.arange(pool.lengths.size), pool.lengths)) for pool in pools]
        self._lengths = [pool.lengths[order] for pool, order in zip(pools, self._order, strict=True)]
        self._costs = [pool.costs[order] for pool, order in zip(pools, self._order, strict=True)]
        self._waited = [pool.waited[order] for pool, order in zip(pools, self._order, strict=True)]

    @property
    def sizes(self) -> list[int]:
        return [order.size for order in self._order]

    def best(self, num_steps: int, most_steps_waited: int) -> _Runs:
        """The groups of the next step."""
        width = max(self.sizes)
        lengths = np.full((len(self._order), width), np.iinfo(np.int64).max)
        costs = np.full(lengths.shape, np.inf)
        sums = np.zeros((len(self._order), width + 1))
        for rank, order in enumerate(self._order):
            lengths[rank, : order.size] = self._lengths[rank]
            costs[rank, : order.size] = self._costs[rank]
            np.cumsum(self._costs[rank], out=sums[rank, 1 : 1 + order.size])
        fits = np.minimum(self._max_tokens // lengths, np.arange(1, width + 1))
        found = [
            self._within(limit, rank, end, count, fits, costs, sums)
            for rank, at in self._seeds(num_steps, most_steps_waited)
            for end, count, limit in self._with_seed(rank, at)
        ]
        return max(found, key=lambda runs: runs.useful / runs.cost if runs.cost else 1.0)

    def take(self, runs: _Runs) -> list[list[int]]:
        """Remove these, and return them as indices of the pools as they were given."""
        groups: list[list[int]] = []
        for rank, (end, count) in enumerate(zip(runs.end.tolist(), runs.count.tolist(), strict=True)):
            gone = slice(end + 1 - count, end + 1)
            groups.append(self._order[rank][gone].tolist())
            for table in (self._order, self._lengths, self._costs, self._waited):
                table[rank] = np.delete(table[rank], gone)
        return groups

    def _seeds(self, num_steps: int, most_steps_waited: int) -> list[tuple[int, int]]:
        """The oldest sample of some ranks, as (rank, number in its sorted pool), those that have waited longest first.

        Only the very oldest one if it is too old.
        """
        oldest = [(rank, int(np.argmin(order))) for rank, order in enumerate(self._order) if order.size]
        oldest.sort(key=lambda seed: -int(self._waited[seed[0]][seed[1]]))
        rank, at = oldest[0]
        return oldest[: 1 if self._waited[rank][at] + num_steps >= most_steps_waited else _SEEDS]

    def _with_seed(self, rank: int, at: int) -> list[tuple[int, int, float]]:
        """Groups that contain a sample, as (number of the longest one, count, cost): full ones, and as it is alone."""
        lengths, costs = self._lengths[rank], self._costs[rank]
        groups = []
        for end in range(at, min(at + _ENDS, lengths.size)):
            count = min(max(self._max_tokens // int(lengths[end]), 1), end + 1)
            if end - count < at:
                groups.append((end, count, count * float(costs[end])))
        return groups

    def _within(
        self, limit: float, rank: int, end: int, count: int, fits: IntArray, costs: FloatArray, sums: FloatArray
    ) -> _Runs:
        """The given group on its rank, and on the others those that do most within the limit, or the cheapest one."""
        with np.errstate(divide="ignore", invalid="ignore"):
            counts = np.floor(limit * _ROUNDING / costs)
        counts = np.minimum(np.where(costs > 0, counts, np.inf), fits).astype(np.int64)
        numbers = np.arange(1, costs.shape[1] + 1)
        useful = np.take_along_axis(sums, np.broadcast_to(numbers, costs.shape), 1) - np.take_along_axis(
            sums, numbers - counts, 1
        )
        ends = useful.argmax(axis=1)
        rows = np.arange(len(ends))
        taken = counts[rows, ends]
        for other, size in enumerate(self.sizes):
            if not taken[other] and size:
                ends[other], taken[other] = 0, 1
            elif not size:
                ends[other], taken[other] = -1, 0
        ends[rank], taken[rank] = end, count
        done = sums[rows, ends + 1] - sums[rows, ends + 1 - taken]
        dearest = max(
            float(number * costs[r, e]) for r, (e, number) in enumerate(zip(ends, taken, strict=True)) if number
        )
        return _Runs(ends, taken, dearest, float(done.sum()))
