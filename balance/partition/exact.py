"""The partition with the smallest makespan, proved by a search for covers, or the best known one with a bound on its
gap."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odc.balance.checks import MAX_PARTS, FloatArray, as_costs, as_count, as_speeds
from odc.balance.partition.bounds import lower_bound
from odc.balance.partition.cover import MAX_ITEMS, search_covers
from odc.balance.partition.differencing import Parts
from odc.balance.partition.instance import ROUNDING, TOLERANCE, Instance
from odc.balance.partition.kway import canonical, fill_empty, split_by_cost
from odc.errors import shown


@dataclass(frozen=True)
class ExactPartition:
    """A partition, with a bound on how much better any other one can be. Makespans are in units of cost / speed.

    Example:
        >>> found = exact_partition([8, 7, 6, 5, 4], 2)
        >>> found.optimal, found.makespan, found.gap
        (True, 15.0, 0.0)
    """

    parts: list[list[int]]
    """The items of each part, ascending."""

    makespan: float
    """The largest time of a part."""

    lower_bound: float
    """A proved lower bound: no partition has a smaller makespan."""

    seconds: float
    """Seconds to find and prove this result."""

    @property
    def optimal(self) -> bool:
        """Whether no partition has a makespan smaller by more than the relative ``TOLERANCE``."""
        return self.makespan <= self.lower_bound * (1 + TOLERANCE)

    @property
    def gap(self) -> float:
        """``(makespan - lower_bound) / lower_bound``; 0 if ``optimal``."""
        return 0.0 if self.optimal else self.makespan / self.lower_bound - 1

    def explain(self) -> str:
        """One sentence for a log."""
        proof = "proved optimal" if self.optimal else f"at most {self.gap:.2g} (relative) above the optimum"
        return f"{len(self.parts)} parts with makespan {self.makespan:.6g}, {proof}, in {self.seconds:.3g} s."


def exact_partition(
    costs: npt.ArrayLike,
    k: int,
    *,
    equal_size: bool = False,
    speeds: npt.ArrayLike | None = None,
    time_limit_s: float = 60.0,
    start: Sequence[Sequence[int]] | None = None,
) -> ExactPartition:
    """Split the items 0 .. len(costs) - 1 into ``k`` parts with the smallest makespan.

    The makespan is the largest total cost of a part, divided by the part's speed if there are ``speeds``.
    The best of ``start`` and the heuristics is what a search must beat; if that meets a lower bound, none
    is started. Up to 40 items are searched by :mod:`odc.balance.partition.cover`. For more items, and where the search
    runs out of time or memory, the result is the best that is known, with the gap to the bound that is known.

    Args:
        costs: one number per item, 0 or at least 1e-140, at most 1e140 in all.
        k: number of parts, at least 1.
        equal_size: all parts get ``len(costs) / k`` items.
        speeds: one number per part, from 1e-9 to 1e9. Default: all 1.
        time_limit_s: for all of it; may be exceeded by what the heuristics need (what
            :func:`odc.balance.karmarkar_karp` takes).
        start: ``k`` lists of indices, together every index once.

    Returns:
        The partition, never worse than ``start``. Without ``speeds`` its parts are in the order of
        :func:`odc.balance.karmarkar_karp`, else part ``p`` has speed ``speeds[p]``.

    Raises:
        ValueError: an argument is not as described.

    Example:
        >>> found = exact_partition([8, 7, 6, 5, 4], 2)
        >>> found.parts, found.makespan
        ([[0, 1], [2, 3, 4]], 15.0)
    """
    begin = time.perf_counter()
    instance = _checked(as_costs(costs), as_count(k, "k", maximum=MAX_PARTS), equal_size, speeds, time_limit_s, start)
    if not instance.proved and instance.costs.size <= MAX_ITEMS:
        search_covers(instance)
    parts = [sorted(part) for part in instance.parts]
    if speeds is None:
        if not equal_size:
            fill_empty(instance.costs, parts)
        parts = canonical(parts)
    makespan = instance.measure(parts)
    return ExactPartition(parts, makespan, min(instance.bound, makespan), time.perf_counter() - begin)


def _checked(
    costs: FloatArray,
    k: int,
    equal_size: bool,
    speeds: npt.ArrayLike | None,
    time_limit_s: float,
    start: Sequence[Sequence[int]] | None,
) -> Instance:
    """The instance, with the best of ``start`` and the heuristics, and with a first bound."""
    deadline = time.perf_counter() + time_limit_s
    if not 0 < time_limit_s < math.inf:
        raise ValueError(f"time_limit_s={time_limit_s}: expected a finite number of seconds above 0")
    if equal_size and costs.size % k:
        raise ValueError(
            f"{costs.size} items cannot be split into k={k} parts of equal size: expected a multiple of {k}; "
            f"drop {costs.size % k} items, add {k - costs.size % k}, or pass equal_size=False"
        )
    given = None if speeds is None else as_speeds(speeds, k)
    part_size = costs.size // k if equal_size else None
    instance = Instance(costs, np.ones(k) if given is None else given, part_size, deadline)
    if start is not None:
        instance.offer(_checked_start(start, k, costs.size, part_size))
    instance.offer(
        split_by_cost(costs, k, equal_size=equal_size, speeds=given) if costs.size else [[] for _ in range(k)]
    )
    instance.raise_bound(lower_bound(costs, k, equal_size=equal_size, speeds=given) * (1 - ROUNDING))
    return instance


def _checked_start(start: Sequence[Sequence[int]], k: int, num_items: int, part_size: int | None) -> Parts:
    try:
        parts = [[as_count(item, "an index in start", 0) for item in part] for part in start]
    except TypeError as error:
        raise ValueError(f"start={shown(start)}: expected k={k} lists of indices") from error
    if len(parts) != k or sorted(item for part in parts for item in part) != list(range(num_items)):
        raise ValueError(
            f"start has {sum(len(part) for part in parts)} indices in {len(parts)} lists: expected k={k} lists "
            f"that together hold each of 0 .. {num_items - 1} once"
        )
    if part_size is not None and any(len(part) != part_size for part in parts):
        raise ValueError(
            f"start has parts of {[len(part) for part in parts]} items: equal_size needs {part_size} in each"
        )
    return parts
