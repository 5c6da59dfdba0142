"""A vision-language model where only some samples have an image: plain FSDP2 with empty images, and ODC without.

    odc bench vlm

The benchmark runs ``examples/vlm_sft.py`` on CPU ranks: a tiny model like Qwen2.5-VL, whose encoder is twice as deep as
its language model. In plain FSDP2 a rank without an image encodes an empty one, because FSDP2's collectives need all
ranks; with ODC it skips the encoder. The ways take turns. Their losses are compared with those of one process, which
runs once.

Not covered: GPUs, large images, other ways to share out images (``odc bench multimodal``).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Run, Table, spread
from odc.bench.training.runs import check_examples, run_child

SCRIPT = Path("examples/vlm_sft.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
ODC_RUN = (sys.executable, "-m", "odc", "run", "--standalone")
FROZEN = "--freeze-encoder"
WAYS = {
    name + ", encoder frozen" * frozen: (launcher, options + (FROZEN,) * frozen)
    for frozen in (False, True)
    for name, launcher, options in (
        ("FSDP2, empty images", TORCHRUN, ("--dummies",)),
        ("ODC, empty images", ODC_RUN, ("--dummies",)),
        ("ODC", ODC_RUN, ()),
    )
}


def measure(
    run: Run,
    ranks: Annotated[int, typer.Option(min=2, help="That are started on this host.")] = 2,
    steps: Annotated[int, typer.Option(min=2, help="Of a run; the first one is not timed.")] = 24,
    width: Annotated[int, typer.Option(min=32, help="Of both parts of the model, a multiple of 32.")] = 128,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each way.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for data and logs.")] = Path("runs/vlm"),
) -> Entries:
    check_examples(SCRIPT, "transformers", "PIL")
    run.environment["threads_per_rank"] = 1

    def train(launcher: tuple[str, ...], num_ranks: int, options: tuple[str, ...]) -> Entries:
        sizes = ("--tiny", "--steps", str(steps), "--width", str(width), "--out", str(out))
        run_child([*launcher, "--nproc-per-node", str(num_ranks), str(SCRIPT), *sizes, *options], out)
        result: Entries = json.loads((out / "stdout.log").read_text().splitlines()[-1])
        run.advance()
        return result

    run.begin(2 + len(WAYS) * repetitions)
    alone = {frozen: train(TORCHRUN, 1, (FROZEN,) * frozen)["losses"] for frozen in (False, True)}
    found: dict[str, list[Entries]] = {name: [] for name in WAYS}
    for name, (launcher, options) in list(WAYS.items()) * repetitions:
        run.describe(name)
        found[name].append(train(launcher, ranks, options))
    runs = []
    for name, results in found.items():
        expected = alone[FROZEN in WAYS[name][1]]
        pairs = [pair for result in results for pair in zip(result["losses"], expected, strict=True)]
        per_s = spread([result["samples_per_s"] for result in results])
        runs.append({"way": name, "samples_per_s": per_s, "max_loss_difference": max(abs(a - b) for a, b in pairs)})
    for number, row in enumerate(runs):
        row["speedup"] = row["samples_per_s"]["median"] / runs[number // 3 * 3]["samples_per_s"]["median"]
    return {"runs": runs}


def figures(result: Entries) -> Figures:
    for row in result["runs"]:
        per_s, difference = row["samples_per_s"], row["max_loss_difference"]
        cells = f"{per_s['median']:.1f} ({per_s['min']:.1f}-{per_s['max']:.1f}) | {row['speedup']:.2f}x"
        yield f"| {row['way']} |", f" {cells} | {difference:.1e} |"


BENCHMARK = Benchmark(
    measure,
    (
        Table(
            "runs",
            "{settings[ranks]} ranks, a tiny model like Qwen2.5-VL",
            (Column("way", "way"),),
            (
                Column("samples/s", "samples_per_s", ".1f"),
                Column("speedup", "speedup", ".2f"),
                Column("loss differs", "max_loss_difference", ".1e"),
            ),
        ),
    ),
    quick={"steps": 8, "repetitions": 1},
    figures=(("docs/multimodal.md", figures, ["vlm"]),),
)
