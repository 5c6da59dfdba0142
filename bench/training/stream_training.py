"""Train one small model for an epoch on streams, under collectives and with ODC, beside minibatches of known lengths.

    python -m odc.bench.training.stream_training --out runs/streams

Runs ``examples/sft.py`` of the repository, from its root, on CPU ranks. All start from the same weights and see the
same samples in an epoch, in orders of their own: LB-Mini's is a shuffle, streams bring samples of similar length or
cost together. So speed and waiting are compared per sample, and losses by the tokens that were seen.

Not covered: more than one epoch, other seeds, models that generalize: the loss is that of training.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from odc.bench.harness.environment import describe_environment
from odc.bench.harness.progress import progress_bar
from odc.bench.training.demo import SCRIPT
from odc.bench.training.runs import ChildError, Configuration, Run, run_child, start_launcher, train

CONFIGURATIONS = (
    Configuration("collective", "lb-micro", "dgap"),
    Configuration("collective", "lb-micro", "steps"),
    Configuration("odc", "lb-mini", "minibatch"),
    Configuration("odc", "lb-mini"),
)
NUM_PARTS = 12
"""Of the tokens of an epoch, in each of which the mean loss is taken."""


@dataclass
class Row:
    """One way to train, over its repetitions."""

    name: str
    samples_per_s: list[float]
    times_first: float
    """Median over that of the first way."""

    waiting_percent: float
    """Of the ranks' time, median."""

    minibatches: int
    samples: int
    tokens: list[float]
    """Seen at the middle of each part of the epoch."""

    losses: list[float]
    """Per token, mean of each part."""


def curve(run: Run) -> tuple[list[float], list[float]]:
    """Tokens seen at the middle of each part of the epoch, and the mean loss of its minibatches, weighted by tokens."""
    tokens = np.array(run.minibatch_tokens, dtype=np.float64)
    middle = np.cumsum(tokens) - tokens / 2
    part = np.minimum((middle * NUM_PARTS / tokens.sum()).astype(int), NUM_PARTS - 1)
    weight = np.bincount(part, weights=tokens, minlength=NUM_PARTS)
    losses = np.bincount(part, weights=tokens * np.array(run.losses), minlength=NUM_PARTS) / np.maximum(weight, 1)
    seen = np.bincount(part, weights=tokens * middle, minlength=NUM_PARTS) / np.maximum(weight, 1)
    filled = weight > 0
    return [round(x, 1) for x in seen[filled].tolist()], [round(x, 4) for x in losses[filled].tolist()]


def summarize(runs: dict[str, list[Run]]) -> list[Row]:
    """One row for each way, in their order."""
    rows: list[Row] = []
    for name, mine in runs.items():
        rates = [round(run.samples_per_s, 3) for run in mine]
        first = statistics.median(rows[0].samples_per_s if rows else rates)
        tokens, losses = curve(mine[0])
        rows.append(
            Row(
                name,
                rates,
                round(statistics.median(rates) / first, 3),
                round(100 * statistics.median(run.shares["wait"] for run in mine), 2),
                len(mine[0].losses),
                sum(mine[0].minibatch_samples),
                tokens,
                losses,
            )
        )
    return rows


def last_loss(losses: Sequence[float]) -> float:
    """Mean of the parts of the last third: one part alone is of some 50 samples, and as high as these are hard."""
    return statistics.fmean(losses[-NUM_PARTS // 3 :])


def show(rows: Sequence[Row]) -> Table:
    """Speed, waiting, and the loss of the last third."""
    table = Table(title="An epoch of streams: the same samples")
    table.add_column("way to train", no_wrap=True)
    for name in ("samples/s", "speedup", "wait %", "steps", "last third"):
        table.add_column(name, justify="right")
    for row in rows:
        rates = row.samples_per_s
        spread = f"{statistics.median(rates):.1f} ({min(rates):.1f}-{max(rates):.1f})"
        figures = (f"{row.times_first:.2f}x", f"{row.waiting_percent:.1f}", str(row.minibatches))
        table.add_row(row.name, spread, *figures, f"{last_loss(row.losses):.3f}")
    return table


app = typer.Typer(add_completion=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder for all results.")] = Path("runs/streams"),
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each way.")] = 3,
    samples: Annotated[int, typer.Option(min=8, help="Samples of a run: 600 are an epoch.")] = 600,
    minibatch_size: Annotated[int, typer.Option(min=1, help="Samples per rank and minibatch, on average.")] = 3,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks, one core each.")] = 2,
    hidden_size: Annotated[int, typer.Option(help="Of the model; a multiple of 64.")] = 256,
    num_layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the model.")] = 4,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all rows to this file.")] = None,
) -> None:
    """Train a small Qwen2 for an epoch of streams; compare speed, waiting and losses."""
    console = Console()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no rank outlives us
    settings = {
        "samples": samples,
        "minibatch-size": minibatch_size,
        "hidden-size": hidden_size,
        "num-layers": num_layers,
    }
    try:
        runs = _run_all(console, out, repetitions, ranks, settings)
    except ChildError as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    rows = summarize(runs)
    console.print(show(rows))
    from odc.bench.training.plots import plot_losses_by_tokens  # only here: matplotlib is an extra

    plot_losses_by_tokens(out / "losses.png", {row.name: (row.tokens, row.losses) for row in rows})
    document: dict[str, Any] = {"rows": [asdict(row) for row in rows], "settings": {**settings, "ranks": ranks}}
    text = json.dumps({**document, "environment": describe_environment()}, indent=1) + "\n"
    for path in (out / "summary.json", json_file):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def _run_all(
    console: Console, out: Path, repetitions: int, ranks: int, settings: dict[str, int]
) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {configuration.name: [] for configuration in CONFIGURATIONS}
    data = out / "data"
    options = ["--data", str(data), "--minibatches", str(10 * settings["samples"])]
    for name, value in settings.items():
        options += [f"--{name}", str(value)]
    turns = [(repetition, c) for repetition in range(1, repetitions + 1) for c in CONFIGURATIONS]
    with closing(start_launcher()) as launcher, progress_bar(console, transient=False) as progress:
        task = progress.add_task("preparing data", total=len(turns))
        prepare = [sys.executable, str(SCRIPT.with_name("sft_data.py")), "--data", str(data)]
        run_child(prepare, out / "logs", lambda _: None)
        for repetition, configuration in turns:
            label = f"{configuration.name} {repetition}/{repetitions}"
            progress.update(task, description=label)
            folder = out / configuration.name / f"repetition-{repetition}"
            run = train(
                launcher, SCRIPT, configuration, folder, num_ranks=ranks, options=options, on_progress=lambda _: None
            )
            progress.advance(task)
            runs[configuration.name].append(run)
            console.print(f"{label}: {run.samples_per_s:.2f} samples/s, {run.seconds:.1f} s")
    return runs


if __name__ == "__main__":
    app()
