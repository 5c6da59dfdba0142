"""Speed of LB-Mini's partition beside the differencing method in the form textbooks have it.

Both run in this process by turns, on the same costs (lengths of the LongAlign law, 1.5B), and medians of CPU time are
compared; the textbook form is left out where it would take a minute. The largest instance also runs in a
process of its own, for its memory.

Not covered: packing into microbatches, other languages than Python.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from odc.balance import karmarkar_karp
from odc.balance.checks import FloatArray
from odc.balance.simulate.laws import sample_lengths
from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Run, Table, spread
from odc.bench.planning import textbook
from odc.bench.planning.paper_costs import paper_cost

SIZES = ((32, 8), (64, 8), (512, 64), (4096, 256), (32768, 1024))
LARGEST_FOR_TEXTBOOK = 4096
COST = paper_cost("1.5B")


def make_costs(n: int, seed: int) -> FloatArray:
    return COST(sample_lengths("longalign", n, seed))


def excess(costs: FloatArray, parts: list[list[int]]) -> float:
    """Makespan over the larger of mean load and largest item, minus 1."""
    return float(max(costs[part].sum() for part in parts) / max(costs.sum() / len(parts), costs.max()) - 1)


def compare(n: int, k: int, repetitions: int) -> dict[str, Any]:
    """Medians and spread of both on the same costs, a new draw in each repetition."""
    seconds: dict[str, list[float]] = {"odc": [], "textbook": []}
    excesses: dict[str, list[float]] = {"odc": [], "textbook": []}

    def run(name: str, partition: Callable[[], list[list[int]]], costs: FloatArray) -> None:
        start = time.process_time()
        parts = partition()
        seconds[name].append(time.process_time() - start)
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
            result[name] = {"time_s": spread(seconds[name]), "largest_excess": max(excesses[name])}
    if seconds["textbook"]:
        result["speedup"] = result["textbook"]["time_s"]["median"] / result["odc"]["time_s"]["median"]
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


def measure(
    run: Run,
    repetitions: Annotated[int, typer.Option(min=1, help="Draws of costs for each size.")] = 7,
) -> Entries:
    gc.collect()
    gc.freeze()  # or the collector would look at what this process imported, most often for the textbook form
    run.begin(len(SIZES) + 1)
    results = []
    for n, k in SIZES:
        run.describe(f"n={n}, k={k}")
        results.append(compare(n, k, repetitions))
        run.advance()
    return {"results": results, "peak_memory_bytes": peak_memory_bytes(*SIZES[-1])}


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 3 else f"{value:.1f}"


def figures(result: Entries) -> Figures:
    for row in result["results"]:
        ours, textbook = row["odc"], row.get("textbook")
        theirs, speedup, excess = "-", "-", "-"
        if textbook is not None:
            theirs, speedup = f"{_short(1e3 * textbook['time_s']['median'])} ms", f"{_short(row['speedup'])}x"
            excess = f"{textbook['largest_excess']:.2%}"
        yield (
            f"| {row['n']}, {row['k']} |",
            f" {_short(1e3 * ours['time_s']['median'])} ms | {theirs} | {speedup} | "
            f"{ours['largest_excess']:.2%}, {excess} |",
        )


BENCHMARK = Benchmark(
    measure,
    "20 s, quick 6 s",
    (
        Table(
            "results",
            "partition of n items into k parts, medians (minimum-maximum) in ms; peak memory of a process with the "
            "largest: {peak_memory_bytes:,} bytes",
            (Column("n", "n"), Column("k", "k")),
            (
                Column("odc", "odc.time_s", ".2f", 1e3),
                Column("textbook", "textbook.time_s", ".2f", 1e3),
                Column("speedup", "speedup", ".1f"),
                Column("excess odc", "odc.largest_excess", ".1e"),
                Column("excess textbook", "textbook.largest_excess", ".1e"),
            ),
        ),
    ),
    quick={"repetitions": 2},
    figures=(("docs/policies.md", figures, ["partition_speed"]),),
)
