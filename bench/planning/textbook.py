"""Reference partitions for the benchmarks, by exhaustive search."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


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
