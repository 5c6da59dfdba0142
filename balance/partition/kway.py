"""Split items into k parts of similar total cost."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from odc.balance.checks import FloatArray, as_costs, as_count
from odc.balance.partition.differencing import Parts, largest_differencing, longest_first
from odc.balance.partition.refine import refine

# A makespan this close (relative) to its lower bound ends the search for a better one.
_CLOSE_ENOUGH = 1e-6


def karmarkar_karp(costs: npt.ArrayLike, k: int, *, equal_size: bool = False) -> list[list[int]]:
    """Split the items 0 .. len(costs) - 1 into ``k`` parts whose largest total cost (the makespan) is small.

    The largest differencing method (Karmarkar and Karp 1982; paper appendix C, Listing 1), improved by moves
    and swaps between parts; longest-processing-time-first, improved the same way, replaces it where it ends
    up better. The result is never worse than the plain method.

    Args:
        costs: one number per item, finite and at least 0.
        k: number of parts, at least 1.
        equal_size: all parts get ``len(costs) / k`` items.

    Returns:
        ``k`` lists of indices, each ascending; together every index once. Parts are ordered by their lowest
        index, so the result depends on nothing but the arguments; empty parts come last. Without
        ``equal_size``, parts are empty only if there are fewer items than parts.

        Ties between equal costs: the lower index counts as the larger cost. Between the two methods, the
        differencing method wins.

    Raises:
        ValueError: a cost is negative, infinite or NaN; ``k`` is below 1; ``equal_size`` and ``len(costs)``
            is not a multiple of ``k``.
    """
    array = as_costs(costs)
    k = as_count(k, "k")
    if equal_size and array.size % k:
        raise ValueError(
            f"{array.size} items cannot be split into k={k} parts of equal size: expected a multiple of {k}; "
            f"drop {array.size % k} items, add {k - array.size % k}, or pass equal_size=False"
        )
    return balance(array, k, equal_size=equal_size)


def balance(costs: FloatArray, k: int, *, equal_size: bool) -> Parts:
    """:func:`karmarkar_karp` for checked arguments."""
    if costs.size <= k:
        return [[item] for item in range(costs.size)] + [[] for _ in range(k - costs.size)]
    if k == 1:
        return [list(range(costs.size))]
    candidates = []
    for method in (largest_differencing, longest_first):
        candidates.append(refine(costs, method(costs, k, equal_size=equal_size), equal_size=equal_size))
        if _quality(costs, candidates[-1])[0] <= lower_bound(costs, k) * (1 + _CLOSE_ENOUGH):
            break
    best = min(candidates, key=lambda parts: _quality(costs, parts))
    if not equal_size:
        fill_empty(costs, best)
    return canonical(best)


def lower_bound(costs: FloatArray, k: int) -> float:
    """The mean load or the largest item: no partition into ``k`` parts has a smaller makespan."""
    return max(float(costs.sum()) / k, float(costs.max(initial=0.0)))


def fill_empty(costs: FloatArray, parts: Parts) -> None:
    """Give every empty part the cheapest item of the heaviest part that has two, as far as there are any.

    No part's cost or number of tokens rises above what the giving part had.
    """
    for part in parts:
        if not part:
            givers = [other for other in parts if len(other) > 1]
            if not givers:
                return
            giver = max(givers, key=lambda other: float(costs[other].sum()))
            cheapest = min(giver, key=lambda item: (costs[item], item))
            giver.remove(cheapest)
            part.append(cheapest)


def canonical(parts: Parts) -> Parts:
    """The same parts, each ascending, ordered by lowest index, empty ones last."""
    return sorted((sorted(part) for part in parts), key=lambda part: (not part, part))


def _quality(costs: FloatArray, parts: Parts) -> tuple[float, float]:
    """Smaller is better: the makespan, then how uneven the rest is."""
    loads = np.array([costs[part].sum() for part in parts])
    return float(loads.max()), float(np.square(loads).sum())
