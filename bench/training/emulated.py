"""Does a run reach what its plan promises? Ranks with emulated compute, FSDP2 and ODC as they are.

    odc bench emulated                              # 8 ranks, LongAlign: collectives + LB-Micro, ODC + LB-Mini
    odc bench emulated --ranks 32 --minibatches 4
    odc bench emulated --between 1Gb --ranks 4 --numel 3125000 --scale 4 --minibatches 2    # 50 million parameters

Each rank trains a model of small layers, each a unit of FSDP2. Forward and backward of a microbatch are sleeps, in
proportion to the cost of its samples by :mod:`odc.balance`; a third of the sleep is the forward. So a minibatch is as
unequal as a real one, and eight ranks need no eight GPUs. All else is real: FSDP2's hooks, its collectives over gloo or
ODC in their place, an optimizer. All ways get the same samples in the same minibatches.

A sleep that lasts too long is taken off the following ones, so compute takes as long as the plan says. The columns are
parts of the time of all ranks:

    planned bubble   bubble rate of the plans: idle time over total time of all minibatches
    overhead         overhead rate of the run: all time that is not compute, the sum of the next three
    waiting          the part in which a rank waited for another one
    transfers        the part inside gathers, pushes, the end and publishing (or gloo's collectives) without waiting
    host             the rest: FSDP2's and autograd's Python, the optimizer, the training loop

The difference, overhead minus planned bubble, is what transfers and host add where a rank would not have waited anyway.
Sleeping ranks leave the cores to the others, so a few cores carry many ranks. But ranks that are awake at the same time
queue for a core, which they would not on a machine with a core for each. So the difference is an upper bound, most of
all for collectives, in which all ranks are awake at the same time. Where collectives need more than ODC, the measured
speedup is larger than it is with a core for each rank. The CPU time of a rank's training thread, beside it, includes no
queue. A larger ``--scale`` makes the difference smaller, as a larger model would: host time is per layer and
microbatch, whatever they compute. By default the scale grows with the number of ranks, which share the machine's cores.

With ``--between`` the ranks are on two hosts: network namespaces, whose network passes so many bytes per second (root
and iproute2 are needed). Then ways run for each kind of sharding, in turn, ``--repetitions`` times; the table shows
each one's median run. The plan is that of ``odc plan hosts``, with what gloo sends (a reduce-scatter twice) and
hides (nothing). Beside it stands what came into the first host:

    full             FSDP2 over all ranks; ODC with ``share_in_host="off"``
    hybrid           sharded inside of a host, replicas over hosts; FSDP2 all-reduces in the last microbatch only
    shared           ODC with ``share_in_host="on"``

Lengths are spread evenly over the law, shuffled; microbatches have at most as many tokens as its longest sample. The
paper's rates and throughput are of more minibatches.

Not covered: bytes within a host (a shard of a layer has ``--numel`` elements), GPUs, communication beside compute,
compute that slows down beside communication.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from typing import Annotated, Any, cast

import torch.distributed as dist
import typer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from odc.balance import CostModel, Machine, Plan, Scenario, law_names
from odc.balance.checks import IntArray
from odc.balance.multimodal.schedule import FORWARD_SHARE
from odc.balance.plan import Comm
from odc.balance.simulate.hosts import Network, Sharding, mean_compute, parse_network
from odc.balance.simulate.laws import even_lengths
from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Row, Run, Table, check_known, spread
from odc.bench.harness.network import received_bytes, two_hosts, why_not
from odc.bench.harness.ranks import NotRunError, Rank, keep_from_collector
from odc.bench.planning.paper_costs import MODELS, paper_cost
from odc.bench.training.bubble import segments, spent_ns
from odc.bench.training.sleeping import SleepingModel
from odc.fsdp_patch import observe_fsdp, patch_fsdp
from odc.timeline import Timeline

WAYS: dict[str, tuple[Comm, str]] = {
    "collective-lb-micro": ("collective", "lb-micro"),
    "collective-lb-micro-global": ("collective", "lb-micro-global"),
    "odc-lb-micro": ("odc", "lb-micro"),
    "odc-lb-mini": ("odc", "lb-mini"),
    "odc-lb-mini-equal": ("odc", "lb-mini-equal"),
}
"""Communication and policy of each way. "lb-mini-equal" has equal numbers of samples on ranks, as the paper's AIME."""
NUM_UNTIMED = 1  # minibatches at the start
UNTIMED_SHARE = 0.1
"""Length of untimed minibatches, as a share of that of timed ones."""
SCALE_PER_RANK_S = 0.375
LAW_SAMPLES = 20_000  # whose longest is the law's

SHARDINGS: dict[Comm, tuple[Sharding, ...]] = {
    "collective": ("full", "hybrid"),
    "odc": ("shared", "hybrid", "full"),
}
"""The kinds of sharding on several hosts."""
GLOO_PASSES = 2.0
"""How often gloo sends what it reduce-scatters."""
ITEM_BYTES = 4  # of parameters and gradients


@dataclass(frozen=True)
class Settings:
    """Settings of a run."""

    ranks: int = 8
    layers: int = 4
    minibatches: int = 30
    minibatch_size: int = 4
    scale: float = 0.0
    """Seconds that a rank computes in an average minibatch; 0: :data:`SCALE_PER_RANK_S` for each rank."""
    model: str = "1.5B"
    law: str = "longalign"
    seed: int = 0
    between: float = 0.0
    """Bytes per second that each of two hosts receives; 0: all ranks are on one."""
    numel: int = 256
    group_size: int = 1
    """Neighbouring ranks that compute the same microbatches: a rank of the plans."""

    def scenario(self) -> Scenario:
        return Scenario(self.lengths(), self.cost(), self.ranks, self.minibatch_size, self.max_tokens(), seed=self.seed)

    def lengths(self) -> IntArray:
        """Lengths of the samples of all timed minibatches."""
        return even_lengths(self.law, self.ranks * self.minibatch_size * self.minibatches)

    def max_tokens(self) -> int:
        """The most tokens of a microbatch."""
        return max(int(even_lengths(self.law, LAW_SAMPLES).max()), int(self.lengths().max()))

    def cost(self) -> CostModel:
        return paper_cost(self.model)

    def plans(self, policy: str) -> list[Plan]:
        """A plan for each timed minibatch. Untimed minibatches have the plan of the first one."""
        return [minibatch.plan for minibatch in self.scenario().plan(policy).minibatches]

    def seconds_per_cost(self, plans: Sequence[Plan]) -> float:
        """Seconds per unit of cost, so that a rank computes for ``scale`` seconds in an average minibatch."""
        scale = self.scale or SCALE_PER_RANK_S * self.ranks
        return scale * self.ranks * len(plans) / sum(float(plan.microbatch_times().sum()) for plan in plans)


Work = list[list[float]]
"""``work[minibatch][microbatch]`` of one rank, seconds of compute."""


def work_of(plans: Sequence[Plan], seconds_per_cost: float, rank: int) -> Work:
    """Seconds of compute of ``rank``: of each microbatch, forward and backward together."""
    timed = [
        [float(cost) * seconds_per_cost for cost in plan.microbatch_times()[rank, : plan.num_microbatches[rank]]]
        for plan in plans
    ]
    return [[UNTIMED_SHARE * seconds for seconds in timed[0]]] * NUM_UNTIMED + timed


@dataclass
class RankRun:
    """One rank's run, untimed minibatches included."""

    timeline: Timeline
    compute_ns: list[int]
    """Time that each minibatch has computed, which is the time slept."""
    cpu_ns: list[int]
    """CPU time of the thread that trains, in each minibatch."""
    shards_bytes: int = 0
    """Bytes of this rank's shards of parameters."""
    overhead_bytes: int = 0
    """Bytes of ODC's memory on this rank."""
    received_bytes: int = 0
    """Bytes that this host has received from the other one in all timed minibatches."""


def meet(partners: dist.ProcessGroup, timeline: Timeline) -> None:
    """Meet the ranks that compute the same microbatches, where they would exchange keys and values."""
    with timeline.span("wait", "partners"):
        dist.barrier(partners)


def run_rank(me: Rank, settings: Settings, comm: Comm, sharding: Sharding, works: Sequence[Work]) -> RankRun:
    """Train on this rank. Other ranks see no difference to real training."""
    rank, partners = me.rank, None
    if settings.group_size > 1:
        shape = me.world_size // settings.group_size, settings.group_size
        whole = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
        # Parameters are sharded over all ranks, as is usual beside context parallelism.
        partners, mesh = whole.get_group("cp"), whole._flatten("dp_cp")
    elif sharding == "hybrid":
        mesh = init_device_mesh("cpu", (2, me.world_size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (me.world_size,))
    model = SleepingModel(settings.layers, settings.numel * me.world_size, mesh)
    set_requires_all_reduce = cast(FSDPModule, model).set_requires_all_reduce
    session = None
    if comm == "odc":
        session = patch_fsdp(model, share_in_host="on" if sharding == "shared" else "off")
    timeline = Timeline(rank) if session is None else session.start_timeline()
    if session is None:
        observe_fsdp(model, timeline)
    if partners is not None:
        model.clock.meet = functools.partial(meet, partners, timeline)
    memory = None if session is None else session.memory()
    run = RankRun(timeline, [], []) if memory is None else RankRun(timeline, [], [], memory.parameters, memory.overhead)
    keep_from_collector()
    dist.barrier()
    reduces_once = session is None and sharding == "hybrid"
    for number, microbatches in enumerate(works[rank]):
        if number == NUM_UNTIMED and settings.between:
            me.meet()
            run.received_bytes = -received_bytes()
        timeline.minibatch, cpu_ns = number, time.thread_time_ns()
        with timeline.span("minibatch", str(number)):
            with nullcontext() if session is None else session.minibatch():
                for index, seconds in enumerate(microbatches):
                    if reduces_once:
                        set_requires_all_reduce(index == len(microbatches) - 1)
                    model.microbatch(seconds)
            model.step()
        run.compute_ns.append(model.clock.take())
        run.cpu_ns.append(time.thread_time_ns() - cpu_ns)
        me.report(1.0 if rank == 0 else 0.0)
    dist.barrier()
    if settings.between:
        run.received_bytes += received_bytes()
    if session is not None:
        session.close()
    return run


def run_way(run: Run, way: str, settings: Settings, sharding: Sharding = "full") -> dict[str, Any]:
    """Plan, run and compare: the result's entry of one way to train."""
    comm, policy = WAYS[way]
    epoch = settings.scenario().plan(policy)
    plans = [minibatch.plan for minibatch in epoch.minibatches]
    seconds_per_cost = settings.seconds_per_cost(plans)
    works = [work_of(plans, seconds_per_cost, rank // settings.group_size) for rank in range(settings.ranks)]
    machine, crosses, enter = Machine(overlap=0.0, num_layers=settings.layers), dict[str, float](), None
    with ExitStack() as stack:
        if settings.between:
            network = Network(2, settings.ranks // 2, settings.between * seconds_per_cost, GLOO_PASSES)
            size = ITEM_BYTES * settings.numel * settings.ranks * settings.layers
            crossing = network.crossing(comm, sharding, size, size)
            machine = network.machine(machine, crossing, comm, settings.layers, mean_compute(plans))
            crosses["planned_crosses_mb"] = sum(crossing.num_bytes(plan, comm, 2) for plan in plans) / len(plans) / 1e6
            enter = stack.enter_context(two_hosts(8 * settings.between)).enter
        runs = run.ranks(settings.ranks, run_rank, settings, comm, sharding, works, enter=enter)
    if settings.between:
        crosses["crosses_mb"] = runs[0].received_bytes / len(plans) / 1e6
    planned_s = epoch.run(comm, machine).makespans * seconds_per_cost
    computed_s = [float(plan.microbatch_times().sum()) * seconds_per_cost / plan.world_size for plan in plans]
    timed = range(NUM_UNTIMED, NUM_UNTIMED + len(plans))
    minibatches = [
        {"planned_bubble": 1 - compute_s / makespan_s, "planned_s": makespan_s, **shares(runs, [number], comm)}
        for number, compute_s, makespan_s in zip(timed, computed_s, planned_s.tolist(), strict=True)
    ]
    planned, measured = 1 - sum(computed_s) / float(planned_s.sum()), shares(runs, timed, comm)
    return {
        "way": way,
        "sharding": sharding,
        "num_microbatches": [list(plan.num_microbatches) for plan in plans],
        "planned_bubble": planned,
        "planned_s": float(planned_s.mean()),
        "difference_points": 100 * (measured["bubble"] - planned),
        **measured,
        "shards_mb": max(each.shards_bytes for each in runs) / 1e6,
        "overhead_mb": max(each.overhead_bytes for each in runs) / 1e6,
        **crosses,
        "minibatches": minibatches,
    }


def shares(runs: Sequence[RankRun], minibatches: Sequence[int], comm: Comm) -> dict[str, float]:
    """Where the time of all ranks went in these minibatches.

    Returns:
        ``bubble`` is the overhead rate, all that is not ``compute``: the sum of ``waiting``, ``communication`` and
        ``host``. ``minibatch_s`` is the time of an average minibatch, ``compute_s`` the part that a rank computes, and
        ``cpu_s`` the CPU time of a rank's training thread, which needs none to sleep and to wait.
    """
    timelines = [run.timeline for run in runs]
    spent = spent_ns(segments(timelines, minibatches, collectives=comm == "collective"))
    compute_ns = sum(run.compute_ns[number] for run in runs for number in minibatches)
    total_ns = spent.total()
    each = 1e-9 / (len(runs) * len(minibatches))
    return {
        "bubble": 1 - compute_ns / total_ns,
        "waiting": spent["wait"] / total_ns,
        "communication": (spent["gather"] + spent["scatter"] + spent["other"]) / total_ns,
        "host": (spent["compute"] - compute_ns) / total_ns,
        "compute": compute_ns / total_ns,
        "minibatch_s": total_ns * each,
        "compute_s": compute_ns * each,
        "cpu_s": sum(run.cpu_ns[number] for run in runs for number in minibatches) * each,
    }


def add_ratios(entries: Sequence[dict[str, Any]]) -> None:
    """Add throughput over that of the first entry, planned and measured. All entries have the same samples."""
    for entry in entries:
        entry["ratio"] = entries[0]["minibatch_s"] / entry["minibatch_s"]
        entry["planned_ratio"] = entries[0]["planned_s"] / entry["planned_s"]


def measure(
    run: Run,
    way: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(WAYS)}; default: collective-lb-micro and odc-lb-mini.")
    ] = None,
    scale: Annotated[
        float, typer.Option(min=0.0, help="Seconds of compute of a rank in a minibatch; 0: 3/8 of the number of ranks.")
    ] = 0.0,
    minibatches: Annotated[int, typer.Option(min=1, help="That are timed; a short one comes first.")] = 30,
    ranks: Annotated[int, typer.Option(min=1, help="That are started on this host.")] = 8,
    layers: Annotated[int, typer.Option(min=1, help="Of the model, a unit each.")] = 4,
    minibatch_size: Annotated[int, typer.Option(min=1, help="Samples per rank and minibatch.")] = 4,
    numel: Annotated[int, typer.Option(min=1, help="Elements of a layer's shard, were it over all ranks.")] = 256,
    seed: Annotated[int, typer.Option(help="Of the shuffle.")] = 0,
    between: Annotated[
        str, typer.Option(help="What the network of two hosts passes, over which the ranks are: 1Gb, 125MB.")
    ] = "",
    repetitions: Annotated[int, typer.Option(min=1, help="Of each way.")] = 1,
    model: Annotated[str, typer.Option(help=f"Cost model, of {', '.join(MODELS)}.")] = "1.5B",
    law: Annotated[str, typer.Option(help=f"Of lengths: {', '.join(law_names())}.")] = "longalign",
) -> Entries:
    ways = way or ["collective-lb-micro", "odc-lb-mini"]
    check_known(way=(ways, WAYS), model=([model], MODELS), law=([law], law_names()))
    network = parse_network(2, between, ranks, "h100") if between else None
    settings = Settings(
        ranks,
        layers,
        minibatches,
        minibatch_size,
        scale,
        model,
        law,
        seed,
        network.bytes_per_s if network else 0.0,
        numel,
    )
    if network is not None and (reason := why_not()) is not None:
        raise NotRunError(f"--between {reason}")
    jobs = [(name, each) for name in ways for each in (SHARDINGS[WAYS[name][0]] if network else ("full",))]
    run.begin(len(jobs) * repetitions * (minibatches + NUM_UNTIMED))
    found: dict[tuple[str, Sharding], list[dict[str, Any]]] = {job: [] for job in jobs}
    for name, each in jobs * repetitions:
        run.describe(f"{name}, {law}, {ranks} ranks" + (f", {each}" if network else ""))
        found[name, each].append(run_way(run, name, settings, each))
    runs = []
    for of_job in found.values():
        of_job.sort(key=lambda entry: entry["minibatch_s"])
        repeated = spread([entry["minibatch_s"] for entry in of_job])
        runs.append({**of_job[len(of_job) // 2], "repeated_minibatch_s": repeated})
    add_ratios(runs)
    return {"forward_share": FORWARD_SHARE, "sizes": asdict(settings), "runs": runs}


def figures(result: Entries) -> Figures:
    rows = {row["way"]: row for row in result["runs"]}
    micro, mini = rows["collective-lb-micro"], rows["odc-lb-mini"]

    def idle(row: dict[str, Any]) -> str:
        return f"{100 * row['planned_bubble']:.1f} % of their time and did not compute for {100 * row['bubble']:.1f} %"

    yield (
        "**Does a run reach its plan?** ",
        f"{result['settings']['ranks']} ranks with emulated compute (a layer is a sleep inside a real FSDP2 unit; "
        f"LongAlign, {result['settings']['minibatch_size']} samples a rank) were planned to idle {idle(micro)} over "
        f"collectives with LB-Micro, {idle(mini)} under ODC with LB-Mini: {mini['planned_ratio']:.2f}x the throughput "
        f"by plan, {mini['ratio']:.2f}x measured",
    )


def figures_of_hosts(slow: Entries, *large: Entries) -> Figures:
    """Figures for rows of a table: what crosses, and overhead, planned and measured; then seconds of a step of a larger
    model."""
    for index, row in enumerate(slow["runs"]):
        cells = [f"{row['planned_crosses_mb']:.0f}", f"{row['crosses_mb']:.0f}"]
        cells += [f"{100 * row[key]:.1f} %" for key in ("planned_bubble", "bubble")]
        for repeated in (result["runs"][index]["repeated_minibatch_s"] for result in large):
            cells.append(f"{repeated['median']:.1f} ({repeated['min']:.1f}-{repeated['max']:.1f})")
        yield f"| {'FSDP2' if index < 2 else 'ODC'}, {row['sharding']} |", f" {' | '.join(cells)} |"


def _way(row: Row) -> str:
    return str(row["way"]) if row["sharding"] == "full" else f"{row['way']}, {row['sharding']}"


PLANNED_AND_MEASURED = (
    Column("planned bubble", "planned_bubble", ".1f", 100),
    Column("overhead", "bubble", ".1f", 100),
    Column("waiting", "waiting", ".1f", 100),
    Column("transfers", "communication", ".1f", 100),
    Column("host", "host", ".1f", 100),
    Column("s a minibatch", "minibatch_s", ".2f"),
    Column("planned speedup", "planned_ratio", ".2f"),
    Column("speedup", "ratio", ".2f"),
)

BENCHMARK = Benchmark(
    measure,
    (
        Table(
            "runs",
            "{settings[ranks]} ranks, {settings[law]}, {settings[minibatch_size]} samples a rank: percent of all "
            "ranks' time",
            (Column("way", _way),),
            (
                *PLANNED_AND_MEASURED,
                Column("CPU ms", "cpu_s", ".1f", 1e3),
                Column("MB into a host planned", "planned_crosses_mb", ".0f"),
                Column("measured", "crosses_mb", ".0f"),
                Column("MB of ODC", lambda row: f"{row['overhead_mb']:.2f}" if row["overhead_mb"] else ""),
            ),
        ),
    ),
    quick={"minibatches": 3, "scale": 2.0},
    figures=(
        ("docs/performance.md", figures, ["emulated"]),
        ("docs/hosts.md", figures_of_hosts, ["emulated_100Mb", "emulated_1Gb", "emulated_10Gb"]),
    ),
)
