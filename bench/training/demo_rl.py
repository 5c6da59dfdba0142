"""Train one small model by reinforcement learning (GRPO) three ways on this machine's CPU, and compare.

The benchmark runs ``examples/grpo.py`` of the repository, from its root: FSDP2's collectives and ODC with equal numbers
of microbatches, and ODC with balanced rollouts. The three ways take turns, so that a drift of the machine's speed
affects all of them. All start from the same weights and generate the same rollouts, to rounding; the benchmark compares
rewards and losses. It times the training part of each step, which includes sharing the rollouts out, but not generating
them. It also counts the bytes of rollouts that change ranks.

Not covered: GPUs, several hosts, an engine for rollouts, training while rollouts are made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Table
from odc.bench.harness.benchmark import Run as Bench
from odc.bench.training.demo import draw
from odc.bench.training.runs import POLICIES, Run, check_examples, runs_table, summarize, train_in_turns, way_of

SCRIPT = Path("examples/grpo.py")
CONFIGURATIONS = tuple(way_of(SCRIPT, *each) for each in POLICIES)


def measure(
    run: Bench,
    out: Annotated[Path, typer.Option(help="Folder for pictures.")] = Path("runs/rl"),
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each configuration.")] = 3,
    minibatches: Annotated[int, typer.Option(min=4, help="Optimizer steps of a run; two are warm-up.")] = 12,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks, one core each.")] = 2,
    max_completion: Annotated[int, typer.Option(min=8, help="Most tokens of a completion.")] = 252,
    hidden_size: Annotated[int, typer.Option(help="Of the model; a multiple of 64.")] = 256,
    num_layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the model.")] = 4,
) -> Entries:
    check_examples(SCRIPT, "transformers", "matplotlib")
    runs = train_in_turns(
        run,
        CONFIGURATIONS,
        out,
        repetitions=repetitions,
        num_ranks=ranks,
        minibatches=minibatches,
        options={
            "minibatches": minibatches,
            "max-completion": max_completion,
            "max-tokens": max_completion + 4,
            "hidden-size": hidden_size,
            "num-layers": num_layers,
        },
    )
    draw(out, runs)
    run.note(f"{out}: summary.json, losses.png, timeline.png")
    return run.keep({"runs": _summarize(runs)}, out / "summary.json")


def _summarize(runs: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    summary = summarize(runs)
    reference = _rollouts(next(iter(runs.values()))[0])["rewards"]
    for row in summary:
        found = [_rollouts(each) for each in runs[row["name"]]]
        differences = [abs(a - b) for one in found for a, b in zip(one["rewards"], reference, strict=True)]
        row |= {
            "rewards": found[0]["rewards"],
            "max_reward_difference": max(differences),
            "moved_bytes": found[0]["moved_bytes"],
            "moved_bytes_per_step": mean(found[0]["moved_bytes"]),
        }
    return summary


def _rollouts(run: Run) -> dict[str, list[float]]:
    found: dict[str, list[float]] = json.loads((run.folder / "rollouts.json").read_text())
    return found


def figures(result: Entries) -> Figures:
    """Figures: speedups of the other two ways over the first, and how much they move."""
    first, even, mini = result["runs"]
    yield (
        "",
        f"{even['speedup']:.2f} times as fast with ODC and equal numbers of microbatches, {mini['speedup']:.2f} times "
        f"with `lb-mini`, of which ranks waited {100 * mini['bubble_rate']:.1f} % of the time "
        f"({100 * first['bubble_rate']:.1f} % over collectives)",
    )
    yield (
        "",
        f"{1e-3 * first['moved_bytes_per_step']:.1f} kB of rollouts changed ranks in a step, with `lb-mini` "
        f"{1e-3 * mini['moved_bytes_per_step']:.1f} kB",
    )


BENCHMARK = Benchmark(
    measure,
    (
        runs_table(),
        Table(
            "runs",
            "rollouts",
            (Column("way", "name"),),
            (
                Column("moved a step, kB", "moved_bytes_per_step", ".1f", 1e-3),
                Column("final reward", lambda row: f"{row['rewards'][-1]:.3f}"),
                Column("reward diff.", "max_reward_difference", ".1e"),
            ),
            "moved: rollouts that changed ranks, of all ranks together.\n"
            "reward diff.: largest difference from the first way's rewards.",
        ),
    ),
    quick={"repetitions": 1, "minibatches": 6, "max_completion": 60, "hidden_size": 128, "num_layers": 2},
    figures=(("docs/reinforcement.md", figures, ["demo_rl"]),),
)
