"""Does a patched model train as FSDP does? Every combination of options, against FSDP's own collectives on CPU.

    python -m odc.bench.proof.conformance
    python -m odc.bench.proof.conformance --filter "fsdp2 hybrid"

Not covered: GPUs, other optimizers than AdamW, unequal numbers of microbatches (plain FSDP has none to compare with),
frozen or unused parameters, checkpoints. Those have tests of their own.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from odc.bench.harness.environment import describe_environment
from odc.bench.harness.progress import progress_bar
from odc.bench.proof.conformance.cells import AXES, Cell, all_cells, select
from odc.bench.proof.conformance.comparison import Outcome
from odc.bench.proof.conformance.launch import run_cells
from odc.bench.proof.conformance.report import summary, write_json, write_markdown

_WORDS = "; ".join(f"{axis}: {', '.join(values)}" for axis, values in AXES.items())


def main(
    only: Annotated[str, typer.Option("--filter", help=f"Only cells with all these words. {_WORDS}")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table to this file; not with --filter.")] = None,
) -> None:
    """Train small models over FSDP's collectives and with ODC on 2 and 4 CPU ranks, and compare them.

    Takes one to three minutes. A cell is one combination of the words of --filter, which may be patterns: --filter
    "fsdp1-* bf16", or a cell's name as the output shows it. Prints what did not pass; exits with 1 if a cell failed.
    """
    if only and markdown:
        raise typer.BadParameter("the table is of all cells: leave out --filter", param_hint="--markdown")
    try:
        cells = select(all_cells(), only.replace("/", " ").split())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--filter") from None
    outcomes = _run(cells)
    console = Console(width=None if sys.stdout.isatty() else 100)
    for outcome in outcomes:
        if outcome.status != "passed" or len(outcomes) == 1:
            console.print(_describe(outcome), markup=False, highlight=False, soft_wrap=True)
    console.print(summary(outcomes), highlight=False)
    environment = {**describe_environment(), "threads_per_rank": 1}
    if json_file:
        write_json(json_file, outcomes, environment)
    if markdown:
        write_markdown(markdown, outcomes, environment)
    if any(outcome.status == "failed" for outcome in outcomes):
        raise typer.Exit(1)


def _run(cells: list[Cell]) -> list[Outcome]:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no rank outlives us
    with progress_bar(Console(stderr=True)) as progress:
        task = progress.add_task("cells", total=len(cells))

        def show(outcome: Outcome) -> None:
            progress.update(task, advance=1, description=outcome.cell.name)

        return run_cells(cells, show)


def _describe(outcome: Outcome) -> str:
    if outcome.status != "passed":
        return f"{outcome.cell.name} {outcome.status}: {outcome.reason}"
    return (
        f"{outcome.cell.name} passed: losses {outcome.losses:.1e}, gradients {outcome.gradients:.1e}, "
        f"parameters {outcome.parameters:.1e}"
    )


if __name__ == "__main__":
    typer.run(main)
