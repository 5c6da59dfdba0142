"""What a stream costs beside torch's own loader: time per sample, time to the first batch, memory with all workers.

    python -m odc.bench.batching.loading
    python -m odc.bench.batching.loading --json runs/loading.json

Samples have a quarter of the lengths of ShareGPT4o and cost next to nothing to make, so the loaders themselves are what
is timed: nothing trains between two batches. Each of two ranks has two workers. ``torch.utils.data.DataLoader`` gives
batches of 8, which workers collate, and single samples; streams give batches of about 3072 padded tokens, aligned over
the ranks in each way. Loaders take turns, a whole epoch each; the table shows medians and the spread.

Memory is what is resident of a rank and its workers, largest of an epoch.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, DistributedSampler

from odc.balance import StreamLoader, sample_lengths
from odc.bench.harness.environment import describe_environment
from odc.bench.harness.progress import progress_bar
from odc.bench.harness.ranks import Rank, run_ranks

WORLD_SIZE, NUM_WORKERS, MAX_TOKENS, NUM_SAMPLES = 2, 2, 3072, 4001
LOADERS = ("torch, batches of 8", "torch, single samples", "dgap", "steps", "minibatch")


class Samples:
    """Token sequences, made when they are asked for."""

    def __init__(self) -> None:
        self.lengths = (sample_lengths("sharegpt4o", NUM_SAMPLES, 0) // 4 + 2).tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(self.lengths[index]) % 1000
        return {"input_ids": ids, "labels": ids.clone()}


def pad(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A padded batch; of no samples one without loss."""
    if not samples:
        return {"input_ids": torch.zeros(1, 2, dtype=torch.int64), "labels": torch.full((1, 2), -100)}
    fill = torch.nn.utils.rnn.pad_sequence
    ids, labels = ([sample[name] for sample in samples] for name in ("input_ids", "labels"))
    return {"input_ids": fill(ids, True, 0), "labels": fill(labels, True, -100)}


@dataclass
class Epoch:
    """How one epoch of one loader went, on one rank."""

    us_per_sample: float
    first_batch_s: float


def make(loader: str, rank: int) -> Callable[[], Iterator[dict[str, torch.Tensor]]]:
    """Batches of an epoch, each time they are asked for."""
    samples = Samples()
    if loader.startswith("torch"):
        whose: Any = DistributedSampler(samples, WORLD_SIZE, rank)  # type: ignore[arg-type]
        size = 8 if loader.endswith("8") else 1
        torch_loader: DataLoader[Any] = DataLoader(
            samples,  # type: ignore[arg-type]
            batch_size=size,
            sampler=whose,
            collate_fn=pad,
            num_workers=NUM_WORKERS,
            multiprocessing_context="fork",
        )
        return lambda: iter(torch_loader)
    options: dict[str, Any] = {"minibatch_size": 8, "comm": "odc"} if loader == "minibatch" else {}
    stream: StreamLoader[Any, Any] = StreamLoader(
        samples,
        pad,
        rank,
        WORLD_SIZE,
        max_tokens=MAX_TOKENS,
        length=lambda sample: sample["input_ids"].numel(),
        align=loader,  # type: ignore[arg-type]
        num_workers=NUM_WORKERS,
        multiprocessing_context="fork",
        **options,
    )
    return lambda: (batch for minibatch in stream for batch in minibatch.microbatches)


def run_epoch(batches: Iterator[dict[str, torch.Tensor]], each: Callable[[int], None] = lambda count: None) -> Epoch:
    """Go through one epoch."""
    dist.barrier()
    begun = time.perf_counter()
    first, number = 0.0, 0
    for count, batch in enumerate(batches):
        first = first or time.perf_counter() - begun
        number += int((batch["labels"][:, 0] != -100).sum())
        each(count)
    return Epoch((time.perf_counter() - begun) * 1e6 / max(number, 1), first)


def memory_of_tree_mb() -> float:
    """Resident, of this process and its children. (Pages that they share count in each: what is shared with the other
    rank would depend on whether that one is still there.)"""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    total = 0
    for pid in [str(os.getpid()), *children]:
        text = Path(f"/proc/{pid}/status").read_text()
        total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS:"))
    return total / 1024


def measure_times(me: Rank, repetitions: int) -> dict[str, list[Epoch]]:
    """All epochs of one rank."""
    loaders = {loader: make(loader, me.rank) for loader in LOADERS}
    found: dict[str, list[Epoch]] = {loader: [] for loader in LOADERS}
    for _ in range(repetitions):
        for loader, batches in loaders.items():
            found[loader].append(run_epoch(batches()))
            me.report(1.0)
    return found


def measure_memory(me: Rank, loader: str) -> float:
    """Most of one rank in one epoch, in a process that has had no other."""
    found = []

    def look(count: int) -> None:
        if count % 25 == 0:
            found.append(memory_of_tree_mb())

    run_epoch(make(loader, me.rank)(), look)
    me.report(1.0)
    return max(found)


@dataclass
class Row:
    """A loader, over ranks and epochs."""

    loader: str
    us_per_sample: list[float]
    times_torch: float
    """Median time per sample over that of torch's batches of 8."""

    first_batch_s: list[float]
    memory_mb: float
    memory_over_torch_mb: float


def summarize(times: Sequence[dict[str, list[Epoch]]], memory: dict[str, float]) -> list[Row]:
    """The slowest rank of each epoch; the largest memory of a rank."""
    rows: list[Row] = []
    for loader in LOADERS:
        epochs = list(zip(*(mine[loader] for mine in times), strict=True))
        slowest = [round(max(epoch.us_per_sample for epoch in same), 1) for same in epochs]
        first = [round(max(epoch.first_batch_s for epoch in same), 3) for same in epochs]
        ratio = statistics.median(slowest) / statistics.median(rows[0].us_per_sample if rows else slowest)
        over = memory[loader] - memory[LOADERS[0]]
        rows.append(Row(loader, slowest, round(ratio, 2), first, round(memory[loader], 1), round(over, 1)))
    return rows


def show(rows: Sequence[Row]) -> Table:
    """One row per loader."""
    table = Table(title=f"{NUM_SAMPLES} samples on {WORLD_SIZE} ranks with {NUM_WORKERS} workers each")
    table.add_column("loader")
    for name in ("us/sample (spread)", "of torch's", "first batch s", "MB more"):
        table.add_column(name, justify="right")
    for row in rows:
        spread = (
            f"{statistics.median(row.us_per_sample):.0f} ({min(row.us_per_sample):.0f}-{max(row.us_per_sample):.0f})"
        )
        first = f"{statistics.median(row.first_batch_s):.2f}"
        table.add_row(row.loader, spread, f"{row.times_torch:.2f}", first, f"{row.memory_over_torch_mb:.0f}")
    return table


app = typer.Typer(add_completion=False)


@app.command()
def main(
    repetitions: Annotated[int, typer.Option(min=1, help="Epochs of each loader.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all rows to this file.")] = None,
) -> None:
    """Time and memory of streams beside torch's DataLoader."""
    with progress_bar(Console(stderr=True)) as progress:
        bar = progress.add_task("loading", total=WORLD_SIZE * len(LOADERS) * (repetitions + 1))

        def run(body: Callable[..., Any], *arguments: Any) -> list[Any]:
            on_progress = functools.partial(progress.advance, bar)
            return run_ranks(WORLD_SIZE, body, *arguments, on_progress=on_progress, have_children=True)

        times = run(measure_times, repetitions)
        memory = {loader: max(run(measure_memory, loader)) for loader in LOADERS}
    rows = summarize(times, memory)
    Console().print(show(rows))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        document = {"rows": [asdict(row) for row in rows], "environment": describe_environment()}
        json_file.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    app()
