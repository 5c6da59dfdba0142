"""Longest processing time first, also for devices of different speeds."""

from __future__ import annotations

import heapq

import numpy as np

from odc.balance.checks import FloatArray
from odc.balance.partition.differencing import Parts


def longest_first(costs: FloatArray, k: int, *, equal_size: bool, speeds: FloatArray | None = None) -> Parts:
    """Longest processing time first: each item, the costliest first, goes where it would be finished first.

    Without ``speeds`` that is the lightest part. With ``equal_size`` a part that holds ``len(costs) / k``
    items takes no more. Ties: the lower index counts as the larger cost, the part with the lower number as
    the one that finishes first.
    """
    capacity = costs.size // k if equal_size else costs.size
    order = np.argsort(-costs, kind="stable").tolist()
    if speeds is None:
        return _lightest_first(costs.tolist(), order, k, capacity)
    parts: Parts = [[] for _ in range(k)]
    loads = np.zeros(k)
    for item in order:
        part = int(np.argmin((loads + costs[item]) / speeds))
        parts[part].append(item)
        loads[part] += costs[item]
        if len(parts[part]) == capacity:
            loads[part] = np.inf
    return parts


def _lightest_first(values: list[float], order: list[int], k: int, capacity: int) -> Parts:
    parts: Parts = [[] for _ in range(k)]
    heap = [(0.0, part) for part in range(k)]
    for item in order:
        load, part = heap[0]
        parts[part].append(item)
        if len(parts[part]) == capacity:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (load + values[item], part))
    return parts
