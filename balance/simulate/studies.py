"""How the gain of ODC depends on one factor at a time (paper section 5.3, figure 10)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from odc.balance.checks import MAX_COUNT, IntArray, as_cost, as_count, as_lengths
from odc.balance.simulate.machine import Machine
from odc.balance.simulate.simulator import Scenario, Simulation
from odc.errors import shown


@dataclass(frozen=True, eq=False)
class Point:
    """One value of the factor."""

    value: float
    baseline: Simulation
    """LB-Micro under collectives, the strong baseline of the paper."""

    candidate: Simulation
    """LB-Mini under ODC."""

    @property
    def speedup(self) -> float:
        """Throughput of the candidate over that of the baseline."""
        return self.candidate.speedup(self.baseline)


@dataclass(frozen=True)
class Setting:
    """A point in the space of studies: the golden setting of the paper's Table 1, or one factor away from it."""

    minibatch_size: int = 4
    """Samples per device and minibatch."""

    devices: int = 8
    max_length: int | None = None
    """Longest sample in tokens; all lengths are scaled by the same ratio. None: as they are."""

    packing_ratio: float = 1.0
    """Most tokens in a microbatch over the longest sample."""

    noise: float = 0.0
    """See :class:`~odc.balance.Machine`."""

    slowdown: float = 0.0
    """One device takes ``1 + slowdown`` times as long as the others, which the plans do not know."""

    def scaled(self, lengths: IntArray) -> IntArray:
        """The lengths at this ``max_length``, at least 1 token each."""
        if self.max_length is None:
            return lengths
        ratio = as_count(self.max_length, "max_length") / int(lengths.max())
        scaled: IntArray = np.maximum(np.rint(lengths * ratio).astype(np.int64), 1)
        return scaled

    def at(self, factor: str, value: float) -> Setting:
        """This setting with another value of one factor.

        Raises:
            ValueError: there is no such factor, or it takes integers and this is none.
        """
        _check_factor(factor)
        changed: dict[str, Any] = {factor: float(value)}
        if factor in ("minibatch_size", "devices", "max_length"):
            if not float(value).is_integer():
                raise ValueError(f"{factor}={value}: expected an integer")
            changed = {factor: as_count(int(value), factor)}
        return replace(self, **changed)


FACTORS: dict[str, tuple[float, ...]] = {
    "minibatch_size": (1, 2, 4, 8, 16, 32),
    "max_length": (4096, 8192, 16384, 32768, 65536, 131072),
    "packing_ratio": (1, 1.5, 2, 3, 4),
    "devices": (2, 4, 8, 16, 32),
    "noise": (0, 0.1, 0.2, 0.3, 0.4),
    "slowdown": (0, 0.05, 0.1, 0.2, 0.4),
}
"""Factors, and values worth looking at. The first four are those of the paper's figure 10."""


def run_setting(scenario: Scenario, setting: Setting, value: float) -> Point:
    """Simulate one point; ``scenario`` gives lengths, costs and seed, and the setting the rest."""
    lengths = setting.scaled(as_lengths(scenario.lengths))
    chosen = replace(
        scenario,
        lengths=lengths,
        minibatch_size=setting.minibatch_size,
        world_size=setting.devices,
        max_tokens=int(_at_least_one(setting.packing_ratio) * lengths.max()),
        batch_size=None,
        speeds=None,
    )
    slow = (1.0,) * (setting.devices - 1) + (1 / (1 + as_cost(setting.slowdown, "slowdown")),)
    machine = Machine(noise=setting.noise, speeds=slow if setting.slowdown else None)
    baseline = chosen.plan("lb-micro").run("collective", machine)
    return Point(value, baseline, chosen.plan("lb-mini").run("odc", machine))


def study(
    scenario: Scenario,
    factor: str,
    values: Sequence[float] | None = None,
    *,
    golden: Setting | None = None,
    on_point: Callable[[], object] | None = None,
) -> list[Point]:
    """Vary one factor and hold the others at the golden setting.

    Args:
        scenario: lengths, cost model, cost of a microbatch and seed; its other fields are replaced.
        factor: one of :data:`FACTORS`.
        values: of the factor; default: those of :data:`FACTORS`.
        golden: the fixed setting, by default the one of the paper's Table 1.
        on_point: called after each point, for a progress bar.

    Raises:
        ValueError: there is no such factor, or a value is out of range.
    """
    _check_factor(factor)
    points = []
    for value in FACTORS[factor] if values is None else values:
        points.append(run_setting(scenario, (golden or Setting()).at(factor, value), value))
        if on_point:
            on_point()
    return points


def _check_factor(factor: str) -> None:
    if factor not in FACTORS:
        raise ValueError(f"factor {shown(factor)} is not known: expected one of {', '.join(FACTORS)}")


def _at_least_one(ratio: float) -> float:
    if ratio > MAX_COUNT:
        raise ValueError(f"packing_ratio={ratio}: expected at most 2**53")
    if not ratio >= 1:
        raise ValueError(f"packing_ratio={ratio}: expected at least 1, or the longest sample has no microbatch")
    return ratio
