"""Time LB-Mini's partition against the differencing method in the form textbooks have it.

    python -m odc.bench.planning.partition_speed --json runs/partition_speed.json

Both run in this process by turns, on the same costs (lengths of the LongAlign law, 1.5B), and the medians are
compared; the textbook form is left out where it would take a minute. The largest instance also runs in a
process of its own, for its memory.

Not covered: packing into microbatches, other languages than Python.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from odc.balance import karmarkar_karp
from odc.balance.checks import FloatArray
from odc.balance.simulate.laws import sample_lengths
from odc.bench.harness.environment import describe_environment
from odc.bench.planning import textbook
from odc.bench.planning.paper_costs import paper_cost

SIZES = ((512, 64), (4096, 256), (32768, 1024))
LARGEST_FOR_TEXTBOOK = 4096
COST = paper_cost("1.5B")


def make_costs(n: int, seed: int) -> FloatArray:
    return COST(sample_lengths("longalign", n, seed))


def excess(costs: FloatArray, parts: list[list[int]]) -> float:
    """Makespan over the larger of mean load and largest item, minus 1."""
    return float(max(costs[part].sum() for part in parts) / max(costs.sum() / len(parts), costs.max()) - 1)


def measure(n: int, k: int, repetitions: int) -> dict[str, Any]:
    """Medians and spread of both on the same costs, a new draw in each repetition."""
    seconds: dict[str, list[float]] = {"odc": [], "textbook": []}
    excesses: dict[str, list[float]] = {"odc": [], "textbook": []}

    def run(name: str, partition: Callable[[], list[list[int]]], costs: FloatArray) -> None:
        start = time.perf_counter()
        parts = partition()
        seconds[name].append(time.perf_counter() - start)
        excesses[name].append(excess(costs, parts))

    for repetition in range(repetitions):
        costs = make_costs(n, repetition)
        values = costs.tolist()
        run("odc", lambda costs=costs: karmarkar_karp(costs, k), costs)  # type: ignore[misc]
        if n <= LARGEST_FOR_TEXTBOOK:
            run("textbook", lambda values=values: textbook.karmarkar_karp(values, k), costs)  # type: ignore[misc]
    result: dict[str, Any] = {"n": n, "k": k}
    for name in seconds:
        if seconds[name]:
            times = seconds[name]
            result[name] = {
                "median_s": statistics.median(times),
                "min_s": min(times),
                "max_s": max(times),
                "largest_excess": max(excesses[name]),
            }
    if seconds["textbook"]:
        result["speedup"] = result["textbook"]["median_s"] / result["odc"]["median_s"]
        pairs = zip(excesses["odc"], excesses["textbook"], strict=True)
        result["never_a_larger_makespan"] = all(ours <= theirs for ours, theirs in pairs)
    return result


# The library by itself: what this benchmark imports needs more memory than the partition.
_MEMORY_SCRIPT = """
import sys
from odc.balance import QuadraticCost, karmarkar_karp
from odc.balance.simulate.laws import sample_lengths
n, k = map(int, sys.argv[1:])
karmarkar_karp(QuadraticCost(1.0, 80000.0)(sample_lengths("longalign", n)), k)
# Not getrusage: its maximum includes the process that forked this one.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(1024 * int(status["VmHWM"].split()[0]))
"""


def peak_memory_bytes(n: int, k: int) -> int:
    """Peak resident memory of a fresh process that partitions one instance, interpreter and numpy included."""
    command = [sys.executable, "-c", _MEMORY_SCRIPT, str(n), str(k)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main(
    repetitions: Annotated[int, typer.Option(min=1, help="Draws of costs for each size.")] = 7,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Compare LB-Mini's partition with the textbook form of Karmarkar and Karp's method, in speed and result."""
    gc.collect()
    gc.freeze()  # or the collector would look at what this process imported, most often for the textbook form
    console = Console(width=None if sys.stdout.isatty() else 100)
    table = Table(title="Partition of n items into k parts, medians (minimum-maximum) in ms")
    for name in ("n", "k", "odc", "textbook", "speedup", "excess odc", "excess textbook"):
        table.add_column(name, justify="right")
    results = []
    for n, k in SIZES:
        with console.status(f"n={n}, k={k}"):
            results.append(measure(n, k, repetitions))
        table.add_row(*_row(results[-1]))
    largest = SIZES[-1]
    memory = peak_memory_bytes(*largest)
    console.print(table)
    console.print(f"peak memory of a process at n={largest[0]}, k={largest[1]}: {memory / 1e6:.0f} MB")
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        result = {"environment": describe_environment(), "peak_memory_bytes": memory, "results": results}
        json_file.write_text(json.dumps(result, indent=1) + "\n")


def _row(result: dict[str, Any]) -> list[str]:
    cells = [str(result["n"]), str(result["k"])]
    for name in ("odc", "textbook"):
        times = result.get(name)
        cells.append("-" if times is None else "{:.1f} ({:.1f}-{:.1f})".format(*_milliseconds(times)))
    cells.append(f"{result['speedup']:.0f}x" if "speedup" in result else "-")
    cells += [f"{result[name]['largest_excess']:.1e}" if name in result else "-" for name in ("odc", "textbook")]
    return cells


def _milliseconds(times: dict[str, float]) -> np.ndarray:
    return 1e3 * np.array([times["median_s"], times["min_s"], times["max_s"]])


if __name__ == "__main__":
    typer.run(main)
