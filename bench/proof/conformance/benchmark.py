"""Does a patched model train as FSDP does? Every combination of options, against FSDP's own collectives on CPU.

    odc bench conformance --filter "fsdp2 hybrid"

Not covered: GPUs, other optimizers than AdamW, unequal numbers of microbatches (plain FSDP has none to compare with),
frozen or unused parameters, checkpoints. Those have tests of their own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Run, Table
from odc.bench.proof.conformance.cells import AXES, all_cells, select
from odc.bench.proof.conformance.comparison import TOLERANCES, Outcome
from odc.bench.proof.conformance.launch import run_cells
from odc.bench.proof.conformance.report import QUANTITIES, summary, write_markdown

_WORDS = "; ".join(f"{axis}: {', '.join(values)}" for axis, values in AXES.items())


def measure(
    run: Run,
    only: Annotated[str, typer.Option("--filter", help=f"Only cells with all these words. {_WORDS}")] = "",
    markdown: Annotated[Path | None, typer.Option(help="Write the table to this file; not with --filter.")] = None,
) -> Entries:
    if only and markdown:
        raise ValueError("--markdown: the table is of all cells; leave out --filter and --quick")
    cells = select(all_cells(), only.replace("/", " ").split())
    run.begin(len(cells), "cells")

    def show(outcome: Outcome) -> None:
        run.advance()
        run.describe(outcome.cell.name)
        if outcome.status != "passed" or len(cells) == 1:
            errors = {name: getattr(outcome, name) for name in QUANTITIES} if not outcome.reason else ""
            run.note(f"{outcome.cell.name} {outcome.status}: {outcome.reason}{errors}")

    outcomes = run_cells(cells, show)
    if failed := sum(outcome.status == "failed" for outcome in outcomes):
        run.missed.append(f"{failed} of {len(cells)} cells failed")
    run.environment["threads_per_rank"] = 1
    if markdown:
        write_markdown(markdown, outcomes, run.document({})["environment"])
    counts = Counter((o.cell.precision, o.status) for o in outcomes)
    return {
        "summary": summary(outcomes),
        "tolerances": TOLERANCES,
        "counts": [{"precision": p, "status": status, "cells": count} for (p, status), count in counts.items()],
        "cells": [{"name": o.cell.name, **asdict(o)} for o in outcomes],
    }


def figures(result: Entries) -> Figures:
    yield "", f"(conformance.md) compares {len(result['cells'])} combinations"


BENCHMARK = Benchmark(
    measure,
    (
        Table(
            "counts", "{summary}", (Column("precision", "precision"), Column("", "status")), (Column("cells", "cells"),)
        ),
    ),
    quick={"only": "fsdp2 full"},
    figures=(("docs/support.md", figures, ["conformance"]),),
)
