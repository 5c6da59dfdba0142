"""Train a tiny omni-modal model on this machine's CPU with no balance, and with more and more of its phases balanced.

The benchmark runs ``examples/multimodal_sft.py`` of the repository, from its root: the thinker of Qwen2.5-Omni with
random weights, with images, sound and text made on the spot. Four configurations take turns, so that a drift of the
machine's speed affects all of them. All start from the same weights and see the same minibatches:

    none        FSDP2; every rank trains on the samples that it has drawn
    language    FSDP2; the language model is balanced over all ranks, encoders run where their sample is (pre-balancing)
    all         FSDP2; each encoder is balanced, too, and its outputs move by all-to-all (OrchMLLM's post-balancing)
    all-odc     ODC; the same, and a rank reads an encoder's outputs from their producer when it needs them

The benchmark compares losses of all minibatches and gradients of the last one with those of "none", and counts
exchanges. Where there are more ranks than cores, waiting ranks leave their cores to others, and balance gains little.

Not covered: GPUs, several hosts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures
from odc.bench.harness.benchmark import Run as Bench
from odc.bench.training.demo import WORDS
from odc.bench.training.runs import LIBRARIES, Run, Way, check_examples, quietest, runs_table, summarize, train_in_turns

SCRIPT = Path("examples/multimodal_sft.py")
OMNI = ("transformers.models.qwen2_5_omni.modeling_qwen2_5_omni", "odc.balance.multimodal.run")


CONFIGURATIONS = tuple(
    Way(SCRIPT, name, comm, ("--comm", comm, "--balance", balance, "--gradients"))
    for name, comm, balance in (
        ("none", "collective", "none"),
        ("language", "collective", "language"),
        ("all", "collective", "all"),
        ("all-odc", "odc", "all"),
    )
)


def measure(
    run: Bench,
    out: Annotated[Path, typer.Option(help="Folder for pictures.")] = Path("runs/multimodal"),
    ranks: Annotated[int, typer.Option(min=2, help="CPU ranks.")] = 2,
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each configuration.")] = 3,
    minibatches: Annotated[int, typer.Option(min=4, help="Minibatches of a run; two are warm-up.")] = 20,
    minibatch_size: Annotated[int, typer.Option(min=1, help="Samples per rank and minibatch.")] = 8,
    hidden_size: Annotated[int, typer.Option(help="Of all three parts of the model; a multiple of 32.")] = 128,
) -> Entries:
    check_examples(SCRIPT, "transformers", "matplotlib")
    runs = train_in_turns(
        run,
        CONFIGURATIONS,
        out,
        repetitions=repetitions,
        num_ranks=ranks,
        minibatches=minibatches,
        options={"minibatches": minibatches, "minibatch-size": minibatch_size, "hidden-size": hidden_size},
        libraries=(*LIBRARIES, *OMNI),
    )
    draw(out, runs)
    run.note(f"{out}: summary.json, losses.png, timeline.png")
    return run.keep({"runs": _summarize(runs)}, out / "summary.json")


def _summarize(runs: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    summary = summarize(runs)
    reference = [_gradients(run) for run in runs["none"]]
    for row in summary:
        repeated = runs[row["name"]]
        differences = [gradient_difference(_gradients(r), base) for r, base in zip(repeated, reference, strict=True)]
        moved = _moved(repeated[0])
        planning = [second for run in repeated for rank in _moved_ranks(run) for second in rank["planning_s"]]
        row |= {
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
    """The largest difference of an element, relative to the largest element of the same parameter's gradient.

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
    """Draw loss curves, and the minibatch of median length of the quietest repetition."""
    from odc.bench.training.plots import plot_losses, plot_phases  # only here: matplotlib is an extra

    drawn = quietest(runs)
    plot_losses(out / "losses.png", {name: run.losses for name, run in drawn.items()})
    base = drawn["none"]
    order = sorted(range(len(base.minibatch_seconds)), key=base.minibatch_seconds.__getitem__)
    middle = base.num_untimed + order[len(order) // 2]
    plot_phases(out / "timeline.png", {name: run.phases(middle) for name, run in drawn.items()}, middle + 1)


_WAYS = {
    "none": "nothing, FSDP2",
    "language": "language model, FSDP2",
    "all": "all phases, FSDP2",
    "all-odc": "all phases, ODC",
}


def figures_4ranks(result: Entries) -> Figures:
    language, everything, odc = (row["speedup"] for row in result["runs"][1:])
    yield "", f"Four ranks on its two cores: {language:.2f}x, {everything:.2f}x and {odc:.2f}x"


def figures(result: Entries) -> Figures:
    settings = result["settings"]
    times = f"{settings['minibatches']} steps, medians of {WORDS[settings['repetitions']]} interleaved repetitions"
    yield "Two CPU ranks,", f" {times} on a {result['environment']['num_cpus']}-core machine"
    for row in result["runs"]:
        speeds = [repetition["speedup"] for repetition in row["repetitions"]]
        speedup, differences = "1", "-"
        if row["name"] != "none":
            speedup = f"{row['speedup']:.2f}x ({min(speeds):.2f}-{max(speeds):.2f})"
            differences = f"{row['max_loss_difference']:.1e}, {row['max_gradient_difference']:.1e}"
        yield (
            f"| {_WAYS[row['name']]} |",
            f" {row['samples_per_s']:.1f} | {speedup} | {100 * row['bubble_rate']:.1f} % | "
            f"{row['exchanges_per_minibatch']:.0f} | {differences} |",
        )


BENCHMARK = Benchmark(
    measure,
    (
        runs_table(
            Column("exchanges per minibatch", "exchanges_per_minibatch", ".1f"),
            Column("moved KB", "moved_bytes_per_minibatch", ".0f", 1 / 1024),
            Column("planning ms", "planning_s", ".1f", 1e3),
            Column("grad. diff.", "max_gradient_difference", ".1e"),
        ),
    ),
    quick={"repetitions": 1, "minibatches": 6, "minibatch_size": 3, "hidden_size": 32},
    figures=(
        ("docs/multimodal.md", figures, ["multimodal_cpu_2ranks"]),
        ("docs/multimodal.md", figures_4ranks, ["multimodal_cpu_4ranks"]),
    ),
)
