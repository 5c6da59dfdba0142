"""A picture of one minibatch of several modalities: what each rank computes, before and after. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from odc.cli.comparison import COMM_NAMES
from odc.cli.phases import Balanced, Outcome, PhaseComparison

_PHASES = ("#7a9cc6", "#c9a227", "#6a994e", "#8e6c8a", "#bc6c25")
_LANGUAGE, _WAIT = "#1f3b5c", "#d1495b"
_MOST_RANKS = 16  # more bars than these cannot be told apart
_TITLES: dict[Balanced, str] = {
    "none": "nothing balanced",
    "language": "language model balanced",
    "whole": "whole samples balanced",
    "all": "all phases balanced",
    "joint": "sum of all phases balanced",
}


def plot_phases(path: Path, found: PhaseComparison) -> None:
    """Two panels of the same minibatch, the one of the median bubble: nothing balanced, and the fastest choice."""
    best = max(found.outcomes, key=lambda outcome: outcome.samples_per_s)
    rates = [
        loads.sum() / makespan for loads, makespan in zip(found.baseline.loads, found.baseline.makespans, strict=True)
    ]
    number = int(np.argsort(rates, kind="stable")[len(rates) // 2])
    panels = [found.baseline] if best is found.baseline else [found.baseline, best]
    figure = Figure(figsize=(6 * len(panels), 5), layout="constrained")
    colours = {name: _PHASES[at % len(_PHASES)] for at, name in enumerate(found.phases[:-1])}
    colours[found.phases[-1]] = _LANGUAGE
    longest = max(outcome.makespans[number] for outcome in panels)
    for axes, outcome in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
        _plot_outcome(axes, outcome, number, list(colours.values()))
        axes.set_xlim(0, longest * 1.01)
    handles = [Patch(color=colour, label=name) for name, colour in {**colours, "waiting": _WAIT}.items()]
    figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=len(handles))
    figure.suptitle(f"Minibatch {number}: what ranks compute, by phase (forward and backward together)")
    figure.savefig(path, dpi=130)


def ranks_to_show(loads: np.ndarray) -> list[int]:
    """The first ranks, and the one with the most work."""
    most = int(loads.sum(axis=0).argmax())
    return sorted([*[rank for rank in range(loads.shape[1]) if rank != most][: _MOST_RANKS - 1], most])


def _plot_outcome(axes: Axes, outcome: Outcome, number: int, colours: list[str]) -> None:
    """Under collectives ranks wait for each other in every phase, under ODC at the end."""
    loads, makespan = outcome.loads[number], outcome.makespans[number]
    ranks = ranks_to_show(loads)
    for height, rank in enumerate(ranks):
        start = 0.0
        for phase, colour in enumerate(colours):
            own = float(loads[phase, rank])
            axes.barh(height, own, left=start, height=0.8, color=colour)
            end = start + own
            if outcome.comm == "collective":
                start += outcome.spans[number][phase]
                axes.barh(height, start - end, left=end, height=0.8, color=_WAIT)
            else:
                start = end
        axes.barh(height, max(0.0, makespan - start), left=start, height=0.8, color=_WAIT)
    axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks], fontsize=7)
    axes.invert_yaxis()
    axes.set_title(f"{_TITLES[outcome.balanced]}, {COMM_NAMES[outcome.comm]}", loc="left")
    axes.set_xlabel("seconds")
    axes.set_ylabel("rank" if len(ranks) == loads.shape[1] else f"{len(ranks)} of {loads.shape[1]} ranks")
