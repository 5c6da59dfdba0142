"""Train a tiny omni-modal model on this machine's CPU with no balance, and with more and more of its phases balanced.

    python -m odc.bench.training.multimodal --ranks 2 --out runs/multimodal
    python -m odc.bench.training.multimodal --ranks 4 --json runs/multimodal_4ranks.json

Runs ``examples/multimodal_sft.py`` of the repository, from its root: the thinker of Qwen2.5-Omni with random weights,
images, sound and text made on the spot. Four configurations take turns, so that a drift of the machine's speed meets
all of them, and all start from the same weights and see the same minibatches:

    none        FSDP2; every rank trains on the samples that it has drawn
    language    FSDP2; the language model is balanced over all ranks, encoders run where their sample is (pre-balancing)
    all         FSDP2; each encoder is balanced, too, what it makes moves by all-to-all (OrchMLLM's post-balancing)
    all-odc     ODC; the same, and what an encoder makes is read from its producer when it is needed

Losses of all minibatches and the gradients of the last one are compared with those of "none"; exchanges are counted.
More ranks than cores share cores: waiting ranks then leave theirs to the others, and balance gains little.

Not covered: GPUs, several hosts.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from odc.bench.harness.environment import describe_environment
from odc.bench.training.runs import LIBRARIES, ChildError, Run, start_launcher, train_in_turns
from odc.bench.training.summary import quietest, summarize

SCRIPT = Path("examples/multimodal_sft.py")
OMNI = ("transformers.models.qwen2_5_omni.modeling_qwen2_5_omni", "odc.balance.multimodal.run")
_WIDTH = 110

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Balance:
    """One way to train."""

    name: str
    comm: str
    balance: str

    @property
    def options(self) -> list[str]:
        """What the script is told."""
        return ["--comm", self.comm, "--balance", self.balance, "--gradients"]


CONFIGURATIONS = (
    Balance("none", "collective", "none"),
    Balance("language", "collective", "language"),
    Balance("all", "collective", "all"),
    Balance("all-odc", "odc", "all"),
)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder for all results.")] = Path("runs/multimodal"),
    ranks: Annotated[int, typer.Option(min=2, help="CPU ranks.")] = 2,
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each configuration.")] = 3,
    minibatches: Annotated[int, typer.Option(min=4, help="Minibatches of a run; two are warm-up.")] = 20,
    minibatch_size: Annotated[int, typer.Option(min=1, help="Samples per rank and minibatch.")] = 8,
    hidden_size: Annotated[int, typer.Option(help="Of all three parts of the model; a multiple of 32.")] = 128,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the summary to this file.")] = None,
) -> None:
    """Train a tiny omni-modal model four ways; compare speed, losses and gradients."""
    console = Console()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no rank outlives us
    if not SCRIPT.is_file():
        print(f"{SCRIPT} is not here: run this from the root of the repository", file=sys.stderr)
        raise typer.Exit(2)
    missing = [name for name in ("transformers", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"this needs {', '.join(missing)}: pip install '.[examples]'", file=sys.stderr)
        raise typer.Exit(2)
    sizes = {"minibatches": minibatches, "minibatch-size": minibatch_size, "hidden-size": hidden_size}
    try:
        runs = _run_all(console, out, repetitions, ranks, sizes)
    except ChildError as error:
        console.print("[red]failed:[/red]", end=" ")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    document: dict[str, Any] = {
        "runs": _summarize(runs),
        "settings": {**sizes, "ranks": ranks, "repetitions": repetitions},
        "environment": {**describe_environment(), "threads_per_rank": 1},
    }
    (out / "summary.json").write_text(json.dumps(document, indent=1))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(document, indent=1) + "\n")
    draw(out, runs)
    Console(width=min(_WIDTH, console.width) if console.is_terminal else _WIDTH).print(table(document["runs"]))
    console.print(f"{out}: summary.json, losses.png, timeline.png")


def _run_all(
    console: Console, out: Path, repetitions: int, ranks: int, sizes: Mapping[str, int]
) -> dict[str, list[Run]]:
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    with closing(start_launcher((*LIBRARIES, *OMNI))) as launcher:
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


def _summarize(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, Any]]:
    summary = summarize(runs)
    reference = [_gradients(run) for run in runs["none"]]
    for name, repeated in runs.items():
        differences = [gradient_difference(_gradients(r), base) for r, base in zip(repeated, reference, strict=True)]
        moved = _moved(repeated[0])
        planning = [second for run in repeated for rank in _moved_ranks(run) for second in rank["planning_s"]]
        summary[name] |= {
            "max_gradient_difference": max(differences),
            "exchanges_per_minibatch": sum(moved["cargoes"].values()) / len(repeated[0].losses),
            "exchanges": dict(moved["cargoes"]),
            "moved_bytes_per_minibatch": sum(moved["received_bytes"].values()) / len(repeated[0].losses),
            "planning_s": median(planning),
        }
    return summary


def _moved_ranks(run: Run) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(run.folder.glob("moved-rank*.json"))]


def _moved(run: Run) -> dict[str, Counter[str]]:
    """Cargoes are the same on all ranks; what was received adds up."""
    ranks = _moved_ranks(run)
    received: Counter[str] = Counter()
    for rank in ranks:
        received.update(rank["received_bytes"])
    return {"cargoes": Counter(ranks[0]["cargoes"]), "received_bytes": received}


def _gradients(run: Run) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(run.folder / "gradients.pt", weights_only=True)
    return found


def gradient_difference(found: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> float:
    """Largest difference of an element, over the largest element of the same parameter's gradient.

    Raises:
        ValueError: they are of different parameters.
    """
    if set(found) != set(reference):
        raise ValueError(f"gradients of different parameters: {sorted(set(found) ^ set(reference))}")
    worst = 0.0
    for name, gradient in reference.items():
        scale = float(gradient.abs().max())
        worst = max(worst, float((found[name] - gradient).abs().max()) / (scale or 1.0))
    return worst


def draw(out: Path, runs: Mapping[str, Sequence[Run]]) -> None:
    """Loss curves, and the minibatch of median length of the quietest repetition."""
    from odc.bench.training.plots import plot_losses, plot_phases  # only here: matplotlib is an extra

    drawn = quietest(runs)
    plot_losses(out / "losses.png", {name: run.losses for name, run in drawn.items()})
    base = drawn["none"]
    order = sorted(range(len(base.minibatch_seconds)), key=base.minibatch_seconds.__getitem__)
    middle = base.num_untimed + order[len(order) // 2]
    plot_phases(out / "timeline.png", {name: run.phases(middle) for name, run in drawn.items()}, middle + 1)


def table(summary: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row per configuration."""
    shown = Table(box=SIMPLE)
    shown.add_column("balanced", no_wrap=True)
    for heading in (
        *("samples\nper s", "speedup", "waiting", "exchanges per\nminibatch", "moved\nKB", "planning\nms"),
        *("loss\ndiff.", "grad.\ndiff."),
    ):
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, entry in summary.items():
        speeds = [repetition["speedup"] for repetition in entry["repetitions"]]
        shown.add_row(
            name,
            f"{entry['samples_per_s']:.2f}",
            "1" if name == "none" else f"{entry['speedup']:.2f}x ({min(speeds):.2f}-{max(speeds):.2f})",
            f"{entry['bubble_rate']:.1%}",
            f"{entry['exchanges_per_minibatch']:.1f}",
            f"{entry['moved_bytes_per_minibatch'] / 1024:.0f}",
            f"{1000 * entry['planning_s']:.1f}",
            "-" if name == "none" else f"{entry['max_loss_difference']:.1e}",
            "-" if name == "none" else f"{entry['max_gradient_difference']:.1e}",
        )
    return shown


if __name__ == "__main__":
    app()
