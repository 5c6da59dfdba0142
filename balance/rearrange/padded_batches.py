"""One batch per rank where the longest item of a batch counts for all of it: searches for the smallest makespan.

A batch of b items costs ``linear * sum(l) + b * quad(longest)``. With ``linear`` 0 and ``quad`` the whole cost of an
item that is layout "padded", with the two terms of a quadratic cost it is "padded-attention". Items are numbered from
the longest to the shortest, so the longest of a batch is the one with the lowest number.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
from dataclasses import dataclass

import numpy as np

from odc.balance.checks import FloatArray, IntArray
from odc.balance.partition import Parts, split_by_cost
from odc.balance.partition.refine import CLOSE_ENOUGH, ExchangeTable

# An exchange must gain this fraction of the makespan: smaller ones are rounding errors, and could repeat forever.
_MIN_GAIN = 1e-9
# Bounds that the filling search tries at most.
_NUM_BOUNDS = 12
# Where there are more items, there are fewer starts: the first is then close to the best.
_MAX_ITEMS_OF_ALL_STARTS = 2**15
# Rounds of exchanges, and comparisons in all of them.
_MIN_ROUNDS, _MAX_ROUNDS = 10, 200
_MAX_COMPARISONS = 2**23
# Items of one row of the table that take part in an exchange: the longest, the shortest, and some between.
_MAX_CANDIDATES = 24
# Ways to pair batches before the costliest one looks at others, and at how many of them it looks.
_NUM_PAIRINGS = 4
_MAX_PARTNERS = 256
_MAX_PAIRS = 2**14
# Two batches with together so few items are split anew in every way, so often.
_MAX_SPLIT = 12
_MAX_SPLITS = 2000
# Larger tables, mostly holes, are not made: their batches stay as they are.
_MAX_CELLS = 2**23


@dataclass(frozen=True)
class Items:
    """Items to batch, from the longest to the shortest."""

    lengths: IntArray
    """Tokens, (num_items,)."""

    quad: FloatArray
    """What each item of a batch costs besides its tokens if this one is the longest, (num_items,), not increasing."""

    linear: float
    """Cost per token."""

    num_ranks: int

    def makespan(self, parts: Parts) -> float:
        """The cost of the costliest batch."""
        return max(self.linear * int(self.lengths[p].sum()) + len(p) * float(self.quad[min(p)]) for p in parts if p)


def contiguous_batches(items: Items) -> Parts:
    """The runs of :func:`best_runs`."""
    return [list(range(start, end)) for start, end in itertools.pairwise([*best_runs(items), items.lengths.size])]


def best_runs(items: Items) -> list[int]:
    """Where they start: the runs of consecutive items, at most ``num_ranks``, with the smallest makespan: exact, to the
    last bit.

    Whether a bound can be met is decided by a greedy: from the longest item on, each batch takes as many as it can. No
    other division into runs gets further with as many batches: a run that starts later has no longer items, so it
    reaches at least as far. Floats round products and sums of larger numbers to no smaller ones, and sums of lengths
    are integers, so all of this holds for the rounded costs as well.

    The bound is bisected, and jumps to where the answer can change. If it is met, down to the makespan reached; if not,
    up to the least cost that any batch of the greedy would have had with one more item: below, the greedy makes the
    same batches. Both are costs of batches, so the search ends at one, and none below can be met.
    """
    # Below it in any case: a batch of the longest item, and (rounding aside) the mean.
    low = items.linear * int(items.lengths[0]) + float(items.quad[0])
    mean = (items.linear * int(items.lengths.sum()) + float(items.quad.sum())) / items.num_ranks
    low = max(low, mean * (1 - 1e-9))
    even = -(-items.lengths.size // items.num_ranks)
    cut = _Greedy(items) if items.linear else _GreedyOfLongest(items)
    # This can be met by batches of equal numbers, but for rounding.
    starts, high, _ = cut(even * (items.linear * int(items.lengths[0]) + float(items.quad[0])) * (1 + 1e-9))
    assert starts is not None
    while low < high:
        middle = low + (high - low) / 2
        found, makespan, next_cost = cut(middle if middle < high else low)
        if found is None:
            low = next_cost
        else:
            starts, high = found, makespan
    return starts


class _Greedy:
    """Cuts the items into runs that cost no more than a bound, from the longest item on."""

    def __init__(self, items: Items) -> None:
        self._lengths, self._quad = items.lengths.tolist(), items.quad.tolist()
        self._sums = [0, *np.cumsum(items.lengths).tolist()]
        self._linear, self._num_ranks = items.linear, items.num_ranks

    def __call__(self, bound: float) -> tuple[list[int] | None, float, float]:
        """Runs that cost no more than ``bound``, which is at least the cost of the longest item by itself.

        Returns:
            Where the runs start (None: more would be needed), the cost of the costliest, and the least cost that one
            of them would have with one more item.
        """
        num_items = len(self._lengths)
        starts: list[int] = []
        start, makespan, next_cost = 0, 0.0, float("inf")
        while start < num_items:
            if len(starts) == self._num_ranks:
                return None, makespan, next_cost
            starts.append(start)
            end, cost = self._reach(start, bound)
            if end < num_items:
                next_cost = min(next_cost, self._cost(start, end + 1))
            makespan = max(makespan, cost)
            start = end
        return starts, makespan, next_cost

    def _cost(self, start: int, end: int) -> float:
        cost: float = self._linear * (self._sums[end] - self._sums[start]) + (end - start) * self._quad[start]
        return cost

    def _reach(self, start: int, bound: float) -> tuple[int, float]:
        """The end of the longest run from ``start`` on that the bound allows, and its cost."""
        end, cost, num_items = start, 0.0, len(self._lengths)
        while end < num_items:
            # At least so many more fit, since none is longer than the next one, but for rounding.
            each = self._linear * self._lengths[end] + self._quad[start]
            further = min(num_items, end + max(1, int((bound - cost) / each) if each else num_items))
            while further > end and (then := self._cost(start, further)) > bound:
                further -= 1
            if further == end:
                break
            end, cost = further, then
        return end, cost


class _GreedyOfLongest:
    """:class:`_Greedy` where the longest item of a run sets the cost of each: how many a run takes depends on that cost
    alone, and items of few different lengths have few different costs."""

    def __init__(self, items: Items) -> None:
        self._costs, group = np.unique(items.quad, return_inverse=True)
        self._group, self._num_ranks = group.tolist(), items.num_ranks

    def __call__(self, bound: float) -> tuple[list[int] | None, float, float]:
        costs, group, num_items = self._costs, self._group, len(self._group)
        found = np.divide(bound, costs, out=np.full(costs.size, float(num_items)), where=costs > 0)
        takes = np.clip(found, 1, num_items).astype(np.int64)
        # The quotient is rounded, and so are the products that the bound is compared with.
        takes -= takes * costs > bound
        takes += (takes + 1) * costs <= bound
        steps, starts, start = takes.tolist(), list[int](), 0
        while start < num_items and len(starts) < self._num_ranks:
            starts.append(start)
            start += steps[group[start]]
        of_run = np.array([group[each] for each in starts])
        ends = np.array([*starts[1:], min(start, num_items)])
        sizes, each = ends - starts, costs[of_run]
        next_cost = ((sizes + 1) * each)[ends < num_items].min(initial=np.inf)
        return (starts if start >= num_items else None), float((sizes * each).max()), float(next_cost)


def filled_batches(items: Items, bound: float) -> Parts | None:
    """At most ``num_ranks`` batches that cost no more than ``bound`` (but for rounding), if this way finds them.

    One batch after the other takes the longest item that is left, and then, again and again, the longest that still
    fits: a run of similar lengths, and short ones into what is left of the bound. None: more batches would be needed.
    """
    num_items, shortest_first = items.lengths.size, items.lengths[::-1].tolist()
    lengths, quad, linear = items.lengths.tolist(), items.quad.tolist(), items.linear
    sums = [0, *np.cumsum(items.lengths).tolist()]
    taken = bytearray(num_items)
    parts: Parts = []
    longest = 0
    while (longest := taken.find(0, longest)) >= 0:
        item = longest
        if len(parts) == items.num_ranks or linear * lengths[item] + quad[item] > bound:
            return None
        part: list[int] = []
        each, room = quad[item], bound
        while item >= 0:
            cost = linear * lengths[item] + each
            if cost <= room:
                # So many at least, as far as none is missing between.
                end = min(num_items, item + max(1, int(room / cost)))
                if (missing := taken.find(1, item, end)) >= 0:
                    end = missing
                part.extend(range(item, end))
                taken[item:end] = b"\1" * (end - item)
                room -= linear * (sums[end] - sums[item]) + (end - item) * each
            else:
                # The first that is short enough.
                end = max(item + 1, num_items - bisect.bisect_right(shortest_first, (room - each) / linear))
            item = taken.find(0, end)
        parts.append(part)
    return parts


def least_cost_first(items: Items) -> Parts:
    """Each item, from the longest on, goes to the batch that is then the cheapest: of a new one or those begun.

    Those begun all become dearer by the same tokens, so the cheapest then is the one with the least cost plus ``quad``
    of its longest item.
    """
    lengths, quad = items.lengths.tolist(), items.quad.tolist()
    parts: Parts = []
    heap: list[tuple[float, int]] = []
    for item in range(items.lengths.size):
        if len(parts) < items.num_ranks and (not heap or quad[item] <= heap[0][0]):
            heapq.heappush(heap, (items.linear * lengths[item] + 2 * quad[item], len(parts)))
            parts.append([item])
        else:
            cost, part = heap[0]
            parts[part].append(item)
            heapq.heapreplace(heap, (cost + items.linear * lengths[item] + quad[parts[part][0]], part))
    return parts


def few_batches(items: Items) -> Parts:
    """At most ``num_ranks`` batches with a small makespan.

    Batches that fill up what is left of a bound, which is bisected between a lower bound and the makespan of the best
    runs of consecutive items; of few items also those runs, and each item where it costs least; of few items or where
    attention hardly counts, the partition by cost. Moves and swaps improve each, and the best is taken. Deterministic,
    and never worse than the best runs.
    """
    runs = contiguous_batches(items)
    if not items.linear:
        return runs  # optimal
    filled = runs
    low = items.linear * int(items.lengths[0]) + float(items.quad[0])
    low = max(low, (items.linear * int(items.lengths.sum()) + float(items.quad.sum())) / items.num_ranks)
    high = items.makespan(runs)
    for _ in range(_NUM_BOUNDS):
        if high <= low * (1 + CLOSE_ENOUGH):
            break
        middle = low + (high - low) / 2
        found = filled_batches(items, middle)
        if found is None:
            low = middle
        else:
            filled, high = found, middle
    starts, few = [filled], items.lengths.size <= _MAX_ITEMS_OF_ALL_STARTS
    if few:
        starts += [runs, least_cost_first(items)]
    # At most about the mean as if all were the longest: attention that hardly counts may be left out of account.
    tokens, even = int(items.lengths.sum()) / items.num_ranks, -(-items.lengths.size // items.num_ranks)
    if few or items.linear * tokens + even * float(items.quad[0]) < high:
        costs = items.linear * items.lengths + items.quad
        starts.append([sorted(part) for part in split_by_cost(costs, items.num_ranks, equal_size=False) if part])
    if not few:
        starts = [min(starts, key=items.makespan)]
    return min((_improved(items, start) for start in starts), key=items.makespan)


def _improved(items: Items, parts: Parts) -> Parts:
    """Moves and swaps of items between two batches, until the costliest batch can make none that helps it."""
    if items.num_ranks == 1 or items.num_ranks * max(map(len, parts)) > _MAX_CELLS:
        return parts
    table = _Table(items, parts + [[] for _ in range(items.num_ranks - len(parts))])
    half, shift = min(items.num_ranks // 2, _MAX_PAIRS), 0
    comparisons = half * min(_MAX_CANDIDATES, max(map(len, parts))) ** 2
    for _ in range(min(_MAX_ROUNDS, max(_MIN_ROUNDS, _MAX_COMPARISONS // max(comparisons, 1)))):
        order = np.argsort(-table.times, kind="stable")
        if shift < min(half, _NUM_PAIRINGS):
            improved = table.exchange(order[:half], np.roll(order[::-1][:half], -shift))
            shift = 0 if improved[0] else shift + 1
        elif not (table.improve(order[0], order[:0:-1][:_MAX_PARTNERS]) or table.split_anew(order)):
            break
    return table.parts()


class _Table(ExchangeTable):
    """Batches as rows of items, the longest first, then -1: no item, of length 0."""

    min_gain = _MIN_GAIN

    def __init__(self, items: Items, parts: Parts) -> None:
        self._linear = items.linear
        # As floats, exact: only their products with costs are rounded.
        self._lengths, self._quad = np.append(items.lengths, 0).astype(np.float64), np.append(items.quad, 0.0)
        self._items = np.full((len(parts), max(map(len, parts)) + 2), -1, dtype=np.int64)
        for row, part in enumerate(parts):
            self._items[row, : len(part)] = part
        self._sums, self.times = np.zeros(len(parts)), np.zeros(len(parts))
        self._counts = np.zeros(len(parts), dtype=np.int64)
        self._splits_left = _MAX_SPLITS
        self._sort(np.arange(len(parts)))

    def parts(self) -> Parts:
        return [row[:count] for row, count in zip(self._items.tolist(), self._counts.tolist(), strict=True)]

    def split_anew(self, order: IntArray) -> bool:
        """Divide the items of the costliest row and of another one, few all together, in another way, if it helps."""
        costliest = int(order[0])
        few = order[1:][self._counts[order[1:]] + self._counts[costliest] <= _MAX_SPLIT]
        for other in few[::-1][: self._splits_left].tolist():
            self._splits_left -= 1
            num_items = int(self._counts[costliest] + self._counts[other])
            pair = [costliest, other]
            both = np.sort(self._items[pair][self._items[pair] >= 0])
            first, firsts = _subsets(num_items)
            second = ~first
            # The longest of all is in the second half of each division.
            costs = self._of_subsets(first, both, firsts)
            costs = np.maximum(costs, self._of_subsets(second, both, np.zeros_like(firsts)))
            best = int(np.argmin(costs))
            if costs[best] < self.times[costliest] * (1 - _MIN_GAIN):
                self._items[pair] = -1
                for row, chosen in zip(pair, (both[first[best]], both[second[best]]), strict=True):
                    missing = chosen.size - self._items.shape[1] + 1
                    if missing > 0:
                        self._items = np.pad(self._items, ((0, 0), (0, missing)), constant_values=-1)
                    self._items[row, : chosen.size] = chosen
                self._sort(np.array(pair))
                return True
        return False

    def _of_subsets(self, chosen: np.ndarray, items: IntArray, firsts: IntArray) -> FloatArray:
        counts = chosen.sum(axis=1)
        costs: FloatArray = self._linear * (chosen @ self._lengths[items]) + counts * self._quad[items[firsts]]
        return costs

    def _best(self, costly: IntArray, cheap: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
        given, taken = self._candidates(costly), self._candidates(cheap)
        gives = np.take_along_axis(self._items[costly], given, axis=1)
        takes = np.take_along_axis(self._items[cheap], taken, axis=1)
        tokens = self._lengths[gives][:, :, None] - self._lengths[takes][:, None, :]
        number = (gives >= 0).astype(np.int64)[:, :, None] - (takes >= 0)[:, None, :]
        heads = np.maximum(self._heads_without(costly, given)[:, :, None], self._quad[takes][:, None, :])
        costs = self._linear * (self._sums[costly][:, None, None] - tokens)
        costs += (self._counts[costly][:, None, None] - number) * heads
        heads = np.maximum(self._heads_without(cheap, taken)[:, None, :], self._quad[gives][:, :, None])
        others = self._linear * (self._sums[cheap][:, None, None] + tokens)
        others += (self._counts[cheap][:, None, None] + number) * heads
        costs = np.maximum(costs, others, out=costs).reshape(costly.size, -1)
        best, pairs = np.argmin(costs, axis=1), np.arange(costly.size)
        return given[pairs, best // taken.shape[1]], taken[pairs, best % taken.shape[1]], costs[pairs, best]

    def _candidates(self, rows: IntArray) -> IntArray:
        """Columns that take part: all items if they are few, else some from the longest to the shortest; no item."""
        counts = self._counts[rows][:, None]
        num = min(_MAX_CANDIDATES, int(counts.max(initial=0)) + 1)
        places = np.arange(num)
        spread = places * np.maximum(counts - 1, 0) // max(num - 1, 1)
        columns: IntArray = np.where(counts <= num, np.minimum(places, counts), spread)
        return np.concatenate([columns, counts], axis=1)

    def _heads_without(self, rows: IntArray, columns: IntArray) -> FloatArray:
        """``quad`` of the longest item of each row without the one in this column."""
        first, second = self._quad[self._items[rows, 0]], self._quad[self._items[rows, 1]]
        heads: FloatArray = np.where(columns == 0, second[:, None], first[:, None])
        return heads

    def _sort(self, rows: IntArray) -> None:
        none = self._lengths.size
        items = np.sort(np.where(self._items[rows] < 0, none, self._items[rows]), axis=1)
        items[items == none] = -1
        self._items[rows] = items
        self._sums[rows], self._counts[rows] = self._lengths[items].sum(axis=1), (items >= 0).sum(axis=1)
        self.times[rows] = self._linear * self._sums[rows] + self._counts[rows] * self._quad[items[:, 0]]
        if (items[:, -1] >= 0).any():
            # Room for one more in each row.
            self._items = np.pad(self._items, ((0, 0), (0, 2)), constant_values=-1)


@functools.cache
def _subsets(num_items: int) -> tuple[np.ndarray, IntArray]:
    """All subsets without item 0, (2 ** (num_items - 1), num_items), and the first item of each (0 if empty)."""
    numbers = np.arange(2 ** (num_items - 1))[:, None]
    chosen = np.hstack([np.zeros_like(numbers), numbers >> np.arange(num_items - 1) & 1]).astype(bool)
    return chosen, np.argmax(chosen, axis=1)
