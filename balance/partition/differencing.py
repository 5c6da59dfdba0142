"""Starting partitions: the largest differencing method, and longest-processing-time-first.

Both take checked inputs and know nothing about token limits. ``odc.balance.partition`` is the public door.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from odc.balance.checks import FloatArray, IntArray

Parts = list[list[int]]


@dataclass
class _Tuple:
    """``k`` parts in the order of their loads, heaviest first. A part is a chain of items, -1 where empty."""

    loads: FloatArray
    heads: IntArray
    tails: IntArray

    @property
    def spread(self) -> float:
        return float(self.loads[0] - self.loads[-1])


def largest_differencing(costs: FloatArray, k: int, *, equal_size: bool) -> Parts:
    """Karmarkar and Karp's largest differencing method for ``k`` parts.

    Every item starts as a tuple of ``k`` parts, of which one holds it. Again and again the two tuples with
    the largest spread (heaviest minus lightest load) are merged, the heaviest part of the one with the
    lightest of the other. Example with ``k=2`` and costs 8, 7, 6, 5, 4: 8 and 7 part (difference 1), 6 and 5
    part (1), then 4 and 1 (3), then 3 and 1 (2): the loads are 16 and 14.

    With ``equal_size`` the items start in sorted groups of ``k``, one in each part, so sizes stay equal
    (``len(costs)`` must be a multiple of ``k``).

    Ties: the lower index counts as the larger cost; of equal spreads the tuple made first goes first.
    """
    order = np.argsort(-costs, kind="stable")
    group = k if equal_size else 1
    next_item = np.full(costs.size, -1, dtype=np.int64)
    # An entry is (-spread, serial, tuple or None); a single group is only built when its turn comes.
    heap: list[tuple[float, int, _Tuple | None]] = []
    for serial in range(costs.size // group):
        first, last = order[serial * group], order[(serial + 1) * group - 1]
        spread = costs[first] - (costs[last] if equal_size else 0.0)
        heap.append((-float(spread), serial, None))
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        first_two = [heapq.heappop(heap), heapq.heappop(heap)]
        a, b = (made or _start(costs, order[i * group : (i + 1) * group], k) for _, i, made in first_two)
        merged = _merge(a, b, next_item)
        heapq.heappush(heap, (-merged.spread, serial, merged))
        serial += 1
    _, i, made = heap[0]
    made = made or _start(costs, order[i * group : (i + 1) * group], k)
    return [_chain(int(head), next_item) for head in made.heads]


def _start(costs: FloatArray, items: IntArray, k: int) -> _Tuple:
    loads = np.zeros(k)
    chain = np.full(k, -1, dtype=np.int64)
    loads[: items.size] = costs[items]
    chain[: items.size] = items
    return _Tuple(loads, chain, chain)


def _merge(a: _Tuple, b: _Tuple, next_item: IntArray) -> _Tuple:
    b_heads, b_tails = b.heads[::-1], b.tails[::-1]
    loads = a.loads + b.loads[::-1]
    joined = (a.tails >= 0) & (b_heads >= 0)
    next_item[a.tails[joined]] = b_heads[joined]
    heads = np.where(a.heads >= 0, a.heads, b_heads)
    tails = np.where(b_tails >= 0, b_tails, a.tails)
    order = np.argsort(-loads, kind="stable")
    return _Tuple(loads[order], heads[order], tails[order])


def _chain(head: int, next_item: IntArray) -> list[int]:
    items = []
    while head >= 0:
        items.append(head)
        head = int(next_item[head])
    return items


def longest_first(costs: FloatArray, k: int, *, equal_size: bool) -> Parts:
    """Longest processing time first: each item, the costliest first, goes to the lightest part.

    With ``equal_size`` a part that holds ``len(costs) / k`` items takes no more. Ties: the lower index counts
    as the larger cost, the part with the lower number as the lighter one.
    """
    limit = costs.size // k if equal_size else costs.size
    parts: Parts = [[] for _ in range(k)]
    heap = [(0.0, part) for part in range(k)]
    for item in np.argsort(-costs, kind="stable"):
        load, part = heap[0]
        parts[part].append(int(item))
        if len(parts[part]) == limit:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (load + float(costs[item]), part))
    return parts
