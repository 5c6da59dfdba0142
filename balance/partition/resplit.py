"""Local search on a partition: split two parts anew, optimally, and walk between equally good partitions.

For few items per part, where single moves and swaps get stuck early.
"""

from __future__ import annotations

import functools
import random

import numpy as np
import numpy.typing as npt

from odc.balance.checks import FloatArray
from odc.balance.partition.differencing import Parts
from odc.balance.partition.refine import MIN_GAIN, Limit

# Two parts with more items than this are left alone: 2 ** 12 ways to split them are looked at.
_MAX_ITEMS = 12
# The latest part is split anew with this many others, those that finish first.
_MAX_PARTNERS = 16
# Pairs that are looked at without a gain before the search ends.
_PATIENCE = 300


def resplit(
    costs: FloatArray,
    parts: Parts,
    *,
    equal_size: bool,
    speeds: FloatArray | None = None,
    limit: Limit | None = None,
    target: float = 0.0,
) -> Parts:
    """Improve ``parts`` until the makespan is at most ``target``, or many pairs were looked at without a gain.

    The part that finishes last and one other are split anew in the best of all ways. If that helps with no
    other part, two parts at random are split anew in some way that keeps both below the makespan, and the
    last part tries again with these two. So the makespan never rises, and the search leaves places in which
    it would be stuck. With ``limit``, which the given parts must meet, no split breaks it.

    Deterministic: the random numbers always start from the same seed.
    """
    if sum(sorted(map(len, parts))[:2]) > _MAX_ITEMS:
        return parts  # no two of them can be split anew
    walk = _Walk(costs, parts, equal_size, speeds, limit)
    rng = random.Random(0)
    num_parts = len(parts)
    partners: list[int] | None = None
    while walk.num_steps < _PATIENCE:
        last = int(np.argmax(walk.times))
        if walk.times[last] <= target:
            break
        if walk.improve(last, partners, target):
            walk.num_steps, partners = 0, None
            continue
        others = [part for part in range(num_parts) if part != last]
        if len(others) < 2:
            break
        partners = rng.sample(others, 2)
        if not walk.shuffle(partners[0], partners[1], rng):
            partners = []
    return walk.parts


class _Walk:
    def __init__(
        self, costs: FloatArray, parts: Parts, equal_size: bool, speeds: FloatArray | None, limit: Limit | None
    ) -> None:
        self._limit = limit
        self.parts = [list(part) for part in parts]
        self.num_steps = 0  # since the last gain
        self._costs = costs
        self._equal_size = equal_size
        self._has_speeds = speeds is not None
        self._rates = np.ones(len(parts)) if speeds is None else speeds
        self.times = np.array([costs[part].sum() for part in self.parts]) / self._rates

    def improve(self, last: int, partners: list[int] | None, target: float) -> bool:
        """Split ``last`` and the best of ``partners`` (default: those that finish first) anew, if it helps."""
        if partners is None:
            partners = [part for part in np.argsort(self.times, kind="stable").tolist() if part != last]
        best, best_time = None, float(self.times[last]) * (1 - MIN_GAIN)
        for other in partners[:_MAX_PARTNERS]:
            items, chosen, times = self._splits(last, other)
            if times.size == 0:
                continue
            split = int(np.argmin(times))
            if times[split] < best_time:
                best, best_time = (other, items, chosen[split]), float(times[split])
                if best_time <= target:
                    break
        if best is None:
            return False
        self._apply(last, *best)
        return True

    def shuffle(self, a: int, b: int, rng: random.Random) -> bool:
        """Split ``a`` and ``b`` anew in any way that keeps both below the makespan, if there is one."""
        items, chosen, times = self._splits(a, b)
        allowed = np.flatnonzero(times < self.times.max() * (1 - MIN_GAIN))
        if allowed.size == 0:
            return False
        self._apply(a, b, items, chosen[allowed[rng.randrange(allowed.size)]])
        return True

    def _splits(self, a: int, b: int) -> tuple[list[int], npt.NDArray[np.bool_], FloatArray]:
        """The items of both parts, all choices of those for ``a``, and when the later part would finish."""
        self.num_steps += 1
        items = self.parts[a] + self.parts[b]
        if len(items) > _MAX_ITEMS:
            return items, np.zeros((0, len(items)), dtype=bool), np.zeros(0)
        chosen, factors, sizes = _subsets(len(items))
        costs = self._costs[items]
        cost_a = factors @ costs
        cost_b = costs.sum() - cost_a
        if self._has_speeds:
            cost_a, cost_b = cost_a / self._rates[a], cost_b / self._rates[b]
        times = np.maximum(cost_a, cost_b, out=cost_b)
        if self._equal_size:
            times[sizes != len(self.parts[a])] = np.inf
        if self._limit is not None:
            weights = self._limit.weights[items]
            weight_a = chosen @ weights
            over = np.maximum(weight_a, weights.sum() - weight_a) > self._limit.capacity
            times[over] = np.inf
        return items, chosen, times

    def _apply(self, a: int, b: int, items: list[int], chosen: npt.NDArray[np.bool_]) -> None:
        for part, wanted in ((a, True), (b, False)):
            self.parts[part] = [
                item for item, is_chosen in zip(items, chosen.tolist(), strict=True) if is_chosen is wanted
            ]
            self.times[part] = self._costs[self.parts[part]].sum() / self._rates[part]


@functools.cache
def _subsets(num_items: int) -> tuple[npt.NDArray[np.bool_], FloatArray, npt.NDArray[np.int64]]:
    """All subsets as rows, (2 ** num_items, num_items), the same as numbers 0 and 1, and their sizes."""
    rows = np.arange(2**num_items)[:, None] >> np.arange(num_items) & 1
    return rows.astype(bool), rows.astype(np.float64), rows.sum(axis=1)
