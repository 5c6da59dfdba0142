"""What a stream costs beside torch's own loader: time per sample, time to the first batch, memory with all workers.

Samples have a quarter of the lengths of ShareGPT4o and cost next to nothing to make, so the loaders themselves are what
is timed: nothing trains between two batches. Each of two ranks has two workers. ``torch.utils.data.DataLoader`` gives
batches of 8, which workers collate, and single samples; streams give batches of about 3072 padded tokens, aligned over
the ranks in each way. Loaders take turns, a whole epoch each; the table shows medians and the spread.

Memory is what is resident of a rank and its workers, largest of an epoch.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.utils.data import DataLoader, DistributedSampler

from odc.balance import StreamLoader, sample_lengths
from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Run, Table, spread
from odc.bench.harness.ranks import Rank

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


def summarize(times: Sequence[dict[str, list[Epoch]]], memory: dict[str, float]) -> list[dict[str, Any]]:
    """The slowest rank of each epoch, also over that of torch's batches of 8; the largest memory of a rank."""
    rows: list[dict[str, Any]] = []
    for loader in LOADERS:
        epochs = list(zip(*(mine[loader] for mine in times), strict=True))
        slowest = [round(max(epoch.us_per_sample for epoch in same), 1) for same in epochs]
        first = [round(max(epoch.first_batch_s for epoch in same), 3) for same in epochs]
        ratio = statistics.median(slowest) / statistics.median(rows[0]["us_per_sample"] if rows else slowest)
        over = memory[loader] - memory[LOADERS[0]]
        row = {"loader": loader, "us_per_sample": slowest, "times_torch": round(ratio, 2), "first_batch_s": first}
        rows.append({**row, "memory_mb": round(memory[loader], 1), "memory_over_torch_mb": round(over, 1)})
    return rows


def measure(
    run: Run,
    repetitions: Annotated[int, typer.Option(min=1, help="Epochs of each loader.")] = 5,
) -> Entries:
    run.begin(WORLD_SIZE * len(LOADERS) * (repetitions + 1), "loading")
    times = run.ranks(WORLD_SIZE, measure_times, repetitions, have_children=True)
    memory = {loader: max(run.ranks(WORLD_SIZE, measure_memory, loader, have_children=True)) for loader in LOADERS}
    return {"rows": summarize(times, memory)}


def figures(result: Entries) -> Figures:
    rows = {row["loader"]: row for row in result["rows"]}
    times = sorted(rows["minibatch"]["us_per_sample"])
    per_minibatch_ms = 8 * times[len(times) // 2] / 1000
    yield "Loading takes ", f'{rows["dgap"]["times_torch"]:.2f}x (`"dgap"`) of the time per sample'
    yield "", f'{rows["steps"]["times_torch"]:.2f}x, `"minibatch"` with 8 samples in a minibatch'
    yield (
        "8 samples in a minibatch ",
        f"{rows['minibatch']['times_torch']:.2f}x, which is {per_minibatch_ms:.0f} ms per minibatch",
    )


BENCHMARK = Benchmark(
    measure,
    "2 min, quick 20 s",
    (
        Table(
            "rows",
            f"{NUM_SAMPLES} samples on {WORLD_SIZE} ranks with {NUM_WORKERS} workers each",
            (Column("loader", "loader"),),
            (
                Column("us/sample", lambda row: Column("", "", ".0f").written(spread(row["us_per_sample"]))),
                Column("of torch's", "times_torch", ".2f"),
                Column("first batch s", lambda row: f"{statistics.median(row['first_batch_s']):.2f}"),
                Column("MB more", "memory_over_torch_mb", ".0f"),
            ),
        ),
    ),
    quick={"repetitions": 1},
    figures=(("docs/streams.md", figures, ["loading"]),),
)
