"""The largest differencing method of Karmarkar and Karp for k parts.

Takes checked inputs and knows nothing about limits. ``odc.balance.partition.kway`` is the public door.
"""

from __future__ import annotations

import heapq
from bisect import insort

import numpy as np

from odc.balance.checks import FloatArray

Parts = list[list[int]]

# The parts of a tuple that hold items, lightest first: (load, items). Parts without items are not stored.
_Tuple = list[tuple[float, list[int]]]

# Up to this many parts, inserting each into a sorted list is cheaper than sorting the list again.
_FEW = 8


def largest_differencing(costs: FloatArray, k: int, *, equal_size: bool) -> Parts:
    """Karmarkar and Karp's largest differencing method for ``k`` parts.

    Every item starts as a tuple of ``k`` parts, of which one holds it. Again and again the two tuples with
    the largest spread (heaviest minus lightest load) are merged, the heaviest part of the one with the
    lightest of the other. Example with ``k=2`` and costs 8, 7, 6, 5, 4: 8 and 7 part (difference 1), 6 and 5
    part (1), then 4 and 1 (3), then 3 and 1 (2): the loads are 16 and 14.

    With ``equal_size`` the items start in sorted groups of ``k``, one in each part, so sizes stay equal
    (``len(costs)`` must be a multiple of ``k``).

    Ties: the lower index counts as the larger cost; of equal spreads the tuple made first goes first; of
    equal loads the part whose list of items compares as smaller counts as the lighter one.

    Most merges are of a full tuple with one that has few items, so parts without items are not stored: n
    items take O(n (log n + log k)) steps and O(n) memory, not O(n k).
    """
    if costs.size == 0:
        return [[] for _ in range(k)]
    queue = _Queue(costs, k, equal_size=equal_size)
    a = queue.pop()
    while not queue.is_empty():
        queue.push(_collect(a, queue, k) or _merge(a, queue.pop(), k))
        a = queue.pop()
    parts = [items for _, items in a]
    return parts + [[] for _ in range(k - len(parts))]


class _Queue:
    """Tuples by their spread, the largest first, of equal ones the oldest.

    Those that nothing was merged into are made when their turn comes: they are sorted already.
    """

    def __init__(self, costs: FloatArray, k: int, *, equal_size: bool) -> None:
        self._order = np.argsort(-costs, kind="stable").tolist()
        self._values = costs[self._order].tolist()
        self._k = k
        self._group = k if equal_size else 1
        self._merged: list[tuple[float, int, _Tuple]] = []
        self._num_pushed = 0
        ends = [0.0] * len(self._values) if self._group == 1 else self._values[self._group - 1 :: self._group]
        spreads = [first - last for first, last in zip(self._values[:: self._group], ends, strict=True)]
        self._serials = sorted(range(len(spreads)), key=lambda serial: (-spreads[serial], serial), reverse=True)
        self._spreads = spreads

    def is_empty(self) -> bool:
        return not (self._serials or self._merged)

    def push(self, merged: _Tuple) -> None:
        spread = merged[-1][0] - (merged[0][0] if len(merged) == self._k else 0.0)
        heapq.heappush(self._merged, (-spread, self._num_pushed, merged))
        self._num_pushed += 1

    def pop(self) -> _Tuple:
        if not self._start_is_next():
            return heapq.heappop(self._merged)[2]
        start = self._serials.pop() * self._group
        return [(self._values[i], [self._order[i]]) for i in range(start + self._group - 1, start - 1, -1)]

    def pop_item(self) -> tuple[float, list[int]] | None:
        """The next tuple if it is a single item."""
        if self._group > 1 or not self._start_is_next():
            return None
        i = self._serials.pop()
        return self._values[i], [self._order[i]]

    def _start_is_next(self) -> bool:
        if not self._serials:
            return False
        return not self._merged or self._spreads[self._serials[-1]] >= -self._merged[0][0]


def _collect(a: _Tuple, queue: _Queue, k: int) -> _Tuple | None:
    """Give single items to the parts of ``a`` that hold nothing, as long as single items are next.

    The same as merging them one by one: ``a`` came first, and what it collects leaves its spread as it is.
    """
    num_before = len(a)
    while len(a) < k and (item := queue.pop_item()):
        a.append(item)
    if len(a) == num_before:
        return None
    a.sort()
    return a


def _merge(a: _Tuple, b: _Tuple, k: int) -> _Tuple:
    """The heaviest part of ``b`` joins the lightest of ``a``, and so on. Reuses the longer list."""
    if len(a) < len(b):
        a, b = b, a
    # The heaviest parts of b get the parts of a that hold nothing; the others, the lightest, meet items.
    num_meeting = max(0, len(a) + len(b) - k)
    merged = [
        (load + other_load, _join(items, other_items))
        for (load, items), (other_load, other_items) in zip(a[:num_meeting], reversed(b[:num_meeting]), strict=True)
    ]
    merged += b[num_meeting:]
    if len(merged) <= _FEW:
        del a[:num_meeting]
        for part in merged:
            insort(a, part)
    else:
        a[:num_meeting] = merged
        a.sort()
    return a


def _join(a: list[int], b: list[int]) -> list[int]:
    """Both lists, in the longer one: one item at a time would else take a copy of a long part each."""
    if len(a) < len(b):
        a, b = b, a
    a.extend(b)
    return a
