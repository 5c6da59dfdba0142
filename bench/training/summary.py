"""From the runs of the demo to its numbers: medians over repetitions, and a table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from odc.bench.harness.benchmark import Column, Table, spread
from odc.bench.training.runs import Run


def loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Largest relative difference between two loss curves, over all minibatches.

    Raises:
        ValueError: the curves differ in length.
    """
    pairs = zip(losses, reference, strict=True)
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


def summarize(runs: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """The rows of a result, one for each way to train.

    ``runs`` has for each configuration its runs in the order of the repetitions; the first configuration is
    the one that the others are compared with, repetition by repetition, since those ran one after the other.
    """
    baseline = next(iter(runs.values()))
    return [{"name": name, **_summarize(repeated, baseline)} for name, repeated in runs.items()]


def _summarize(runs: Sequence[Run], baseline: Sequence[Run]) -> dict[str, Any]:
    speedups = [run.samples_per_s / base.samples_per_s for run, base in zip(runs, baseline, strict=True)]
    differences = [loss_difference(r.losses, b.losses) for r, b in zip(runs, baseline, strict=True)]

    def middle(value: Callable[[Run], float]) -> float:
        return median(value(run) for run in runs)

    return {
        "samples_per_s": middle(lambda run: run.samples_per_s),
        "tokens_per_s": middle(lambda run: run.tokens_per_s),
        "bubble_rate": middle(lambda run: run.shares["wait"]),
        "transfer_rate": middle(lambda run: sum(run.shares[kind] for kind in ("gather", "scatter", "other"))),
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


def quietest(runs: Mapping[str, Sequence[Run]]) -> dict[str, Run]:
    """All configurations' runs of one repetition, to draw: the one that took the least time in all.

    Runs of one repetition are neighbours in time, and this one was disturbed least.
    """
    repetitions = list(zip(*runs.values(), strict=True))
    best = min(repetitions, key=lambda repetition: sum(run.seconds for run in repetition))
    return dict(zip(runs, best, strict=True))


def _spread(entry: Mapping[str, Any], key: str) -> dict[str, float]:
    return spread([repetition[key] for repetition in entry["repetitions"]])


def runs_table(*columns: Column) -> Table:
    """One row per way to train; further ``columns``."""
    return Table(
        "runs",
        "{settings[ranks]} ranks, medians of {settings[repetitions]} runs (lowest-highest)",
        (Column("way", "name"),),
        (
            Column("samples/s", lambda row: _spread(row, "samples_per_s"), ".1f"),
            Column("speedup", lambda row: _spread(row, "speedup"), ".2f"),
            Column("tokens/s", "tokens_per_s", ".0f"),
            Column("bubble rate", "bubble_rate", ".1%"),
            Column("transfer", "transfer_rate", ".1%"),
            *columns,
            Column("final loss", lambda row: f"{row['losses'][-1]:.4f}"),
            Column("loss diff.", "max_loss_difference", ".1e"),
        ),
        "bubble rate: measured, time in which a rank waits for another one. transfer: time in which it moves\n"
        "parameters and gradients. loss diff.: largest relative difference from the first way's losses.",
    )
