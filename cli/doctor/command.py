"""``odc doctor`` prints what this machine can do for ODC, and what to change."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from odc.cli.output import output

if TYPE_CHECKING:
    from odc.cli.doctor.checks import Report
    from odc.cli.doctor.finding import Row

_STYLES = {"ok": "green", "warning": "yellow", "missing": "yellow", "not needed": "dim", "error": "bold red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Also the rows that this machine does not need.")] = False,
) -> None:
    """Check what this machine can do for ODC, and say what to do about what it cannot.

    The verdict first, then one row per check: ok; warning (works, but slower, less far or untested); missing (this
    machine could use it); error (refused until this is put right); with --all also not needed. The exit status is 1 if
    there is an error, else 0. Nothing is installed or changed, and no memory is taken on any GPU.

    Examples:

        odc doctor

        docker run --gpus all IMAGE odc doctor --json
    """
    from odc.cli.doctor.checks import examine  # imports torch, by and by

    report = examine()
    if as_json:
        typer.echo(json.dumps(report.to_json()))
    else:
        show(report, show_all=show_all)
    if not report.ok:
        raise typer.Exit(1)


def show(report: Report, *, show_all: bool = False) -> None:
    """Print the verdict and the table, at most as wide as the terminal or 80 columns."""
    from odc.cli.doctor.finding import Status

    table = Table(show_lines=False)
    table.add_column("check", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("found, and what to do (->)", overflow="fold")
    hidden = 0
    for row in report.rows:
        if row.finding.status is Status.NOT_NEEDED and not show_all:
            hidden += 1
            continue
        status = row.finding.status.value
        table.add_row(escape(row.check), f"[{_STYLES[status]}]{status}[/]", _cell(row))
    console = output()
    console.print(f"[bold]{escape(verdict(report))}[/bold]", highlight=False)
    console.print(table, highlight=False)
    if hidden:
        console.print(f"{hidden} rows more, of what this machine does not need, with --all.", highlight=False)


def _cell(row: Row) -> str:
    advice = row.finding.advice
    return escape(row.finding.found) + (f"\n[bold]-> {escape(advice)}[/bold]" if advice else "")


def verdict(report: Report) -> str:
    """What can be trained on here and what cannot; then a line for each thing to do, and who asks for it."""
    from odc.cli.doctor.finding import Status

    works = {"CPU ranks": report.cpu_works, "GPUs": report.gpus_work}
    can, cannot = ([name for name, here in works.items() if here is wanted] for wanted in (True, False))
    text = f"This machine can train on {' and '.join(can)}." if can else ""
    if cannot:
        why = ": it has none" if "CUDA devices" in report.named(Status.NOT_NEEDED) else ""
        text += f"{' It' if can else 'This machine'} cannot train on {' or '.join(cannot)}{why}."
    to_do: dict[str, list[str]] = {}
    for row in report.rows:
        if row.finding.status in (Status.ERROR, Status.MISSING):
            to_do.setdefault(row.finding.advice, []).append(row.check)
    lines = [text, *(f"Do ({', '.join(checks)}): {advice}" for advice, checks in to_do.items())]
    if names := report.named(Status.WARNING):
        lines.append(f"Warnings, see below: {', '.join(names)}.")
    return "\n".join(lines)
