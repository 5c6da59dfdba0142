"""Does a run on groups of ranks reach what ``odc plan context-parallel`` says? Emulated compute, real FSDP2.

The benchmark works as :mod:`.emulated` does, but neighbouring ranks form groups that run the same microbatches, each a
slice of every sample. Before each forward and backward of a layer the ranks of a group meet in a barrier, as they do to
exchange keys and values. Then each sleeps as long as :class:`~odc.balance.costs.context_parallel.ContextParallel` says
of its slice and of the exchange. Parameters are sharded over all ranks. All ways, whatever the size of the groups, have
the same samples in the same minibatches. A group's microbatch holds as many tokens as its ranks together.

Costs are those of ``odc plan`` by default: FLOPs of Qwen2.5-7B at 40 % of the peak of one H100, and NVLink as the data
sheet has it. Sleeps last as long as these costs say. Throughput is compared with that of the first way on the first
size.

    planned     bubble rate of the plans: the part of the ranks' time in which one group waits for another
    overhead    overhead rate of the run: the part of the ranks' time that is neither compute nor exchange of keys and
                values. Barriers count

Not covered: bytes of keys and values, slices that are not equal, GPUs, and what :mod:`.emulated` does not cover. Ranks
share few cores, and the ranks of a group are awake at the same time: the overhead rate is an upper bound. All ranks of
a group wait for the one that wakes up last, so on a machine that does other work give ranks precedence (``chrt -r 1 odc
bench context-parallel``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from odc.balance import Plan, Scenario, TransformerCost, law_names, preset_names
from odc.balance.costs.context_parallel import ContextParallel
from odc.balance.costs.devices import DEVICES, LINKS
from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Numbers, Run, Table, check_known, numbers
from odc.bench.training.emulated import NUM_UNTIMED, PLANNED_AND_MEASURED, WAYS, Settings, add_ratios, run_way

DEVICE = DEVICES["h100"]
FLOPS_PER_S = 0.4 * DEVICE.flops_per_s
SIZES, SAMPLES = Numbers(1, 2, 4, 8), Numbers(1, 4)
LARGEST_DIFFERENCE = 5.0  # points, between the planned bubble rate and the measured overhead rate


@dataclass(frozen=True)
class GroupSettings(Settings):
    """Settings of a run on groups of one size."""

    link: str = "nvlink"

    def cost(self) -> TransformerCost:
        return TransformerCost.from_config(self.model)

    def scenario(self) -> Scenario:
        alone, size = super().scenario(), self.group_size
        group = ContextParallel.from_config(self.model, size, DEVICE.links[self.link])
        assert alone.max_tokens is not None
        return alone.on_groups(size, group.flops(self.cost(), FLOPS_PER_S), size * alone.max_tokens)

    def seconds_per_cost(self, plans: Sequence[Plan]) -> float:
        """Seconds per FLOP, so that compute takes ``scale`` times as long as planned."""
        return self.scale / FLOPS_PER_S


def measure(
    run: Run,
    context_parallel: Annotated[
        Numbers, typer.Option(parser=numbers, help="Ranks of a group; each divides the number of ranks.")
    ] = SIZES,
    minibatch_size: Annotated[Numbers, typer.Option(parser=numbers, help="Samples per rank and minibatch.")] = SAMPLES,
    way: Annotated[
        list[str] | None,
        typer.Option(help=f"Of {', '.join(WAYS)}; default: collective-lb-micro-global and odc-lb-mini."),
    ] = None,
    scale: Annotated[float, typer.Option(min=0.01, help="Compute takes so many times as long as planned.")] = 1.0,
    samples: Annotated[int, typer.Option(min=1, help="Per rank, in all timed minibatches.")] = 8,
    ranks: Annotated[int, typer.Option(min=1, help="That are started on this host.")] = 8,
    layers: Annotated[int, typer.Option(min=1, help="Of the emulated model, a unit each.")] = 2,
    model: Annotated[str, typer.Option(help="A preset: what costs are counted of.")] = "qwen2.5-7b",
    link: Annotated[str, typer.Option(help=f"Of {', '.join(LINKS)}: what keys and values cross.")] = "nvlink",
    law: Annotated[str, typer.Option(help=f"Of lengths: {', '.join(law_names())}.")] = "longalign",
    seed: Annotated[int, typer.Option(help="Of the shuffle.")] = 0,
) -> Entries:
    ways = way or ["collective-lb-micro-global", "odc-lb-mini"]
    check_known(way=(ways, WAYS), model=([model], preset_names()), link=([link], LINKS), law=([law], law_names()))
    if wrong := [size for size in context_parallel if ranks % size]:
        raise ValueError(f"--context-parallel {wrong[0]}: {ranks} ranks cannot be shared out evenly")
    counts = {size: max(1, samples // size) for size in minibatch_size}
    run.begin(sum(count + NUM_UNTIMED for count in counts.values()) * len(context_parallel) * len(ways))
    runs = []
    for each, count in counts.items():
        compared = []
        for size in context_parallel:
            settings = GroupSettings(ranks, layers, count, each, scale, model, law, seed, group_size=size, link=link)
            for name in ways:
                run.describe(f"{name}, {each} samples a rank, groups of {size}")
                entry = run_way(run, name, settings)
                compared.append({"minibatch_size": each, "context_parallel": size, **entry})
                if abs(entry["difference_points"]) > LARGEST_DIFFERENCE:
                    run.miss(
                        f"{name}, {each} samples a rank, groups of {size}: the overhead rate is "
                        f"{entry['difference_points']:.1f} points above the planned bubble rate"
                    )
        add_ratios(compared)
        runs += compared
        run.keep({"runs": runs})
    return {"runs": runs, "largest_difference_points": max(abs(row["difference_points"]) for row in runs)}


def figures(result: Entries) -> Figures:
    rows = {(row["minibatch_size"], row["context_parallel"], row["way"]): row for row in result["runs"]}
    for each, size in dict.fromkeys((samples, size) for samples, size, _ in rows):
        fsdp, odc = (rows[each, size, way] for way in ("collective-lb-micro-global", "odc-lb-mini"))
        cells = "".join(
            f" {100 * row['planned_bubble']:.1f} % | {100 * row['bubble']:.1f} % | {row['planned_ratio']:.2f}x | "
            f"{row['ratio']:.2f}x |"
            for row in (fsdp, odc)
        )
        yield f"| {each}, {size} |", cells


BENCHMARK = Benchmark(
    measure,
    (
        Table(
            "runs",
            "{settings[ranks]} ranks, {settings[law]}: percent of all ranks' time, and throughput over the first",
            (
                Column("samples a rank", "minibatch_size"),
                Column("ranks of a group", "context_parallel"),
                Column("way", "way"),
            ),
            PLANNED_AND_MEASURED,
        ),
    ),
    quick={"minibatch_size": Numbers(1), "context_parallel": Numbers(1, 4), "samples": 2, "scale": 0.2},
    figures=(("docs/policies.md", figures, ["context_parallel"]),),
)
