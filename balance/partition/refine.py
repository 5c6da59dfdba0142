"""Local search on a partition: move an item, or swap two, in many disjoint pairs of parts at once."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from odc.balance.checks import FloatArray, IntArray
from odc.balance.partition.differencing import Parts

# An exchange must gain this fraction of the makespan: gains as small as rounding errors could repeat forever.
MIN_GAIN = 1e-6

# A makespan this close (relative) to its lower bound is good enough: no cost model is exact to one part in
# ten thousand.
CLOSE_ENOUGH = 1e-4

_MAX_ROUNDS = 200
# Where costs differ by orders of magnitude, some parts hold thousands of tiny items and most a few: a table of
# all would be mostly holes. Only the costliest items of each part take part, in at most so many cells, or in
# this many columns.
_MAX_CELLS = 2**18
_MIN_WIDTH = 16
# Comparisons of all rounds together.
_MAX_COMPARISONS = 2**28
# Comparisons at once: five times as fast in a processor's cache as beyond it.
_BLOCK = 2**15
# Ways to pair parts that are tried before the heaviest one looks at all others.
_NUM_PAIRINGS = 4
# The heaviest part looks at this many others, the lightest.
_MAX_PARTNERS = 128
# Up to this many items a part, all pairs of items are compared; above, each with its nearest counterparts.
_DENSE_WIDTH = 48


@dataclass(frozen=True)
class Limit:
    """A second sum that no part may exceed: the token limit of a microbatch."""

    weights: IntArray
    capacity: int


def refine(
    costs: FloatArray,
    parts: Parts,
    *,
    equal_size: bool,
    speeds: FloatArray | None = None,
    limit: Limit | None = None,
    loads: FloatArray | None = None,
    target: float = 0.0,
) -> Parts:
    """Improve ``parts`` by moves and swaps until they are even or none helps.

    In each round parts are paired, slow with fast, and each pair makes the exchange after which the later one
    of the two finishes earliest, if that is earlier than before. A move is a swap with nothing; with
    ``equal_size``, for parts of equal sizes, there are only swaps. With ``limit``, which the given parts must
    meet, an exchange that breaks it is not made. Part p finishes at its cost over ``speeds[p]``; ``loads[p]``
    is a part of its cost that stays. Parts that finish by ``target`` only help others. A part that
    finishes last and finds no partner is set aside, and the search goes on among the others: where one large
    item fixes the makespan, the rest must still come out even.

    The makespan never rises, and without ``speeds`` no part becomes empty. The result is deterministic; items
    within a part have no particular order.
    """
    table = _Table(costs, parts, equal_size=equal_size, speeds=speeds, limit=limit, loads=loads, target=target)
    active = np.arange(len(parts))
    shift = 0
    for _ in range(table.num_rounds):
        if active.size < 2 or table.is_even(active):
            break
        order = active[np.argsort(-table.times[active], kind="stable")]
        half = order.size // 2
        if shift < min(half, _NUM_PAIRINGS):
            fast = order[::-1][:half]
            improved = table.exchange(order[:half], np.concatenate([fast[half - shift :], fast[: half - shift]]))
            shift = 0 if improved[0] else shift + 1
        else:
            if not table.improve(order[0], order[:0:-1][:_MAX_PARTNERS]):
                active = active[active != order[0]]
            shift = 0
    return table.parts()


class ExchangeTable(ABC):
    """A partition as a table: a row per part, -1 is no item. Exchanges between two rows improve it: a swap of items, or
    a move, which is a swap with none."""

    min_gain: ClassVar[float]
    """An exchange must gain this fraction of the makespan."""

    times: FloatArray
    """When each part finishes."""

    _items: IntArray
    _target = 0.0
    """Who finishes by then gives nothing."""

    def exchange(self, slow: IntArray, fast: IntArray) -> npt.NDArray[np.bool_]:
        """The best exchange of each pair of rows, where it helps; which did. No row is in two pairs."""
        given, taken, times = self._best(slow, fast)
        before = self.times[slow]
        helps = (before > self._target) & (times < before - self.min_gain * float(self.times.max(initial=0.0)))
        self._swap(slow[helps], given[helps], fast[helps], taken[helps])
        return helps

    def improve(self, row: np.int64, others: IntArray) -> bool:
        """Make the best exchange of ``row`` with one of ``others``, if it helps."""
        given, taken, times = self._best(np.full_like(others, row), others)
        best = int(np.argmin(times))
        if not times[best] < self.times[row] * (1 - self.min_gain):
            return False
        self._swap(np.array([row]), given[[best]], others[[best]], taken[[best]])
        return True

    def _swap(self, slow: IntArray, given: IntArray, fast: IntArray, taken: IntArray) -> None:
        self._items[slow, given], self._items[fast, taken] = self._items[fast, taken], self._items[slow, given]
        self._sort(np.concatenate([slow, fast]))

    @abstractmethod
    def _best(self, slow: IntArray, fast: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
        """For each pair: columns of what to give and take, and when the later one would then finish."""

    @abstractmethod
    def _sort(self, rows: IntArray) -> None:
        """Put the items of these rows, which have others now, in order, and work out their times."""


class _Table(ExchangeTable):
    """The items of each part by cost. No item has cost 0."""

    min_gain = MIN_GAIN

    def __init__(
        self,
        costs: FloatArray,
        parts: Parts,
        *,
        equal_size: bool,
        speeds: FloatArray | None,
        limit: Limit | None,
        loads: FloatArray | None,
        target: float,
    ) -> None:
        self._target = target
        self._item_costs = np.append(costs, 0.0)
        self._item_weights = None if limit is None else np.append(limit.weights, 0)
        self._capacity = 0 if limit is None else limit.capacity
        self._speeds = speeds
        self._room_needed = not equal_size
        widest = max(map(len, parts))
        width = min(widest, max(_MIN_WIDTH, _MAX_CELLS // len(parts)))
        self._left_out: Parts = [[] for _ in parts]
        self._fixed_loads = np.zeros(len(parts)) if loads is None else loads
        self._fixed_weights = np.zeros(len(parts), dtype=np.int64)
        if widest > width:
            costliest_first = [sorted(part, key=lambda item: (-costs[item], item)) for part in parts]
            parts, self._left_out = [p[:width] for p in costliest_first], [p[width:] for p in costliest_first]
            self._fixed_loads = self._fixed_loads + np.array([costs[items].sum() for items in self._left_out])
            if limit is not None:
                self._fixed_weights = np.array([limit.weights[items].sum() for items in self._left_out])
        self._items = np.full((len(parts), width + (2 if self._room_needed else 0)), -1, dtype=np.int64)
        for row, items in enumerate(parts):
            self._items[row, : len(items)] = items
        self._costs = np.zeros(self._items.shape)
        self._loads = np.zeros(len(parts))
        self._sort(np.arange(len(parts)))

    @property
    def times(self) -> FloatArray:  # type: ignore[override]
        return self._loads if self._speeds is None else self._loads / self._speeds

    def is_even(self, rows: IntArray) -> bool:
        """Whether these parts finish together, as closely as costs are known."""
        total_speed = rows.size if self._speeds is None else self._speeds[rows].sum()
        ideal = float(self._loads[rows].sum() / total_speed)
        return bool(self.times[rows].max() <= max(ideal * (1 + CLOSE_ENOUGH), self._target))

    def parts(self) -> Parts:
        rows = self._items.tolist()
        return [
            [item for item in row if item >= 0] + left_out for row, left_out in zip(rows, self._left_out, strict=True)
        ]

    @property
    def num_rounds(self) -> int:
        """How many rounds are worth their time: each compares all items of half the parts with others."""
        height, width = self._items.shape
        comparisons = int(height * width * (width if width <= _DENSE_WIDTH else 2 * _DENSE_WIDTH))
        return min(_MAX_ROUNDS, max(10, _MAX_COMPARISONS // max(comparisons, 1)))

    def _best(self, slow: IntArray, fast: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
        width = self._items.shape[1]
        at_once = max(1, _BLOCK // (width * min(width, _DENSE_WIDTH)))
        if slow.size <= at_once:
            return self._best_of_block(slow, fast)
        blocks = [slice(start, start + at_once) for start in range(0, slow.size, at_once)]
        found = [self._best_of_block(slow[block], fast[block]) for block in blocks]
        given, taken, times = zip(*found, strict=True)
        return np.concatenate(given), np.concatenate(taken), np.concatenate(times)

    def _best_of_block(self, slow: IntArray, fast: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
        num_pairs, width = slow.size, self._items.shape[1]
        if width <= _DENSE_WIDTH:
            # Every item of the one with every item of the other.
            given, taken = _pairs(width)
            costs = (self._costs[slow][:, :, None] - self._costs[fast][:, None, :]).reshape(num_pairs, -1)
        else:
            given = np.tile(np.arange(width), 2)
            taken = self._nearest(slow, fast)
            costs = self._costs[slow][:, given] - self._costs[fast[:, None], taken]
        times = self._times_after(slow, fast, costs)
        if self._item_weights is not None:
            weights = self._item_weights[self._items]
            moved = weights[slow][:, given] - weights[fast[:, None], taken]
            totals = (weights.sum(axis=1) + self._fixed_weights)[:, None]
            times[np.maximum(totals[slow] - moved, totals[fast] + moved) > self._capacity] = np.inf
        if times.size == 0:
            return slow, fast, np.full(num_pairs, np.inf)
        best, pairs = np.argmin(times, axis=1), np.arange(num_pairs)
        return given[best], taken[best] if taken.ndim == 1 else taken[pairs, best], times[pairs, best]

    def _times_after(self, slow: IntArray, fast: IntArray, given: FloatArray) -> FloatArray:
        """When the later part of each pair finishes if the slow one gives this cost to the fast one."""
        slow_times = self._loads[slow][:, None] - given
        fast_times = self._loads[fast][:, None] + given
        if self._speeds is not None:
            slow_times /= self._speeds[slow][:, None]
            fast_times /= self._speeds[fast][:, None]
        return np.maximum(slow_times, fast_times, out=slow_times)

    def _nearest(self, slow: IntArray, fast: IntArray) -> IntArray:
        """For each item of the slow part the two of the fast one nearest to its ideal counterpart.

        Both finish together if the slow part gives ``(L_s v_f - L_f v_s) / (v_s + v_f)`` (loads L, speeds v).
        One binary search serves all pairs: those of pair p are shifted by 2 p, costs scaled to at most 1.
        """
        width = self._items.shape[1]
        # The part of two devices' work that the fast one should have.
        share = 0.5 if self._speeds is None else self._speeds[fast] / (self._speeds[slow] + self._speeds[fast])
        ideal = (self._loads[slow] + self._loads[fast]) * share - self._loads[fast]
        scale = float(self._item_costs.max()) or 1.0
        first = 2.0 * np.arange(slow.size)[:, None]
        wanted = (self._costs[slow] - ideal[:, None]) / scale
        keys = first + self._costs[fast] / scale
        above = np.searchsorted(keys.ravel(), (first + np.clip(wanted, -0.25, 1.25)).ravel()).reshape(-1, width)
        above -= np.arange(slow.size)[:, None] * width
        return np.concatenate([np.clip(above - 1, 0, width - 1), np.clip(above, 0, width - 1)], axis=1)

    def _sort(self, rows: IntArray) -> None:
        items = self._items[rows]
        if self._room_needed and not (items < 0).any(axis=1).all():
            # Some part has no place left for one more item.
            self._items = np.pad(self._items, ((0, 0), (2, 0)), constant_values=-1)
            self._costs = np.pad(self._costs, ((0, 0), (2, 0)))
            items = self._items[rows]
        costs = self._item_costs[items]
        lines, order = np.arange(rows.size)[:, None], np.argsort(costs, axis=1, kind="stable")
        self._items[rows], self._costs[rows] = items[lines, order], costs[lines, order]
        # Summed anew: loads kept up to date by differences would drift.
        self._loads[rows] = costs.sum(axis=1) + self._fixed_loads[rows]


@functools.cache
def _pairs(width: int) -> tuple[IntArray, IntArray]:
    """The columns of all pairs of an item of one part with an item of another."""
    first, second = np.divmod(np.arange(width * width), width)
    return first, second
