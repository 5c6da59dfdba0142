"""How far LB-Mini's partitions are from the optimum.

    python -m odc.bench.planning.partition_quality --json runs/partition_quality.json

- On the shipped length laws (1.5B costs, 8 devices): the bubble rate of 200 minibatches beside the least possible.
  That is the larger of mean load and largest sample (and other simple bounds) where LB-Mini is within 0.1 % of it;
  else the exact solver is asked for the optimum, or for what it can prove in time.
- On random small instances: the makespan over that of exhaustive search.

Not covered: limits on tokens, which no partition over ranks has to keep; packing is another question.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from odc.balance import karmarkar_karp
from odc.balance.checks import FloatArray
from odc.balance.partition.bounds import lower_bound
from odc.balance.partition.differencing import Parts, largest_differencing
from odc.balance.partition.exact import exact_partition
from odc.balance.simulate.laws import law_names, sample_lengths
from odc.bench.harness.environment import describe_environment
from odc.bench.harness.progress import progress_bar
from odc.bench.planning.paper_costs import paper_cost
from odc.bench.planning.textbook import optimal_makespan

COST = paper_cost("1.5B")
DEVICES = 8
MINIBATCH_SIZES = (2, 4, 8, 16)
NEAR_BOUND = 0.001
MOST_POINTS_ABOVE = 0.1
MOST_MEAN_EXCESS = 0.001


def makespan(costs: FloatArray, parts: Parts) -> float:
    return max(float(costs[part].sum()) for part in parts)


def measure_law(
    law: str, minibatch_size: int, num_minibatches: int, time_limit_s: float, progress: Progress
) -> dict[str, Any]:
    """Bubble rates (percent) over all minibatches: LB-Mini's, and the least that is possible."""
    n = minibatch_size * DEVICES
    costs = COST(sample_lengths(law, n * num_minibatches)).reshape(num_minibatches, n)
    bar = progress.add_task(f"{law}, minibs {minibatch_size}", total=num_minibatches)
    found, bounds, num_asked, num_optimal = [], [], 0, 0
    for minibatch in costs:
        parts = karmarkar_karp(minibatch, DEVICES)
        found.append(makespan(minibatch, parts))
        bounds.append(lower_bound(minibatch, DEVICES))
        if found[-1] > bounds[-1] * (1 + NEAR_BOUND):
            exact = exact_partition(minibatch, DEVICES, time_limit_s=time_limit_s, start=parts)
            bounds[-1] = exact.lower_bound
            num_asked += 1
            num_optimal += exact.optimal
        progress.advance(bar)
    progress.remove_task(bar)
    work = costs.sum() / DEVICES
    # A bound is a sum in another order than the work: the least rate is 0, not -1e-14.
    rate, least = (max(0.0, 100 * (1 - work / np.sum(makespans))) for makespans in (found, bounds))
    return {
        "law": law,
        "minibatch_size": minibatch_size,
        "num_minibatches": num_minibatches,
        "num_near_bound": num_minibatches - num_asked,
        "num_solved": num_optimal,
        "bubble_percent": float(rate),
        "least_bubble_percent": float(least),
        "points_above": float(rate - least),
    }


def random_instances(num: int, equal_size: bool) -> Iterator[tuple[FloatArray, int]]:
    """Costs of 2 to 16 items and a number of parts from 2 to 4."""
    rng = np.random.default_rng(20)
    for _ in range(num):
        k = int(rng.integers(2, 5))
        n = int(rng.integers(k, 17))
        if equal_size:
            n -= n % k
        yield COST(rng.lognormal(9.5, 0.8, n).clip(100, 65536)), k


def measure_random(num: int, equal_size: bool, progress: Progress) -> dict[str, Any]:
    """Relative excess over the optimum, of our partition and of the plain differencing method."""
    bar = progress.add_task("random instances" + ", equal sizes" * equal_size, total=num)
    ours, plain = [], []
    for costs, k in random_instances(num, equal_size):
        best = optimal_makespan(costs, k, equal_size=equal_size)
        ours.append(makespan(costs, karmarkar_karp(costs, k, equal_size=equal_size)) / best - 1)
        plain.append(makespan(costs, largest_differencing(costs, k, equal_size=equal_size)) / best - 1)
        progress.advance(bar)
    progress.remove_task(bar)
    return {
        "equal_size": equal_size,
        "num_instances": num,
        "mean_excess": float(np.mean(ours)),
        "largest_excess": float(np.max(ours)),
        "mean_excess_of_plain_differencing": float(np.mean(plain)),
    }


def main(
    minibatches: Annotated[int, typer.Option(min=1, help="Minibatches for each law and size.")] = 200,
    instances: Annotated[int, typer.Option(min=1, help="Random instances, of each kind.")] = 1000,
    time_limit_s: Annotated[float, typer.Option(min=0.1, help="Of the exact solver, for each minibatch.")] = 5.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Compare LB-Mini's partitions with optimal ones. Exits with 1 if they are further off than they should be."""
    with progress_bar(Console(stderr=True)) as progress:
        random = [measure_random(instances, equal_size, progress) for equal_size in (False, True)]
        laws = [
            measure_law(law, size, minibatches, time_limit_s, progress)
            for law in law_names()
            for size in MINIBATCH_SIZES
        ]
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(_show_laws(laws))
    console.print(_show_random(random))
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        result = {"environment": describe_environment(), "time_limit_s": time_limit_s, "laws": laws, "random": random}
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if any(row["points_above"] > MOST_POINTS_ABOVE for row in laws):
        raise typer.Exit(1)
    if any(row["mean_excess"] > MOST_MEAN_EXCESS for row in random):
        raise typer.Exit(1)


def _show_laws(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"Bubble rate of LB-Mini on {DEVICES} devices, percent")
    for name in ("law", "minibs", "LB-Mini", "least possible", "points above", "near bound", "solved"):
        table.add_column(name, justify="left" if name == "law" else "right")
    for row in rows:
        table.add_row(
            row["law"],
            str(row["minibatch_size"]),
            f"{row['bubble_percent']:.3f}",
            f"{row['least_bubble_percent']:.3f}",
            f"{row['points_above']:.3f}",
            f"{row['num_near_bound']} of {row['num_minibatches']}",
            f"{row['num_solved']} of {row['num_minibatches'] - row['num_near_bound']}",
        )
    return table


def _show_random(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Makespan over the optimum, up to 16 items in up to 4 parts")
    for name in ("sizes", "instances", "mean excess", "largest", "plain differencing, mean"):
        table.add_column(name, justify="left" if name == "sizes" else "right")
    for row in rows:
        table.add_row(
            "equal" if row["equal_size"] else "any",
            str(row["num_instances"]),
            f"{row['mean_excess']:.4%}",
            f"{row['largest_excess']:.2%}",
            f"{row['mean_excess_of_plain_differencing']:.2%}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
