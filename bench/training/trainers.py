"""Samples per second of scripts of three training libraries: ``torchrun``, ``odc run``, ``odc run --balance lb-mini``,
``odc run --online``.

The benchmark runs ``examples/{accelerate_sft,hf_trainer,trl_sft}.py`` of the repository, from its root, with FSDP2.
Lengths are long-tailed (8 to 400 tokens, log-normal). The ways to launch take turns, so that a drift of the machine's
speed affects all of them. Each run trains on the same samples, in the same steps (except ``--online``, which chooses
them), and its losses are compared. Times are the scripts' own: they start with the first step, warm-up included.

The comparison shows what a user gets by changing the command. The scripts pad their batches and LB-Mini packs samples
into rows, so a part of its gain is padding that is not computed. ``--equal`` adds LB-Micro, which packs too, with equal
numbers of microbatches.

Not covered: GPUs, more than one host, FSDP1.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Run, Table, spread
from odc.bench.training.demo import WORDS
from odc.bench.training.runs import ChildError, check_examples, run_child

EXAMPLES = Path("examples")
SCRIPTS = ("accelerate_sft", "hf_trainer", "trl_sft")
LONGEST = 401  # tokens of a sample of the scripts, TRL's token for the end included
LARGEST_LOSS_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class Way:
    """One way to launch a script."""

    name: str
    odc: bool
    policy: str | None = None
    online: bool = False
    """Whether samples are balanced online, in rows of at most as many tokens as the longest sample has, which is the
    policies' default."""

    def command(self, script: str, num_ranks: int, options: list[str]) -> list[str]:
        """The words of the command line."""
        ranks = ["--nproc-per-node", str(num_ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        launcher = ["odc", "run", *ranks] if self.odc else ["torch.distributed.run", *ranks]
        balance = [] if self.policy is None else ["--balance", self.policy]
        balance += ["--online", "--max-tokens", str(LONGEST)] * self.online
        path = str(EXAMPLES / f"{script}.py")
        if script == "accelerate_sft":  # a loop of one's own: the options are the script's
            return [sys.executable, "-m", *launcher, path, *options, *balance]
        return [sys.executable, "-m", *launcher, *balance, path, *options]


PLAIN = Way("torchrun", odc=False)
WAYS = (
    PLAIN,
    Way("odc run", odc=True),
    Way("odc run --balance lb-mini", odc=True, policy="lb-mini"),
    Way("odc run --online", odc=True, online=True),
)
EQUAL = Way("odc run --balance lb-micro", odc=True, policy="lb-micro")


def measure(
    run: Run,
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each script, each way.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of a run.")] = 40,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks, one core each.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per rank and batch, 4 batches a step.")] = 2,
    script: Annotated[list[str] | None, typer.Option(help="Only this script; may be repeated.")] = None,
    equal: Annotated[bool, typer.Option(help="Also LB-Micro, with equal numbers of microbatches.")] = False,
) -> Entries:
    check_examples(EXAMPLES, "accelerate", "transformers", "trl")
    scripts = script or list(SCRIPTS)
    ways = [*WAYS, EQUAL] if equal else list(WAYS)
    options = ["--steps", str(steps), "--per-device-batch-size", str(batch_size)]
    runs = _run_all(run, scripts, ways, repetitions, ranks, options)
    run.environment |= {
        "threads_per_rank": 1,
        **{name: version(name) for name in ("accelerate", "transformers", "trl")},
    }
    return {"rows": [_summarize(name, way, runs) for name in scripts for way in ways]}


Runs = dict[tuple[str, str], list[dict[str, Any]]]
"""(script, way) -> what the script wrote, run by run."""


def _run_all(run: Run, scripts: list[str], ways: list[Way], repetitions: int, ranks: int, options: list[str]) -> Runs:
    runs: Runs = {(script, way.name): [] for script in scripts for way in ways}
    jobs = list(itertools.product(range(repetitions), scripts, ways))
    with tempfile.TemporaryDirectory() as folder:
        for repetition, script, way in run.each(jobs, lambda job: f"{job[1]}, {job[2].name}"):
            place = Path(folder) / f"{script}-{way.name.replace(' ', '-')}-{repetition}"
            result = place / "result.json"
            run_child(way.command(script, ranks, [*options, "--log-json", str(result)]), place)
            found = json.loads(result.read_text())
            found["samples_per_s"] *= ranks
            runs[script, way.name].append(found)
            found["loss_difference"] = _loss_difference(script, way, found, runs[script, PLAIN.name][0])
            run.note(f"{place.name}: {found['samples_per_s']:.1f} samples/s")
    return runs


def _loss_difference(script: str, way: Way, run: dict[str, Any], plain: dict[str, Any]) -> float | None:
    """The largest from the losses of the plain launch; None: the samples of a step are others.

    Raises:
        ChildError: there are more or fewer losses, or one is too far off.
    """
    if len(run["losses"]) != len(plain["losses"]):
        raise ChildError(
            f"{script}, {way.name}: {len(run['losses'])} steps, and {len(plain['losses'])} by {PLAIN.name}"
        )
    if way.online:
        return None
    worst: float = max(abs(a - b) for a, b in zip(run["losses"], plain["losses"], strict=True))
    if worst > LARGEST_LOSS_DIFFERENCE:
        raise ChildError(f"{script}, {way.name}: a loss differs by {worst:.2g} from that of {PLAIN.name}")
    return worst


def _summarize(script: str, way: Way, runs: Runs) -> dict[str, Any]:
    mine, plain = runs[script, way.name], runs[script, PLAIN.name]
    rates = [run["samples_per_s"] for run in mine]
    speedups = [run["samples_per_s"] / other["samples_per_s"] for run, other in zip(mine, plain, strict=True)]
    return {
        "script": script,
        "way": way.name,
        "samples_per_s": spread(rates),
        "speedup": spread(speedups),
        "final_loss": mine[0]["losses"][-1],
        "largest_loss_difference": None if way.online else max(run["loss_difference"] for run in mine),
    }


def figures(result: Entries) -> Figures:
    settings = result["settings"]
    yield "", f"{settings['steps']} steps, medians of {WORDS[settings['repetitions']]} interleaved runs"
    rows = {(row["script"], row["way"]): row for row in result["rows"]}
    names = {"accelerate_sft": "accelerate loop", "hf_trainer": "transformers `Trainer`", "trl_sft": "TRL `SFTTrainer`"}
    for script, name in names.items():
        plain, odc, balanced, online = (rows[script, way.name] for way in WAYS)
        by_hand = ", with its one line" if script == "accelerate_sft" else ""
        worst = max(row["largest_loss_difference"] for row in (plain, odc, balanced))
        speedups = f"{_speedup(odc)} | {_speedup(balanced)}{by_hand} | {_speedup(online)}{by_hand}"
        yield f"| {name} |", f" {plain['samples_per_s']['median']:.0f} samples/s | {speedups} | {worst:.1e} |"


def _speedup(row: Entries) -> str:
    return "{median:.2f}x ({min:.2f}-{max:.2f})".format(**row["speedup"])


BENCHMARK = Benchmark(
    measure,
    (
        Table(
            "rows",
            "{settings[steps]} steps of training scripts as they are",
            (Column("script", "script"), Column("launched by", "way")),
            (
                Column("samples/s", "samples_per_s", ".1f"),
                Column("speedup", "speedup", ".2f"),
                Column("largest loss difference", "largest_loss_difference", ".1e"),
            ),
        ),
    ),
    quick={"repetitions": 1, "steps": 5, "script": ["accelerate_sft"]},
    figures=(("docs/trainers.md", figures, ["trainers_cpu_2ranks"]),),
)
