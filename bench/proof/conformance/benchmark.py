"""Does a patched model train as FSDP does? Every combination of options, against FSDP's own collectives on CPU.

    odc bench conformance --filter "fsdp2 hybrid"

Each cell is a plain script of ``odc bench parity``.

Not covered: GPUs, other optimizers than AdamW, unequal numbers of microbatches (plain FSDP has none to compare with),
frozen or unused parameters, checkpoints. Those have tests of their own.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Run, Table
from odc.bench.proof.conformance.cells import (
    AXES,
    MEANINGS,
    QUANTITIES,
    TOLERANCES,
    Outcome,
    all_cells,
    run_cells,
    select,
)
from odc.bench.proof.parity.training import STEPS

# The table of cells as Markdown


COMMAND = "odc bench conformance --json bench/results/conformance.json --markdown docs/conformance.md"
_INTRODUCTION = f"""\
A cell is one FSDP configuration. It trains a small model for {STEPS} steps of AdamW, once over FSDP's gloo
collectives and once after `session = odc.patch_fsdp(model)`. Each rank has its own data. All ranks have the same number
of microbatches, which plain FSDP needs. A cell *passed* if ODC was used in all {STEPS} minibatches on each rank, and

- the loss of every microbatch, their sum over the ranks, and the norm at every clipping,
- every gradient at every `optimizer.step`,
- every parameter after the last step

differ by at most {TOLERANCES["fp32"]:g} (fp32) or {TOLERANCES["bf16"]:g} (bf16) of the largest absolute value in their
tensor or, for a gradient, in any microbatch's part of it. Gradients may differ by as many times that as there have been
steps; in fp32, losses and parameters by {STEPS} times that. A cell is *refused* if `patch_fsdp` raises
`odc.UnsupportedError`, otherwise *failed*. In bf16, FSDP rounds sums of gradients to bfloat16; ODC sums in float32. The
script is a plain one of those that `odc bench parity` makes up by chance.
"""
_CELLS = """\
A number is the largest error of a passed cell; 0 means equal. Columns are accumulation and clipping. Separate errors of
losses, gradients and parameters are in the [committed result](../bench/results/conformance.json).
"""
ROW = ("FSDP", "precision", "sharding")  # the axes of a row; the others make its columns
COLUMNS = list(itertools.product(*(values for axis, values in AXES.items() if axis not in ROW)))


def summary(outcomes: Sequence[Outcome]) -> str:
    """Numbers of cells by status, in one line."""
    counts = Counter(outcome.status for outcome in outcomes)
    return f"{len(outcomes)} cells: {counts['passed']} passed, {counts['refused']} refused, {counts['failed']} failed"


def write_markdown(path: Path, outcomes: Sequence[Outcome], environment: Mapping[str, object]) -> None:
    """Write the table of cells and an explanation of its words to ``path``."""
    parts = [
        "# Conformance with FSDP\n",
        f"**{summary(outcomes)}** (torch {environment['torch']}, {environment['date']}). Regenerate with\n",
        f"```sh\n{COMMAND}\n```\n",
        _INTRODUCTION,
        _table(("precision", *(f"largest error of {q}" for q in QUANTITIES)), _largest_errors(outcomes)),
        "## Cells\n",
        _CELLS,
        _table((*ROW, *map(", ".join, COLUMNS)), _rows(outcomes)),
        "## Axes\n",
        *(f"- {axis}: {', '.join(f'*{v}* ({MEANINGS[v]})' for v in values)}" for axis, values in AXES.items()),
        "",
    ]
    if reasons := [(o.cell.name, o.status, _one_line(o.reason)) for o in outcomes if o.status != "passed"]:
        parts += ["## Refused and failed\n", _table(("cell", "result", "reason"), reasons)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts))


def _largest_errors(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    rows = []
    for precision in AXES["precision"]:
        errors = [[getattr(o, q) for o in outcomes if o.cell.precision == precision] for q in QUANTITIES]
        rows.append(
            (precision, *(_number(max((e for e in column if e is not None), default=None)) for column in errors))
        )
    return rows


def _rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    entries = {o.cell.values: _entry(o) for o in outcomes}
    rows = itertools.product(*(AXES[axis] for axis in ROW))
    return [(*row, *(entries.get((*row, *column), "") for column in COLUMNS)) for row in rows]


def _entry(outcome: Outcome) -> str:
    """The largest error, or the status of a cell that has not passed."""
    errors = [error for error in (getattr(outcome, q) for q in QUANTITIES) if error is not None]
    return _number(max(errors)) if outcome.status == "passed" else outcome.status


def _one_line(reason: str) -> str:
    return " ".join(reason.replace("|", "\\|").split())


def _number(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}" if error else "0"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


# The command


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
