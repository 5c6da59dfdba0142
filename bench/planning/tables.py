"""The bubble rates of the paper's Tables 4 and 6, simulated, cell by cell beside the published ones.

    python -m odc.bench.planning.tables
    python -m odc.bench.planning.tables --model 1.5B --dataset LongAlign --json runs/tables.json

Lengths are spread evenly over the shipped laws, which were fitted to the 1.5B rows; nothing was fitted to the
other sizes. Costs: see :mod:`.paper_costs`. A global minibatch is the next ``devices * minibatch size``
samples of the shuffled set, a microbatch has at most as many tokens as the longest sample, and the bubble rate
is idle time over total time of all minibatches. "Native" balances batches of 256 samples per device before it
cuts them, which the paper does not state.

Not covered: Tables 3 and 5 (throughput), which need GPUs.
"""

from __future__ import annotations

import csv
import json
import multiprocessing
import signal
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from odc.balance.plan import Comm
from odc.balance.simulate.laws import even_lengths
from odc.balance.simulate.simulator import PlannedEpoch, Scenario
from odc.bench.harness.environment import describe_environment
from odc.bench.harness.progress import progress_bar
from odc.bench.planning.paper_costs import MODELS, paper_cost

LAW_OF = {"LongAlign": "longalign", "SWE-Smith": "swesmith", "AIME": "aime"}
POLICY_OF = {
    "LocalSort": "local-sort",
    "LB-Micro": "lb-micro",
    "LB-Mini": "lb-mini",
    "Native": "verl-native",
}
NATIVE_BATCH_SIZE = 256
# Root mean square errors, in points, that the shipped laws must reach on the rows they were fitted to.
LARGEST_ERROR = {"LongAlign": 1.0, "SWE-Smith": 1.6, "AIME": 1.0}


@dataclass(frozen=True)
class Cell:
    """One number of a table, in percent."""

    table: int
    dataset: str
    model: str
    devices: int
    method: str
    minibatch_size: int
    paper: float

    @property
    def comm(self) -> Comm:
        return "odc" if self.method.startswith("ODC") else "collective"

    @property
    def policy(self) -> str:
        policy = POLICY_OF[self.method.partition(" ")[2]]
        # In RL, verl asks for equally many samples per device (section 5.2).
        return "lb-mini-equal" if (policy, self.dataset) == ("lb-mini", "AIME") else policy


def read_cells() -> list[Cell]:
    """The published cells."""
    with (files("odc.bench.planning.planning") / "bubble_rates.csv").open() as file:
        return [
            Cell(
                int(row["table"]),
                row["dataset"],
                row["model"],
                int(row["devices"]),
                row["method"],
                int(row["minibatch_size"]),
                float(row["bubble_percent"]),
            )
            for row in csv.DictReader(file)
        ]


def simulate_cells(cells: Sequence[Cell], num_samples: int) -> list[float]:
    """Bubble rates (percent) of cells that share dataset, model, devices and minibatch size."""
    first = cells[0]
    scenario = Scenario(
        even_lengths(LAW_OF[first.dataset], num_samples),
        paper_cost(first.model),
        first.devices,
        first.minibatch_size,
        batch_size=max(NATIVE_BATCH_SIZE, first.minibatch_size),
    )
    planned: dict[str, PlannedEpoch] = {}
    rates = []
    for cell in cells:
        if cell.policy not in planned:
            planned[cell.policy] = scenario.plan(cell.policy)
        rates.append(100 * planned[cell.policy].run(cell.comm).bubble_rate)
    return rates


def simulate_all(cells: Iterable[Cell], num_samples: int, num_jobs: int, console: Console) -> dict[Cell, float]:
    """Simulate all cells in ``num_jobs`` processes, which end at once if this is interrupted."""
    groups: dict[tuple[str, str, int], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.dataset, cell.model, cell.minibatch_size].append(cell)
    simulated: dict[Cell, float] = {}
    others = set(multiprocessing.active_children())
    with progress_bar(console) as progress, ProcessPoolExecutor(num_jobs) as pool:
        bar = progress.add_task("planning", total=sum(map(len, groups.values())))
        # The largest first, so that no process ends up alone with one.
        ordered = sorted(groups.values(), key=lambda group: -group[0].devices * group[0].minibatch_size)
        try:
            with _interrupts_later():
                futures = {pool.submit(simulate_cells, group, num_samples): group for group in ordered}
            for future in as_completed(futures):
                simulated.update(zip(futures[future], future.result(), strict=True))
                progress.advance(bar, len(futures[future]))
        except BaseException:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            pool.shutdown(cancel_futures=True)
            raise
    return simulated


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Ctrl-C takes effect after the block. Processes started in it never see one: this process ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def rms_error(simulated: dict[Cell, float], dataset: str, model: str) -> float:
    """Root mean square of simulated minus published, in points."""
    errors = [rate - cell.paper for cell, rate in simulated.items() if (cell.dataset, cell.model) == (dataset, model)]
    return float(np.sqrt(np.mean(np.square(errors))))


def show(simulated: dict[Cell, float], dataset: str, model: str) -> Table:
    """The rows of one dataset and model: simulated, published, difference."""
    cells = {(c.method, c.minibatch_size): c for c in simulated if (c.dataset, c.model) == (dataset, model)}
    first = next(iter(cells.values()))
    sizes = sorted({size for _, size in cells})
    error = rms_error(simulated, dataset, model)
    table = Table(
        title=f"Table {first.table}: {dataset}, {model} on {first.devices} devices, bubble rate in percent",
        caption=f"simulated / paper (difference); root mean square error {error:.2f} points",
    )
    table.add_column("method")
    for size in sizes:
        table.add_column(f"minibs {size}", justify="right")
    for method in dict.fromkeys(method for method, _ in cells):
        row = [(simulated[cells[method, size]], cells[method, size].paper) for size in sizes]
        table.add_row(method, *(f"{rate:.2f} / {paper:.2f} ({rate - paper:+.2f})" for rate, paper in row))
    return table


def main(
    dataset: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(LAW_OF)}.")] = None,
    model: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(MODELS)}.")] = None,
    samples: Annotated[int, typer.Option(min=1024, help="Samples per dataset; fewer are faster and noisier.")] = 20_000,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all cells to this file.")] = None,
) -> None:
    """Simulate Tables 4 and 6 of the paper. Exits with 1 if a fitted row is further off than it should be."""
    for name, given, known in (("--dataset", dataset, LAW_OF), ("--model", model, MODELS)):
        for value in given or ():
            if value not in known:
                raise typer.BadParameter(f"{value!r}: expected one of {', '.join(known)}", param_hint=name)
    cells = [c for c in read_cells() if c.dataset in (dataset or LAW_OF) and c.model in (model or MODELS)]
    if not cells:
        raise typer.BadParameter("the paper has no such rows (AIME has no 32B)")
    progress_console = Console(stderr=True)
    try:
        simulated = simulate_all(cells, samples, jobs, progress_console)
    except KeyboardInterrupt:
        progress_console.print("interrupted")
        raise typer.Exit(130) from None
    errors = {}
    console = Console(width=None if sys.stdout.isatty() else 120)
    for name, size in dict.fromkeys((cell.dataset, cell.model) for cell in cells):
        console.print(show(simulated, name, size))
        errors[name, size] = rms_error(simulated, name, size)
    if json_file:
        _write(json_file, simulated, errors, samples)
    too_far = {key: error for key, error in errors.items() if key[1] == "1.5B" and error > LARGEST_ERROR[key[0]]}
    for (name, size), error in too_far.items():
        console.print(f"[red]{name} {size}: {error:.2f} points, expected at most {LARGEST_ERROR[name]}[/red]")
    if too_far:
        raise typer.Exit(1)


def _write(path: Path, simulated: dict[Cell, float], errors: dict[tuple[str, str], float], num_samples: int) -> None:
    result = {
        "environment": describe_environment(),
        "num_samples": num_samples,
        "rms_error_points": {f"{dataset} {model}": round(error, 3) for (dataset, model), error in errors.items()},
        "cells": [{**asdict(cell), "simulated": round(rate, 3)} for cell, rate in simulated.items()],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
