"""Split items into k parts of similar total cost."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import numpy.typing as npt

from odc.balance.checks import MAX_PARTS, FloatArray, as_costs, as_count, as_speeds
from odc.balance.layout import permuted
from odc.balance.partition.bounds import lower_bound
from odc.balance.partition.differencing import Parts, largest_differencing
from odc.balance.partition.refine import CLOSE_ENOUGH, Limit, refine
from odc.balance.partition.resplit import resplit

# Up to so many items a part, splitting pairs anew finds all that moves and swaps find, in a fraction of the time.
_FEW_EACH = 4
# A makespan this far (relative) above its bound, after moves and swaps, is worth a second start.
_WORTH_ANOTHER = 1e-3


def karmarkar_karp(
    costs: npt.ArrayLike, k: int, *, equal_size: bool = False, speeds: npt.ArrayLike | None = None
) -> list[list[int]]:
    """Split the items 0 .. len(costs) - 1 into ``k`` parts with a small makespan (the largest total cost of a part).

    The largest differencing method (Karmarkar and Karp 1982; paper appendix C, Listing 1) and longest
    processing time first, each then improved by moves and swaps, the better result also by splitting pairs of
    parts anew; the search ends early where the makespan is within 1e-4 (relative) of a lower bound. The
    result is never worse than either method by itself.

    Args:
        costs: one number per item, 0 or at least 1e-140, at most 1e140 in all.
        k: number of parts, at least 1.
        equal_size: all parts get ``len(costs) / k`` items.
        speeds: part p needs the time total cost / ``speeds[p]``, (k,), from 1e-9 to 1e9; the makespan is the longest
            such time. Default: all equal.

    Returns:
        ``k`` lists of indices, each ascending; together every index once. Without ``speeds``, parts are
        ordered by their lowest index, so the result depends on nothing but the arguments; empty parts come
        last, and there are some only if there are fewer items than parts. With ``speeds``, part p is for
        device p; among devices of equal speed the parts are ordered like that.

        Ties between equal costs: the lower index counts as the larger cost. Between the two methods, the
        differencing method wins.

    Raises:
        ValueError: a cost or a speed is out of range or NaN, or a speed is missing; ``k`` is out of range;
            ``equal_size`` and ``len(costs)`` is not a multiple of ``k``.

    Example:
        >>> karmarkar_karp([8, 7, 6, 5, 4], 2)
        [[0, 1], [2, 3, 4]]
    """
    array = as_costs(costs)
    k = as_count(k, "k", maximum=MAX_PARTS)
    if equal_size and array.size % k:
        raise ValueError(
            f"{array.size} items cannot be split into k={k} parts of equal size: expected a multiple of {k}; "
            f"drop {array.size % k} items, add {k - array.size % k}, or pass equal_size=False"
        )
    return split_by_cost(array, k, equal_size=equal_size, speeds=None if speeds is None else as_speeds(speeds, k))


def split_by_cost(
    costs: FloatArray, k: int, *, equal_size: bool, speeds: FloatArray | None = None, thorough: bool = True
) -> Parts:
    """:func:`karmarkar_karp` for checked arguments; with ``equal_size``, sizes may differ by one if they must.

    Without ``thorough`` only the better start is improved, and only by moves and swaps. That is faster, and
    leaves the parts below the makespan more even, which splitting pairs anew does not look at.
    """
    if speeds is None or (speeds == speeds[0]).all():
        return canonical(_search(costs, k, equal_size, None, thorough))
    # From the fastest device to the slowest, so that the order in which they are given has no say.
    fastest_first = np.argsort(-speeds, kind="stable")
    sorted_speeds = speeds[fastest_first]
    parts = _search(costs, k, equal_size, sorted_speeds, thorough)
    starts = np.flatnonzero(np.diff(sorted_speeds, prepend=np.inf)).tolist()
    for start, end in zip(starts, [*starts[1:], k], strict=True):
        parts[start:end] = canonical(parts[start:end])
    return permuted(parts, fastest_first.tolist())


def split_beside(costs: FloatArray, loads: FloatArray) -> Parts:
    """Share items out over parts that have loads already, so that the largest sum of both is small.

    Longest processing time first on top of the loads, then moves and swaps. Both checked.

    Returns:
        Part p belongs to ``loads[p]``; its items ascending.
    """
    parts = _lightest_first(costs, loads, capacity=costs.size)
    return [sorted(part) for part in refine(costs, parts, equal_size=False, loads=loads)]


def longest_first(costs: FloatArray, k: int, *, equal_size: bool, speeds: FloatArray | None = None) -> Parts:
    """Longest processing time first: each item, the costliest first, goes where it would be finished first.

    Without ``speeds`` that is the lightest part. With ``equal_size`` a part that holds ``len(costs) / k``
    items takes no more. Ties: the lower index counts as the larger cost, the part with the lower number as
    the one that finishes first.
    """
    capacity = costs.size // k if equal_size else costs.size
    loads = np.zeros(k)
    if speeds is None:
        return _lightest_first(costs, loads, capacity)
    parts: Parts = [[] for _ in range(k)]
    for item in np.argsort(-costs, kind="stable").tolist():
        part = int(np.argmin((loads + costs[item]) / speeds))
        parts[part].append(item)
        loads[part] += costs[item]
        if len(parts[part]) == capacity:
            loads[part] = np.inf
    return parts


def _lightest_first(costs: FloatArray, loads: FloatArray, capacity: int) -> Parts:
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


def _search(costs: FloatArray, k: int, equal_size: bool, speeds: FloatArray | None, thorough: bool) -> Parts:
    """``speeds`` are given from the fastest to the slowest."""
    if k == 1:
        return [list(range(costs.size))]
    if costs.size <= k and speeds is None:
        return [[item] for item in range(costs.size)] + [[] for _ in range(k - costs.size)]
    if equal_size and costs.size % k:
        return _almost_equal(costs, k, speeds, thorough)
    target = lower_bound(costs, k, equal_size=equal_size, speeds=speeds) * (1 + CLOSE_ENOUGH)
    starts = [
        _differencing(costs, k, equal_size=equal_size, speeds=speeds),
        longest_first(costs, k, equal_size=equal_size, speeds=speeds),
    ]
    candidates = sorted(((_quality(costs, parts, speeds), parts) for parts in starts), key=lambda c: c[0])
    best_quality, best = candidates[0]
    for number, (_, start) in enumerate([] if thorough and costs.size <= _FEW_EACH * k else candidates):
        # The better start in any case: also parts below the makespan shall be even.
        if number and (best_quality[0] <= target * (1 + _WORTH_ANOTHER) or not thorough):
            break
        parts = refine(costs, start, equal_size=equal_size, speeds=speeds)
        quality = _quality(costs, parts, speeds)
        if quality < best_quality:
            best_quality, best = quality, parts
    if thorough and best_quality[0] > target:
        best = resplit(costs, best, equal_size=equal_size, speeds=speeds, target=target)
    if speeds is None and not equal_size:
        fill_empty(costs, best)
    return best


def _almost_equal(costs: FloatArray, k: int, speeds: FloatArray | None, thorough: bool) -> Parts:
    """Parts whose sizes differ by one: of equal sizes, with an item that is nothing in some of them.

    The differencing method puts one item of each sorted group into each part, so none starts with two
    nothings: they are the last items of the last group. A limit keeps it so.
    """
    padded = np.append(costs, np.zeros(-costs.size % k))
    limit = Limit((np.arange(padded.size) >= costs.size).astype(np.int64), 1)
    parts = _differencing(padded, k, equal_size=True, speeds=speeds)
    parts = refine(padded, parts, equal_size=True, speeds=speeds, limit=limit)
    if thorough:
        target = lower_bound(costs, k, speeds=speeds) * (1 + CLOSE_ENOUGH)
        parts = resplit(padded, parts, equal_size=True, speeds=speeds, limit=limit, target=target)
    return [[item for item in part if item < costs.size] for part in parts]


def _differencing(costs: FloatArray, k: int, *, equal_size: bool, speeds: FloatArray | None) -> Parts:
    """The largest differencing method, its heaviest part for the fastest device."""
    parts = largest_differencing(costs, k, equal_size=equal_size)
    if speeds is None:
        return parts
    return [parts[part] for part in np.argsort(-part_loads(costs, parts), kind="stable")]


def part_loads(costs: FloatArray, parts: Parts) -> FloatArray:
    """Total cost of each part."""
    items = np.fromiter(itertools.chain.from_iterable(parts), dtype=np.int64)
    owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return np.bincount(owners, weights=costs[items], minlength=len(parts)).astype(np.float64, copy=False)


def _quality(costs: FloatArray, parts: Parts, speeds: FloatArray | None) -> tuple[float, float]:
    """Smaller is better: the makespan, then how uneven the rest is."""
    loads = part_loads(costs, parts)
    times = loads if speeds is None else loads / speeds
    return float(times.max()), float(np.square(times).sum())


def fill_empty(costs: FloatArray, parts: Parts) -> None:
    """Give every empty part the cheapest item of the heaviest part that has two, as far as there are any.

    No part's cost or number of tokens rises above what the giving part had.
    """
    empty = [part for part in parts if not part]
    if not empty:
        return
    loads = part_loads(costs, parts).tolist()
    givers = [(-load, number) for number, load in enumerate(loads) if len(parts[number]) > 1]
    heapq.heapify(givers)
    cheapest_last: dict[int, list[int]] = {}
    for part in empty:
        if not givers:
            return
        load, number = givers[0]
        if number not in cheapest_last:
            cheapest_last[number] = sorted(parts[number], key=lambda item: (-costs[item], -item))
        item = cheapest_last[number].pop()
        parts[number].remove(item)
        part.append(item)
        if len(parts[number]) > 1:
            heapq.heapreplace(givers, (load + float(costs[item]), number))
        else:
            heapq.heappop(givers)


def canonical(parts: Parts) -> Parts:
    """The same parts, each ascending, ordered by lowest index, empty ones last."""
    return sorted((sorted(part) for part in parts), key=lambda part: (not part, part))
