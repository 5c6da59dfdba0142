"""The progress bar of the benchmarks."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn


def progress_bar(console: Console, *, transient: bool = True) -> Progress:
    """Description, bar, count and elapsed time; gone when done unless it is not ``transient``."""
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=transient)
