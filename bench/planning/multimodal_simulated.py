"""What balancing every phase of a model of several modalities gains, by plans alone: OrchMLLM's models and ranks.

    python -m odc.bench.planning.multimodal_simulated --json runs/multimodal_simulated.json

Lengths are drawn from a law of samples (:mod:`odc.balance.simulate.modalities`), costs are counted FLOPs of the models
of table 1 (:mod:`.multimodal_sizes`), and time is cost: each phase is planned as in training, and worked out
by :func:`odc.balance.multimodal.step_times`. Ways to train, on the same samples, with collectives and with ODC:

    none             samples stay where they were read
    language         the language model is balanced, encoders work where its samples are (pre-balancing)
    whole            samples are balanced by what they cost in all phases together, and encoded where they are: no item
                     moves. Without lockstep a rank may be late in one phase if it is early in another
    all              every phase is balanced by itself (post-balancing)

``ratio`` is throughput over that of none under collectives. ``busy`` is the time that all ranks spend on FLOPs without
padding, over all their time: what the paper's MFU counts, in units of the MFU that a rank has while it computes.
``bubble`` counts padding as work. On 2560 ranks the paper's baseline without balance had smaller minibatches, for which
memory sufficed; its ``ratio`` is also given against that.

Then the ablations, on 128 ranks: the algorithm of one encoder used for the other (figure 11), an all-gather in place of
the all-to-all (equations 3 and 4, figure 12), batches that are not placed on nodes (figure 13). And what planning takes
here, on one core (the paper overlaps it with the step, as :class:`~odc.balance.multimodal.MultimodalLoader` does).

Not covered: communication takes no time, memory is without limit (one microbatch per rank and phase, as in the paper),
and a rank's speed does not depend on its batch. So what the paper gains from fuller memory is not here.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from odc.balance import Rearrangement, get_policy, karmarkar_karp
from odc.balance.checks import FloatArray
from odc.balance.layout import Layout, microbatch_costs
from odc.balance.multimodal import MinibatchLengths, MinibatchSchedule, Orchestrator, Phase, StepTimes, step_times
from odc.balance.rearrange.post_balance import post_balance
from odc.balance.simulate.modalities import sample_modalities
from odc.bench.harness.environment import describe_environment
from odc.bench.harness.progress import progress_bar
from odc.bench.planning.multimodal_sizes import SIZES, ModelSize

RANKS = (8, 128, 2560)
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
"""Of MFU, all over none, on 2560 ranks (section 8.1)."""
# 40 % of what an H100 does in bfloat16, as the paper reaches.
_FLOPS_PER_S = 0.4 * 989e12
Advance = Callable[[], object]


def draw(size: ModelSize, num_ranks: int, samples_per_rank: int, number: int, way: str = "none") -> MinibatchLengths:
    """Minibatch ``number`` as the ranks have read it; of other numbers of samples it has others of the same law."""
    samples = sample_modalities(num_ranks * samples_per_rank, number)
    return size.minibatch(
        samples, karmarkar_karp(size.sample_costs(samples), num_ranks) if way == "whole" else num_ranks
    )


def orchestrator(size: ModelSize, num_ranks: int, way: str) -> Orchestrator:
    """Of one of :data:`WAYS`. All ranks have one microbatch in each phase, so collectives can run it as well."""
    nodes = RANKS_PER_NODE if num_ranks > RANKS_PER_NODE else None
    return Orchestrator(size.phases, size.language, num_ranks, ranks_per_node=nodes, comm="collective", **WAYS[way])


def useful(schedule: MinibatchSchedule) -> float:
    """FLOPs without padding."""
    return float(sum(plan.costs.sum() for plan in (schedule.language, *schedule.encoders.values())))


def by_phase(schedule: MinibatchSchedule) -> dict[str, float]:
    """Of each phase, the slowest rank's time over what it would be, evenly shared and without padding."""
    plans = {**schedule.encoders, "language": schedule.language}
    return {
        name: plan.makespan("collective") * plan.world_size / float(plan.costs.sum()) for name, plan in plans.items()
    }


def compare(size: ModelSize, num_ranks: int, samples_per_rank: int, minibatches: int, advance: Advance) -> Any:
    """The ways on the same minibatches: an entry of the result."""
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
        work += useful(schedule)
        plans = {**schedule.encoders, "language": schedule.language}
        shares.append({name: float(plan.costs.sum()) / useful(schedule) for name, plan in plans.items()})
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
        "share_of_phase": _means(shares),
        "slowest_over_even": {way: _means(found) for way, found in slowest.items()},
        "ways": rows,
    }


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}


def rigid(size: ModelSize, num_ranks: int, minibatches: int) -> dict[str, float]:
    """Figure 11: ``busy`` under collectives where both encoders are balanced by the algorithm of one of them."""
    names = {"tailored": None, "all rmpad": "packed", "all pad": "padded"}
    times: dict[str, float] = dict.fromkeys(names, 0.0)
    work = 0.0
    for number in range(minibatches):
        lengths = draw(size, num_ranks, size.samples_per_rank(num_ranks), number)
        schedule = orchestrator(size, num_ranks, "all").plan(lengths)
        work += useful(schedule)
        for name, layout in names.items():
            times[name] += schedule.language.makespan("collective")
            for phase in size.phases:
                items = lengths.items[phase.name].encoder
                parts = _parts(phase, items, num_ranks, layout or phase.layout)
                costs = microbatch_costs([[part] for part in parts], phase.cost(items), items, phase.layout)
                times[name] += float(costs.max())
    return {name: work / (num_ranks * total) for name, total in times.items()}


def _parts(phase: Phase, items: Any, num_ranks: int, layout: Any) -> list[list[int]]:
    as_layout: Layout = layout
    return post_balance(items, num_ranks, cost=phase.cost, layout=as_layout)


def journeys(size: ModelSize, schedule: MinibatchSchedule, *, placed: bool) -> Iterator[tuple[str, FloatArray]]:
    """What moves between ranks in a forward, (rank, rank) bytes of each kind; not ``placed``: batches go to ranks in
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
            makes = _parts(phase, items.encoder, schedule.num_ranks, phase.layout)
            has_items, wants_items = ([items.of_samples(mine) for mine in side] for side in (has, wants))
            routes[f"{phase.name} inputs"] = Rearrangement.between(has_items, makes)
            routes[f"{phase.name} outputs"] = Rearrangement.between(makes, wants_items)
    for name, route in routes.items():
        yield name, route.volume(num_bytes[name])


def moving(size: ModelSize, num_ranks: int, minibatches: int) -> dict[str, dict[str, float]]:
    """Figures 12 and 13: of each kind, bytes that a rank moves, as an all-gather and as an all-to-all, and between
    nodes with and without placement."""
    nodes = np.arange(num_ranks) // RANKS_PER_NODE
    rows: dict[str, list[dict[str, float]]] = {}
    for number in range(minibatches):
        lengths = draw(size, num_ranks, size.samples_per_rank(num_ranks), number)
        schedule = orchestrator(size, num_ranks, "all").plan(lengths)
        unplaced = dict(journeys(size, schedule, placed=False))
        for name, volume in journeys(size, schedule, placed=True):
            moved = volume - np.diag(np.diag(volume))
            between, before = (np.where(nodes[:, None] != nodes, v, 0).sum(axis=1) for v in (volume, unplaced[name]))
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
    found = {name: _means(each) for name, each in rows.items()}
    for each in found.values():
        each["placed_over_unplaced"] = each["between_nodes_bytes"] / each["between_nodes_unplaced_bytes"]
        each["placed_over_unplaced_most"] = each["between_nodes_most_bytes"] / each["between_nodes_most_unplaced_bytes"]
        each["all_gather_over_all_to_all"] = each["all_gather_bytes"] / each["all_to_all_bytes"]
    return found


def planning(num_ranks: int, samples_per_rank: int, repetitions: int) -> dict[str, float]:
    """Seconds that :meth:`Orchestrator.plan` takes for all phases of MLLM-10B, placement included."""
    size = SIZES["MLLM-10B"]
    seconds = []
    for number in range(repetitions):
        lengths = draw(size, num_ranks, samples_per_rank, number)
        orchestra = orchestrator(size, num_ranks, "all")
        start = time.perf_counter()
        schedule = orchestra.plan(lengths)
        seconds.append(time.perf_counter() - start)
    return {
        "ranks": num_ranks,
        "samples_per_rank": samples_per_rank,
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "repetitions": repetitions,
        "step_s": step_times(schedule, "collective").makespan / _FLOPS_PER_S,
    }


def comparison_table(entries: Sequence[dict[str, Any]]) -> Table:
    """Ratio, busy and bubble of each way."""
    table = Table(title="throughput over that of none under collectives, and busy/bubble in percent")
    for name in ("model", "ranks x samples", "", *WAYS):
        table.add_column(name, justify="right" if name in WAYS else "left")
    for entry in entries:
        for suffix, comm in (("", "collectives"), (", ODC", "ODC")):
            rows = [entry["ways"][f"{way}{suffix}"] for way in WAYS]
            cells = [f"{row['ratio']:.3f}x {100 * row['busy']:.1f}/{100 * row['bubble']:.1f}" for row in rows]
            table.add_row(entry["model"], f"{entry['ranks']} x {entry['samples_per_rank']}", comm, *cells)
    return table


def rigid_table(found: dict[str, dict[str, float]]) -> Table:
    """Figure 11."""
    table = Table(title=f"busy, percent, on {ABLATION_RANKS} ranks: algorithms of the encoders (figure 11)")
    table.add_column("model")
    for name in next(iter(found.values())):
        table.add_column(name, justify="right")
    for model, row in found.items():
        table.add_row(model, *(f"{100 * value:.1f}" for value in row.values()))
    return table


def moving_table(found: dict[str, dict[str, dict[str, float]]]) -> Table:
    """Figures 12 and 13."""
    table = Table(title=f"MB of a rank and minibatch, forward, on {ABLATION_RANKS} ranks (figures 12, 13)")
    columns = ("model", "what", "all-gather", "all-to-all", "between nodes", "unplaced", "of it", "most", "unplaced")
    for name in (*columns, "of it"):
        table.add_column(name, justify="left" if name in ("model", "what") else "right")
    for model, kinds in found.items():
        for name, row in kinds.items():
            values = [row[key] / 1e6 for key in ("all_gather_bytes", "all_to_all_bytes")]
            cells = [f"{value:.1f}" for value in values]
            for most in ("", "_most"):
                pair = (f"between_nodes{most}_bytes", f"between_nodes{most}_unplaced_bytes")
                cells += [f"{row[key] / 1e6:.2f}" for key in pair] + [f"{row[f'placed_over_unplaced{most}']:.3f}"]
            table.add_row(model, name, *cells)
    return table


def planning_table(rows: Sequence[dict[str, float]]) -> Table:
    """Table 2's ranks."""
    table = Table(title=f"planning all phases of MLLM-10B, {PLANNING_SAMPLES} samples a rank (table 2's sizes)")
    for name in ("ranks", "planning, s", "a step at 40 % MFU, s"):
        table.add_column(name, justify="right")
    for row in rows:
        spread = f"{row['median_s']:.2f} ({row['min_s']:.2f}-{row['max_s']:.2f})"
        table.add_row(f"{row['ranks']}", spread, f"{row['step_s']:.1f}")
    return table


def _rounded(value: Any) -> Any:
    """Six digits of all numbers."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def main(
    ranks: Annotated[list[int] | None, typer.Option(min=2, help=f"Compare on so many: {RANKS}.")] = None,
    model: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(SIZES)}.")] = None,
    minibatches: Annotated[int | None, typer.Option(min=1, help=f"Of each comparison ({MINIBATCHES}, else 2).")] = None,
    ablations: Annotated[bool, typer.Option(help="Figures 11 to 13 and planning, too.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Compare balancing no phase, the language model, and all phases of OrchMLLM's models, by their plans."""
    for name in model or ():
        if name not in SIZES:
            raise typer.BadParameter(f"{name!r}: expected one of {', '.join(SIZES)}", param_hint="--model")
    sizes = [SIZES[name] for name in model or SIZES]
    counts = {number: minibatches or MINIBATCHES.get(number, 2) for number in ranks or RANKS}
    jobs = [(size, number, size.samples_per_rank(number)) for number in counts for size in sizes]
    jobs += [(size, 2560, size.unbalanced_size) for size in sizes if 2560 in counts]
    result: dict[str, Any] = {"environment": describe_environment(), "paper_ratio": PAPER_RATIO, "comparisons": []}
    with progress_bar(Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(WAYS) * sum(counts[number] for _, number, _ in jobs))
        for size, number, samples in jobs:
            progress.update(bar, description=f"{size.name}, {number} ranks")
            entry = compare(size, number, samples, counts[number], lambda: progress.advance(bar))
            result["comparisons"].append(entry)
        if ablations:
            progress.update(bar, total=None, description="ablations")
            few = minibatches or 5
            result["rigid"] = {size.name: rigid(size, ABLATION_RANKS, few) for size in sizes}
            result["moving"] = {size.name: moving(size, ABLATION_RANKS, few) for size in sizes}
            progress.update(bar, description="planning")
            result["planning"] = [planning(number, PLANNING_SAMPLES, minibatches or 3) for number in PLANNING_RANKS]
    result = add_paper_sizes(result)
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(comparison_table(result["comparisons"]))
    for found in result["against_smaller_minibatches"]:
        console.print(
            f"{found['model']} on 2560 ranks, minibatches as large as the paper's with and without balance: "
            f"{found['ratio']:.2f}x (the paper: {PAPER_RATIO[0]} to {PAPER_RATIO[1]} in MFU)"
        )
    if ablations:
        console.print(rigid_table(result["rigid"]))
        console.print(moving_table(result["moving"]))
        console.print(planning_table(result["planning"]))
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(_rounded(result), indent=1) + "\n")


def add_paper_sizes(result: dict[str, Any]) -> dict[str, Any]:
    """All phases balanced, against none with the minibatches of the paper's baseline, on 2560 ranks."""
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


if __name__ == "__main__":
    typer.run(main)
