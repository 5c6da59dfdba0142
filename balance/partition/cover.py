"""The best partition of at most 40 items, as a cover of the items by subsets.

Suppose that no part ends after some level. Then each part's load is at most the level times its speed, and at
least the total minus what the other parts can take until then. Near the optimum this window is narrow, and few
subsets of the items fall into it: the columns. A partition is a cover: k columns that hold every item once. The
level starts at the lower bound and rises. Without a cover it becomes the lower bound; the best cover, at the
first level that has one, is the optimum.

Example: costs 9, 7, 6, 5, 3 and k = 3. The total is 30, so the level starts at 10.
Level 10: the window is 30 - 2 * 10 = 10 to 10, and the only column is 7+3. Nothing covers 9: no makespan is 10.
Level 11: the window is 30 - 2 * 11 = 8 to 11, and the columns are 9, 7+3, 6+5, 6+3, 5+3. Covers are built by the
largest item left: 9 only fits 9, then 7 only 7+3, then 6 fits 6+5 (not 6+3, as 3 is taken): makespan 11, the best.

Columns come from the sorted subset sums of two halves of the items (Horowitz and Sahni 1974). Partial covers grow
breadth first and merge where they hold the same items. Schreiber and Korf 2014 use a similar scheme.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from odc.balance.checks import FloatArray, IntArray
from odc.balance.partition.differencing import Parts
from odc.balance.partition.instance import ROUNDING, Instance

# All subsets of each half of the items are listed, so there is a limit to them.
MAX_ITEMS = 40
# The search stops where memory would grow large.
MAX_COLUMNS, MAX_STATES = 1_000_000, 2_000_000
_CHUNK = 2_000_000  # pairs of a state and a column looked at together

# The level starts this far above the bound (relative), and how that distance grows.
_FIRST_GAP, _GAP_GROWTH = 1e-8, 1.4
# A level with fewer columns than this is skipped, for one twice as far above the bound.
_FEW_COLUMNS = 100

# A subset of the items that can be a part: its items as bits, the index of its part's speed, its total cost.
_COLUMN = np.dtype([("mask", "i8"), ("kind", "i8"), ("load", "f8")])
# A partial cover: its items as bits, how many parts of each speed it has, the cost and the speed of all other
# items and parts, the time of its latest part, and its node in the tree of choices.
_STATE = np.dtype([("mask", "i8"), ("used", "i8"), ("left", "f8"), ("speed", "f8"), ("time", "f8"), ("node", "i8")])


def search_covers(instance: Instance) -> None:
    """Improve the partition and the bound until they are proved, or time or memory is used up."""
    search, gap = _Search(instance), _FIRST_GAP
    top, floor = instance.makespan * (1 - 1e-9), instance.bound
    while not instance.proved and instance.seconds_left() > 0:
        level = min(floor * (1 + gap), top)
        columns = search.columns(level)
        if columns is None:
            return
        if columns.size < _FEW_COLUMNS and level < top:
            gap *= 2
            continue
        covers = _Covers(search, columns, level)
        complete, parts = covers.build(), covers.best_parts()
        if parts is not None:
            instance.offer(parts)
        if not complete:
            return
        instance.raise_bound((level if parts is None else instance.makespan) * (1 - ROUNDING))
        gap *= _GAP_GROWTH


class _Search:
    """What all levels share, and the columns of one. Items are numbered from the largest cost to the smallest."""

    def __init__(self, instance: Instance) -> None:
        self.instance, self.num_items = instance, instance.costs.size
        # Of more parts than items, the slowest stay empty.
        self.fastest = np.argsort(-instance.speeds, kind="stable")[: self.num_items]
        self.speeds, self.counts = np.unique(instance.speeds[self.fastest], return_counts=True)
        # How many parts of each speed are used, as digits of one number.
        self.radix = np.cumprod(np.concatenate([[1], self.counts + 1]))[:-1]
        self.total, self.total_speed = float(instance.sorted_costs.sum()), float(self.speeds @ self.counts)
        self.slack = ROUNDING * self.total
        half = self.num_items // 2
        self.left = _subsets(instance.sorted_costs[:half], 0)
        self.right = _subsets(instance.sorted_costs[half:], half)

    def columns(self, level: float) -> npt.NDArray[np.void] | None:
        """The subsets that can be a part if no part ends after ``level``; None if there are too many."""
        (sums_l, masks_l), (sums_r, masks_r) = self.left, self.right
        pieces, num_columns = [], 0
        for kind, speed in enumerate(self.speeds):
            # The subsets of the right half that bring one of the left half into the window are neighbours.
            lightest = self.total - level * (self.total_speed - speed) - self.slack
            first = np.searchsorted(sums_r, lightest - sums_l, "left")
            count = np.searchsorted(sums_r, level * speed + self.slack - sums_l, "right") - first
            num_columns += int(count.sum())
            if num_columns > MAX_COLUMNS:
                return None
            i = np.repeat(np.arange(count.size), count)
            j = np.arange(i.size) - np.repeat(np.cumsum(count) - count - first, count)
            piece = np.zeros(i.size, dtype=_COLUMN)
            piece["mask"], piece["kind"], piece["load"] = masks_l[i] | masks_r[j], kind, sums_l[i] + sums_r[j]
            fits = piece["mask"] != 0
            if self.instance.part_size is not None:
                sizes = np.sum([(piece["mask"] >> i) & 1 for i in range(self.num_items)], axis=0)
                fits &= sizes == self.instance.part_size
            pieces.append(piece[fits])
        return np.concatenate(pieces)


class _Covers:
    """The covers of one level, built breadth first in the order of the largest item left."""

    def __init__(self, search: _Search, columns: npt.NDArray[np.void], level: float) -> None:
        self.search, self.columns, self.level = search, columns, level
        self.best_time, self.best_node = search.instance.makespan, -1
        # The tree of choices, in pieces: the node before each node, and the column that was added to it.
        self.parents: list[IntArray] = [np.array([-1])]
        self.chosen: list[IntArray] = [np.array([-1])]
        self.num_nodes = 1

    def build(self) -> bool:
        """Look for the best cover that beats the instance's makespan. Whether the search went through."""
        search, lowest = self.search, _lowest_item(self.columns["mask"])
        start = np.array([(0, 0, search.total, search.total_speed, 0.0, 0)], dtype=_STATE)
        waiting = {0: [start]}  # by the largest item left
        for item in range(search.num_items):
            states = _distinct(np.concatenate(waiting.pop(item, [np.zeros(0, dtype=_STATE)])))
            mine = np.flatnonzero(lowest == item)
            rows = max(1, _CHUNK // max(1, mine.size))
            for a in range(0, states.size, rows):
                if search.instance.seconds_left() < 0 or self.num_nodes > MAX_STATES:
                    return False
                new = self._take_best(self._extend(states[a : a + rows], mine))
                uncovered = _lowest_item(~new["mask"])
                for next_item in np.unique(uncovered).tolist():
                    waiting.setdefault(next_item, []).append(new[uncovered == next_item])
        return True

    def best_parts(self) -> Parts | None:
        """The best cover that was met, as a partition; None if there was none."""
        if self.best_node < 0:
            return None
        instance, search, node = self.search.instance, self.search, self.best_node
        parents, chosen = np.concatenate(self.parents), np.concatenate(self.chosen)
        parts: Parts = [[] for _ in range(instance.speeds.size)]
        free = {speed: [p for p in search.fastest.tolist() if instance.speeds[p] == speed] for speed in search.speeds}
        while chosen[node] >= 0:
            column = self.columns[chosen[node]]
            items = [i for i in range(search.num_items) if int(column["mask"]) >> i & 1]
            parts[free[search.speeds[column["kind"]]].pop()] = instance.order[items].tolist()
            node = int(parents[node])
        return parts

    def _extend(self, states: npt.NDArray[np.void], mine: IntArray) -> npt.NDArray[np.void]:
        """Every state with every column of ``mine`` that is free of its items and leaves no too large rest."""
        search = self.search
        i, j = np.nonzero((states["mask"][:, None] & self.columns["mask"][mine]) == 0)
        old, added = states[i], self.columns[mine[j]]
        kind = added["kind"]
        speed, radix = search.speeds[kind], search.radix[kind]
        new = np.empty(i.size, dtype=_STATE)
        new["mask"], new["used"] = old["mask"] | added["mask"], old["used"] + radix
        new["left"], new["speed"] = old["left"] - added["load"], old["speed"] - speed
        new["time"] = np.maximum(old["time"], added["load"] / speed)
        keep = (new["left"] <= self.level * new["speed"] + search.slack) & (new["time"] < self.best_time)
        keep &= old["used"] // radix % (search.counts[kind] + 1) < search.counts[kind]
        new = new[keep]
        new["node"] = self.num_nodes + np.arange(new.size)
        self.num_nodes += new.size
        self.parents.append(old["node"][keep])
        self.chosen.append(mine[j][keep])
        return new

    def _take_best(self, states: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Note the best complete cover among ``states``. The states that can still beat it."""
        done = states[states["mask"] == (1 << self.search.num_items) - 1]
        if done.size:
            best = done[np.argmin(done["time"])]
            self.best_time, self.best_node = float(best["time"]), int(best["node"])
        return states[states["time"] < self.best_time]


def _subsets(costs: FloatArray, first_bit: int) -> tuple[FloatArray, IntArray]:
    """The sums of all subsets, ascending, and the subsets as bits from ``first_bit`` on."""
    sums, masks = np.zeros(1), np.zeros(1, dtype=np.int64)
    for i, cost in enumerate(costs):
        sums = np.concatenate([sums, sums + cost])
        masks = np.concatenate([masks, masks | (1 << (first_bit + i))])
    order = np.argsort(sums, kind="stable")
    return sums[order], masks[order]


def _lowest_item(masks: IntArray) -> IntArray:
    """The index of the lowest set bit of every mask, of which each has at most 52 and at least one."""
    return np.frexp((masks & -masks).astype(np.float64))[1].astype(np.int64) - 1


def _distinct(states: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Of states that cover the same items with as many parts of each speed, the one that ends first."""
    states = states[np.lexsort((states["time"], states["used"], states["mask"]))]
    same = (states["mask"][1:] == states["mask"][:-1]) & (states["used"][1:] == states["used"][:-1])
    distinct: npt.NDArray[np.void] = states[np.concatenate([np.ones(min(1, states.size), dtype=bool), ~same])]
    return distinct
