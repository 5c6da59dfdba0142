"""Does a run reach the bubble rate that its plan promises? Ranks with emulated compute, and ODC as it is.

    odc bench emulated --policy lb-mini --policy lb-micro    # beside it LB-Micro under emulated collectives

Each rank goes through the minibatches of a transformer of small layers (a unit each): a gather before a layer's forward
and before its backward, a push after its backward, finish, optimizer, publish. Forward and backward of a microbatch are
sleeps, in proportion to what :mod:`odc.balance` says its samples cost, a third of them in the forward; so a minibatch
is as unequal as a real one, and eight ranks need no eight GPUs. It starts the ranks itself.

A sleep that lasts too long is taken off the ones that follow, so compute takes what the plan says. The rest of a
minibatch's time is idle time (the optimizer, the same on all ranks, counts as neither):

    planned       bubble rate of the plans: idle time over total time of all minibatches, longer ones counting for more
    measured      the same of the run: what is not compute, over the time of the minibatches, all ranks
    waiting       the part of it in which a rank waited for another one
    host work     the part inside ODC's operations without that, not being given a core included
    loop          the rest: the emulated training loop itself

The difference, measured minus planned, is what ODC adds. Sleeping ranks leave the cores to the others, so a few cores
carry eight ranks; but the host work of those that are awake at the same time overlaps less than where each has a core,
and the difference is an upper bound. How far host work was held up by that: beside it stands the CPU time of a rank's
training thread, which knows no queue for a core. A larger ``--scale`` makes the difference smaller, as a larger model
would: host work is per layer and microbatch, whatever they compute.

The planned rate is that of the lengths drawn: among few minibatches it is anything, among hundreds 13.5 % (LongAlign,
the defaults otherwise). The larger it is, the smaller the difference: a rank that would wait has time for host work.

LB-Micro runs under collectives: in the place of each gather and of each push all ranks meet in a barrier of gloo. Its
waiting is that for the last one to come; its "host work" is gloo's, and no measure of a real collective.

Not covered: bytes (a shard has ``--numel`` elements), GPUs, compute that slows down beside communication.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import typer

from odc import ParamSlice, Runtime, RuntimeConfig, UnitSpec
from odc.balance import Plan, Scenario, bubble_rate, law_names, sample_lengths
from odc.balance.plan import Comm
from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Run, Table
from odc.bench.harness.ranks import Rank
from odc.bench.planning.paper_costs import MODELS, paper_cost
from odc.bench.training.bubble import segments
from odc.setup.agreement import ProcessGroupExchange
from odc.timeline import Timeline

COMM_OF: dict[str, Comm] = {"lb-mini": "odc", "lb-micro": "collective"}
FORWARD_SHARE = 1 / 3
NUM_UNTIMED = 1  # minibatches at the start


@dataclass(frozen=True)
class Settings:
    """What is run."""

    ranks: int = 8
    layers: int = 16
    minibatches: int = 30
    minibatch_size: int = 4
    scale: float = 2.0
    optimizer_s: float = 0.01
    model: str = "1.5B"
    law: str = "longalign"
    seed: int = 0
    accumulate: str = "auto"
    hosts: int = 1
    numel: int = 256

    def plans(self, policy: str) -> list[Plan]:
        """One for each timed minibatch; the first is also that of those that are not timed."""
        num_samples = self.ranks * self.minibatch_size * self.minibatches
        lengths = sample_lengths(self.law, num_samples, self.seed)
        scenario = Scenario(lengths, paper_cost(self.model), self.ranks, self.minibatch_size, seed=self.seed)
        return [minibatch.plan for minibatch in scenario.plan(policy).minibatches]

    def seconds_per_cost(self, plans: Sequence[Plan]) -> float:
        """So that a rank computes for ``scale`` seconds in an average minibatch."""
        return self.scale * self.ranks * len(plans) / sum(float(plan.microbatch_times().sum()) for plan in plans)


Work = list[list[float]]
"""``work[minibatch][microbatch]`` of one rank, seconds of compute."""


def work_of(plans: Sequence[Plan], seconds_per_cost: float, rank: int) -> Work:
    """What ``rank`` computes, a forward and backward each."""
    return [
        [float(cost) * seconds_per_cost for cost in plan.microbatch_times()[rank, : plan.num_microbatches[rank]]]
        for plan in [plans[0]] * NUM_UNTIMED + list(plans)
    ]


@dataclass(frozen=True)
class RankRun:
    """One rank's run, untimed minibatches included."""

    timeline: Timeline
    compute_ns: list[int]
    """Of each minibatch, as it was."""
    optimizer_ns: list[int]
    cpu_ns: list[int]
    """Of the thread that trains."""


class Clock:
    """Emulates compute by sleeping. What a sleep lasts too long is taken off the next ones."""

    def __init__(self) -> None:
        self._owed_ns = 0
        self.slept_ns = 0
        """Since the last :meth:`take`."""

    def compute(self, seconds: float) -> None:
        self._owed_ns += round(seconds * 1e9)
        if self._owed_ns <= 0:
            return
        started_ns = time.monotonic_ns()
        time.sleep(self._owed_ns * 1e-9)
        spent_ns = time.monotonic_ns() - started_ns
        self._owed_ns -= spent_ns
        self.slept_ns += spent_ns

    def take(self) -> int:
        """What has been slept since the last call, nanoseconds."""
        spent_ns, self.slept_ns = self.slept_ns, 0
        return spent_ns


class Communication:
    """What a training loop asks for. Here: ranks that meet wherever FSDP has a collective."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline

    def span(self, kind: str, label: str = "minibatch") -> AbstractContextManager[None]:
        """The operation in the block, all of it."""
        return self.timeline.span(kind, label)

    def begin(self) -> None:
        """Before the first layer of a minibatch."""

    def gather(self, layer: int) -> None:
        """Before a layer's forward, and before its backward."""
        with self.span("gather", f"layer{layer}"):
            dist.barrier()

    def push(self, layer: int) -> None:
        """After a layer's backward."""
        with self.span("scatter", f"layer{layer}"):
            dist.barrier()

    def finish(self) -> None:
        """Before the optimizer."""

    def publish(self) -> None:
        """After it."""

    def close(self) -> None:
        """After the last minibatch."""


class OnDemand(Communication):
    """ODC. Its runtime records the waits; the spans around its operations are the loop's and miss none of the work."""

    def __init__(self, rank: int, settings: Settings) -> None:
        numel, world_size = settings.numel, settings.ranks
        params = (ParamSlice("weight", numel),)
        units = [UnitSpec(f"layer{i}", numel, torch.float32, params) for i in range(settings.layers)]
        host_id = f"host{rank * settings.hosts // world_size}" if settings.hosts > 1 else ""
        config = RuntimeConfig(accumulate=settings.accumulate, host_id=host_id)
        self._runtime = Runtime.create(ProcessGroupExchange(), units, config)
        self._shard, self._whole = torch.zeros(numel), torch.zeros(numel * world_size)
        super().__init__(self._runtime.start_timeline())

    def begin(self) -> None:
        with self.span("finish"):
            self._runtime.begin()

    def gather(self, layer: int) -> None:
        with self.span("gather"):
            self._runtime.gather(layer, self._whole, own_in_place=True)

    def push(self, layer: int) -> None:
        with self.span("scatter"):
            self._runtime.scatter_accumulate(layer, self._whole)

    def finish(self) -> None:
        with self.span("finish"):
            self._runtime.finish()

    def publish(self) -> None:
        with self.span("publish"):
            for layer in range(len(self._runtime.units)):
                self._runtime.publish(layer, self._fill)

    def _fill(self, out: torch.Tensor) -> None:
        out.copy_(self._shard)

    def close(self) -> None:
        self._runtime.close()


def run_rank(
    me: Rank,
    settings: Settings,
    comm: Comm,
    works: Sequence[Work],
) -> RankRun:
    """Train, as far as the others can tell."""
    gc.collect()
    gc.freeze()
    rank = me.rank
    communication = OnDemand(rank, settings) if comm == "odc" else Communication(Timeline(rank))
    run = RankRun(communication.timeline, [], [], [])
    communication.publish()
    dist.barrier()
    for number, microbatches in enumerate(works[rank]):
        run.timeline.minibatch, cpu_ns = number, time.thread_time_ns()
        with run.timeline.span("minibatch", str(number)):
            _minibatch(run, communication, settings, microbatches)
        run.cpu_ns.append(time.thread_time_ns() - cpu_ns)
        me.report(1.0 if rank == 0 else 0.0)
    dist.barrier()
    communication.close()
    return run


def _minibatch(run: RankRun, communication: Communication, settings: Settings, microbatches: Sequence[float]) -> None:
    clock, layers = Clock(), range(settings.layers)
    communication.begin()
    for seconds in microbatches:
        forward_s = FORWARD_SHARE * seconds / settings.layers
        backward_s = seconds / settings.layers - forward_s
        for layer in layers:
            communication.gather(layer)
            clock.compute(forward_s)
        for layer in reversed(layers):
            communication.gather(layer)
            clock.compute(backward_s)
            communication.push(layer)
    communication.finish()
    run.compute_ns.append(clock.take())
    clock.compute(settings.optimizer_s)
    run.optimizer_ns.append(clock.take())
    communication.publish()


def run_policy(run: Run, policy: str, settings: Settings) -> dict[str, Any]:
    """Plan, run and compare: the result's entry of one policy."""
    plans, comm = settings.plans(policy), COMM_OF[policy]
    seconds_per_cost = settings.seconds_per_cost(plans)
    works = [work_of(plans, seconds_per_cost, rank) for rank in range(settings.ranks)]
    runs = run.ranks(settings.ranks, run_rank, settings, comm, works)
    timed = range(NUM_UNTIMED, NUM_UNTIMED + len(plans))
    makespans = [plan.makespan(comm) * seconds_per_cost for plan in plans]
    minibatches = [
        {"planned_bubble": plan.bubble_rate(comm), "planned_s": planned_s, **shares(runs, [number], comm)}
        for number, plan, planned_s in zip(timed, plans, makespans, strict=True)
    ]
    planned, measured = bubble_rate(plans, comm), shares(runs, timed, comm)
    return {
        "policy": policy,
        "comm": comm,
        "num_microbatches": [list(plan.num_microbatches) for plan in plans],
        "planned_bubble": planned,
        "planned_s": sum(makespans) / len(plans),
        "difference_points": 100 * (measured["bubble"] - planned),
        **measured,
        "minibatches": minibatches,
    }


def shares(runs: Sequence[RankRun], minibatches: Sequence[int], comm: Comm) -> dict[str, float]:
    """Where the time of all ranks went in these minibatches, optimizer apart.

    Returns:
        ``bubble``: all that is not ``compute``; it is the sum of ``waiting``, ``host_work`` and ``loop``.
        ``minibatch_s``: what a minibatch takes on average; ``compute_s``, ``host_work_s``: what of it a rank spends so;
        ``cpu_s``: CPU time of its training thread, which sleeps and waits without any.
    """
    spent: Counter[str] = Counter()
    collectives = comm == "collective"
    for rank in segments([run.timeline for run in runs], minibatches, collectives=collectives):
        for segment in rank:
            spent[segment.activity] += segment.end_ns - segment.start_ns
    compute_ns = sum(run.compute_ns[number] for run in runs for number in minibatches)
    optimizer_ns = sum(run.optimizer_ns[number] for run in runs for number in minibatches)
    total_ns = spent.total() - optimizer_ns
    host_ns = spent["gather"] + spent["scatter"] + spent["other"]
    each = 1e-9 / (len(runs) * len(minibatches))
    return {
        "bubble": 1 - compute_ns / total_ns,
        "waiting": spent["wait"] / total_ns,
        "host_work": host_ns / total_ns,
        "loop": (spent["compute"] - compute_ns - optimizer_ns) / total_ns,
        "compute": compute_ns / total_ns,
        "minibatch_s": total_ns * each,
        "compute_s": compute_ns * each,
        "host_work_s": host_ns * each,
        "cpu_s": sum(run.cpu_ns[number] for run in runs for number in minibatches) * each,
    }


LAYERS, NUMEL = Settings.layers, Settings.numel


def measure(
    run: Run,
    policy: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(COMM_OF)}; lb-mini by default.")] = None,
    scale: Annotated[float, typer.Option(min=1e-6, help="Seconds of compute of a rank in a minibatch.")] = 2.0,
    minibatches: Annotated[int, typer.Option(min=1, help="That are timed; one more comes first.")] = 30,
    ranks: Annotated[int, typer.Option(min=1, help="That are started on this host.")] = 8,
    layers: Annotated[int, typer.Option(min=1, help="Of the model, a unit each.")] = LAYERS,
    minibatch_size: Annotated[int, typer.Option(min=1, help="Samples per rank and minibatch.")] = 4,
    optimizer_s: Annotated[float, typer.Option(min=0.0, help="Seconds that the optimizer takes.")] = 0.01,
    numel: Annotated[int, typer.Option(min=1, help="Elements of a shard of a unit.")] = NUMEL,
    seed: Annotated[int, typer.Option(help="Of the lengths.")] = 0,
    hosts: Annotated[int, typer.Option(min=1, help="The ranks pose as so many hosts: tcp between them.")] = 1,
    model: Annotated[str, typer.Option(help=f"Cost model, of {', '.join(MODELS)}.")] = "1.5B",
    law: Annotated[str, typer.Option(help=f"Of lengths: {', '.join(law_names())}.")] = "longalign",
    accumulate: Annotated[Literal["auto", "direct", "daemon"], typer.Option(help="Who adds to a sum.")] = "auto",
) -> Entries:
    policies = policy or ["lb-mini"]
    for given, known in (*((name, COMM_OF) for name in policies), (model, MODELS), (law, law_names())):
        if given not in known:
            raise ValueError(f"{given!r}: expected one of {', '.join(known)}")
    if hosts > ranks:
        raise ValueError(f"--hosts {hosts}: at most one for each of {ranks} ranks")
    settings = Settings(
        ranks, layers, minibatches, minibatch_size, scale, optimizer_s, model, law, seed, accumulate, hosts, numel
    )
    run.begin(len(policies) * (minibatches + NUM_UNTIMED))
    runs = []
    for name in policies:
        run.describe(name)
        runs.append(run_policy(run, name, settings))
    return {"forward_share": FORWARD_SHARE, "runs": runs}


def figures(result: Entries) -> Figures:
    settings = result["settings"]
    (row,) = (row for row in result["runs"] if row["policy"] == "lb-mini")
    planned, measured, waiting = (100 * row[key] for key in ("planned_bubble", "bubble", "waiting"))
    yield (
        "**Does a run reach its plan?** ",
        f"{settings['ranks']} ranks with emulated compute (a layer is a sleep; LongAlign, LB-Mini, "
        f"{settings['minibatch_size']} samples a rank) were planned to idle {planned:.1f} % of their time and idled "
        f"{measured:.1f} %, of which they waited for one another {waiting:.1f} %",
    )


BENCHMARK = Benchmark(
    measure,
    "2 min, quick 20 s",
    (
        Table(
            "runs",
            "bubble rate, percent of all ranks' time; a minibatch, ms",
            (Column("policy", "policy"), Column("comm", "comm")),
            (
                Column("planned", "planned_bubble", ".2f", 100),
                Column("measured", "bubble", ".2f", 100),
                Column("difference", "difference_points", ".2f"),
                Column("waiting", "waiting", ".2f", 100),
                Column("host work", "host_work", ".2f", 100),
                Column("loop", "loop", ".2f", 100),
                Column("planned, ms", "planned_s", ".1f", 1e3),
                Column("measured, ms", "minibatch_s", ".1f", 1e3),
                Column("host work, ms", "host_work_s", ".1f", 1e3),
                Column("CPU of a rank, ms", "cpu_s", ".1f", 1e3),
            ),
        ),
    ),
    quick={"minibatches": 6, "scale": 0.5},
    figures=(("docs/performance.md", figures, ["emulated"]),),
)
