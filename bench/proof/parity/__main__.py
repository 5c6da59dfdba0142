"""Do scripts made up by chance train under ODC as under plain FSDP? Pairs of everything a script may do.

    python -m odc.bench.proof.parity --cases 300 --seed 0 --json bench/results/parity.json
    python -m odc.bench.proof.parity --seed 0 --only-case 17

Each case is a training script of four steps on 2 to 4 CPU ranks, run over FSDP's collectives and then with ODC; its
losses, the gradients of every step, and its last parameters are compared. Where ranks have unequal numbers of
microbatches, plain FSDP runs further ones whose loss is zero. Not covered: GPUs, checkpoints, GradScaler, compilation.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from odc.bench.harness.environment import describe_environment
from odc.bench.harness.progress import progress_bar
from odc.bench.proof.parity.cases import FACTORS, Case, generate
from odc.bench.proof.parity.comparison import OUTCOMES, TOLERANCES, Outcome
from odc.bench.proof.parity.launch import kind_of, run_cases


def main(
    cases: Annotated[int, typer.Option(min=1, help="How many cases.")] = 300,
    seed: Annotated[int, typer.Option(help="The same seed, the same cases.")] = 0,
    only_case: Annotated[int | None, typer.Option(min=0, help="Only this one of them, whatever their number.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    log: Annotated[Path | None, typer.Option(help="Append what ranks write on standard error to this file.")] = None,
) -> None:
    """Train generated scripts over FSDP's collectives and with ODC, and compare them. Takes 10 to 20 minutes for 300.

    Prints each case that is neither equal nor refused by name, and how to repeat it; exits with 1 if there is one.
    """
    if only_case is not None and json_file is not None:
        raise typer.BadParameter("a result file is of all cases: leave out --only-case", param_hint="--json")
    numbers = range(cases) if only_case is None else range(only_case, only_case + 1)
    generated = dict(enumerate(itertools.islice(generate(seed), numbers.stop)))
    outcomes = _run({number: generated[number] for number in numbers}, seed, log)
    console = Console(width=None if sys.stdout.isatty() else 120)
    if only_case is not None:
        _show(console, outcomes[0], seed)
        console.print(outcomes[0].errors)
    console.print(_table(outcomes))
    for kind, count in Counter(kind_of(o.reason) for o in outcomes if o.status == "refused").most_common():
        console.print(f"refused {count} times: {kind}", markup=False, highlight=False, soft_wrap=True)
    if json_file:
        write_json(json_file, outcomes, seed)
    if any(outcome.status not in ("equal", "refused") for outcome in outcomes):
        raise typer.Exit(1)


def _run(cases: dict[int, Case], seed: int, log: Path | None) -> list[Outcome]:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no rank outlives us
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
    with progress_bar(console) as progress:
        task = progress.add_task("cases", total=len(cases))

        def show(outcome: Outcome) -> None:
            progress.update(task, advance=1, description=f"case {outcome.number}")
            if outcome.status not in ("equal", "refused"):
                _show(progress.console, outcome, seed)

        return run_cases(cases, show, log=log)


def _show(console: Console, outcome: Outcome, seed: int) -> None:
    text = (
        f"case {outcome.number} {outcome.status}: {outcome.reason}\n  {outcome.case.describe()}\n"
        f"  python -m odc.bench.proof.parity --seed {seed} --only-case {outcome.number}"
    )
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _table(outcomes: Sequence[Outcome]) -> Table:
    """Counts by kind of FSDP, ranks and transport."""
    table = Table("FSDP", "ranks", "transport", *OUTCOMES, title="Generated scripts under ODC and plain FSDP")
    for fsdp, ranks, transport in itertools.product(FACTORS["fsdp"], FACTORS["ranks"], FACTORS["transport"]):
        row = [o for o in outcomes if (o.case.fsdp, o.case.ranks, o.case.transport) == (fsdp, ranks, transport)]
        if row:
            table.add_row(fsdp, ranks, transport, *_counts(row))
    table.add_section()
    table.add_row("all", "", "", *_counts(outcomes))
    return table


def _counts(outcomes: Sequence[Outcome]) -> list[str]:
    counts = Counter(outcome.status for outcome in outcomes)
    return [str(counts[status] or "") for status in OUTCOMES]


def write_json(path: Path, outcomes: Sequence[Outcome], seed: int) -> None:
    """All outcomes with what they were measured on."""
    counts = Counter(outcome.status for outcome in outcomes)
    refusals = Counter(kind_of(outcome.reason) for outcome in outcomes if outcome.status == "refused")
    compared = [outcome.errors for outcome in outcomes if outcome.errors and outcome.case.precision == "fp32"]
    document = {
        "environment": {**describe_environment(), "threads_per_rank": 1},
        "command": f"python -m odc.bench.proof.parity --cases {len(outcomes)} --seed {seed}",
        "seed": seed,
        "tolerances": TOLERANCES,
        "counts": {status: counts[status] for status in OUTCOMES},
        "refusals": dict(refusals.most_common()),
        "largest_errors_fp32": {w: max(errors[w] for errors in compared) for w in compared[0]} if compared else {},
        "cases": [outcome.as_row() for outcome in outcomes],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
