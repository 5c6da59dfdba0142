"""How good and how fast post-balancing is, and how much less then crosses between nodes.

- Quality: the makespan over that of exhaustive search, on 250 random instances of up to 9 items on up to 4 ranks. For a
  sample of mean length, attention costs from a thousandth of the rest to three times the rest.
- Speed: 153,600 samples on 2,560 ranks. For a sample of mean length, attention costs a tenth of the rest. The excess is
  the makespan over a bound for every division, the mean cost without padding; how much of the excess can be avoided is
  not known.
- Nodes: what the rank that sends most sends to other nodes, over the same without placement, for 60 samples a rank that
  are post-balanced over nodes of 8. With pulp, on 128 ranks, also the result of CBC after 12 seconds on the integer
  program of the paper's algorithm 3, and the bound of its linear relaxation.

Not covered: the time in which ranks tell each other their lengths, and the exchange itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from itertools import product
from typing import Annotated, Any, get_args

import numpy as np
import typer

from odc.balance import QuadraticCost, place_on_nodes, post_balance, sample_lengths
from odc.balance.checks import FloatArray, IntArray
from odc.balance.costs import attention_costs
from odc.balance.layout import Layout, microbatch_costs
from odc.balance.partition.differencing import Parts
from odc.bench.harness.benchmark import Benchmark, Column, Entries, Run, Table, spread
from odc.bench.planning.multimodal_simulated import RANKS_PER_NODE, to_other_nodes
from odc.bench.planning.partition_quality import least_makespan, subsets

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
LAWS = ("llava", "sharegpt4o", "longalign")
SAMPLES_PER_RANK = 60
ATTENTION = 0.1
MOST_MEAN_EXCESS: dict[str, float] = {"packed": 0.002, "padded": 1e-12, "padded-attention": 0.01}


def cost_for(lengths: IntArray, attention: float) -> QuadraticCost:
    """A cost by which attention is ``attention`` times the rest, for a sample of mean length."""
    return QuadraticCost(attention / float(lengths.mean()), 1.0)


def makespan(lengths: IntArray, parts: Parts, cost: QuadraticCost, layout: Layout) -> float:
    attention = attention_costs(cost, lengths)
    return float(microbatch_costs([[part] for part in parts], cost(lengths), lengths, layout, attention).max())


def optimal_makespan(lengths: IntArray, num_ranks: int, cost: QuadraticCost, layout: Layout) -> float:
    """The smallest makespan of all divisions."""
    held = subsets(lengths.size)
    longest, number = (held * lengths).max(axis=1).astype(np.float64), held.sum(axis=1)
    if layout == "packed":
        costs: FloatArray = held @ cost(lengths)
    elif layout == "padded":
        costs = number * cost(longest)
    else:
        costs = cost.b * (held @ lengths) + number * cost.a * longest**2
    return least_makespan(costs, num_ranks)


def measure_quality(num_instances: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(11)
    excesses: dict[Layout, list[float]] = {layout: [] for layout in LAYOUTS}
    for instance in range(num_instances):
        n, num_ranks = int(rng.integers(2, 10)), int(rng.integers(2, 5))
        lengths = rng.integers(1, 100, n) if instance % 2 else np.ceil(rng.lognormal(4, 1, n)).astype(np.int64)
        cost = cost_for(lengths, 10 ** rng.uniform(-3, 0.5))
        for layout, excess in excesses.items():
            parts = post_balance(lengths, num_ranks, cost=cost, layout=layout)
            best = optimal_makespan(lengths, num_ranks, cost, layout)
            excess.append(makespan(lengths, parts, cost, layout) / best - 1)
    return [
        {
            "layout": layout,
            "num_instances": num_instances,
            "mean_excess": float(np.mean(excess)),
            "largest_excess": float(np.max(excess)),
            "num_optimal": int((np.array(excess) < 1e-12).sum()),
        }
        for layout, excess in excesses.items()
    ]


def measure_speed(law: str, num_ranks: int, layout: Layout, repetitions: int) -> dict[str, Any]:
    seconds, excesses = [], []
    for repetition in range(repetitions):
        lengths = sample_lengths(law, SAMPLES_PER_RANK * num_ranks, repetition)
        cost = cost_for(lengths, ATTENTION)
        start = time.perf_counter()
        parts = post_balance(lengths, num_ranks, cost=cost, layout=layout)
        seconds.append(time.perf_counter() - start)
        bound = max(float(cost(lengths).mean()) * SAMPLES_PER_RANK, float(cost(lengths).max()))
        excesses.append(makespan(lengths, parts, cost, layout) / bound - 1)
    return {
        "law": law,
        "layout": layout,
        "num_samples": SAMPLES_PER_RANK * num_ranks,
        "num_ranks": num_ranks,
        "time_s": spread(seconds),
        "largest_excess": max(excesses),
    }


def rearranged(law: str, num_ranks: int, seed: int) -> IntArray:
    """Tokens of each packed batch that each rank has, (num_ranks, num_ranks)."""
    lengths = sample_lengths(law, SAMPLES_PER_RANK * num_ranks, seed)
    volume = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    for j, part in enumerate(post_balance(lengths, num_ranks, cost=cost_for(lengths, ATTENTION), layout="packed")):
        np.add.at(volume[:, j], np.array(part) // SAMPLES_PER_RANK, lengths[part])
    return volume


def most_sent(volume: IntArray, nodes: IntArray) -> float:
    """The largest volume that a rank sends to other nodes if batch j is on ``nodes[j]``."""
    return float(to_other_nodes(volume.astype(np.float64), nodes).max())


def measure_nodes(law: str, num_ranks: int, seed: int, cbc_s: float | None) -> dict[str, Any]:
    volume = rearranged(law, num_ranks, seed)
    unplaced = most_sent(volume, np.arange(num_ranks) // RANKS_PER_NODE)
    start = time.perf_counter()
    placed = place_on_nodes(volume, RANKS_PER_NODE)
    seconds = time.perf_counter() - start
    result: dict[str, Any] = {"law": law, "num_ranks": num_ranks, "ranks_per_node": RANKS_PER_NODE, "seed": seed}
    result |= {"seconds": seconds, "share": most_sent(volume, np.array(placed) // RANKS_PER_NODE) / unplaced}
    if cbc_s is not None:
        result["least_share"] = algorithm_3(volume, cbc_s, relaxed=True)[0] / unplaced
        nodes = algorithm_3(volume, cbc_s, relaxed=False)[1]
        result |= {"cbc_s": cbc_s, "cbc_share": most_sent(volume, nodes) / unplaced}
    return result


def algorithm_3(volume: IntArray, limit_s: float, *, relaxed: bool) -> tuple[float, IntArray]:
    """Solve the paper's integer program. Returns what the rank that sends most sends, and the node of each batch.

    Relaxed, batches may be divided over nodes, so the first is a lower bound.
    """
    pulp: Any = importlib.import_module("pulp")
    num_ranks, num_nodes = len(volume), len(volume) // RANKS_PER_NODE
    unit = float(volume.sum(axis=1).max()) / 1e4
    program = pulp.LpProblem("nodes", pulp.LpMinimize)
    most = program.add_variable("most", 0)
    program.setObjective(pulp.LpAffineExpression([(most, 1.0)]))
    kind = "Continuous" if relaxed else "Binary"
    x = [[program.add_variable(f"x{j}_{n}", 0, 1, kind) for n in range(num_nodes)] for j in range(num_ranks)]
    for row in x:
        program.addConstraint(pulp.lpSum(row) == 1)
    for node in range(num_nodes):
        program.addConstraint(pulp.lpSum(row[node] for row in x) == RANKS_PER_NODE)
    for rank, volumes in enumerate((volume / unit).tolist()):
        kept = [(row[rank // RANKS_PER_NODE], amount) for row, amount in zip(x, volumes, strict=True)]
        program.addConstraint(pulp.LpAffineExpression([*kept, (most, 1.0)]) >= sum(volumes))
    # The CBC that comes with pulp.
    program.solve(pulp.COIN_CMD(path=pulp.PULP_CBC_CMD.pulp_cbc_path, msg=False, timeLimit=limit_s))
    nodes = np.array([int(np.argmax([variable.value() or 0.0 for variable in row])) for row in x])
    return float(most.value()) * unit, nodes


def measure(
    run: Run,
    instances: Annotated[int, typer.Option(min=1, help="Random instances for exhaustive search.")] = 250,
    ranks: Annotated[int, typer.Option(min=8, help="Ranks of the speed measurement, a multiple of 8.")] = 2560,
    repetitions: Annotated[int, typer.Option(min=1, help="Draws of lengths for each law and layout.")] = 3,
    cbc_s: Annotated[float, typer.Option(min=0.1, help="Time limit of CBC, for each of its programs.")] = 12.0,
) -> Entries:
    limit_s = cbc_s if importlib.util.find_spec("pulp") else None
    if limit_s is None:
        run.note("pulp is not installed: CBC is left out")
    beside_cbc = min(128, ranks)
    quality = measure_quality(instances)
    speeds, sizes = list(product(LAWS, LAYOUTS)), ((beside_cbc, 0, limit_s), (beside_cbc, 1, limit_s), (ranks, 0, None))
    found: Entries = {
        "quality": quality,
        "speed": [measure_speed(law, ranks, layout, repetitions) for law, layout in run.each(speeds)],
        "nodes": [measure_nodes(law, *each) for each, law in run.each(list(product(sizes, LAWS)))],
    }
    for row in quality:
        if row["mean_excess"] > MOST_MEAN_EXCESS[row["layout"]]:
            run.miss(f"{row['layout']}: a mean excess of more than {MOST_MEAN_EXCESS[row['layout']]:.1%}")
    return found


_LAW, _NUM_RANKS = Column("law", "law"), Column("ranks", "num_ranks")
BENCHMARK = Benchmark(
    measure,
    (
        Table(
            "quality",
            "makespan over the optimum, up to 9 items on up to 4 ranks",
            (Column("layout", "layout"), Column("instances", "num_instances")),
            (
                Column("optimal", "num_optimal"),
                Column("mean excess", "mean_excess", ".4%"),
                Column("largest", "largest_excess", ".4%"),
            ),
        ),
        Table(
            "speed",
            "one batch per rank, median (minimum-maximum)",
            (_LAW, Column("layout", "layout"), Column("samples", "num_samples"), _NUM_RANKS),
            (Column("s", "time_s", ".2f"), Column("above mean without padding", "largest_excess", ".2%")),
        ),
        Table(
            "nodes",
            f"most that a rank sends to other nodes of {RANKS_PER_NODE}, over that without placement",
            (_LAW, _NUM_RANKS, Column("seed", "seed")),
            (
                Column("placed", "share", ".3f"),
                Column("s", "seconds", ".2f"),
                Column("CBC", "cbc_share", ".3f"),
                Column("no less than", "least_share", ".3f"),
            ),
        ),
    ),
    quick={"instances": 20, "ranks": 64, "repetitions": 1, "cbc_s": 1.0},
)
