"""What one synchronization per minibatch saved, computed from measured microbatch times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

Times = Sequence[Sequence[float]]
"""Of one rank: seconds of each microbatch, minibatch by minibatch."""


@dataclass(frozen=True)
class Savings:
    """Sums over minibatches, in seconds."""

    minibatches: int
    compute_s: float
    """Mean over ranks of the time spent in microbatches, communication excluded."""
    critical_s: float
    """With one synchronization per minibatch: the sum of each minibatch's slowest rank."""
    lockstep_s: float
    """With one per microbatch: the sum of each microbatch's slowest rank. Collectives synchronize at every layer, so
    this is the least that they would take."""

    @property
    def saved_s(self) -> float:
        return self.lockstep_s - self.critical_s


def savings(ranks: Sequence[Times]) -> Savings:
    """Compare one synchronization per minibatch with one per microbatch, for the same microbatches.

    Minibatches are aligned from the last one, since long runs keep only the latest. A rank with fewer microbatches
    counts as 0 s in the ones it lacks.

    >>> savings([[[1.0, 3.0]], [[3.0, 1.0]]]).saved_s
    2.0
    """
    count = min((len(times) for times in ranks), default=0)
    compute_s = critical_s = lockstep_s = 0.0
    for index in range(count):
        minibatch = [times[len(times) - count + index] for times in ranks]
        busy = [sum(microbatches) for microbatches in minibatch]
        compute_s += sum(busy) / len(ranks)
        critical_s += max(busy)
        lockstep_s += sum(max(row) for row in zip_longest(*minibatch, fillvalue=0.0))
    return Savings(count, compute_s, critical_s, lockstep_s)


def describe(result: Savings, waited_s: Sequence[float], wall_s: float, model: str = "") -> str:
    """One line for people.

    Args:
        model: its name, where there are several.
        waited_s: measured seconds each rank was blocked by another one.
        wall_s: wall-clock seconds from patching to the end.
    """
    mean_wait_s = sum(waited_s) / len(waited_s)
    whose = f"{model}: " if model else ""
    text = (
        f"odc: {whose}{result.minibatches} minibatches on {len(waited_s)} ranks in {wall_s:.1f} s; ranks waited for "
        f"one another {mean_wait_s:.1f} s each ({_percent(mean_wait_s, wall_s)})."
    )
    if not result.minibatches:
        return text
    return (
        f"{text} In step at every microbatch, as collectives go, the same work would have taken at least "
        f"{result.saved_s:.1f} s longer ({_percent(result.saved_s, wall_s)}): that waiting was saved."
    )


def _percent(part_s: float, whole_s: float) -> str:
    return f"{100 * part_s / whole_s:.0f} %" if whole_s > 0 else "-"
