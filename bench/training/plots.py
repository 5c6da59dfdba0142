"""Pictures of training runs: loss curves, and what each rank did when. Needs matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from odc.bench.training.bubble import Segment

_COLOURS = {
    "compute": "#7a9cc6",
    "gather": "#5aa469",
    "scatter": "#c9a227",
    "other": "#9a9a9a",
    "wait": "#d1495b",
    # Of several modalities.
    "vision": "#c9a227",
    "audio": "#a56cc1",
    "language": "#7a9cc6",
    "move": "#5aa469",
    "load": "#1f3b5c",
}
_NAMES = {"other": "publish and finish"}
# Curves that lie on each other: each one thinner than the one before, so that all can be seen.
_STYLES = (("#7a9cc6", 6.0, "-"), ("#1f3b5c", 2.5, "-"), ("#f2a65a", 1.5, "--"))


def plot_losses(path: Path, curves: Mapping[str, Sequence[float]]) -> None:
    """Plot the loss per minibatch of each configuration."""
    figure, axes = _axes_of_losses("minibatch", "Training loss: same weights, same minibatches")
    for number, (name, losses) in enumerate(curves.items()):
        colour, width, style = _STYLES[number % len(_STYLES)]
        axes.plot(range(1, len(losses) + 1), losses, style, color=colour, linewidth=width, label=name)
    axes.legend()
    figure.savefig(path, dpi=150)


def plot_losses_by_tokens(path: Path, curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    """Plot the loss per token against the tokens seen so far. Each way has (tokens, losses)."""
    title = "Training loss: same weights, same samples in an epoch, another order"
    figure, axes = _axes_of_losses("tokens seen", title)
    for name, (tokens, losses) in curves.items():
        axes.plot(tokens, losses, marker="o", markersize=3, label=name)
    axes.legend()
    figure.savefig(path, dpi=120)


def _axes_of_losses(over: str, title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(over)
    axes.set_ylabel("loss per token")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    return figure, axes


def plot_timelines(path: Path, runs: Mapping[str, Sequence[Sequence[Segment]]], title: str) -> None:
    """Draw one bar per rank and configuration, all on one time scale. Each run's minibatch starts at 0."""
    figure = Figure(figsize=(11, 1.2 + 1.4 * len(runs)), layout="constrained")
    _draw_bars(figure, runs, lambda segment: _COLOURS[segment.activity])
    there = {segment.activity for ranks in runs.values() for rank in ranks for segment in rank}
    names = {} if "move" in there else _NAMES
    handles = [Patch(color=colour, label=names.get(a, a)) for a, colour in _COLOURS.items() if a in there]
    _finish(figure, path, handles, len(handles), title)


_PHASE_COLOURS = {
    "encode image": "#e07a5f",
    "backward image": "#b5533c",
    "encode audio": "#81b29a",
    "backward audio": "#4f7f67",
    "language": "#7a9cc6",
    "move": "#f2cc8f",
    "wait": "#d1495b",
    "": "#c9c9c9",
}
_PHASE_NAMES = {"": "loss, clip, step", "move": "moving items", "language": "language model", "wait": "waiting"}


def plot_phases(path: Path, runs: Mapping[str, Sequence[Sequence[Segment]]], minibatch: int) -> None:
    """Draw the phases of a model of several modalities: one bar per rank and configuration, on one time scale."""
    num_ranks = max(len(ranks) for ranks in runs.values())
    figure = Figure(figsize=(11, 1.2 + (0.8 + 0.3 * num_ranks) * len(runs)), layout="constrained")
    _draw_bars(figure, runs, lambda segment: _PHASE_COLOURS[_kind(segment.activity)])
    handles = [Patch(color=colour, label=_PHASE_NAMES.get(name, name)) for name, colour in _PHASE_COLOURS.items()]
    _finish(figure, path, handles, 4, f"Minibatch {minibatch}")


def _kind(name: str) -> str:
    """What a phase's span is drawn as."""
    return name if name in _PHASE_COLOURS else name.split(" ")[0]


def _draw_bars(
    figure: Figure, runs: Mapping[str, Sequence[Sequence[Segment]]], colour_of: Callable[[Segment], str]
) -> None:
    """A row of axes for each run, a bar for each of its ranks. What encloses another segment comes before it."""
    rows = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    longest_s = 0.0
    for axes, (name, ranks) in zip(rows, runs.items(), strict=True):
        start_ns = min(segment.start_ns for rank in ranks for segment in rank)
        duration_s = (max(segment.end_ns for rank in ranks for segment in rank) - start_ns) * 1e-9
        longest_s = max(longest_s, duration_s)
        for number, rank in enumerate(ranks):
            bars = [((segment.start_ns - start_ns) * 1e-9, segment.seconds) for segment in rank]
            axes.broken_barh(bars, (number - 0.4, 0.8), facecolors=[colour_of(segment) for segment in rank])
        axes.axvline(duration_s, color="black", linewidth=1)
        axes.set_title(f"{name}: {duration_s:.2f} s", loc="left", fontsize=10)
        axes.set_yticks(range(len(ranks)), [f"rank {number}" for number in range(len(ranks))])
        axes.invert_yaxis()
    rows[-1].set_xlim(0, 1.02 * longest_s)
    rows[-1].set_xlabel("seconds")


def _finish(figure: Figure, path: Path, handles: list[Patch], num_columns: int, title: str) -> None:
    figure.legend(handles=handles, loc="outside upper right", ncols=num_columns, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=150)
