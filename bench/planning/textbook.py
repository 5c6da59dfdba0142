"""Reference partitions for the benchmarks: the textbook differencing method, and exhaustive search."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def karmarkar_karp(costs: Sequence[float], k: int) -> list[list[int]]:
    """The largest differencing method as textbooks have it: a heap of tuples of ``k`` (load, items) each."""
    heap = []
    for serial, cost in enumerate(costs):
        parts: list[tuple[float, list[int]]] = [(cost, [serial])] + [(0.0, []) for _ in range(k - 1)]
        heap.append((-cost, serial, parts))
    heapq.heapify(heap)
    for serial in range(len(costs), 2 * len(costs) - 1):
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        merged = [(x + y, p + q) for (x, p), (y, q) in zip(a, reversed(b), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
    return [items for _, items in heap[0][2]]


def optimal_makespan(costs: FloatArray, k: int, *, equal_size: bool) -> float:
    """The smallest makespan of all partitions into ``k`` <= 4 parts, by looking at every one of them.

    Every split of every subset in two, 3 ** n of them, gives the best makespan of two parts for each subset;
    three parts are a subset and the rest in two, four are a subset in two and the rest in two.
    """
    if k == 1:
        return float(costs.sum())
    n = costs.size
    sums, sizes = np.zeros(1), np.zeros(1, np.int64)
    differences, balances = np.zeros(1), np.zeros(1, np.int8)
    for cost in costs:
        sums, sizes = np.concatenate([sums, sums + cost]), np.concatenate([sizes, sizes + 1])
        # An item is in neither of two parts, in the first, or in the second.
        differences = np.concatenate([differences, differences + cost, differences - cost])
        if equal_size:
            balances = np.concatenate([balances, balances + np.int8(1), balances - np.int8(1)])
    smallest = np.abs(differences, out=differences)
    if equal_size:
        smallest[balances != 0] = np.inf
    smallest = smallest.reshape((3,) * n)
    for item in range(n):
        neither, first, second = np.moveaxis(smallest, item, 0)
        smallest = np.stack([neither, np.minimum(first, second)], axis=item)
    smallest = smallest.ravel()  # by subset: bit i is item i
    in_two = (sums + smallest) / 2
    rest = in_two[::-1]  # of the complement
    if k == 2:
        return float(in_two[-1])
    makespans, share = (np.maximum(sums, rest), 3) if k == 3 else (np.maximum(in_two, rest), 2)
    return float(makespans[sizes * share == n].min() if equal_size else makespans.min())
