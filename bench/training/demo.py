"""Train one small model three ways on this machine's CPU and compare: FSDP2's collectives, and ODC twice.

Runs ``examples/sft.py`` of the repository, from its root. The three configurations take turns, so that a
drift of the machine's speed meets all of them. All start from the same weights and see the same minibatches.
Writes the result (``summary.json``), loss curves, a timeline and a Perfetto trace into the folder ``--out``.

Not covered: GPUs, more than one host, models that do not fit into a cache, optimizers other than AdamW.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from odc.bench.harness.benchmark import Benchmark, Entries, Figures, Run
from odc.bench.training.runs import CONFIGURATIONS, check_examples, run_child, train_in_turns
from odc.bench.training.summary import quietest, runs_table, summarize
from odc.bench.training.trace import write_trace

SCRIPT = Path("examples/sft.py")


def measure(
    run: Run,
    out: Annotated[Path, typer.Option(help="Folder for pictures and trace.")] = Path("runs/demo"),
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each configuration.")] = 3,
    minibatches: Annotated[int, typer.Option(min=4, help="Minibatches of a run; two are warm-up.")] = 36,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks, one core each.")] = 2,
    hidden_size: Annotated[int, typer.Option(help="Of the model; a multiple of 64.")] = 256,
    num_layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the model.")] = 4,
) -> Entries:
    check_examples(SCRIPT, "transformers", "tokenizers", "matplotlib")
    data = prepare_data(run, out)
    runs = train_in_turns(
        run,
        SCRIPT,
        CONFIGURATIONS,
        out,
        repetitions=repetitions,
        num_ranks=ranks,
        minibatches=minibatches,
        options={"data": data, "minibatches": minibatches, "hidden-size": hidden_size, "num-layers": num_layers},
    )
    run.environment["transformers"] = version("transformers")

    from odc.bench.training.plots import plot_losses, plot_timelines  # only here: matplotlib is an extra

    drawn = quietest(runs)
    plot_losses(out / "losses.png", {name: each.losses for name, each in drawn.items()})
    first = next(iter(drawn.values()))
    middle = (first.num_untimed + len(first.losses)) // 2  # of the timed part
    plot_timelines(out / "timeline.png", {name: each.segments([middle]) for name, each in drawn.items()}, middle + 1)
    write_trace(out / "trace.json", drawn)
    run.note(f"{out}: summary.json, losses.png, timeline.png, trace.json (open it at ui.perfetto.dev)")
    return run.keep({"runs": summarize(runs)}, out / "summary.json")


def prepare_data(run: Run, out: Path) -> Path:
    """The samples of ``examples/sft.py``."""
    run.describe("preparing data")
    data = out / "data"
    script = str(SCRIPT.with_name("sft_data.py"))
    run_child([sys.executable, script, "--data", str(data)], out / "logs", lambda _: None)
    return data


WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def figures(result: Entries) -> Figures:
    names = {
        "collective-lb-micro": "FSDP2 collectives + LB-Micro",
        "odc-lb-micro": "ODC + LB-Micro",
        "odc-lb-mini": "ODC + LB-Mini",
    }
    for row in result["runs"]:
        difference = f"{row['max_loss_difference']:.1e}" if row["name"].startswith("odc") else "-"
        yield (
            f"| {names[row['name']]} |",
            f" {row['samples_per_s']:.1f} | {row['speedup']:.2f}x | {row['tokens_per_s']:.0f} | "
            f"{100 * row['bubble_rate']:.1f} % | {row['losses'][-1]:.4f} | {difference} |",
        )
    yield "", f"Medians of {WORDS[result['settings']['repetitions']]} interleaved repetitions on a noisy "
    yield "", f"on a noisy {result['environment']['num_cpus']}-core machine"


BENCHMARK = Benchmark(
    measure,
    "3 min, quick 50 s",
    (runs_table(),),
    quick={"repetitions": 1, "minibatches": 8},
    needs="the extra examples, the repository",
    figures=(("docs/performance.md", figures, ["demo_cpu_2ranks"]),),
)
