"""What planning costs a rank's host, and what it gives: minibatches of a loader, loads evened out, OrchMLLM's largest.

- Loader: CPU time per minibatch of a :class:`~odc.balance.MinibatchLoader` of one rank, in all threads and in the
  thread that trains. Reading a sample costs nothing. The benchmark goes through an epoch, its shuffle included. The
  thread that trains plans the first two minibatches; another thread plans the others beside it.
- ``rebalance``: samples of MLLM-10B begin on the ranks that have read them; nodes have 8 ranks. ``moved`` is the part
  of the cost that changes ranks, ``between_nodes`` the part of the tokens that changes nodes, ``excess`` the makespan
  above the mean.
- Plans: all phases of MLLM-10B (:func:`.multimodal_simulated.orchestrator`), each balanced by itself. ``even`` is the
  time of a phase's slowest rank over the time of ranks that share the phase evenly, without padding; ``between_nodes``
  is the part of the bytes of all samples and items that crosses between nodes in a forward.

Times are medians, smallest and largest values of the repetitions, on one core.

Not covered: the time in which ranks tell each other their lengths, and how much planning slows the training beside it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer

from odc.balance import (
    MinibatchLoader,
    MinibatchSampler,
    Rearrangement,
    TransformerCost,
    preset,
    rebalance,
    sample_lengths,
)
from odc.balance.checks import FloatArray
from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Run, Table, spread
from odc.bench.planning.multimodal_simulated import (
    RANKS_PER_NODE,
    by_phase,
    draw,
    journeys,
    means,
    plans_of,
    to_other_nodes,
)
from odc.bench.planning.multimodal_sizes import SIZES

LOADERS = ((8, 4, 50), (64, 8, 20), (256, 16, 5), (1024, 16, 3))
"""Ranks, samples of each rank, and minibatches of an epoch."""
REBALANCE_RANKS = (64, 256, 1024, 2560)
PLAN_RANKS = (256, 2560)
MODEL, LAW = "MLLM-10B", "longalign"


def measure_loader(num_ranks: int, samples: int, minibatches: int, repetitions: int) -> dict[str, Any]:
    """Seconds of CPU per minibatch on rank 0."""
    sampler = MinibatchSampler(
        sample_lengths(LAW, num_ranks * samples * minibatches, 0),
        minibatch_size=samples,
        world_size=num_ranks,
        cost=TransformerCost.from_config(preset("qwen2.5-1.5b")),
    )
    loader = MinibatchLoader(range(sampler.lengths.size), sampler, list, 0, comm="odc")
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
        "cpu_s": spread(everywhere),
        "training_thread_s": spread(training),
    }


def measure_rebalance(num_ranks: int, repetitions: int) -> dict[str, Any]:
    """Measure ``rebalance`` on the language model's samples."""
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
    return {"ranks": num_ranks, "cpu_s": spread(seconds), **means(rows)}


def measure_plan(num_ranks: int, repetitions: int) -> dict[str, Any]:
    """Measure plans of all phases."""
    size = SIZES[MODEL]
    seconds, rows = [], []
    for took_s, schedule in plans_of(
        size, num_ranks, size.samples_per_rank(num_ranks), repetitions, clock=time.process_time
    ):
        seconds.append(took_s)
        row = {f"even {name}": ratio for name, ratio in by_phase(schedule).items()}
        for name, volume in journeys(size, schedule, placed=True):
            row[f"between_nodes {name}"] = _between_nodes(volume)
        rows.append(row)
    return {"ranks": num_ranks, "cpu_s": spread(seconds), **means(rows)}


def _between_nodes(volume: FloatArray) -> float:
    """The part of all that goes from a rank of one node to one of another."""
    return float(to_other_nodes(volume).sum() / volume.sum())


def measure(
    run: Run,
    repetitions: Annotated[int, typer.Option(min=1, help="Epochs, and minibatches of each other size.")] = 3,
    ranks: Annotated[int, typer.Option(min=64, help="Of the largest world that is planned.")] = 2560,
) -> Entries:
    jobs: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    jobs += [("loader", functools.partial(measure_loader, *each, repetitions)) for each in LOADERS if each[0] <= ranks]
    for part, of, worlds in (("rebalance", measure_rebalance, REBALANCE_RANKS), ("plan", measure_plan, PLAN_RANKS)):
        jobs += [(part, functools.partial(of, each, repetitions)) for each in worlds if each <= ranks]
    found: Entries = {"model": MODEL, "law": LAW, "loader": [], "rebalance": [], "plan": []}
    for part, job in run.each(jobs, lambda each: each[0]):
        found[part].append(job())
    return found


def figures(result: Entries) -> Figures:
    for row in result["loader"][-2:]:
        yield (
            f"| {row['ranks']} ranks, {row['samples_per_rank']} samples each |",
            f" {1e3 * row['cpu_s']['median']:.0f} ms |",
        )
    plan = result["plan"][-1]
    yield f"| {result['model']}, {plan['ranks']} ranks |", f" {_s(plan)} s |"


def figures_moved(result: Entries) -> Figures:
    moved, plan = result["rebalance"][-1], result["plan"][-1]
    yield (
        "",
        f"On {moved['ranks']} ranks, samples of {result['model']}, {moved['moved']:.1%} of the cost changes ranks and "
        f"{moved['between_nodes']:.1%} of the tokens nodes; all phases are planned in {_s(plan)} s",
    )


def _s(row: dict[str, Any]) -> str:
    return f"{row['cpu_s']['median']:.2f}"


_RANKS, _CPU = Column("ranks", "ranks"), Column("CPU ms", "cpu_s", ".1f", 1e3)
_KINDS = ("vision inputs", "vision outputs", "audio inputs", "audio outputs", "text")
BENCHMARK = Benchmark(
    measure,
    (
        Table(
            "loader",
            "MinibatchLoader, CPU time per minibatch",
            (_RANKS, Column("samples", "samples_per_rank")),
            (_CPU, Column("in the training thread, ms", "training_thread_s", ".1f", 1e3)),
        ),
        Table(
            "rebalance",
            "rebalance, and parts of 1",
            (_RANKS,),
            (_CPU, *(Column(name.replace("_", " "), name, ".4f") for name in ("moved", "between_nodes", "excess"))),
        ),
        Table(
            "plan",
            "all phases of {model}: even, and between nodes",
            (_RANKS,),
            (
                _CPU,
                *(Column(name, f"even {name}", ".4f") for name in ("vision", "audio", "language")),
                *(Column(name, f"between_nodes {name}", ".4f") for name in _KINDS),
            ),
        ),
    ),
    quick={"repetitions": 1, "ranks": 256},
    figures=(
        ("docs/policies.md", figures, ["planning"]),
        ("docs/multimodal.md", figures_moved, ["planning"]),
    ),
)
