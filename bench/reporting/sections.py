"""The sections of the report: what each measures, and what it says. Text is fixed; figures come from benchmarks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odc.balance import Scenario
from odc.balance.simulate.laws import even_lengths
from odc.balance.simulate.studies import FACTORS, study
from odc.bench.harness import catalogue, results
from odc.bench.harness.benchmark import Column, Entries, Numbers, Row, Table
from odc.bench.planning.paper_costs import paper_cost
from odc.bench.planning.tables import LAW_OF, Cell, read_cells, read_throughput

if TYPE_CHECKING:
    from odc.bench.reporting.report import Report


@dataclass(frozen=True)
class Section:
    """A heading, what is said of it, and what stands below: blocks of Markdown, measured."""

    name: str
    title: str
    text: str
    measure: Callable[[Report], Iterator[str]] | None


def primitives(report: Report) -> Iterator[str]:
    small = {"largest": 1 << 20, "repetitions": 3, "late": 1}
    found = report.measure("primitives", small, largest=1 << 26, factor=16, repetitions=9, late=2)
    yield report.tables("primitives", found)
    path, shown = report.picture("primitives", "Bus bandwidth against size, of gather, push, collectives and memory")
    from odc.bench.harness.pictures import draw  # only here: matplotlib is an extra

    benchmark = catalogue.find("primitives")
    assert benchmark.picture is not None
    draw(path, benchmark.picture, found, benchmark.title)
    yield shown


def demo(report: Report) -> Iterator[str]:
    folder = Path("runs/report/demo")
    small = {"minibatches": 4, "alternatives": False}
    found = report.measure("demo", small, out=folder, repetitions=2, minibatches=24, alternatives=True)
    yield report.tables("demo", found)
    for name, alternative in (("losses", "Losses: the curves lie on each other"), ("timeline", "Who did what when")):
        path, shown = report.picture(f"demo_{name}", alternative)
        shutil.copyfile(folder / f"{name}.png", path)
        yield shown


@dataclass(frozen=True)
class Emulation:
    """Minibatches of emulated devices: a cell of the paper's tables."""

    dataset: str
    model: str
    ranks: int
    minibatch_size: int
    minibatches: int
    scale: float


EMULATIONS = (
    Emulation("LongAlign", "1.5B", 8, 1, 4, 1.0),
    Emulation("LongAlign", "1.5B", 8, 2, 5, 2.0),
    Emulation("LongAlign", "1.5B", 8, 4, 8, 2.0),
    Emulation("LongAlign", "1.5B", 8, 8, 4, 2.0),
    Emulation("SWE-Smith", "1.5B", 8, 2, 5, 2.0),
    Emulation("SWE-Smith", "1.5B", 8, 4, 4, 2.0),
    Emulation("SWE-Smith", "1.5B", 8, 8, 3, 2.0),
    Emulation("AIME", "1.5B", 8, 2, 4, 2.0),
    Emulation("AIME", "1.5B", 8, 4, 4, 2.0),
    Emulation("LongAlign", "14B", 16, 4, 4, 3.0),
    Emulation("SWE-Smith", "14B", 16, 4, 4, 3.0),
    Emulation("LongAlign", "32B", 32, 4, 3, 5.0),
    Emulation("SWE-Smith", "32B", 32, 4, 3, 5.0),
)
"""About ten minutes; the models are those that the paper has on so many devices."""
QUICK_EMULATIONS = (Emulation("LongAlign", "1.5B", 8, 4, 1, 0.5),)
BASELINE, OURS = "Collective LB-Micro", "ODC LB-Mini"

_CELL = (
    Column("lengths", "dataset"),
    Column("model", "model"),
    Column("ranks", "ranks"),
    Column("samples a rank", "minibatch_size"),
)
BUBBLES = Table(
    "cells",
    "bubble rates in percent: collectives + LB-Micro, then ODC + LB-Mini",
    _CELL,
    tuple(
        Column(f"{which}{what}", f"{way}.{what}", ".1f")
        for way, which in (("baseline", ""), ("ours", "ODC: "))
        for what in ("planned", "measured", "waiting", "transfers", "host", "paper")
    ),
)
SPEEDUPS = Table(
    "cells",
    "throughput of ODC + LB-Mini over collectives + LB-Micro",
    _CELL,
    tuple(Column(what, f"speedup.{what}", ".2f") for what in ("planned", "measured", "without transfers", "paper")),
)


def emulated(report: Report) -> Iterator[str]:
    bubbles = {(c.dataset, c.model, c.method, c.minibatch_size): c for c in read_cells()}
    throughput = read_throughput()
    rows = []
    for each in QUICK_EMULATIONS if report.quick else EMULATIONS:
        cells = [bubbles[each.dataset, each.model, method, each.minibatch_size] for method in (BASELINE, OURS)]
        options = {
            "ranks": each.ranks,
            "model": each.model,
            "law": LAW_OF[each.dataset],
            "minibatch_size": each.minibatch_size,
            "minibatches": each.minibatches,
            "scale": each.scale,
            "way": [f"{cell.comm}-{cell.policy}" for cell in cells],
        }
        rows.append(emulated_row(each, cells, throughput, report.measure("emulated", options, **options)["runs"]))
    for table in (SPEEDUPS, BUBBLES):
        yield results.markdown(table, rows, {})
    path, shown = report.picture("emulated", "Speedup by plan, as measured and in the paper; measured bubble by plan")
    draw_emulated(path, rows)
    yield shown


def emulated_row(
    each: Emulation, cells: Sequence[Cell], throughput: dict[Cell, float], runs: Sequence[Row]
) -> dict[str, Any]:
    """Of both ways, the plan, what was measured, and the paper; rates in percent."""
    row: dict[str, Any] = {name: getattr(each, name) for name in ("dataset", "model", "ranks", "minibatch_size")}
    for name, cell, run in zip(("baseline", "ours"), cells, runs, strict=True):
        parts = {"planned": "planned_bubble", "measured": "bubble", "transfers": "communication"}
        row[name] = {
            **{part: 100 * run[parts.get(part, part)] for part in (*parts, "waiting", "host")},
            "paper": cell.paper,
        }
    busy = [run["minibatch_s"] * (1 - run["communication"]) for run in runs]
    row["speedup"] = {
        "planned": runs[1]["planned_ratio"],
        "measured": runs[1]["ratio"],
        "without transfers": busy[0] / busy[1],
        "paper": throughput[cells[1]] / throughput[cells[0]],
    }
    return row


def draw_emulated(path: Path, rows: Sequence[Row]) -> None:
    """Speedups as bars, and bubble rates against their plans."""
    from matplotlib.figure import Figure  # only here: matplotlib is an extra

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    speedups, bubbles = figure.subplots(1, 2, width_ratios=(2, 1))
    colours = {"planned": "#9a9a9a", "without transfers": "#7a9cc6", "measured": "#1f3b5c", "paper": "#5aa469"}
    for number, (kind, colour) in enumerate(colours.items()):
        at = [index + 0.21 * (number - 1.5) for index in range(len(rows))]
        speedups.bar(at, [row["speedup"][kind] for row in rows], 0.2, color=colour, label=kind)
    names = [f"{row['dataset']}\n{row['ranks']} ranks, {row['minibatch_size']} each" for row in rows]
    speedups.set_xticks(range(len(rows)), names, rotation=60, ha="right", fontsize=8)
    speedups.set_ylabel("throughput over collectives + LB-Micro")
    speedups.axhline(1.0, color="black", linewidth=1)
    for way, colour, label in (("baseline", "#d1495b", "collectives + LB-Micro"), ("ours", "#1f3b5c", "ODC + LB-Mini")):
        points = [(row[way]["planned"], row[way]["measured"]) for row in rows]
        bubbles.scatter(*zip(*points, strict=True), color=colour, label=label)
    bubbles.plot([0, 80], [0, 80], "--", color="#9a9a9a", label="as planned")
    bubbles.set_xlabel("planned bubble rate, %")
    bubbles.set_ylabel("measured bubble rate, %")
    for axes in (speedups, bubbles):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def hybrid(report: Report) -> Iterator[str]:
    small = {"ranks": 4, "minibatches": 1, "scale": 0.5}
    found = report.measure(
        "emulated",
        small,
        hosts=2,
        numel=1 << 16,
        way=["odc-lb-mini"],
        sharding=["full", "hybrid"],
        minibatches=5,
        scale=2.0,
    )
    yield report.tables("emulated", found)


def streams(report: Report) -> Iterator[str]:
    found = report.measure("batching", {}, only="longalign")
    yield report.tables("batching", found, "streams")
    small = {"out": Path("runs/report/streams")}
    found = report.measure("stream-training", small, samples=150, repetitions=1, out=Path("runs/report/streams"))
    yield report.tables("stream-training", found)


def modalities(report: Report) -> Iterator[str]:
    small = {"minibatches": 1, "scale": 0.3, "ranks": 4}
    found = report.measure("multimodal-emulated", small, model=["MLLM-84B"], minibatches=2, scale=2.0)
    yield report.tables("multimodal-emulated", found)


FIGURE_10 = ("minibatch_size", "max_length", "packing_ratio", "devices")


def planning(report: Report) -> Iterator[str]:
    yield report.tables("tables", report.measure("tables", {}, model=["1.5B"]), "errors")
    lengths = even_lengths("longalign", 512 if report.quick else 2048)
    scenario = Scenario(lengths, paper_cost("1.5B"), 8, 4)
    for factor in FIGURE_10:
        values = FACTORS[factor][:2] if report.quick else FACTORS[factor]
        points = study(scenario, factor, values)
        name = factor.replace("_", " ")
        table = Table(
            "points",
            f"planned speedup by {name}",
            (Column("", lambda row: row["name"]),),
            tuple(Column(f"{point.value:g}", f"at {place}", ".2f") for place, point in enumerate(points)),
        )
        speedups = {f"at {place}": point.speedup for place, point in enumerate(points)}  # a dot in a key would nest
        row = {"name": name, **speedups}
        yield results.markdown(table, [row], {})
    yield report.tables("planning", report.measure("planning", {}, repetitions=2))


def host_time(report: Report) -> Iterator[str]:
    small: Entries = {"ranks": Numbers(2), "repetitions": 2, "setups": 1}
    found = report.measure("host-time", small, ranks=Numbers(2, 4, 8), repetitions=4, setups=2, accumulate=["direct"])
    table = catalogue.find("host-time").tables[0]
    yield results.markdown(table, found[table.rows], found)
    small = {"units": 4, "rounds": 2, "repetitions": 2}
    yield report.tables("fsdp-host-time", report.measure("fsdp-host-time", small, repetitions=10), "parts")


SECTIONS = (
    Section(
        "primitives",
        "Primitives",
        """\
`odc bench primitives`: `gather` and `scatter_accumulate` beside collectives and plain memory operations. All ranks
begin each operation together, so one-sided operations do not profit from their freedom here. `busbw` is counted as
nccl-tests does. The second table is about that freedom: what the others lose when a rank is late.""",
        primitives,
    ),
    Section(
        "demo",
        "Training a small model",
        """\
`odc bench demo --alternatives`: a Qwen2 of 8 million parameters on two CPU ranks, and what one could do instead.
*Once a step*: no synchronization of gradients and no resharding inside the step, which needs memory for whole
parameters and gradients on each rank. *Compute alone*: ranks exchange nothing; nothing can be faster. Waiting of
DDP is not seen: its collectives go beside its backward.""",
        demo,
    ),
    Section(
        "emulated",
        "Emulated devices",
        """\
`odc bench emulated`: each rank trains sleeping layers inside real FSDP2 units; a sleep takes what the cost model
says. Collectives are gloo's. *Planned* is what the plans of the same minibatches promise; the paper's speedups are
of its tables 3 and 5, its bubble rates of tables 4 and 6 (figures 8 and 9 draw tables 5 and 3). The minibatches
here are few, so compare what was measured with the plan, and the plan with the paper. AIME's samples are shared out
in equal numbers, as in the paper.

*Waiting*, *transfers* and *host* are the parts of the measured bubble. All ranks of a collective are awake at the
same time and queue for this machine's cores: most of their *transfers* is that queue. *Without transfers* is the
speedup with the time of transfers taken off on both sides.""",
        emulated,
    ),
    Section(
        "hybrid",
        "Hybrid sharding",
        """\
`odc bench emulated --hosts 2`: the ranks pose as two hosts, with TCP over loopback between them. *Full*: a layer is
sharded over all ranks, so a gather and a push cross between hosts. *Hybrid*: sharded within a host, summed over
hosts once a minibatch. The paper's figures 12 and 13 compare the two on GPUs and a real network; here the network
is this machine's memory, and layers are small.""",
        hybrid,
    ),
    Section(
        "streams",
        "Streams",
        """\
`odc bench batching`: simulated epochs of samples whose lengths show only when they are read, by what is aligned
between ranks, beside LB-Mini, which knows all lengths. Then `odc bench stream-training`: the small model, trained
on streams.""",
        streams,
    ),
    Section(
        "modalities",
        "Several modalities",
        """\
`odc bench multimodal-emulated`: encoders and a language model that sleep; what moves between them is really sent,
shrunk. *Language*: the language model's work is balanced; *all*: that of encoders, too; *all, ODC*: without
collectives.""",
        modalities,
    ),
    Section(
        "planning",
        "Plans",
        """\
How far simulated bubble rates are from the paper's tables 4 and 6 (`odc bench tables`), how the planned speedup of
ODC with LB-Mini over collectives with LB-Micro depends on one factor at a time (the paper's figure 10, whose values
are not printed there: it peaks at a moderate minibatch size, grows with the longest sample and with devices, and
shrinks with the packing ratio), and what planning costs (`odc bench planning`).""",
        planning,
    ),
    Section(
        "host-time",
        "Host time",
        """\
`odc bench host-time`: CPU time of the calling thread, bytes aside, against the number of ranks. Then
`odc bench fsdp-host-time`: what that adds to FSDP2's own, for a unit of 12 parameters and a microbatch.""",
        host_time,
    ),
    Section(
        "limits",
        "What emulation leaves out",
        """\
- A sleep takes no core, no memory and no bandwidth: nothing here slows down because something else is moving or
  computing.
- Layers have few elements: a transfer takes the time of its host work, not of its bytes. Where bytes matter, look
  at *Primitives*, and there at bandwidths of one host's memory.
- Ranks share this machine's cores. Whatever is awake at the same time queues for one; on machines with a core for
  each rank, host time overlaps more, and collectives profit most.
- Communication does not run beside compute, neither FSDP2's nor ODC's. On GPUs both overlap, so transfers cost less
  than here.
- Costs are those of the cost model, exactly. Real kernels have noise, and ranks whose speeds differ.
- Hosts are poses: what goes between them goes over loopback.
- No GPU, NVLink, InfiniBand or driver takes part: `bench/results/UNPROVEN.md` says what has run on a GPU.""",
        None,
    ),
)
