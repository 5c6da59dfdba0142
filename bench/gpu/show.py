"""The results for people and for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from odc.bench.gpu.isolation import FAILED, NOT_RUN, PASSED, Outcome
from odc.bench.harness.results import shown

_LONGEST_TEXT = 400
_STYLES = {PASSED: "green", FAILED: "bold red", NOT_RUN: "yellow"}


def console() -> Console:
    """Of the width of the terminal, or of a file."""
    return Console(width=None if sys.stdout.isatty() else 140)


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    """What failed, at length; what was measured; and a line per check, last."""
    for outcome in outcomes:
        if outcome.log:
            console().print(
                f"--- {outcome.name}: the end of its output\n{outcome.log}\n", markup=False, highlight=False
            )
        for measured in outcome.tables:
            console().print(shown(measured, outcome.data[measured.rows], outcome.data))
    table = Table(title=summary(outcomes))
    for column in ("check", "result", "figures, or why", "s"):
        table.add_column(column, justify="right" if column == "s" else "left")
    for outcome in outcomes:
        style = _STYLES[outcome.status]
        seconds = f"{outcome.seconds:.0f}" if outcome.status != NOT_RUN else ""
        table.add_row(outcome.name, f"[{style}]{outcome.status}[/]", _plain(outcome.figures), seconds)
    console().print(table)


def _plain(text: str) -> str:
    """One line, not too long, and no markup."""
    line = " ".join(text.split())
    return escape(line if len(line) <= _LONGEST_TEXT else line[:_LONGEST_TEXT] + " ...")


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line."""
    counts = {status: sum(outcome.status == status for outcome in outcomes) for status in _STYLES}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)


def rows_of(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """All outcomes, for JSON."""
    return [
        {
            "name": outcome.name,
            "status": outcome.status,
            "figures": outcome.figures,
            "seconds": round(outcome.seconds, 1),
            "data": outcome.data,
        }
        for outcome in outcomes
    ]
