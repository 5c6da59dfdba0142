"""Draws plans, studies, and one minibatch of several modalities. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from odc.balance import Plan, Simulation
from odc.balance.checks import FloatArray, IntArray
from odc.balance.plan import Comm
from odc.balance.simulate.studies import Point
from odc.cli.comparison import COMM_NAMES, Comparison, at_minibatch_sizes
from odc.cli.output import significant
from odc.cli.phases import Balanced, Outcome, PhaseComparison

_COMPUTE = ("#7a9cc6", "#a9c0dd")
_WAIT = "#d1495b"
_COLLECTIVE, _ODC = "#c9a227", "#1f3b5c"
_LANGUAGE = _ODC
_SIZES = (1, 2, 4, 8, 16)
_MOST_RANKS = 16  # more bars than these cannot be told apart
_LABELS = {
    "minibatch_size": "samples per device and minibatch",
    "max_length": "longest sample (tokens)",
    "packing_ratio": "tokens per microbatch / longest sample",
    "devices": "devices",
    "noise": "relative error of the cost estimates",
    "slowdown": "one device slower by",
}


def plot_plan(path: Path, comparison: Comparison, *, minibatch_only: bool = False) -> None:
    """Four panels: lengths, one minibatch under FSDP and under ODC, and curves over minibatch sizes; or the second."""
    if minibatch_only:
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        _plot_minibatch(figure.subplots(), comparison)
        figure.savefig(path, dpi=130)
        return
    figure = Figure(figsize=(12, 8), layout="constrained")
    top_left, top_right, low_left, low_right = figure.subplots(2, 2).flat
    _plot_lengths(top_left, np.asarray(comparison.scenario.lengths), comparison.lengths.size)
    _plot_sizes(low_left, low_right, comparison)
    _plot_minibatch(top_right, comparison)
    figure.savefig(path, dpi=130)


def plot_groups(path: Path, found: Mapping[int, Comparison]) -> None:
    """Two panels: throughput and bubble rate by devices of a group, the fastest plan of each kind of communication."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    panels = figure.subplots(1, 2)
    sizes = list(found)
    colours: dict[Comm, str] = {"collective": _COLLECTIVE, "odc": _ODC}
    for comm, colour in colours.items():
        best = [(size, simulation) for size in sizes if (simulation := found[size].best(comm)) is not None]
        for axes, values in zip(
            panels, ([s.samples_per_time for _, s in best], [100 * s.bubble_rate for _, s in best]), strict=True
        ):
            axes.plot([size for size, _ in best], values, "o-", color=colour, label=f"fastest plan, {COMM_NAMES[comm]}")
    for axes, what in zip(panels, ("samples/s", "bubble rate (%)"), strict=True):
        _label_sizes(axes, sizes, "devices of a group", what)
        axes.set_ylim(0, max(1e-9, 1.1 * axes.get_ylim()[1]))
        axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def plot_studies(path: Path, studies: Mapping[str, Sequence[Point]]) -> None:
    """One panel per factor: the speedup by ODC, and both bubble rates."""
    columns = min(2, len(studies))
    rows = -(-len(studies) // columns)
    figure = Figure(figsize=(6 * columns, 3.6 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, (factor, points) in zip(panels, studies.items(), strict=False):
        _plot_study(axes, factor, points)
    for axes in panels[len(studies) :]:
        axes.set_axis_off()
    figure.suptitle("ODC with LB-Mini against collectives with LB-Micro, one factor at a time")
    figure.savefig(path, dpi=130)


def _plot_lengths(axes: Axes, lengths: IntArray, num_all: int) -> None:
    low, high = lengths.min(), max(lengths.max(), lengths.min() + 1)
    bins = np.geomspace(low, high, 50) if high > 20 * low else np.linspace(low, high, 50)
    axes.hist(lengths, bins=bins.tolist(), color=_COMPUTE[0])
    if high > 20 * low:
        axes.set_xscale("log")
    axes.axvline(float(np.median(lengths)), color="black", linewidth=1, label=f"median {np.median(lengths):,.0f}")
    part = f" of {num_all:,}" if num_all > lengths.size else ""
    axes.set_title(f"{lengths.size:,}{part} samples, longest {lengths.max():,} tokens", loc="left")
    axes.set_xlabel("length (tokens)")
    axes.set_ylabel("samples")
    axes.legend(frameon=False)


def _shown(comparison: Comparison) -> list[Simulation]:
    """What the recommendation compares: the fastest with FSDP, and the fastest with ODC."""
    both = (comparison.best("collective"), comparison.best("odc"))
    return [simulation for simulation in both if simulation is not None]


def _plot_minibatch(axes: Axes, comparison: Comparison) -> None:
    """One minibatch, that of the median speedup: what each rank does when."""
    shown = _shown(comparison)
    bars = [(comparison.planned[simulation.policy], simulation.comm) for simulation in shown]
    ratios = shown[0].makespans / (shown[-1].makespans if len(shown) > 1 else 1.0)
    number = int(np.argsort(ratios, kind="stable")[ratios.size // 2])
    plans = {comm: epoch.minibatches[number].plan for epoch, comm in bars}
    height, ticks = 0.0, []
    longest = max(plan.makespan(comm) for comm, plan in plans.items())
    for comm, plan in plans.items():
        ranks = ranks_to_show(plan.microbatch_times().sum(axis=1))
        for rank in ranks:
            _plot_microbatches(axes, plan, rank, comm, height)
            ticks.append((height, f"{rank}"))
            height -= 1
        axes.text(0, height + len(ranks) + 0.6, f" {COMM_NAMES[comm]} with {plan.policy}")
        height -= 1.4
    axes.set_yticks([tick for tick, _ in ticks], [label for _, label in ticks], fontsize=7)
    axes.set_xlim(0, longest * 1.01)
    axes.set_ylim(height + 1.0, 2.4)
    axes.set_title(_timeline_title(comparison, plans), loc="left")
    axes.set_xlabel("seconds")
    world_size = comparison.scenario.world_size
    axes.set_ylabel("rank" if world_size <= _MOST_RANKS else f"{_MOST_RANKS} of {world_size} ranks")
    shades = tuple(Patch(color=colour) for colour in _COMPUTE)
    axes.legend(
        [shades, Patch(color=_WAIT)],
        ["microbatches", "waiting"],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        frameon=False,
        loc="upper right",  # beside the first title, where there are no bars
        ncols=2,
        fontsize=8,
        borderpad=0,
    )


def ranks_to_show(work: FloatArray) -> list[int]:
    """The first ranks, and the one with the most work: the others wait for it at the end."""
    most = int(work.argmax())
    return sorted([*[rank for rank in range(work.size) if rank != most][: _MOST_RANKS - 1], most])


def _timeline_title(comparison: Comparison, plans: Mapping[Comm, Plan]) -> str:
    num_samples = next(iter(plans.values())).num_samples
    times = ", ".join(f"{COMM_NAMES[comm]} {significant(plan.makespan(comm))} s" for comm, plan in plans.items())
    differs = any(machine.noise or machine.gather or machine.scatter for machine in comparison.machines.values())
    return f"One step of {num_samples} samples: {times}{', as planned' if differs else ''}"


def _plot_microbatches(axes: Axes, plan: Plan, rank: int, comm: Comm, height: float) -> None:
    """Under collectives ranks wait for each other in every microbatch, under ODC at the end."""
    times = plan.microbatch_times()
    spans = times.max(axis=0) if comm == "collective" else times[rank]
    colours = [_COMPUTE[number % 2] for number in range(spans.size)]
    _plot_rank(axes, height, times[rank].tolist(), spans.tolist(), colours, plan.makespan(comm))


def _plot_rank(
    axes: Axes, height: float, times: Sequence[float], spans: Sequence[float], colours: Sequence[str], end: float
) -> None:
    """What a rank computes, piece by piece: after each it waits until its span is over, and at last until the end."""
    start = 0.0
    for own, span, colour in zip(times, spans, colours, strict=True):
        axes.barh(height, own, left=start, height=0.8, color=colour)
        if span > own:
            axes.barh(height, span - own, left=start + own, height=0.8, color=_WAIT)
        start += span
    axes.barh(height, max(0.0, end - start), left=start, height=0.8, color=_WAIT)


def _plot_sizes(bubbles: Axes, speedup: Axes, comparison: Comparison) -> None:
    num_samples, world_size = np.size(comparison.scenario.lengths), comparison.scenario.world_size
    sizes = [size for size in _SIZES if size * world_size <= num_samples]
    names = {
        "collective": "lb-micro-global",
        "odc": "lb-mini",
        **{each.comm: each.policy for each in _shown(comparison)},
    }
    fsdp, odc = f"{names['collective']}, FSDP", f"{names['odc']}, ODC"
    found = at_minibatch_sizes(comparison, names["collective"], names["odc"], sizes)
    for which, name, colour in ((0, fsdp, _COLLECTIVE), (1, odc, _ODC)):
        rates = [100 * found[size][which].bubble_rate for size in sizes]
        bubbles.plot(sizes, rates, "o-", color=colour, label=name)
    bubbles.set_title("Bubble rate by minibatch size", loc="left")
    bubbles.legend(frameon=False)
    gains = [100 * (found[size][1].speedup(found[size][0]) - 1) for size in sizes]
    speedup.plot(sizes, gains, "o-", color=_ODC)
    speedup.set_title(f"Speedup of {odc} over {fsdp}", loc="left")
    for axes, what, lowest in (
        (bubbles, "bubble rate (%)", 0.0),
        (speedup, "more samples/s (%)", min(0.0, *gains)),
    ):
        _label_sizes(axes, sizes, "samples per rank and minibatch", what)
        axes.set_ylim(1.1 * lowest, max(1.0, axes.get_ylim()[1]))


def _label_sizes(axes: Axes, sizes: Sequence[int], of_what: str, what: str) -> None:
    """Powers of two along the horizontal axis."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel(of_what)
    axes.set_ylabel(what)
    axes.grid(alpha=0.3)


def _plot_study(axes: Axes, factor: str, points: Sequence[Point]) -> None:
    values = [point.value for point in points]
    axes.plot(values, [100 * (point.speedup - 1) for point in points], "o-", color=_ODC, label="more samples/s")
    axes.plot(
        values, [100 * p.baseline.bubble_rate for p in points], ":", color=_COLLECTIVE, label="bubble rate, collectives"
    )
    axes.plot(values, [100 * p.candidate.bubble_rate for p in points], ":", color=_COMPUTE[0], label="bubble rate, ODC")
    if min(values) > 0 and max(values) > 4 * min(values):
        axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    axes.set_xlabel(_LABELS[factor])
    axes.set_ylabel("%")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)


# Several modalities: what each rank computes, before and after


_PHASES = ("#7a9cc6", "#c9a227", "#6a994e", "#8e6c8a", "#bc6c25")
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


def _plot_outcome(axes: Axes, outcome: Outcome, number: int, colours: list[str]) -> None:
    """Under collectives ranks wait for each other in every phase, under ODC at the end."""
    loads, makespan = outcome.loads[number], outcome.makespans[number]
    ranks = ranks_to_show(loads.sum(axis=0))
    for height, rank in enumerate(ranks):
        times = loads[:, rank].tolist()
        spans = outcome.spans[number] if outcome.comm == "collective" else times
        _plot_rank(axes, height, times, spans, colours, makespan)
    axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks], fontsize=7)
    axes.invert_yaxis()
    axes.set_title(f"{_TITLES[outcome.balanced]}, {COMM_NAMES[outcome.comm]}", loc="left")
    axes.set_xlabel("seconds")
    axes.set_ylabel("rank" if len(ranks) == loads.shape[1] else f"{len(ranks)} of {loads.shape[1]} ranks")
