"""What planning costs a rank's host, and what it gives: minibatches of a loader, loads evened out, OrchMLLM's largest.

    python -m odc.bench.planning.planning
    python -m odc.bench.planning.planning --before runs/planning_before.json --json runs/planning.json

- Loader: CPU time per minibatch of a :class:`~odc.balance.MinibatchLoader` of one rank, in all threads and in the one
  that trains, whose samples cost nothing to read. An epoch is gone through, its shuffle included; its first two
  minibatches are planned by the thread that trains, the others beside it.
- ``rebalance``: samples of MLLM-10B where they were read, nodes of 8 ranks. ``moved`` is the cost that changes ranks,
  ``between_nodes`` the tokens that change nodes, both of all; ``excess`` is the makespan above the mean.
- Plans: all phases of MLLM-10B (:func:`.multimodal_simulated.orchestrator`), each balanced by itself.
  ``even`` is the slowest rank of a phase over what it would be, evenly shared and without padding; ``between_nodes``
  the bytes that cross between nodes in a forward, of all that samples and items have.

Times are medians, smallest and largest of the repetitions, of one core. With ``--before``, the rows of a file that this
module has written at another commit stand beside the new ones.

Not covered: the time in which ranks tell each other their lengths, and what planning beside the training takes from it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from odc.balance import MinibatchLoader, Rearrangement, TransformerCost, preset, rebalance, sample_lengths
from odc.balance.checks import FloatArray
from odc.bench.harness.environment import describe_environment
from odc.bench.harness.progress import progress_bar
from odc.bench.planning.multimodal_simulated import by_phase, draw, journeys, orchestrator
from odc.bench.planning.multimodal_sizes import SIZES

LOADERS = ((8, 4, 50), (64, 8, 20), (256, 16, 5), (1024, 16, 3))
"""Ranks, samples of each, minibatches of an epoch."""
REBALANCE_RANKS = (64, 256, 1024, 2560)
PLAN_RANKS = (256, 2560)
RANKS_PER_NODE = 8
MODEL, LAW = "MLLM-10B", "longalign"
Advance = Callable[[], object]


class _Nothing:
    """A dataset whose samples cost nothing."""

    def __getitem__(self, index: int) -> int:
        return index


def measure_loader(num_ranks: int, samples: int, minibatches: int, repetitions: int) -> dict[str, Any]:
    """Seconds of CPU per minibatch on rank 0."""
    loader = MinibatchLoader(
        _Nothing(),
        sample_lengths(LAW, num_ranks * samples * minibatches, 0),
        list,
        0,
        num_ranks,
        minibatch_size=samples,
        cost=TransformerCost.from_config(preset("qwen2.5-1.5b")),
        comm="odc",
    )
    everywhere, training = [], []
    for epoch in range(repetitions):
        loader.set_epoch(epoch)
        start = time.process_time(), time.thread_time()
        for _ in loader:
            pass
        everywhere.append((time.process_time() - start[0]) / minibatches)
        training.append((time.thread_time() - start[1]) / minibatches)
    return {
        "ranks": num_ranks,
        "samples_per_rank": samples,
        "minibatches": minibatches,
        "cpu_s": _spread(everywhere),
        "training_thread_s": _spread(training),
    }


def measure_rebalance(num_ranks: int, repetitions: int) -> dict[str, Any]:
    """Of the language model's samples."""
    size = SIZES[MODEL]
    seconds, rows = [], []
    for number in range(repetitions):
        lengths = draw(size, num_ranks, size.samples_per_rank(num_ranks), number)
        costs = size.language.cost(lengths.language)
        home = [lengths.samples_of(rank) for rank in range(num_ranks)]
        start = time.process_time()
        parts = rebalance(costs, home, ranks_per_node=RANKS_PER_NODE)
        seconds.append(time.process_time() - start)
        route = Rearrangement.between(home, parts)
        cost = route.volume(costs)
        loads = cost.sum(axis=0)
        rows.append(
            {
                "moved": 1 - float(np.trace(cost) / cost.sum()),
                "between_nodes": _between_nodes(route.volume(lengths.language)),
                "excess": float(loads.max() / loads.mean()) - 1,
            }
        )
    return {"ranks": num_ranks, "cpu_s": _spread(seconds), **_means(rows)}


def measure_plan(num_ranks: int, repetitions: int) -> dict[str, Any]:
    """Of all phases."""
    size = SIZES[MODEL]
    orchestra = orchestrator(size, num_ranks, "all")
    seconds, rows = [], []
    for number in range(repetitions):
        lengths = draw(size, num_ranks, size.samples_per_rank(num_ranks), number)
        start = time.process_time()
        schedule = orchestra.plan(lengths)
        seconds.append(time.process_time() - start)
        row = {f"even {name}": ratio for name, ratio in by_phase(schedule).items()}
        for name, volume in journeys(size, schedule, placed=True):
            row[f"between_nodes {name}"] = _between_nodes(volume)
        rows.append(row)
    return {"ranks": num_ranks, "cpu_s": _spread(seconds), **_means(rows)}


def _between_nodes(volume: FloatArray) -> float:
    """The part of all that goes from a rank of one node to one of another."""
    num_nodes = len(volume) // RANKS_PER_NODE
    by_node = volume.reshape(num_nodes, RANKS_PER_NODE, num_nodes, RANKS_PER_NODE).sum(axis=(1, 3))
    return 1 - float(np.trace(by_node) / by_node.sum())


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    return {name: round(of(seconds), 6) for name, of in (("median", statistics.median), ("min", min), ("max", max))}


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.fmean(row[name] for row in rows), 6) for name in rows[0]}


def measure(repetitions: int, advance: Advance) -> dict[str, Any]:
    """All of it."""
    found: dict[str, Any] = {"loader": [], "rebalance": [], "plan": []}
    for sizes in LOADERS:
        found["loader"].append(measure_loader(*sizes, repetitions))
        advance()
    for num_ranks in REBALANCE_RANKS:
        found["rebalance"].append(measure_rebalance(num_ranks, repetitions))
        advance()
    for num_ranks in PLAN_RANKS:
        found["plan"].append(measure_plan(num_ranks, repetitions))
        advance()
    return found


def commit() -> str:
    """Of the tree in which this runs; empty where there is none."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip()


def tables(result: dict[str, Any]) -> list[Table]:
    """One for each part, times in ms; a row measured before stands above its new one."""
    shown = []
    for part, title in (("loader", "MinibatchLoader"), ("rebalance", "rebalance"), ("plan", f"all phases of {MODEL}")):
        table = Table(title=f"{title}, CPU ms and parts of 1")
        names = [name for name in result[part][0] if name != "minibatches"]
        for name in ("commit", *names):
            table.add_column(name, justify="left" if name == "commit" else "right")
        for number, row in enumerate(result[part]):
            for of, each in ((result.get("before"), None), (result, row)):
                if of is not None:
                    values = each or of[part][number]
                    table.add_row(of["commit"], *(_cell(values[name]) for name in names))
        shown.append(table)
    return shown


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return f"{1e3 * value['median']:.1f} ({1e3 * value['min']:.1f}-{1e3 * value['max']:.1f})"
    return str(value) if isinstance(value, int) else f"{value:.4f}"


def main(
    repetitions: Annotated[int, typer.Option(min=1, help="Epochs, and minibatches of each other size.")] = 3,
    before: Annotated[Path | None, typer.Option(help="What this has written at another commit.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """CPU time of planning, and how good the plans are."""
    with progress_bar(Console(stderr=True)) as progress:
        bar = progress.add_task("planning", total=len(LOADERS) + len(REBALANCE_RANKS) + len(PLAN_RANKS))
        result: dict[str, Any] = {"commit": commit(), "model": MODEL, "law": LAW, "repetitions": repetitions}
        result |= measure(repetitions, lambda: progress.advance(bar))
    result["environment"] = describe_environment()
    if before is not None:
        result["before"] = json.loads(before.read_text())
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in tables(result):
        console.print(table)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
