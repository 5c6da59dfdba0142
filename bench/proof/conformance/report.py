"""The table of cells as Markdown."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from odc.bench.proof.conformance.cells import AXES, MEANINGS
from odc.bench.proof.conformance.comparison import TOLERANCES, Outcome
from odc.bench.proof.conformance.training import STEPS

COMMAND = "odc bench conformance --json bench/results/conformance.json --markdown docs/conformance.md"
QUANTITIES = ("losses", "gradients", "parameters")
_INTRODUCTION = f"""\
A cell is one FSDP configuration. It trains a small transformer for {STEPS} steps of AdamW, once over FSDP's gloo
collectives and once after `session = odc.patch_fsdp(model)`. Each rank has its own data. All ranks have the same number
of microbatches, which plain FSDP needs. A cell *passed* if ODC was used in all {STEPS} minibatches on each rank, and

- the mean loss of every step,
- every gradient at the first `optimizer.step` and the norm at every clipping,
- every parameter after the last step

differ by at most {TOLERANCES["fp32"]:g} (fp32) or {TOLERANCES["bf16"]:g} (bf16) of the largest absolute value in their
tensor. A cell is *refused* if `patch_fsdp` raises `odc.UnsupportedError`, otherwise *failed*. In bf16, FSDP rounds
sums of gradients to bfloat16; ODC sums in float32.
"""
_CELLS = """\
A number is the largest error of a passed cell; 0 means equal. Columns are accumulation and clipping. Separate errors of
losses, gradients and parameters are in the [committed result](../bench/results/conformance.json).
"""
ROW = ("FSDP", "precision", "sharding")  # the axes of a row; the others make its columns
COLUMNS = list(itertools.product(*(values for axis, values in AXES.items() if axis not in ROW)))


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line."""
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
        _table(("axis", "value", "meaning"), [(axis, v, MEANINGS[v]) for axis, vs in AXES.items() for v in vs]),
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
