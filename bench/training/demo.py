"""Train one small model three ways on this machine's CPU and compare: FSDP2's collectives, and ODC twice.

The benchmark runs ``examples/sft.py`` of the repository, from its root. The three configurations take turns, so that a
drift of the machine's speed affects all of them. All start from the same weights and see the same minibatches. The
folder ``--out`` gets the result (``summary.json``), loss curves, a timeline and a Perfetto trace.

``--alternatives`` adds ODC through FSDP2's flat buffers (``ODC_STAGING=on``), which ODC otherwise avoids. It also adds
what one could do where memory allows, by ``examples/once_a_step.py``: ODC, FSDP2 and DDP that communicate once a step,
and so hold whole parameters and gradients on each rank; and ranks that do the same work and exchange nothing. These
have LB-Mini's minibatches. DDP's collectives run beside its backward, so its waiting is not seen.

Not covered: GPUs, more than one host, models that do not fit into a cache, optimizers other than AdamW.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from odc.bench.harness.benchmark import Benchmark, Entries, Figures
from odc.bench.harness.benchmark import Run as Bench
from odc.bench.training.bubble import write_trace
from odc.bench.training.runs import (
    POLICIES,
    Run,
    Way,
    check_examples,
    quietest,
    run_child,
    runs_table,
    summarize,
    train_in_turns,
    way_of,
)
from odc.config import STAGING

SCRIPT, ONCE_A_STEP = Path("examples/sft.py"), Path("examples/once_a_step.py")


CONFIGURATIONS = tuple(way_of(SCRIPT, *each) for each in POLICIES)
_MINI = ("--policy", "lb-mini")
ALTERNATIVES = (
    Way(SCRIPT, "odc-lb-mini-staged", "odc", (*_MINI, "--comm", "odc"), {STAGING: "on"}),
    Way(ONCE_A_STEP, "odc-once-a-step", "odc", (*_MINI, "--odc")),
    Way(ONCE_A_STEP, "fsdp2-once-a-step", "collective", _MINI),
    Way(ONCE_A_STEP, "ddp-once-a-step", "collective", (*_MINI, "--ddp")),
    Way(ONCE_A_STEP, "compute-alone", "collective", (*_MINI, "--compute-alone")),
)
"""Ways that ``--alternatives`` adds, with LB-Mini's minibatches."""


def measure(
    run: Bench,
    out: Annotated[Path, typer.Option(help="Folder for pictures and trace.")] = Path("runs/demo"),
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each configuration.")] = 3,
    minibatches: Annotated[int, typer.Option(min=4, help="Minibatches of a run; two are warm-up.")] = 36,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks, one core each.")] = 2,
    hidden_size: Annotated[int, typer.Option(help="Of the model; a multiple of 64.")] = 256,
    num_layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the model.")] = 4,
    alternatives: Annotated[
        bool,
        typer.Option("--alternatives", help="Also ODC staged, ODC, FSDP2 and DDP once a step, and no communication."),
    ] = False,
    dtype: Annotated[
        Literal["fp32", "bf16"], typer.Option(help="What is computed in, and gathered; gradients are summed in fp32.")
    ] = "fp32",
) -> Entries:
    check_examples(SCRIPT, "transformers", "tokenizers", "matplotlib")
    data = prepare_data(run, out)
    runs = train_in_turns(
        run,
        (*CONFIGURATIONS, *(ALTERNATIVES if alternatives else ())),
        out,
        repetitions=repetitions,
        num_ranks=ranks,
        minibatches=minibatches,
        options={
            "data": data,
            "minibatches": minibatches,
            "hidden-size": hidden_size,
            "num-layers": num_layers,
            "dtype": dtype,
        },
    )
    run.environment["transformers"] = version("transformers")

    write_trace(out / "trace.json", {name: run.recording for name, run in draw(out, runs).items()})
    run.note(f"{out}: summary.json, losses.png, timeline.png, trace.json (open it at ui.perfetto.dev)")
    return run.keep({"runs": without_the_unseen(summarize(runs))}, out / "summary.json")


def draw(out: Path, runs: Mapping[str, Sequence[Run]]) -> dict[str, Run]:
    """Draw loss curves and timelines of one repetition, which is returned."""
    from odc.bench.training.plots import plot_losses, plot_timelines  # only here: matplotlib is an extra

    drawn = quietest(runs)
    plot_losses(out / "losses.png", {name: each.losses for name, each in drawn.items() if name != "compute-alone"})
    first = next(iter(drawn.values()))
    middle = (first.num_untimed + len(first.losses)) // 2  # of the timed part
    plot_timelines(
        out / "timeline.png", {name: each.segments([middle]) for name, each in drawn.items()}, f"Minibatch {middle + 1}"
    )
    return drawn


def without_the_unseen(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Remove rates that cannot be seen: only FSDP2's collectives and ODC's operations record waiting and transfers.
    Ranks that exchange nothing have losses of their own, so their difference goes, too."""
    for row in rows:
        if row["name"] in ("ddp-once-a-step", "compute-alone"):
            row |= {"bubble_rate": None, "transfer_rate": None}
        if row["name"] == "compute-alone":
            row["max_loss_difference"] = None
    return rows


def prepare_data(run: Bench, out: Path) -> Path:
    """Prepare the samples of ``examples/sft.py``; return their file."""
    run.describe("preparing data")
    data = out / "data"
    script = str(SCRIPT.with_name("sft_data.py"))
    run_child([sys.executable, script, "--data", str(data)], out / "logs")
    return data


WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


NAMES = {
    "collective-lb-micro": "FSDP2 collectives + LB-Micro",
    "odc-lb-micro": "ODC + LB-Micro",
    "odc-lb-mini": "ODC + LB-Mini",
    "odc-lb-mini-staged": "ODC + LB-Mini, staged",
    "odc-once-a-step": "ODC + LB-Mini, once a step",
    "fsdp2-once-a-step": "FSDP2 once a step",
    "ddp-once-a-step": "DDP once a step",
    "compute-alone": "compute alone",
}


BY_SIZE_ONLY = ("odc-lb-mini-staged", "odc-once-a-step")


def figures(result: Entries) -> Figures:
    for row in result["runs"]:
        if row["name"] in BY_SIZE_ONLY:
            continue
        speedup, bubble, difference = f"{row['speedup']:.2f}x", "-", "-"
        if row["bubble_rate"] is not None:
            bubble = f"{100 * row['bubble_rate']:.1f} %"
        if row["max_loss_difference"]:
            difference = f"{row['max_loss_difference']:.1e}"
        if row["name"] != CONFIGURATIONS[0].name:
            speedups = [repetition["speedup"] for repetition in row["repetitions"]]
            speedup += f" ({min(speedups):.2f}-{max(speedups):.2f})"
        yield f"| {NAMES[row['name']]} |", f" {row['samples_per_s']:.1f} | {speedup} | {bubble} | {difference} |"
    times = WORDS[result["settings"]["repetitions"]]
    yield "", f"Medians of {times} repetitions that took turns, on a {result['environment']['num_cpus']}-core machine"


def figures_in_short(result: Entries) -> Figures:
    for row in result["runs"]:
        if row["name"] not in BY_SIZE_ONLY:
            yield f"| {NAMES[row['name']]} |", f" {row['speedup']:.2f}x |"


SIZES = ("demo_8m_fp32", "demo_8m_bf16", "demo_49m_fp32", "demo_49m_bf16")


def figures_by_size(*results: Entries) -> Figures:
    speedups = [{row["name"]: f"{row['speedup']:.2f}x" for row in result["runs"]} for result in results]
    for name, words in NAMES.items():
        yield f"| {words} |", f" {' | '.join(column[name] for column in speedups)} |"


BENCHMARK = Benchmark(
    measure,
    (runs_table(),),
    quick={"repetitions": 1, "minibatches": 8},
    figures=(
        ("docs/performance.md", figures, ["demo_8m_fp32"]),
        ("docs/performance.md", figures_by_size, SIZES),
        ("README.md", figures_in_short, ["demo_8m_fp32"]),
    ),
)
