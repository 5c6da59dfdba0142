"""``odc doctor``: what this machine can do for ODC, and what to change."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from odc.cli.output import output

if TYPE_CHECKING:
    from odc.doctor import Report, Row

_STYLES = {"ok": "green", "warning": "yellow", "missing": "yellow", "not needed": "dim", "error": "bold red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Check what this machine can do for ODC, and say what to do about what it cannot.

    One row per check: ok; warning (works, but slower, less far or untested); missing (this machine could use it);
    not needed; error (refused until this is put right; the last line says whether CPU training works). The exit
    status is 1 if there is an error, else 0. Nothing is installed or changed, and no memory is taken on any GPU.

    Examples:

        odc doctor

        docker run --gpus all IMAGE odc doctor --json
    """
    from odc.doctor import examine  # imports torch, by and by

    report = examine()
    if as_json:
        typer.echo(json.dumps(report.to_json()))
    else:
        show(report)
    if not report.ok:
        raise typer.Exit(1)


def show(report: Report) -> None:
    """Print the table and what follows from it, at most as wide as the terminal or 80 columns."""
    table = Table(title="What this machine can do for ODC", title_justify="left", show_lines=False)
    table.add_column("check", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("found, and what to do (->)", overflow="fold")
    for row in report.rows:
        status = row.finding.status.value
        table.add_row(escape(row.check), f"[{_STYLES[status]}]{status}[/]", _cell(row))
    console = output()
    console.print(table, highlight=False)
    console.print(f"[bold]{escape(summary(report))}[/bold]", highlight=False)


def _cell(row: Row) -> str:
    advice = row.finding.advice
    return escape(row.finding.found) + (f"\n[bold]-> {escape(advice)}[/bold]" if advice else "")


def summary(report: Report) -> str:
    """Whether CPU training works, and where to look."""
    from odc.doctor import Status

    text = "CPU training works here." if report.cpu_works else "CPU training does not work here."
    for status, label in ((Status.ERROR, "Errors"), (Status.WARNING, "Warnings"), (Status.MISSING, "Missing")):
        if names := report.named(status):
            text += f" {label}: {', '.join(names)}."
    return text
