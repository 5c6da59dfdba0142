"""Train one small model for an epoch on streams, under collectives and with ODC, beside minibatches of known lengths.

The benchmark runs ``examples/sft.py`` of the repository, from its root, on CPU ranks. All ways start from the same
weights and see the same samples in an epoch, in different orders: LB-Mini's order is a shuffle, streams bring samples
of similar length or cost together. So speed and waiting are compared per sample, and losses by the number of tokens
seen.

Not covered: more than one epoch, other seeds, models that generalize: the loss is that of training.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Table, spread
from odc.bench.harness.benchmark import Run as Bench
from odc.bench.training.demo import SCRIPT, prepare_data
from odc.bench.training.runs import Run, check_examples, train_in_turns, way_of

CONFIGURATIONS = (
    way_of(SCRIPT, "collective", "lb-micro", "dgap"),
    way_of(SCRIPT, "collective", "lb-micro", "steps"),
    way_of(SCRIPT, "odc", "lb-mini", "minibatch"),
    way_of(SCRIPT, "odc", "lb-mini"),
)
NUM_PARTS = 12
"""Number of parts into which the tokens of an epoch are divided. Each part has a mean loss."""


def curve(run: Run) -> tuple[list[float], list[float]]:
    """For each part of the epoch, the tokens seen at its middle, and the mean loss of its minibatches, weighted by
    tokens."""
    tokens = np.array(run.minibatch_tokens, dtype=np.float64)
    middle = np.cumsum(tokens) - tokens / 2
    part = np.minimum((middle * NUM_PARTS / tokens.sum()).astype(int), NUM_PARTS - 1)
    weight = np.bincount(part, weights=tokens, minlength=NUM_PARTS)
    losses = np.bincount(part, weights=tokens * np.array(run.losses), minlength=NUM_PARTS) / np.maximum(weight, 1)
    seen = np.bincount(part, weights=tokens * middle, minlength=NUM_PARTS) / np.maximum(weight, 1)
    filled = weight > 0
    return [round(x, 1) for x in seen[filled].tolist()], [round(x, 4) for x in losses[filled].tolist()]


def rows_of(runs: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """One row for each way, in their order. ``times_first`` and ``waiting_percent`` (of the ranks' time) are medians.
    Tokens and losses are those of :func:`curve`."""
    rows: list[dict[str, Any]] = []
    for name, mine in runs.items():
        rates = [round(run.samples_per_s, 3) for run in mine]
        first = statistics.median(rows[0]["samples_per_s"] if rows else rates)
        tokens, losses = curve(mine[0])
        rows.append(
            {
                "name": name,
                "samples_per_s": rates,
                "times_first": round(statistics.median(rates) / first, 3),
                "waiting_percent": round(100 * statistics.median(run.shares["wait"] for run in mine), 2),
                "minibatches": len(mine[0].losses),
                "samples": sum(mine[0].minibatch_samples),
                "tokens": tokens,
                "losses": losses,
            }
        )
    return rows


def last_loss(losses: Sequence[float]) -> float:
    """Mean loss of the parts of the last third. One part alone has some 50 samples, and depends on how hard these
    are."""
    return statistics.fmean(losses[-NUM_PARTS // 3 :])


def measure(
    run: Bench,
    out: Annotated[Path, typer.Option(help="Folder for the picture of losses.")] = Path("runs/streams"),
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each way.")] = 3,
    samples: Annotated[int, typer.Option(min=8, help="Samples of a run: 600 are an epoch.")] = 600,
    minibatch_size: Annotated[int, typer.Option(min=1, help="Samples per rank and minibatch, on average.")] = 3,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks, one core each.")] = 2,
    hidden_size: Annotated[int, typer.Option(help="Of the model; a multiple of 64.")] = 256,
    num_layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the model.")] = 4,
) -> Entries:
    check_examples(SCRIPT, "transformers", "tokenizers", "matplotlib")
    sizes = {"samples": samples, "minibatch-size": minibatch_size, "hidden-size": hidden_size, "num-layers": num_layers}
    options = {"data": prepare_data(run, out), "minibatches": 10 * samples, **sizes}
    runs = train_in_turns(run, CONFIGURATIONS, out, repetitions=repetitions, num_ranks=ranks, options=options)
    rows = rows_of(runs)

    from odc.bench.training.plots import plot_losses_by_tokens  # only here: matplotlib is an extra

    plot_losses_by_tokens(out / "losses.png", {row["name"]: (row["tokens"], row["losses"]) for row in rows})
    return run.keep({"rows": rows}, out / "summary.json")


def figures(result: Entries) -> Figures:
    names = {
        "collective-dgap": 'collectives, `"dgap"`, padded',
        "collective-steps": 'collectives, `"steps"`, padded',
        "odc-minibatch": 'ODC, `"minibatch"`, packed',
        "odc-lb-mini": "ODC, LB-Mini, lengths known",
    }
    for row in result["rows"]:
        rates = sorted(row["samples_per_s"])
        yield (
            f"| {names[row['name']]} |",
            f" {rates[len(rates) // 2]:.1f} ({row['times_first']:.2f}x) | {row['waiting_percent']:.1f} % | "
            f"{row['minibatches']} | {last_loss(row['losses']):.3f} |",
        )


BENCHMARK = Benchmark(
    measure,
    (
        Table(
            "rows",
            "an epoch of streams: the same samples",
            (Column("way to train", "name"),),
            (
                Column("samples/s", lambda row: Column("", "", ".1f").written(spread(row["samples_per_s"]))),
                Column("speedup", "times_first", ".2f"),
                Column("wait %", "waiting_percent", ".1f"),
                Column("steps", "minibatches"),
                Column("last third", lambda row: f"{last_loss(row['losses']):.3f}"),
            ),
        ),
    ),
    quick={"repetitions": 1, "samples": 60, "hidden_size": 64, "num_layers": 1},
    figures=(("docs/streams.md", figures, ["stream_training"]),),
)
