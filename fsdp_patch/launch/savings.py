"""What one synchronization per minibatch saved, computed from measured microbatch times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

# Below this part of the time nothing was saved, as far as clocks can tell.
_NOTHING = 0.005

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
    most_microbatches: int = 0
    """Of a rank in a minibatch."""

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
    most = 0
    for index in range(count):
        minibatch = [times[len(times) - count + index] for times in ranks]
        busy = [sum(microbatches) for microbatches in minibatch]
        compute_s += sum(busy) / len(ranks)
        critical_s += max(busy)
        lockstep_s += sum(max(row) for row in zip_longest(*minibatch, fillvalue=0.0))
        most = max(most, *map(len, minibatch))
    return Savings(count, compute_s, critical_s, lockstep_s, most)


def describe(
    result: Savings, waited_s: Sequence[float], wall_s: float, transfers_s: Sequence[float], model: str = ""
) -> str:
    """One line for people.

    Args:
        model: its name, where there are several.
        waited_s: measured seconds each rank was blocked by another one.
        wall_s: wall-clock seconds from patching to the end.
        transfers_s: measured seconds of each rank in ODC's operations, besides waiting.
    """
    mean_wait_s = sum(waited_s) / len(waited_s)
    whose = f"{model}: " if model else ""
    text = (
        f"odc: {whose}{result.minibatches} minibatches on {len(waited_s)} ranks in {wall_s:.1f} s; ranks waited for "
        f"one another {mean_wait_s:.1f} s each ({_percent(mean_wait_s, wall_s)})."
    )
    if not result.minibatches:
        return text
    mean_transfer_s = sum(transfers_s) / len(transfers_s)
    if result.saved_s < _NOTHING * wall_s:
        why = "the same rank was slowest in every microbatch, or none"
        if result.most_microbatches < 2:
            why = "each rank had one microbatch per minibatch"
        return (
            f"{text} No waiting was saved: in step at every microbatch, as collectives go, the same work would have "
            f"taken no longer, since {why}. {_transfers(mean_transfer_s)}"
        )
    text = (
        f"{text} In step at every microbatch, as collectives go, the same work would have taken at least "
        f"{result.saved_s:.1f} s longer ({_percent(result.saved_s, wall_s)}): that waiting was saved."
    )
    if mean_transfer_s > result.saved_s:
        return f"{text} Communication cost more than that. {_transfers(mean_transfer_s)}"
    return text


def _transfers(mean_s: float) -> str:
    return (
        f"ODC's own transfers took {mean_s:.1f} s of each rank: it was worth it only if the collectives of plain "
        "FSDP take longer, which a run with torchrun alone tells."
    )


def _percent(part_s: float, whole_s: float) -> str:
    return f"{100 * part_s / whole_s:.0f} %" if whole_s > 0 else "-"
