"""From the runs of the demo to its numbers: medians over repetitions, and a table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from odc.bench.training.runs import Run


def loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Largest relative difference between two loss curves, over all minibatches.

    Raises:
        ValueError: the curves differ in length.
    """
    pairs = zip(losses, reference, strict=True)
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


def summarize(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, Any]]:
    """The entry ``"runs"`` of ``summary.json``.

    ``runs`` has for each configuration its runs in the order of the repetitions; the first configuration is
    the one that the others are compared with, repetition by repetition, since those ran one after the other.
    """
    baseline = next(iter(runs.values()))
    return {name: _summarize(repeated, baseline) for name, repeated in runs.items()}


def _summarize(runs: Sequence[Run], baseline: Sequence[Run]) -> dict[str, Any]:
    speedups = [run.samples_per_s / base.samples_per_s for run, base in zip(runs, baseline, strict=True)]
    differences = [loss_difference(r.losses, b.losses) for r, b in zip(runs, baseline, strict=True)]

    def middle(value: Callable[[Run], float]) -> float:
        return median(value(run) for run in runs)

    return {
        "samples_per_s": middle(lambda run: run.samples_per_s),
        "tokens_per_s": middle(lambda run: run.tokens_per_s),
        "bubble_rate": middle(lambda run: run.shares["wait"]),
        "transfer_rate": middle(_transfer),
        "speedup": median(speedups),
        "losses": runs[0].losses,
        "max_loss_difference": max(differences),
        "repetitions": [
            {
                "samples_per_s": run.samples_per_s,
                "tokens_per_s": run.tokens_per_s,
                "seconds": run.seconds,
                "speedup": speedup,
                "max_loss_difference": difference,
                "time_shares": run.shares,
                "minibatch_seconds": run.minibatch_seconds,
            }
            for run, speedup, difference in zip(runs, speedups, differences, strict=True)
        ],
    }


def _transfer(run: Run) -> float:
    return run.shares["gather"] + run.shares["scatter"] + run.shares["other"]


def quietest(runs: Mapping[str, Sequence[Run]]) -> dict[str, Run]:
    """All configurations' runs of one repetition, to draw: the one that took the least time in all.

    Runs of one repetition are neighbours in time, and this one was disturbed least.
    """
    repetitions = list(zip(*runs.values(), strict=True))
    best = min(repetitions, key=lambda repetition: sum(run.seconds for run in repetition))
    return dict(zip(runs, best, strict=True))


def table(summary: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row per configuration, at most 100 columns wide."""
    num_repetitions = len(next(iter(summary.values()))["repetitions"])
    shown = Table(box=SIMPLE, caption=_caption(num_repetitions), caption_justify="left")
    shown.add_column("configuration", no_wrap=True)
    for heading in ("samples/s", "speedup", "tokens/s", "waiting", "transfer", "final\nloss", "loss\ndiff."):
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, entry in summary.items():
        is_baseline = name == next(iter(summary))
        shown.add_row(
            name,
            f"{_short(entry['samples_per_s'])}\n{_spread(entry, 'samples_per_s')}",
            "1" if is_baseline else f"{_short(entry['speedup'])}x\n{_spread(entry, 'speedup')}",
            f"{entry['tokens_per_s']:.0f}",
            f"{entry['bubble_rate']:.1%}",
            f"{entry['transfer_rate']:.1%}",
            f"{entry['losses'][-1]:.4f}",
            "-" if is_baseline else f"{entry['max_loss_difference']:.1e}",
        )
    return shown


def _short(value: float) -> str:
    """Three digits, or more before the point."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _spread(entry: Mapping[str, Any], key: str) -> str:
    values = [repetition[key] for repetition in entry["repetitions"]]
    return f"[dim]{_short(min(values))}-{_short(max(values))}[/dim]" if len(values) > 1 else ""


def _caption(num_repetitions: int) -> str:
    over = f"Medians of {num_repetitions} runs, lowest-highest below. " if num_repetitions > 1 else ""
    return (
        f"{over}waiting: measured bubble rate, time in which a rank waits for another one. transfer: time in "
        "which it moves parameters and gradients. loss diff.: largest relative difference of the loss curve "
        "from that of the collective run."
    )
