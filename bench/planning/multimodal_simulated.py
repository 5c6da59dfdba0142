"""What balancing every phase of a model of several modalities gains, by plans alone: OrchMLLM's models and ranks.

Lengths are drawn from a law of samples (:mod:`odc.balance.simulate.modalities`). Costs are counted FLOPs of the models
of table 1 (:mod:`.multimodal_sizes`), and time is cost. Each phase is planned as in training, and
:func:`odc.balance.multimodal.step_times` computes how long a step takes. The ways to train, on the same samples, each
with collectives and with ODC:

    none             samples stay where they were read
    language         the language model is balanced; encoders work where its samples are (pre-balancing)
    whole            samples are balanced by their cost in all phases together, and encoded where they are: no item
                     moves. Without lockstep a rank may be late in one phase if it is early in another
    all              every phase is balanced by itself (post-balancing)

``ratio`` is throughput over that of "none" under collectives. ``busy`` is the time that all ranks spend on FLOPs
without padding, over all their time; this is what the paper's MFU counts, in units of the MFU that a rank has while it
computes. ``bubble`` counts padding as work. On 2560 ranks the paper's baseline without balance had smaller minibatches,
because its memory sufficed for no more; ``ratio`` is also given against that baseline.

Ablations follow, on 128 ranks: the algorithm of one encoder used for the other (figure 11), an all-gather in place of
the all-to-all (equations 3 and 4, figure 12), batches that are not placed on nodes (figure 13). The last table shows
how long planning takes here, on one core. (The paper plans beside the training step, as
:class:`~odc.balance.multimodal.MultimodalLoader` does.)

Not covered: communication takes no time, memory is without limit (one microbatch per rank and phase, as in the paper),
and a rank's speed does not depend on its batch. So what the paper gains from fuller memory is not here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import typer

from odc.balance import Rearrangement, get_policy, karmarkar_karp
from odc.balance.checks import FloatArray, IntArray
from odc.balance.layout import Layout, microbatch_costs
from odc.balance.multimodal import MinibatchLengths, MinibatchSchedule, Orchestrator, StepTimes, step_times
from odc.balance.plan import Plan
from odc.balance.rearrange.post_balance import post_balance
from odc.balance.simulate.modalities import sample_modalities
from odc.bench.harness.benchmark import (
    Benchmark,
    Column,
    Entries,
    Figures,
    Numbers,
    Run,
    Table,
    check_known,
    numbers,
    spread,
)
from odc.bench.planning.multimodal_sizes import SIZES, ModelSize

RANKS = Numbers(8, 128, 2560)
RANKS_PER_NODE = 8
ABLATION_RANKS = 128
PLANNING_RANKS = (64, 128, 256, 512, 1024, 2560)  # table 2
PLANNING_SAMPLES = 60
MINIBATCHES = {8: 40, 128: 10}
WAYS: dict[str, dict[str, Any]] = {
    "none": {"policy": None, "balance_encoders": False},
    "language": {"policy": "lb-mini", "balance_encoders": False},
    "whole": {"policy": None, "balance_encoders": False},
    "all": {"policy": "lb-mini", "balance_encoders": True},
}
PAPER_RATIO = (1.5, 2.0)
"""The paper's MFU of "all" over that of "none", on 2560 ranks (section 8.1)."""
# 40 % of what an H100 does in bfloat16, as the paper reaches.
_FLOPS_PER_S = 0.4 * 989e12
Advance = Callable[[], object]


def draw(size: ModelSize, num_ranks: int, samples_per_rank: int, number: int, way: str = "none") -> MinibatchLengths:
    """Minibatch ``number`` as the ranks have read it. Another number of samples has another minibatch of the same
    law."""
    samples = sample_modalities(num_ranks * samples_per_rank, number)
    return size.minibatch(
        samples, karmarkar_karp(size.sample_costs(samples), num_ranks) if way == "whole" else num_ranks
    )


def orchestrator(size: ModelSize, num_ranks: int, way: str) -> Orchestrator:
    """The orchestrator of one of :data:`WAYS`. All ranks have one microbatch in each phase, so collectives can run it
    as well."""
    nodes = RANKS_PER_NODE if num_ranks > RANKS_PER_NODE else None
    return Orchestrator(size.phases, size.language, num_ranks, ranks_per_node=nodes, comm="collective", **WAYS[way])


def plans_of(
    size: ModelSize, num_ranks: int, samples_per_rank: int, number: int, clock: Callable[[], float] = time.perf_counter
) -> Iterator[tuple[float, MinibatchSchedule]]:
    """Plan ``number`` minibatches with all phases balanced, placement included. Yields the seconds of planning, and the
    plan."""
    orchestra = orchestrator(size, num_ranks, "all")
    for minibatch in range(number):
        lengths = draw(size, num_ranks, samples_per_rank, minibatch)
        start = clock()
        schedule = orchestra.plan(lengths)
        yield clock() - start, schedule


def plans_by_phase(schedule: MinibatchSchedule) -> dict[str, Plan]:
    """The plans of the encoders and of the language model, by name."""
    return {**schedule.encoders, "language": schedule.language}


def useful(schedule: MinibatchSchedule) -> float:
    """FLOPs of all phases without padding."""
    return float(sum(plan.costs.sum() for plan in plans_by_phase(schedule).values()))


def by_phase(schedule: MinibatchSchedule) -> dict[str, float]:
    """For each phase the slowest rank's time over the time of ranks that share the phase evenly, without padding."""
    return {
        name: plan.makespan("collective") * plan.world_size / float(plan.costs.sum())
        for name, plan in plans_by_phase(schedule).items()
    }


def compare(size: ModelSize, num_ranks: int, samples_per_rank: int, minibatches: int, advance: Advance) -> Any:
    """Compare the ways on the same minibatches: an entry of the result."""
    times: dict[str, list[StepTimes]] = {}
    work, slowest, shares = 0.0, {way: [] for way in WAYS}, []  # type: ignore[var-annotated]
    for number in range(minibatches):
        for way in WAYS:
            lengths = draw(size, num_ranks, samples_per_rank, number, way)
            schedule = orchestrator(size, num_ranks, way).plan(lengths)
            times.setdefault(way, []).append(step_times(schedule, "collective"))
            times.setdefault(f"{way}, ODC", []).append(step_times(schedule, "odc"))
            slowest[way].append(by_phase(schedule))
            advance()
        of_all = useful(schedule)
        work += of_all
        shares.append({name: float(plan.costs.sum()) / of_all for name, plan in plans_by_phase(schedule).items()})
    first = sum(step.makespan for step in times["none"])
    rows = {}
    for way, steps in times.items():
        total = sum(step.makespan for step in steps)
        rows[way] = {
            "makespan_flops": total / minibatches,
            "ratio": first / total,
            "busy": work / (num_ranks * total),
            "bubble": 1 - sum(step.work for step in steps) / (num_ranks * total),
        }
    return {
        "model": size.name,
        "ranks": num_ranks,
        "samples_per_rank": samples_per_rank,
        "minibatches": minibatches,
        "flops_per_sample": work / (minibatches * num_ranks * samples_per_rank),
        "share_of_phase": means(shares),
        "slowest_over_even": {way: means(found) for way, found in slowest.items()},
        "ways": rows,
    }


def means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}


def rigid(size: ModelSize, num_ranks: int, minibatches: int) -> dict[str, float]:
    """Figure 11: ``busy`` under collectives where both encoders are balanced by the algorithm of one of them."""
    names: dict[str, Layout | None] = {"tailored": None, "all rmpad": "packed", "all pad": "padded"}
    times: dict[str, float] = dict.fromkeys(names, 0.0)
    work = 0.0
    for _, schedule in plans_of(size, num_ranks, size.samples_per_rank(num_ranks), minibatches):
        work += useful(schedule)
        for name, layout in names.items():
            times[name] += schedule.language.makespan("collective")
            for phase in size.phases:
                items = schedule.lengths.items[phase.name].encoder
                parts = post_balance(items, num_ranks, cost=phase.cost, layout=layout or phase.layout)
                costs = microbatch_costs([[part] for part in parts], phase.cost(items), items, phase.layout)
                times[name] += float(costs.max())
    return {name: work / (num_ranks * total) for name, total in times.items()}


def journeys(size: ModelSize, schedule: MinibatchSchedule, *, placed: bool) -> Iterator[tuple[str, FloatArray]]:
    """What moves between ranks in a forward: (rank, rank) bytes of each kind. If not ``placed``, batches go to ranks in
    the order in which the algorithms return them."""
    lengths, num_bytes = schedule.lengths, size.bytes_of(schedule.lengths)
    routes = {"text": schedule.samples}
    for name in schedule.encoders:
        routes |= {f"{name} inputs": schedule.inputs[name], f"{name} outputs": schedule.outputs[name]}
    if not placed:
        ranks = range(schedule.num_ranks)
        has = [lengths.samples_of(rank) for rank in ranks]
        language = get_policy("lb-mini").plan(
            lengths.language, world_size=schedule.num_ranks, max_tokens=2**40, cost=size.language.cost
        )
        wants = [[sample for microbatch in mine for sample in microbatch] for mine in language.microbatches]
        routes["text"] = Rearrangement.between(has, wants)
        for phase in size.phases:
            items = lengths.items[phase.name]
            makes = post_balance(items.encoder, schedule.num_ranks, cost=phase.cost, layout=phase.layout)
            has_items, wants_items = ([items.of_samples(mine) for mine in side] for side in (has, wants))
            routes[f"{phase.name} inputs"] = Rearrangement.between(has_items, makes)
            routes[f"{phase.name} outputs"] = Rearrangement.between(makes, wants_items)
    for name, route in routes.items():
        yield name, route.volume(num_bytes[name])


def to_other_nodes(volume: FloatArray, nodes: IntArray | None = None) -> FloatArray:
    """What each rank sends to other nodes, (num_ranks,), of a volume by rank and batch. Batch j is on ``nodes[j]``, by
    default on the node of rank j."""
    own = np.arange(len(volume)) // RANKS_PER_NODE
    sent: FloatArray = np.where(own[:, None] != (own if nodes is None else nodes), volume, 0).sum(axis=1)
    return sent


def moving(size: ModelSize, num_ranks: int, minibatches: int) -> dict[str, dict[str, float]]:
    """Figures 12 and 13: bytes that a rank moves, of each kind, as an all-gather and as an all-to-all, and between
    nodes with and without placement."""
    rows: dict[str, list[dict[str, float]]] = {}
    for _, schedule in plans_of(size, num_ranks, size.samples_per_rank(num_ranks), minibatches):
        unplaced = dict(journeys(size, schedule, placed=False))
        for name, volume in journeys(size, schedule, placed=True):
            moved = volume - np.diag(np.diag(volume))
            between, before = to_other_nodes(volume), to_other_nodes(unplaced[name])
            largest = float(volume.sum(axis=1).max())
            row = {
                "all_gather_bytes": (num_ranks - 1) * largest,
                "all_gather_memory_bytes": float(volume.sum()),
                "all_to_all_bytes": float(max(moved.sum(axis=0).max(), moved.sum(axis=1).max())),
                "all_to_all_bound_bytes": float(max(largest, volume.sum(axis=0).max())),
                "between_nodes_bytes": float(between.mean()),
                "between_nodes_unplaced_bytes": float(before.mean()),
                "between_nodes_most_bytes": float(between.max()),
                "between_nodes_most_unplaced_bytes": float(before.max()),
            }
            rows.setdefault(name, []).append(row)
    found = {name: means(each) for name, each in rows.items()}
    for each in found.values():
        each["placed_over_unplaced"] = each["between_nodes_bytes"] / each["between_nodes_unplaced_bytes"]
        each["placed_over_unplaced_most"] = each["between_nodes_most_bytes"] / each["between_nodes_most_unplaced_bytes"]
        each["all_gather_over_all_to_all"] = each["all_gather_bytes"] / each["all_to_all_bytes"]
    return found


def planning(num_ranks: int, samples_per_rank: int, repetitions: int) -> dict[str, Any]:
    """Seconds that :meth:`Orchestrator.plan` takes for all phases of MLLM-10B, placement included."""
    found = list(plans_of(SIZES["MLLM-10B"], num_ranks, samples_per_rank, repetitions))
    return {
        "ranks": num_ranks,
        "samples_per_rank": samples_per_rank,
        "time_s": spread([seconds for seconds, _ in found]),
        "repetitions": repetitions,
        "step_s": step_times(found[-1][1], "collective").makespan / _FLOPS_PER_S,
    }


def measure(
    run: Run,
    ranks: Annotated[Numbers, typer.Option(parser=numbers, help="Compare on so many.")] = RANKS,
    model: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(SIZES)}.")] = None,
    minibatches: Annotated[
        int, typer.Option(min=0, help="Of each comparison; 0: 40 on 8 ranks, 10 on 128, else 2.")
    ] = 0,
    ablations: Annotated[bool, typer.Option(help="Figures 11 to 13 and planning, too.")] = True,
) -> Entries:
    check_known(model=(model, SIZES))
    sizes = [SIZES[name] for name in model or SIZES]
    counts = {number: minibatches or MINIBATCHES.get(number, 2) for number in ranks}
    jobs = [(size, number, size.samples_per_rank(number)) for number in counts for size in sizes]
    jobs += [(size, 2560, size.unbalanced_size) for size in sizes if 2560 in counts]
    few = minibatches or 5
    steps = len(PLANNING_RANKS) + 2 * len(sizes) if ablations else 0
    run.begin(len(WAYS) * sum(counts[number] for _, number, _ in jobs) + steps)
    result: Entries = {"paper_ratio": list(PAPER_RATIO), "comparisons": [], "rigid": [], "moving": [], "planning": []}
    for size, number, samples in jobs:
        run.describe(f"{size.name}, {number} ranks")
        result["comparisons"].append(compare(size, number, samples, counts[number], run.advance))
    for size in sizes if ablations else ():
        run.describe("ablations")
        result["rigid"].append({"model": size.name, **rigid(size, ABLATION_RANKS, few)})
        run.advance()
        found = moving(size, ABLATION_RANKS, few)
        result["moving"] += [{"model": size.name, "what": what, **row} for what, row in found.items()]
        run.advance()
    for number in PLANNING_RANKS if ablations else ():
        run.describe("planning")
        result["planning"].append(planning(number, PLANNING_SAMPLES, minibatches or 3))
        run.advance()
    return add_paper_sizes(result)


def add_paper_sizes(result: Entries) -> Entries:
    """Add the ratio of all phases balanced to none balanced with the smaller minibatches of the paper's baseline, on
    2560 ranks."""
    of = {(entry["model"], entry["ranks"], entry["samples_per_rank"]): entry["ways"] for entry in result["comparisons"]}
    found = []
    for size in SIZES.values():
        key = (size.name, 2560, size.unbalanced_size)
        if key in of:
            balanced = of[size.name, 2560, size.samples_per_rank(2560)]
            ratio = balanced["all"]["busy"] / of[key]["none"]["busy"]
            odc = balanced["all, ODC"]["busy"] / of[key]["none"]["busy"]
            found.append({"model": size.name, "ratio": ratio, "ratio_odc": odc})
    return {**result, "against_smaller_minibatches": found}


def figures(result: Entries) -> Figures:
    against_smaller = {entry["model"]: entry["ratio_odc"] for entry in result["against_smaller_minibatches"]}
    shown = set[str]()
    for entry in result["comparisons"]:
        name, ways = f"{entry['model']}, {entry['ranks']} ranks", entry["ways"]
        if entry["ranks"] == 8 or name in shown:  # once more with smaller minibatches
            continue
        shown.add(name)
        text = f" {ways['language']['ratio']:.2f}x | {ways['all']['ratio']:.2f}x | {ways['all, ODC']['ratio']:.2f}x |"
        if entry["ranks"] == 2560:
            text += f" {against_smaller[entry['model']]:.2f}x |"
        yield f"| {name} |", text


_MODEL, _NUM_RANKS = Column("model", "model"), Column("ranks", "ranks")
BENCHMARK = Benchmark(
    measure,
    (
        Table(
            "comparisons",
            "throughput over that of none under collectives",
            (_MODEL, _NUM_RANKS, Column("samples", "samples_per_rank")),
            tuple(Column(way, f"ways.{way}.ratio", ".3f") for each in WAYS for way in (each, f"{each}, ODC")),
        ),
        Table(
            "comparisons",
            "busy with FLOPs that are no padding",
            (_MODEL, _NUM_RANKS, Column("samples", "samples_per_rank")),
            tuple(Column(way, f"ways.{way}.busy", ".1%") for each in WAYS for way in (each, f"{each}, ODC")),
        ),
        Table(
            "against_smaller_minibatches",
            "all phases on 2560 ranks, minibatches as large as the paper's with and without balance: over none "
            "(the paper: {paper_ratio[0]} to {paper_ratio[1]} in MFU)",
            (_MODEL,),
            (Column("collectives", "ratio", ".2f"), Column("ODC", "ratio_odc", ".2f")),
        ),
        Table(
            "rigid",
            f"busy on {ABLATION_RANKS} ranks: algorithms of the encoders (figure 11)",
            (_MODEL,),
            tuple(Column(name, name, ".1%") for name in ("tailored", "all rmpad", "all pad")),
        ),
        Table(
            "moving",
            f"MB of a rank and minibatch, forward, on {ABLATION_RANKS} ranks (figures 12, 13)",
            (_MODEL, Column("what", "what")),
            (
                Column("all-gather", "all_gather_bytes", ".1f", 1e-6),
                Column("all-to-all", "all_to_all_bytes", ".1f", 1e-6),
                Column("between nodes", "between_nodes_bytes", ".2f", 1e-6),
                Column("unplaced", "between_nodes_unplaced_bytes", ".2f", 1e-6),
                Column("of it", "placed_over_unplaced", ".3f"),
                Column("most", "between_nodes_most_bytes", ".2f", 1e-6),
                Column("unplaced", "between_nodes_most_unplaced_bytes", ".2f", 1e-6),
                Column("of it", "placed_over_unplaced_most", ".3f"),
            ),
        ),
        Table(
            "planning",
            f"planning all phases of MLLM-10B, {PLANNING_SAMPLES} samples a rank (table 2's sizes)",
            (_NUM_RANKS,),
            (Column("planning, s", "time_s", ".2f"), Column("a step at 40 % MFU, s", "step_s", ".1f")),
        ),
    ),
    quick={"ranks": Numbers(8), "minibatches": 4, "ablations": False},
    figures=(("docs/multimodal.md", figures, ["multimodal_simulated"]),),
)
