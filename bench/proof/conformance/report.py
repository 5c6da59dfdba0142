"""The table of cells as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from odc.bench.proof.conformance.cells import AXES, MEANINGS
from odc.bench.proof.conformance.comparison import TOLERANCES, Outcome
from odc.bench.proof.conformance.training import STEPS

COMMAND = "odc bench conformance --json bench/results/conformance.json --markdown docs/conformance.md"
QUANTITIES = ("losses", "gradients", "parameters")
_INTRODUCTION = f"""\
The same training script twice per cell, {STEPS} steps of AdamW on a small transformer: over FSDP's gloo collectives,
and after one more line, `session = odc.patch_fsdp(model)`. Every rank has its own data, and all ranks have equally
many microbatches, because plain FSDP needs that. A cell is *passed* if

- the mean loss of every step,
- every gradient as the first `optimizer.step` finds it, and the norm that clipping finds in every step,
- every parameter after the last step

differ by at most {TOLERANCES["fp32"]:g} (fp32) or {TOLERANCES["bf16"]:g} (bf16) of the largest absolute value in their
tensor, and if on every rank ODC has gathered, pushed and ended {STEPS} minibatches. It is *refused* if `patch_fsdp`
raises `odc.UnsupportedError`, and *failed* in all other cases. The columns of numbers are the largest of these errors;
0 is equality. In bf16 FSDP rounds sums of gradients to bfloat16, on-demand communication sums in float32.
"""


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
        "## Axes\n",
        _table(("axis", "value", "meaning"), [(axis, v, MEANINGS[v]) for axis, vs in AXES.items() for v in vs]),
        "## Cells\n",
        _table((*AXES, "result", *QUANTITIES, "reason"), [_row(outcome) for outcome in outcomes]),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts))


def read_statuses(markdown: str) -> dict[str, str]:
    """Status of each cell by name, from what :func:`write_markdown` wrote."""
    rows = [[entry.strip() for entry in line.split("|")[1:-1]] for line in markdown.splitlines()]
    return {"/".join(row[: len(AXES)]): row[len(AXES)] for row in rows if row and row[0] in AXES["FSDP"]}


def _largest_errors(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    rows = []
    for precision in AXES["precision"]:
        errors = [[getattr(o, q) for o in outcomes if o.cell.precision == precision] for q in QUANTITIES]
        rows.append(
            (precision, *(_number(max((e for e in column if e is not None), default=None)) for column in errors))
        )
    return rows


def _row(outcome: Outcome) -> tuple[str, ...]:
    reason = " ".join(outcome.reason.replace("|", "\\|").split())
    return (*outcome.cell.values, outcome.status, *(_number(getattr(outcome, q)) for q in QUANTITIES), reason)


def _number(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}" if error else "0"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
