"""Train one small model three ways on this machine's CPU and compare: FSDP2's collectives, and ODC twice.

    python -m odc.bench.training.demo --out runs/demo

Runs ``examples/sft.py`` of the repository, from its root. The three configurations take turns, so that a
drift of the machine's speed meets all of them. All start from the same weights and see the same minibatches.

Not covered: GPUs, more than one host, models that do not fit into a cache, optimizers other than AdamW.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from odc.bench.harness.environment import describe_environment
from odc.bench.training.runs import CONFIGURATIONS, ChildError, Run, run_child, start_launcher, train_in_turns
from odc.bench.training.summary import quietest, summarize, table
from odc.bench.training.trace import write_trace

SCRIPT = Path("examples/sft.py")
WIDTH = 100  # columns of the table

app = typer.Typer(add_completion=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder for all results.")] = Path("runs/demo"),
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each configuration.")] = 3,
    minibatches: Annotated[int, typer.Option(min=4, help="Minibatches of a run; two are warm-up.")] = 36,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks, one core each.")] = 2,
    hidden_size: Annotated[int, typer.Option(help="Of the model; a multiple of 64.")] = 256,
    num_layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the model.")] = 4,
) -> None:
    """Train a small Qwen2 on CPU ranks, with FSDP2's collectives and with ODC; compare speed and losses."""
    console = Console()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no rank outlives us
    _check_installation()
    sizes = {"minibatches": minibatches, "hidden-size": hidden_size, "num-layers": num_layers}
    try:
        runs = _run_all(console, out, repetitions, ranks, sizes)
    except ChildError as error:
        console.print("[red]demo failed:[/red]", end=" ")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    settings = {**sizes, "ranks": ranks, "repetitions": repetitions}
    summary = _write(out, runs, settings)
    Console(width=min(WIDTH, console.width) if console.is_terminal else WIDTH).print(table(summary))
    console.print(f"{out}: summary.json, losses.png, timeline.png, trace.json (open it at ui.perfetto.dev)")


def _check_installation() -> None:
    if not SCRIPT.is_file():
        print(f"{SCRIPT} is not here: run the demo from the root of the repository", file=sys.stderr)
        raise typer.Exit(2)
    missing = [n for n in ("transformers", "tokenizers", "matplotlib") if importlib.util.find_spec(n) is None]
    if missing:
        print(f"the demo needs {', '.join(missing)}: pip install '.[examples]'", file=sys.stderr)
        raise typer.Exit(2)


def _run_all(console: Console, out: Path, repetitions: int, ranks: int, sizes: dict[str, int]) -> dict[str, list[Run]]:
    data = out / "data"
    options = ["--data", str(data)]
    for name, value in sizes.items():
        options += [f"--{name}", str(value)]
    with closing(start_launcher()) as launcher:
        with console.status("preparing data"):
            prepare = [sys.executable, str(SCRIPT.with_name("sft_data.py")), "--data", str(data)]
            run_child(prepare, out / "logs", lambda _: None)
        return train_in_turns(
            launcher,
            SCRIPT,
            CONFIGURATIONS,
            out,
            repetitions=repetitions,
            num_ranks=ranks,
            minibatches=sizes["minibatches"],
            options=options,
            console=console,
        )


def _write(out: Path, runs: dict[str, list[Run]], settings: dict[str, int]) -> dict[str, dict[str, Any]]:
    from odc.bench.training.plots import plot_losses, plot_timelines  # only here: matplotlib is an extra

    summary = summarize(runs)
    environment = {
        **describe_environment(),
        "threads_per_rank": 1,
        "transformers": version("transformers"),
    }
    document = {"runs": summary, "settings": settings, "environment": environment}
    (out / "summary.json").write_text(json.dumps(document, indent=1))
    drawn = quietest(runs)
    plot_losses(out / "losses.png", {name: run.losses for name, run in drawn.items()})
    middle = _middle_minibatch(list(drawn.values()))
    plot_timelines(out / "timeline.png", {name: run.segments([middle]) for name, run in drawn.items()}, middle + 1)
    write_trace(out / "trace.json", drawn)
    return summary


def _middle_minibatch(runs: Sequence[Run]) -> int:
    """The one in the middle of the timed part, the same for all configurations."""
    return (runs[0].num_untimed + len(runs[0].losses)) // 2


if __name__ == "__main__":
    app()
