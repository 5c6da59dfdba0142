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
    loads = np.zeros(k)
    if speeds is None:
        return lightest_first(costs, loads, capacity)
    parts: Parts = [[] for _ in range(k)]
    for item in np.argsort(-costs, kind="stable").tolist():
        part = int(np.argmin((loads + costs[item]) / speeds))
        parts[part].append(item)
        loads[part] += costs[item]
        if len(parts[part]) == capacity:
            loads[part] = np.inf
    return parts


def lightest_first(costs: FloatArray, loads: FloatArray, capacity: int) -> Parts:
    """The same without ``speeds``, on top of the parts' ``loads``. One that holds ``capacity`` items takes no more."""
    parts: Parts = [[] for _ in loads]
    values, heap = costs.tolist(), [(load, part) for part, load in enumerate(loads.tolist())]
    heapq.heapify(heap)
    for item in np.argsort(-costs, kind="stable").tolist():
        load, part = heap[0]
        parts[part].append(item)
        if len(parts[part]) == capacity:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (load + values[item], part))
    return parts
