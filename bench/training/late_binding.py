"""What late binding brings on ranks that are not as planned. Emulated compute, real FSDP2, ODC and loader.

The benchmark works as :mod:`.emulated` does, but microbatches come from a :class:`~odc.balance.MinibatchLoader`, with
and without ``late_binding``. A sample takes its cost in FLOPs, exactly or times a random factor (``--noise`` is the
standard deviation of the factor's logarithm). In the cases with noise one rank is slower, too (``--slow``); no loader
is told. ``--microbatch-cost`` adds a fixed time to each microbatch, a share of what an average one takes by its
samples; the loaders know this share. Both ways get the same samples in the same minibatches; the benchmark checks that
each sample is computed once.

    over ideal      how much longer minibatches took than if all samples were shared out evenly over the ranks' speeds,
                    in as many microbatches as planned
    speedup         over the loader without late binding; the two take turns, minibatch by minibatch. In brackets the
                    20th and 80th percentile over resampled minibatches
    taken           samples that ranks took from others
    microbatches    their number over that of the plan

Speeds are measured while training; the loader uses them from the eighth minibatch on.

Not covered: GPUs, where a microbatch is bound when the device has begun the one before; reading samples, which takes no
time here.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh

from odc.balance import MinibatchLoader, MinibatchSampler, law_names
from odc.balance.checks import FloatArray
from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Row, Run, Table, check_known
from odc.bench.harness.ranks import SILENCE_LIMIT_S, BenchError, Rank, keep_from_collector
from odc.bench.planning.paper_costs import MODELS
from odc.bench.training.emulated import Settings
from odc.bench.training.sleeping import SleepingModel
from odc.fsdp_patch import patch_fsdp
from odc.fsdp_patch.session import Session

SLOW_RANK = 3
PERCENT = [0, 5, 25]


@dataclass(frozen=True)
class Case(Settings):
    """Settings of one case."""

    microbatch_share: float = 0.0
    """The fixed time of a microbatch, as a share of what an average one takes by its samples."""
    noise: float = 0.0
    slow: float = 1.0
    """Speed of one rank."""

    def speeds(self) -> FloatArray:
        return np.where(np.arange(self.ranks) == SLOW_RANK % self.ranks, self.slow, 1.0)

    def loader(self, rank: int, microbatch_cost: float, *, late: bool) -> MinibatchLoader[int, list[int]]:
        sampler = MinibatchSampler(
            self.lengths(), minibatch_size=self.minibatch_size, world_size=self.ranks, cost=self.cost(),
            max_tokens=self.max_tokens(), microbatch_cost=microbatch_cost, seed=self.seed,
        )  # fmt: skip
        return MinibatchLoader(range(sampler.lengths.size), sampler, list, rank, late_binding=late)


@dataclass
class RankRun:
    """The run of one rank and way."""

    minibatch_s: list[float]
    computed: list[list[int]]
    num_microbatches: int
    num_planned: int
    num_taken: int
    speeds: list[float]


class Way:
    """One way to bind samples on one rank, minibatch by minibatch."""

    def __init__(self, case: Case, rank: int, microbatch_cost: float, *, late: bool) -> None:
        self.loader = case.loader(rank, microbatch_cost, late=late)
        self._minibatches = iter(self.loader)
        self.found = RankRun([], [], 0, 0, 0, [])

    def run(self, session: Session, compute: Callable[[list[int]], object], end: Callable[[], object]) -> None:
        """Run the next minibatch."""
        minibatch = next(self._minibatches)
        dist.barrier()
        started, mine, found = time.perf_counter(), list[int](), self.found
        with session.minibatch():
            for samples in minibatch.microbatches:
                mine += samples
                found.num_microbatches += 1
                compute(samples)
        end()
        found.minibatch_s.append(time.perf_counter() - started)
        found.computed.append(mine)
        assert minibatch.plan is not None
        found.num_planned += sum(minibatch.plan.num_microbatches)
        found.num_taken, found.speeds = self.loader.num_taken, self.loader.speeds


def meet_as_under_torchrun(me: Rank) -> None:
    """Replace the process group's store by a server, as under torchrun: a file takes several times as long for each
    word."""
    options: dict[str, Any] = {"world_size": me.world_size, "timeout": timedelta(seconds=SILENCE_LIMIT_S)}
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, **options) if me.rank == 0 else None
    port = torch.tensor([0 if server is None else server.port])
    dist.broadcast(port, 0)
    dist.destroy_process_group()
    store = server or TCPStore("127.0.0.1", int(port), is_master=False, **options)
    dist.init_process_group(me.place.backend(me.world_size), store=store, rank=me.rank, world_size=me.world_size)


def run_rank(me: Rank, case: Case) -> tuple[list[RankRun], float]:
    """Run both ways, a minibatch of each in turn. Returns their runs, and the ideal seconds of a minibatch."""
    torch.manual_seed(0)
    meet_as_under_torchrun(me)
    costs = case.cost()(case.lengths())
    rng = np.random.default_rng(case.seed)
    actual = costs * np.exp(rng.normal(0.0, case.noise, costs.size) - case.noise**2 / 2)
    speeds = case.speeds()
    plain = case.loader(me.rank, 0.0, late=False)
    num_planned = sum(sum(planned.plan.num_microbatches) for planned in plain.sampler)
    microbatch_cost = case.microbatch_share * float(costs.sum()) / num_planned
    seconds_per_cost = case.scale * case.ranks * case.minibatches / float(costs.sum())
    model = SleepingModel(case.layers, case.numel * me.world_size, init_device_mesh("cpu", (me.world_size,)))
    ways = [Way(case, me.rank, microbatch_cost, late=late) for late in (False, True)]
    keep_from_collector()

    def compute(samples: list[int]) -> None:
        cost = float(actual[samples].sum()) + microbatch_cost
        model.microbatch(cost * seconds_per_cost / float(speeds[me.rank]))

    with patch_fsdp(model) as session:
        for number in range(case.minibatches):
            for way in ways if number % 2 else reversed(ways):
                way.run(session, compute, model.step)
                model.clock.take()
                me.report(1.0 if me.rank == 0 else 0.0)
    runs = [way.found for way in ways]
    ideal = (float(actual.sum()) + microbatch_cost * runs[0].num_planned) * seconds_per_cost / float(speeds.sum())
    return runs, ideal / case.minibatches


def run_case(run: Run, case: Case) -> dict[str, Any]:
    """Run one case: an entry of the result."""
    found = run.ranks(case.ranks, run_rank, case)
    ideal_s = found[0][1]
    entry: dict[str, Any] = {**asdict(case), "ideal_s": ideal_s}
    for name, way in zip(("planned", "late"), zip(*(runs for runs, _ in found), strict=True), strict=True):
        check_samples([each.computed for each in way])
        seconds = float(np.mean([each.minibatch_s for each in way]))
        entry[name] = {
            "minibatch_s": seconds,
            "seconds": np.mean([each.minibatch_s for each in way], axis=0),
            "over_ideal": seconds / ideal_s - 1,
            "microbatches": sum(each.num_microbatches for each in way) / way[0].num_planned,
            "taken": sum(each.num_taken for each in way),
            "speeds": way[0].speeds,
        }
    entry["speedup"] = speedup(entry["planned"].pop("seconds"), entry["late"].pop("seconds"), case.seed)
    return entry


def speedup(planned: FloatArray, late: FloatArray, seed: int) -> dict[str, float]:
    """Speedup of all minibatches, with the 20th and 80th percentile over minibatches that are drawn with
    replacement."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, planned.size, (1000, planned.size))
    low, high = np.quantile(planned[drawn].sum(1) / late[drawn].sum(1), [0.2, 0.8])
    return {"median": float(planned.sum() / late.sum()), "p20": float(low), "p80": float(high)}


def check_samples(computed: Sequence[Sequence[list[int]]]) -> None:
    """Check that each sample was computed once.

    Raises:
        BenchError: not so.
    """
    samples = sorted(itertools.chain(*(mine for rank in computed for mine in rank)))
    if samples != list(range(len(samples))):
        raise BenchError("a sample was computed twice, or not at all")


def measure(
    run: Run,
    law: Annotated[
        list[str] | None, typer.Option(help=f"Of lengths: {', '.join(law_names())}; default: the paper's.")
    ] = None,
    microbatch_cost: Annotated[
        list[int] | None,
        typer.Option(help="What a microbatch takes beside its samples, percent of these; default: 0, 5 and 25."),
    ] = None,
    noise: Annotated[float, typer.Option(min=0.0, help="Of costs, beside cases without.")] = 0.2,
    slow: Annotated[float, typer.Option(min=0.1, max=1.0, help="Speed of one rank where there is noise.")] = 0.85,
    minibatches: Annotated[int, typer.Option(min=1, help="Of each way.")] = 16,
    scale: Annotated[float, typer.Option(min=0.01, help="Seconds of compute of a rank in a minibatch.")] = 1.5,
    ranks: Annotated[int, typer.Option(min=1, help="That are started on this host.")] = 8,
    layers: Annotated[int, typer.Option(min=1, help="Of the model, a unit each.")] = 2,
    minibatch_size: Annotated[int, typer.Option(min=1, help="Samples per rank and minibatch.")] = 8,
    model: Annotated[str, typer.Option(help=f"Cost model, of {', '.join(MODELS)}.")] = "1.5B",
    seed: Annotated[int, typer.Option(help="Of the shuffle and of the noise.")] = 0,
) -> Entries:
    laws = law or ["longalign", "swesmith", "aime"]
    check_known(law=(laws, law_names()), model=([model], MODELS))
    cases = [
        Case(
            ranks,
            layers,
            minibatches,
            minibatch_size,
            scale,
            model,
            name,
            seed,
            microbatch_share=percent / 100,
            noise=of_costs,
            slow=speed,
        )
        for name in laws
        for percent in (microbatch_cost or PERCENT)
        for of_costs, speed in ((0.0, 1.0), (noise, slow))
    ]
    run.begin(2 * len(cases) * minibatches)
    entries = []
    for case in cases:
        run.describe(f"{case.law}, microbatches {case.microbatch_share:.0%}" + (", noise" if case.noise else ", exact"))
        entries.append(run_case(run, case))
    return {"runs": entries}


def _estimates(row: Row) -> str:
    return f"{row['noise']:.0%} noise, a rank at {row['slow']:.0%}" if row["noise"] else "exact"


def figures(result: Entries) -> Figures:
    """Figures for rows of a table: the speedup by law and microbatch cost, with exact estimates and with others."""
    for law in dict.fromkeys(row["law"] for row in result["runs"]):
        rows = [row for row in result["runs"] if row["law"] == law]
        cells = [row["speedup"]["median"] for noise in (False, True) for row in rows if bool(row["noise"]) == noise]
        yield f"| {law} |", " " + " | ".join(f"{cell:.3f}" for cell in cells) + " |"


BENCHMARK = Benchmark(
    measure,
    (
        Table(
            "runs",
            "{settings[ranks]} ranks, {settings[minibatch_size]} samples a rank, {settings[minibatches]} minibatches",
            (
                Column("law", "law"),
                Column("microbatch cost (%)", "microbatch_share", ".0f", 100),
                Column("estimates", _estimates),
            ),
            (
                Column("over ideal: plan (%)", "planned.over_ideal", ".1f", 100),
                Column("late (%)", "late.over_ideal", ".1f", 100),
                Column("speedup", "speedup", ".3f"),
                Column("taken", "late.taken"),
                Column("microbatches", "late.microbatches", ".2f"),
            ),
        ),
    ),
    quick={"minibatches": 12, "scale": 0.2, "law": ["swesmith"], "microbatch_cost": [5]},
    figures=(("docs/policies.md", figures, ["late_binding"]),),
)
