"""One partitioning problem, with the best partition and the best bound found so far: what the solvers share."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np

from odc.balance.checks import FloatArray, IntArray
from odc.balance.partition.differencing import Parts

# A makespan this close (relative) to its lower bound counts as optimal: no cost model is that exact.
TOLERANCE = 1e-6

# The rounding of sums of floats, relative, with room to spare.
ROUNDING = 1e-12


@dataclass
class Instance:
    """A checked problem. Solvers read it, offer partitions and raise the bound until it is ``proved``."""

    costs: FloatArray
    """One cost per item, (num_items,)."""

    speeds: FloatArray
    """One speed per part, (k,); a part's time is its total cost divided by its speed."""

    part_size: int | None
    """Number of items of every part; None: any."""

    deadline: float
    """When to stop, on the clock ``time.perf_counter``."""

    parts: Parts = field(default_factory=list)
    """The best partition so far."""

    makespan: float = math.inf
    """The makespan of ``parts``, which a solver must beat."""

    bound: float = 0.0
    """The best bound so far: no partition has a smaller makespan."""

    order: IntArray = field(init=False)
    """The items from the largest cost to the smallest, of equal costs the lower index first."""

    sorted_costs: FloatArray = field(init=False)
    """``costs[order]``."""

    unit: int = field(init=False)
    """Every makespan is a multiple of this; 0 if that is not known."""

    def __post_init__(self) -> None:
        self.order = np.argsort(-self.costs, kind="stable")
        self.sorted_costs = self.costs[self.order]
        # Of integers all sums are multiples of their greatest common divisor.
        integers = (self.costs % 1 == 0).all() and (self.speeds == 1).all() and self.costs.sum() < 1e9
        self.unit = int(np.gcd.reduce(self.costs.astype(np.int64), initial=0)) if integers else 0

    @property
    def proved(self) -> bool:
        """Whether ``parts`` counts as optimal."""
        return self.makespan <= self.bound * (1 + TOLERANCE)

    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.perf_counter()

    def measure(self, parts: Parts) -> float:
        """The makespan of ``parts``."""
        return max(float(self.costs[part].sum() / speed) for part, speed in zip(parts, self.speeds, strict=True))

    def offer(self, parts: Parts) -> None:
        """Keep ``parts`` if they are better than the best so far."""
        if (makespan := self.measure(parts)) < self.makespan:
            self.parts, self.makespan = parts, makespan

    def raise_bound(self, bound: float) -> None:
        """Note that no makespan is below ``bound``."""
        if self.unit:
            bound = self.unit * math.ceil(bound / self.unit * (1 - 1e-10))
        self.bound = max(self.bound, bound)
