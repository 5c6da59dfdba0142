"""Prints tables, reports, progress and numbers, and errors in one line instead of a traceback."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from odc._version import install_command
from odc.errors import shorten

_PICTURES = (".png", ".svg", ".pdf")
_LONGEST_NAME = 100  # characters of a path in a message
_LONGEST_ERROR = 1000


def output(width: int = 80) -> Console:
    """Standard output: as wide as the terminal, or of so many columns where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A bar on standard error, gone when done, so that standard output holds the result alone. Yields ``update`` of
    :class:`rich.progress.Progress`, for this bar."""
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        yield partial(bars.update, bars.add_task(what, total=total))


def new_table(title: str, *headings: str) -> Table:
    """A table without rows; a heading with > before it is one of numbers, which stand to the right."""
    table = Table(title=title, title_justify="left")
    for heading in headings:
        name = heading.removeprefix(">")
        table.add_column(name, justify="left" if name == heading else "right", no_wrap=True)
    return table


def show_report(
    document: Mapping[str, object],
    header: Iterable[str],
    lengths: str,
    tables: Iterable[Table],
    costs: str,
    *,
    as_json: bool,
    plot: Path | None,
    notes: Iterable[str] = (),
    advice: str = "",
    behind: Iterable[str | Table] = (),
) -> None:
    """Print a plan or a study: what it is of, what came of it, what it assumes, and what to make of it; or, as JSON,
    the document alone."""
    if as_json:
        typer.echo(json.dumps(document))
        return
    say = partial(output().print, highlight=False)
    for line in header:
        say(escape(line))
    say(f"Lengths: {escape(lengths)}.", style="dim")
    for table in tables:
        say(table)
    say(f"Costs: {escape(costs)}", style="dim")
    for line in notes:
        say(escape(line))
    if advice:
        say(f"\n[bold]{escape(advice)}[/bold]")
    if plot is not None:
        say(f"Pictures: {escape(str(plot))}")
    for part in behind:
        say(part)


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """What users can cause ends the command with one line and status 2; Ctrl-C with 130."""
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        raise typer.Exit(130) from None
    except BrokenPipeError:  # whoever read the output has enough of it
        raise
    except (ValueError, OverflowError, OSError, MemoryError, RecursionError) as error:
        line = f"[red]error:[/red] {escape(shorten(' '.join(_explain(error).split()), _LONGEST_ERROR))}"
        Console(stderr=True).print(line, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


def _explain(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        name = str(error.filename or "")
        shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
        return f"{error.strerror}: {shown!r}" if name else error.strerror
    if isinstance(error, OverflowError):
        return f"a number is too large: {error}"
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}" if str(error) else "not enough memory"
    return str(error) or type(error).__name__


def check_plot(path: Path | None) -> None:
    """Refuse a picture that could not be saved, before anything is computed.

    Raises:
        ValueError: no such folder, a folder itself, another suffix, or matplotlib is missing.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"--plot {path} is a folder: expected a file in it, e.g. {path / 'plan.png'}")
    if path.suffix.lower() not in _PICTURES:
        raise ValueError(f"--plot {path} ends in {path.suffix!r}: expected one of {', '.join(_PICTURES)}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {str(path.parent)!r}; make it first")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"--plot needs matplotlib: {install_command('plot')}")


def significant(value: float) -> str:
    """Three significant digits, never with an exponent: 24,100 or 2.10."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    rounded = float(f"{value:.2e}")
    return f"{rounded:,.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"


def gigabytes(num_bytes: float) -> str:
    """In GB of 10^9 bytes, as data sheets have it; rounded up, so that what does not fit looks like it."""
    return f"{math.ceil(num_bytes / 1e9):,} GB"
