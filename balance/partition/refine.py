"""Local search on a partition: move an item, or swap two, while the heavier of two parts gets lighter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odc.balance.checks import FloatArray, IntArray
from odc.balance.partition.differencing import Parts

# An exchange must gain this fraction of the load: no cost model is that exact, and gains as small as rounding
# errors could repeat forever.
_MIN_GAIN = 1e-6

# At most this many exchanges per item. The most that any of 1500 random instances needed was 1.4.
_EXCHANGES_PER_ITEM = 8


# Only this many parts, the lightest, are looked at as partners. With all of them, 4096 items in 256 parts
# took half as long again, and the makespan fell by 0.0005%.
_MAX_PARTNERS = 128


@dataclass(frozen=True)
class Limit:
    """A second sum that no part may exceed: the token limit of a microbatch."""

    weights: IntArray
    capacity: int


def refine(costs: FloatArray, parts: Parts, *, equal_size: bool, limit: Limit | None = None) -> Parts:
    """Improve ``parts`` by moves and swaps until none helps.

    The heaviest part that can still improve gives an item away, or swaps one for a cheaper one, such that the
    heavier of the two parts involved becomes lighter. So the makespan never rises, and parts below it are
    balanced as well. A move is a swap with nothing; with ``equal_size`` there are only swaps. With ``limit``,
    which the given parts must meet, an exchange that breaks it is not made.

    No part becomes empty. The result is deterministic; parts keep their order, items within a part ascend.
    """
    search = _Search(costs, parts, equal_size=equal_size, limit=limit)
    num_exchanges_left = _EXCHANGES_PER_ITEM * costs.size
    active = np.ones(len(parts), dtype=bool)
    changed = False
    while num_exchanges_left > 0:
        if not active.any():
            if not changed:
                break
            # Parts that found no partner may find one now.
            active[:] = True
            changed = False
        heaviest = int(np.argmax(np.where(active, search.loads, -1.0)))
        if search.improve(heaviest):
            changed = True
            num_exchanges_left -= 1
        else:
            active[heaviest] = False
    return search.parts()


class _Search:
    """The partition under change, and an index that finds the best exchange of one part with others.

    For an item x of part a (load A) and part b (load B) the best counterpart y of b is the one nearest to
    x - (A - B) / 2. The index holds the items of all parts in one sorted array, part p shifted by 2 * p and
    costs scaled to at most 1, so one binary search serves all parts.
    """

    def __init__(self, costs: FloatArray, parts: Parts, *, equal_size: bool, limit: Limit | None) -> None:
        k = len(parts)
        self.num_items = costs.size
        # One item "nothing" per part turns a move into a swap.
        num_nothings = 0 if equal_size else k
        self.costs = np.concatenate([costs, np.zeros(num_nothings)])
        self.owner = np.concatenate([np.zeros(costs.size, dtype=np.int64), np.arange(num_nothings)])
        for part, items in enumerate(parts):
            self.owner[items] = part
        self.loads = np.bincount(self.owner, weights=self.costs, minlength=k)
        self.scale = float(self.costs.max(initial=0.0)) or 1.0
        self.limit = limit
        if limit is not None:
            self.weights = np.concatenate([limit.weights, np.zeros(num_nothings, dtype=np.int64)])
        self.sorted_items = np.arange(self.costs.size)
        self._rebuild()

    def parts(self) -> Parts:
        parts: Parts = [[] for _ in range(self.loads.size)]
        for item, part in enumerate(self.owner[: self.num_items].tolist()):
            parts[part].append(item)
        return parts

    def improve(self, a: int) -> bool:
        """Make the exchange that leaves the heavier of ``a`` and its partner lightest, if one helps."""
        others = np.argsort(self.loads, kind="stable")[:_MAX_PARTNERS]
        others = others[self.loads[others] < self.loads[a]]
        mine = np.flatnonzero(self.owner[: self.num_items] == a)
        if others.size == 0 or mine.size == 0:
            return False
        theirs = self._nearest(a, mine, others)
        given = self.costs[mine][:, None, None] - self.costs[theirs]
        heavier = np.maximum(self.loads[a] - given, self.loads[others][None, :, None] + given)
        if self.limit is not None:
            heavier[~self._within_limit(a, mine, others, theirs, self.limit.capacity)] = np.inf
        best = int(np.argmin(heavier))
        if heavier.flat[best] >= self.loads[a] * (1 - _MIN_GAIN):
            return False
        i, j, _ = np.unravel_index(best, heavier.shape)
        self._exchange(a, int(mine[i]), int(others[j]), int(theirs.flat[best]))
        return True

    def _nearest(self, a: int, mine: IntArray, others: IntArray) -> IntArray:
        """The two items of every other part nearest to the ideal counterpart: (mine, others, 2)."""
        ideal = self.costs[mine][:, None] - (self.loads[a] - self.loads[others])[None, :] / 2
        query = 2 * others[None, :] + np.clip(ideal / self.scale, -0.25, 1.25)
        above = np.searchsorted(self.keys, query)
        first, last = self.starts[others], self.starts[others + 1] - 1
        below = np.clip(above - 1, first, last)
        above = np.clip(above, first, last)
        nearest: IntArray = self.sorted_items[np.stack([below, above], axis=-1)]
        return nearest

    def _within_limit(
        self, a: int, mine: IntArray, others: IntArray, theirs: IntArray, capacity: int
    ) -> npt.NDArray[np.bool_]:
        totals = np.bincount(self.owner, weights=self.weights, minlength=self.loads.size)
        given = self.weights[mine][:, None, None] - self.weights[theirs]
        most = np.maximum(totals[a] - given, totals[others][None, :, None] + given)
        within: npt.NDArray[np.bool_] = most <= capacity
        return within

    def _exchange(self, a: int, mine: int, b: int, theirs: int) -> None:
        self.owner[mine] = b
        if theirs < self.num_items:
            self.owner[theirs] = a
        # Summed anew: loads kept up to date by differences would drift.
        self.loads = np.bincount(self.owner, weights=self.costs, minlength=self.loads.size)
        self._rebuild()

    def _rebuild(self) -> None:
        keys = (2.0 * self.owner + self.costs / self.scale)[self.sorted_items]
        # Nearly in order after an exchange, which a stable sort makes use of.
        order = np.argsort(keys, kind="stable")
        self.sorted_items, self.keys = self.sorted_items[order], keys[order]
        self.starts = np.searchsorted(self.owner[self.sorted_items], np.arange(self.loads.size + 1))
