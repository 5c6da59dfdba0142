"""How far LB-Mini's partitions are from the optimum.

- On the shipped length laws (1.5B costs, 8 devices): the bubble rate of 200 minibatches beside the least possible one.
  The least makespan is the larger of mean load and largest sample (and other simple bounds) where LB-Mini is within
  0.1 % of this bound. Elsewhere the exact solver computes the optimum, or the best bound that it can prove in time.
- On random small instances: the makespan over that of exhaustive search.

Not covered: limits on tokens, which no partition over ranks has to keep. Packing is another question.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from odc.balance import karmarkar_karp
from odc.balance.checks import FloatArray
from odc.balance.partition.bounds import lower_bound
from odc.balance.partition.differencing import Parts, largest_differencing
from odc.balance.partition.exact import exact_partition
from odc.balance.simulate.laws import law_names, sample_lengths
from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Run, Table
from odc.bench.planning.paper_costs import paper_cost

BoolArray = npt.NDArray[np.bool_]
COST = paper_cost("1.5B")
DEVICES = 8
MINIBATCH_SIZES = (2, 4, 8, 16)
NEAR_BOUND = 0.001
MOST_POINTS_ABOVE = 0.1
MOST_MEAN_EXCESS = 0.001


def subsets(number: int) -> BoolArray:
    """The items of each subset, (2 ** number, number): bit i of a row's number is item i."""
    held: BoolArray = (np.arange(2**number)[:, None] >> np.arange(number) & 1).astype(bool)
    return held


def least_makespan(of_subset: FloatArray, k: int) -> float:
    """The smallest makespan of all divisions of items into ``k`` <= 4 parts, by looking at every one of them.

    Every split of every subset in two, 3 ** n of them, gives the best makespan of two parts for each subset;
    three parts are a subset and the rest in two, four are a subset in two and the rest in two.

    Args:
        of_subset: what a part costs, by subset as in :func:`subsets`; infinite where that must be none.
    """
    number = of_subset.size.bit_length() - 1
    if k == 1:
        return float(of_subset[-1])
    if k == 2:
        return float(np.maximum(of_subset, of_subset[::-1]).min())
    halves = []
    for picks in ([0, 1, 0], [0, 0, 1]):  # an item is in neither of two parts, in the first, or in the second
        part = of_subset
        for item in range(number):
            part = part.reshape(-1, 2, 3**item)[:, picks].reshape(-1)
        halves.append(part)
    in_two = np.maximum(halves[0], halves[1], out=halves[0])
    for item in range(number):
        rows = in_two.reshape(2**item, 3, -1)
        in_two = np.stack([rows[:, 0], np.minimum(rows[:, 1], rows[:, 2])], axis=1)
    in_two = in_two.ravel()
    return float(np.maximum(of_subset if k == 3 else in_two, in_two[::-1]).min())  # the rest is the complement


def optimal_makespan(costs: FloatArray, k: int, *, equal_size: bool) -> float:
    """The smallest makespan of items whose costs do not depend on their part."""
    held = subsets(costs.size)
    sums = held @ costs
    return least_makespan(np.where(held.sum(axis=1) * k == costs.size, sums, np.inf) if equal_size else sums, k)


def makespan(costs: FloatArray, parts: Parts) -> float:
    return max(float(costs[part].sum()) for part in parts)


def measure_law(run: Run, law: str, minibatch_size: int, num_minibatches: int, time_limit_s: float) -> dict[str, Any]:
    """Bubble rates (percent) over all minibatches: LB-Mini's, and the least possible one."""
    n = minibatch_size * DEVICES
    costs = COST(sample_lengths(law, n * num_minibatches)).reshape(num_minibatches, n)
    run.describe(f"{law}, minibs {minibatch_size}")
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
        run.advance()
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
    """Random instances: costs of 2 to 16 items, and a number of parts from 2 to 4."""
    rng = np.random.default_rng(20)
    for _ in range(num):
        k = int(rng.integers(2, 5))
        n = int(rng.integers(k, 17))
        if equal_size:
            n -= n % k
        yield COST(rng.lognormal(9.5, 0.8, n).clip(100, 65536)), k


def measure_random(run: Run, num: int, equal_size: bool) -> dict[str, Any]:
    """Relative excess over the optimum, of this package's partition and of the plain differencing method."""
    run.describe("random instances" + ", equal sizes" * equal_size)
    ours, plain = [], []
    for costs, k in random_instances(num, equal_size):
        best = optimal_makespan(costs, k, equal_size=equal_size)
        ours.append(makespan(costs, karmarkar_karp(costs, k, equal_size=equal_size)) / best - 1)
        plain.append(makespan(costs, largest_differencing(costs, k, equal_size=equal_size)) / best - 1)
        run.advance()
    return {
        "equal_size": equal_size,
        "num_instances": num,
        "mean_excess": float(np.mean(ours)),
        "largest_excess": float(np.max(ours)),
        "mean_excess_of_plain_differencing": float(np.mean(plain)),
    }


def measure(
    run: Run,
    minibatches: Annotated[int, typer.Option(min=1, help="Minibatches for each law and size.")] = 200,
    instances: Annotated[int, typer.Option(min=1, help="Random instances, of each kind.")] = 1000,
    time_limit_s: Annotated[float, typer.Option(min=0.1, help="Of the exact solver, for each minibatch.")] = 5.0,
) -> Entries:
    of_laws = [(law, size) for law in law_names() for size in MINIBATCH_SIZES]
    run.begin(2 * instances + len(of_laws) * minibatches)
    random = [measure_random(run, instances, equal_size) for equal_size in (False, True)]
    laws = [measure_law(run, *each, minibatches, time_limit_s) for each in of_laws]
    for row in laws:
        if row["points_above"] > MOST_POINTS_ABOVE:
            run.miss(f"{row['law']}: more than {MOST_POINTS_ABOVE} points above the least possible")
    for row in random:
        if row["mean_excess"] > MOST_MEAN_EXCESS:
            run.miss(f"random instances: a mean excess of more than {MOST_MEAN_EXCESS:.1%}")
    return {"laws": laws, "random": random}


def figures(result: Entries) -> Figures:
    worst = max(row["points_above"] for row in result["laws"])
    yield "", f"its bubble rate is at most {worst:.2f} points above the least possible"
    free, equal = sorted(result["random"], key=lambda row: row["equal_size"])
    yield (
        "",
        f"on {free['num_instances']} random small instances the mean excess over exhaustive search is "
        f"{free['mean_excess']:.3%} (equal sizes: {equal['mean_excess']:.3%}, where plain Karmarkar-Karp leaves "
        f"{equal['mean_excess_of_plain_differencing']:.1%})",
    )


BENCHMARK = Benchmark(
    measure,
    (
        Table(
            "laws",
            f"bubble rate of LB-Mini on {DEVICES} devices, percent",
            (Column("law", "law"), Column("minibs", "minibatch_size")),
            (
                Column("LB-Mini", "bubble_percent", ".3f"),
                Column("least possible", "least_bubble_percent", ".3f"),
                Column("points above", "points_above", ".3f"),
                Column("minibatches", "num_minibatches"),
                Column("near bound", "num_near_bound"),
                Column("solved", "num_solved"),
            ),
        ),
        Table(
            "random",
            "makespan over the optimum, up to 16 items in up to 4 parts",
            (Column("equal sizes", "equal_size"), Column("instances", "num_instances")),
            (
                Column("mean excess", "mean_excess", ".4%"),
                Column("largest", "largest_excess", ".2%"),
                Column("plain differencing, mean", "mean_excess_of_plain_differencing", ".2%"),
            ),
        ),
    ),
    quick={"minibatches": 10, "instances": 20, "time_limit_s": 0.5},
    figures=(("docs/policies.md", figures, ["partition_quality"]),),
)
