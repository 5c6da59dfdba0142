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
A cell is one way to train by FSDP: {STEPS} steps of AdamW on a small transformer, over FSDP's gloo collectives and once
more after `session = odc.patch_fsdp(model)`. Ranks have data of their own, and equally many microbatches, which plain
FSDP needs. A cell has *passed* if

- the mean loss of every step,
- every gradient as the first `optimizer.step` finds it, and the norm that clipping finds in every step,
- every parameter after the last step

differ by at most {TOLERANCES["fp32"]:g} (fp32) or {TOLERANCES["bf16"]:g} (bf16) of the largest absolute value in their
tensor, and ODC was at work in all {STEPS} minibatches on every rank. It is *refused* if `patch_fsdp` raises
`odc.UnsupportedError`, else *failed*. In bf16 FSDP rounds sums of gradients to bfloat16; ODC sums in float32.
"""
_CELLS = """\
A number is the largest error of a cell that has passed, 0 is equality; columns are
accumulation and clipping. The errors of losses, gradients and parameters by themselves are in the
[committed result](../bench/results/conformance.json).
"""
ROW = ("FSDP", "precision", "sharding")  # the axes of a row; the others make its columns
COLUMNS = list(itertools.product(*(values for axis, values in AXES.items() if axis not in ROW)))


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line."""
    counts = Counter(outcome.status for outcome in outcomes)
    return f"{len(outcomes)} cells: {counts['passed']} passed, {counts['refused']} refused, {counts['failed']} failed"


def write_markdown(path: Path, outcomes: Sequence[Outcome], environment: Mapping[str, object]) -> None:
    """The table of cells, with what its words mean."""
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
    """The largest error, or what became of the cell instead."""
    errors = [error for error in (getattr(outcome, q) for q in QUANTITIES) if error is not None]
    return _number(max(errors)) if outcome.status == "passed" else outcome.status


def _one_line(reason: str) -> str:
    return " ".join(reason.replace("|", "\\|").split())


def _number(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}" if error else "0"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
