"""How much longer a gather takes where several ranks read from one owner at the same time. Links as fluids, no bytes.

    odc bench links

Each rank computes, gathers, computes, and so on. The time that it computes is drawn anew each time, so that ranks are
out of step. Each rank has a link that carries as much in as out (NVLink through a switch). All transfers share the
links with max-min fairness: no transfer is slowed down to speed up one that is faster already. A gather reads from all
other ranks: from one after the other, from two at a time, or from all at once.

With one owner after the other, ranks that are in step form a ring and never meet at an owner; ranks that are out of
step do. Two at a time is how copies are ordered for two copy engines. All at once is how the kernels read: neighbouring
programs of a launch begin with different owners.

Not covered: latency, messages of different sizes, other traffic on a link.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Run, Table, summary

RATIOS = (0.0, 1.0, 4.0, 10.0)
_TINY = 1e-12


@dataclass
class Reader:
    """A reader that takes slices from one owner after the other: ``left`` slices remain, and it is at owner number
    ``at``."""

    rank: int
    at: int
    left: int
    slice: float
    """Size of a slice; a whole gather is 1."""
    rest: float = field(init=False)

    def __post_init__(self) -> None:
        self.rest = self.slice

    def read(self, amount: float) -> None:
        self.rest -= amount
        if self.rest < _TINY:
            self.at, self.left, self.rest = self.at + 1, self.left - 1, self.slice


def max_min_rates(flows: Sequence[tuple[int, int]]) -> list[float]:
    """The rate of each flow, which is a pair (into rank, out of rank). Each link carries 1 in each direction.

    >>> max_min_rates([(0, 2), (1, 2), (1, 3)])
    [0.5, 0.5, 0.5]
    >>> max_min_rates([(0, 2), (1, 2), (4, 3)])
    [0.5, 0.5, 1.0]
    """
    links: dict[tuple[str, int], set[int]] = {}
    for number, (into, out_of) in enumerate(flows):
        links.setdefault(("in", into), set()).add(number)
        links.setdefault(("out", out_of), set()).add(number)
    room, rates = dict.fromkeys(links, 1.0), [0.0] * len(flows)
    while any(links.values()):
        rate, full = min((room[link] / len(there), link) for link, there in links.items() if there)
        for number in list(links[full]):
            rates[number] = rate
            for link, there in links.items():
                if number in there:
                    there.discard(number)
                    room[link] -= rate
    return rates


def gather_times(num_ranks: int, num_readers: int, ratio: float, num_gathers: int, seed: int) -> list[float]:
    """Times of all gathers of all ranks, over the time of a gather alone. ``ratio`` is the mean computation over that
    time."""
    choice, now, found = random.Random(seed), 0.0, list[float]()
    begin_at = {rank: choice.random() * (1 + ratio) for rank in range(num_ranks)}  # those that compute
    began, readers, counts = dict[int, float](), dict[int, list[Reader]](), [0] * num_ranks
    others = num_ranks - 1
    while min(counts) < num_gathers:
        active = [reader for each in readers.values() for reader in each if reader.left]
        owners = [(one.rank + 1 + one.at % others) % num_ranks for one in active]
        rates = max_min_rates(list(zip((one.rank for one in active), owners, strict=True)))
        steps = [one.rest / rate for one, rate in zip(active, rates, strict=True)]
        step = min([*steps, *(at - now for at in begin_at.values())])
        now += step
        for one, rate in zip(active, rates, strict=True):
            one.read(rate * step)
        for rank in [rank for rank, each in readers.items() if not any(reader.left for reader in each)]:
            found.append(now - began[rank])
            counts[rank] += 1
            begin_at[rank] = now + ratio * choice.uniform(0.5, 1.5)
            del readers[rank]
        for rank in [rank for rank, at in begin_at.items() if at - now < _TINY]:
            del begin_at[rank]
            began[rank], size = now, 1 / (others * num_readers)
            starts = [number * others // num_readers for number in range(num_readers)]
            readers[rank] = [Reader(rank, start, others, size) for start in starts]
    return found


def measure(
    run: Run,
    ranks: Annotated[int, typer.Option(min=3, help="Of one host, behind one switch.")] = 8,
    gathers: Annotated[int, typer.Option(min=1, help="Of each rank, at least, in each repetition.")] = 40,
    repetitions: Annotated[int, typer.Option(min=1, help="Draws of computations.")] = 5,
) -> Entries:
    rows: list[dict[str, Any]] = []
    for ratio in run.each(RATIOS):
        row: dict[str, Any] = {"ratio": ratio}
        for way, readers in (("one", 1), ("two", 2), ("all", ranks - 1)):
            means = [gather_times(ranks, readers, ratio, gathers, seed) for seed in range(repetitions)]
            row[way] = summary([sum(times) / len(times) for times in means])
        rows.append(row)
    return {"rows": rows}


def figures(result: Entries) -> Figures:
    for row in result["rows"]:
        cells = " | ".join(f"{row[way]['median']:.2f}" for way in ("one", "two", "all"))
        yield f"| {row['ratio']:g} |", f" {cells} |"


BENCHMARK = Benchmark(
    measure,
    (
        Table(
            "rows",
            "time of a gather over that of one alone, {settings[ranks]} ranks, median (20th-80th percentile)",
            (Column("computation over gather", "ratio", "g"),),
            (
                Column("one owner after the other", "one", ".2f"),
                Column("two at a time", "two", ".2f"),
                Column("all", "all", ".2f"),
            ),
        ),
    ),
    quick={"gathers": 10, "repetitions": 2},
    figures=(("docs/gpu.md", figures, ["links"]),),
)
