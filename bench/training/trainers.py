"""Samples per second of scripts of three training libraries: ``torchrun``, ``odc run``, ``odc run --balance lb-mini``,
``odc run --online``.

    python -m odc.bench.training.trainers --json runs/trainers.json

Runs ``examples/{accelerate_sft,hf_trainer,trl_sft}.py`` of the repository, from its root, with FSDP2. Lengths are
long-tailed (8 to 400 tokens, log-normal). The ways to launch take turns, so that a drift of the machine's speed meets
all of them; each run trains on the same samples, in the same steps (but for ``--online``, which chooses them) and its
losses are compared. Times are the scripts' own: they start with the first step, warm-up included.

What is compared is what a user gets by changing the command: the scripts pad their batches, LB-Mini packs samples into
rows, so part of its gain is padding not computed. ``--equal`` adds LB-Micro, which packs too, with equal numbers of
microbatches.

Not covered: GPUs, more than one host, FSDP1.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from odc.bench.harness.environment import describe_environment
from odc.bench.training.runs import ChildError, run_child

EXAMPLES = Path("examples")
SCRIPTS = ("accelerate_sft", "hf_trainer", "trl_sft")
LONGEST = 401  # tokens of a sample of the scripts, TRL's token for the end included
LARGEST_LOSS_DIFFERENCE = 1e-4

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Way:
    """One way to launch a script."""

    name: str
    odc: bool
    policy: str | None = None
    online: bool = False
    """With rows of at most as many tokens as the longest sample has, which is what policies take by default."""

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


@app.command()
def main(
    json_path: Annotated[Path, typer.Option("--json", help="File for the results.")] = Path("runs/trainers.json"),
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each script, each way.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of a run.")] = 40,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks, one core each.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per rank and batch, 4 batches a step.")] = 2,
    script: Annotated[list[str] | None, typer.Option(help="Only this script; may be repeated.")] = None,
    equal: Annotated[bool, typer.Option(help="Also LB-Micro, with equal numbers of microbatches.")] = False,
) -> None:
    """Compare four ways to launch unmodified training scripts on CPU ranks."""
    console = Console(width=100)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no rank outlives us
    if not EXAMPLES.is_dir():
        print(f"{EXAMPLES} is not here: run this from the root of the repository", file=sys.stderr)
        raise typer.Exit(2)
    scripts = script or list(SCRIPTS)
    ways = [*WAYS, EQUAL] if equal else list(WAYS)
    options = ["--steps", str(steps), "--per-device-batch-size", str(batch_size)]
    try:
        runs = _run_all(console, scripts, ways, repetitions, ranks, options)
    except ChildError as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    rows = [_summarize(name, way, runs) for name in scripts for way in ways]
    settings = {"repetitions": repetitions, "steps": steps, "ranks": ranks, "batch_size": batch_size, "fsdp": 2}
    libraries = {name: version(name) for name in ("accelerate", "transformers", "trl")}
    document = {
        "rows": rows,
        "settings": settings,
        "environment": {**describe_environment(), "threads_per_rank": 1, **libraries},
    }
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(document, indent=1))
    console.print(_table(rows))


Runs = dict[tuple[str, str], list[dict[str, Any]]]
"""(script, way) -> what the script wrote, run by run."""


def _run_all(
    console: Console, scripts: list[str], ways: list[Way], repetitions: int, ranks: int, options: list[str]
) -> Runs:
    runs: Runs = {(script, way.name): [] for script in scripts for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        for repetition in range(repetitions):
            for script in scripts:
                for way in ways:
                    place = Path(folder) / f"{script}-{way.name.replace(' ', '-')}-{repetition}"
                    result = place / "result.json"
                    run_child(
                        way.command(script, ranks, [*options, "--log-json", str(result)]), place, lambda done: None
                    )
                    run = json.loads(result.read_text())
                    runs[script, way.name].append(run)
                    _check_losses(script, way, run, runs[script, PLAIN.name][0])
                    samples_per_s = run["samples_per_s"] * ranks
                    console.print(
                        f"{script}, {way.name}, {repetition + 1}/{repetitions}: {samples_per_s:.1f} samples/s"
                    )
                    run["samples_per_s"] = samples_per_s
    return runs


def _check_losses(script: str, way: Way, run: dict[str, Any], plain: dict[str, Any]) -> None:
    if len(run["losses"]) != len(plain["losses"]):
        raise ChildError(
            f"{script}, {way.name}: {len(run['losses'])} steps, and {len(plain['losses'])} by {PLAIN.name}"
        )
    if way.online:
        return
    worst = max(abs(a - b) for a, b in zip(run["losses"], plain["losses"], strict=True))
    if worst > LARGEST_LOSS_DIFFERENCE:
        raise ChildError(f"{script}, {way.name}: a loss differs by {worst:.2g} from that of {PLAIN.name}")


def _summarize(script: str, way: Way, runs: Runs) -> dict[str, Any]:
    mine, plain = runs[script, way.name], runs[script, PLAIN.name]
    rates = [run["samples_per_s"] for run in mine]
    speedups = [run["samples_per_s"] / other["samples_per_s"] for run, other in zip(mine, plain, strict=True)]
    worst = None  # the samples of a step are others
    if not way.online:
        worst = max(abs(a - b) for run in mine for a, b in zip(run["losses"], plain[0]["losses"], strict=True))
    return {
        "script": script,
        "way": way.name,
        "samples_per_s": statistics.median(rates),
        "samples_per_s_range": [min(rates), max(rates)],
        "speedup": statistics.median(speedups),
        "speedup_range": [min(speedups), max(speedups)],
        "final_loss": mine[0]["losses"][-1],
        "largest_loss_difference": worst,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table()
    for name in ("script", "launched by", "samples/s (range)", "speedup (range)", "largest loss difference"):
        table.add_column(name)
    for row in rows:
        low, high = row["samples_per_s_range"]
        slowest, fastest = row["speedup_range"]
        table.add_row(
            row["script"],
            row["way"],
            f"{row['samples_per_s']:.1f} ({low:.1f}-{high:.1f})",
            f"{row['speedup']:.2f}x ({slowest:.2f}-{fastest:.2f})",
            "other steps" if (worst := row["largest_loss_difference"]) is None else f"{worst:.1e}",
        )
    return table


if __name__ == "__main__":
    app()
