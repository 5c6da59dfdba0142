"""The bubble rates of the paper's Tables 4 and 6, simulated, cell by cell beside the published ones.

Lengths are spread evenly over the shipped laws. The laws were fitted to the rows of the 1.5B model; nothing was fitted
to the other sizes. Costs are those of :mod:`.paper_costs`. A global minibatch is the next ``devices * minibatch size``
samples of the shuffled set. A microbatch has at most as many tokens as the longest sample. The bubble rate is idle time
over total time of all minibatches. "Native" balances batches of 256 samples per device before it cuts them into
minibatches; the paper does not state this number.

Not covered: Tables 3 and 5 (throughput), which need GPUs; ``odc bench emulated`` has devices that pose as such.
"""

from __future__ import annotations

import csv
import multiprocessing
import signal
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Annotated

import numpy as np
import typer

from odc.balance.plan import Comm
from odc.balance.simulate.laws import even_lengths
from odc.balance.simulate.simulator import PlannedEpoch, Scenario
from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Run, Table, check_known
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
    """Read the published cells."""
    with (files("odc.bench.planning") / "bubble_rates.csv").open() as file:
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


def simulate_all(run: Run, cells: Iterable[Cell], num_samples: int, num_jobs: int) -> dict[Cell, float]:
    """Simulate all cells in ``num_jobs`` processes, which end at once if this is interrupted."""
    groups: dict[tuple[str, str, int], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.dataset, cell.model, cell.minibatch_size].append(cell)
    simulated: dict[Cell, float] = {}
    others = set(multiprocessing.active_children())
    run.begin(sum(map(len, groups.values())), "planning")
    with ProcessPoolExecutor(num_jobs) as pool:
        # The largest first, so that no process ends up alone with one.
        ordered = sorted(groups.values(), key=lambda group: -group[0].devices * group[0].minibatch_size)
        try:
            with _interrupts_later():
                futures = {pool.submit(simulate_cells, group, num_samples): group for group in ordered}
            for future in as_completed(futures):
                simulated.update(zip(futures[future], future.result(), strict=True))
                run.advance(len(futures[future]))
        except BaseException:
            for process in set(multiprocessing.active_children()) - others:
                process.kill()  # a fork has the handler of SIGTERM of this process
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


def measure(
    run: Run,
    dataset: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(LAW_OF)}.")] = None,
    model: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(MODELS)}.")] = None,
    samples: Annotated[int, typer.Option(min=1024, help="Samples per dataset; fewer are faster and noisier.")] = 20_000,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
) -> Entries:
    check_known(dataset=(dataset, LAW_OF), model=(model, MODELS))
    cells = [c for c in read_cells() if c.dataset in (dataset or LAW_OF) and c.model in (model or MODELS)]
    if not cells:
        raise ValueError("the paper has no such rows (AIME has no 32B)")
    simulated = simulate_all(run, cells, samples, jobs)
    groups = dict.fromkeys((cell.dataset, cell.model) for cell in cells)
    errors = {key: rms_error(simulated, *key) for key in groups}
    for (name, size), error in errors.items():
        if size == "1.5B" and error > LARGEST_ERROR[name]:
            run.miss(f"{name} {size}: {error:.2f} points, expected at most {LARGEST_ERROR[name]}")
    return {
        "rms_error_points": {f"{name} {size}": round(error, 3) for (name, size), error in errors.items()},
        "errors": [
            {"dataset": name, "model": size, "rms_error_points": round(error, 3)}
            for (name, size), error in errors.items()
        ],
        "cells": [{**asdict(cell), "simulated": round(rate, 3)} for cell, rate in simulated.items()],
    }


def figures(result: Entries) -> Figures:
    errors = result["rms_error_points"]
    fitted = {data: errors[f"{data} 1.5B"] for data in LAW_OF}
    others = [error for cell, error in errors.items() if not cell.endswith(" 1.5B")]
    yield (
        "Root mean square errors on the 1.5B rows, to which the length laws were fitted: ",
        f"{fitted['LongAlign']:.2f} points for LongAlign, {fitted['SWE-Smith']:.2f} for SWE-Smith, "
        f"{fitted['AIME']:.2f} for AIME; the other sizes, unfitted, {min(others):.1f} to {max(others):.1f}",
    )
    yield "", f"[all {len(result['cells'])} cells](../bench/results/tables.json)"


BENCHMARK = Benchmark(
    measure,
    (
        Table(
            "cells",
            "Tables 4 and 6: bubble rates in percent",
            tuple(
                Column(n.replace("_size", ""), n) for n in ("dataset", "model", "devices", "method", "minibatch_size")
            ),
            (
                Column("simulated", "simulated", ".2f"),
                Column("paper", "paper", ".2f"),
                Column("difference", lambda row: f"{row['simulated'] - row['paper']:+.2f}"),
            ),
        ),
        Table(
            "errors",
            "root mean square of the differences",
            (Column("dataset", "dataset"), Column("model", "model")),
            (Column("points", "rms_error_points", ".2f"),),
        ),
    ),
    quick={"model": ["1.5B"], "samples": 1024},
    figures=(("docs/performance.md", figures, ["tables"]),),
)
