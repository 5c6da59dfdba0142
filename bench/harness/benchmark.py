"""What a benchmark declares, and the :class:`Run` that it is given while it measures.

A benchmark is one module. Its function ``measure`` has the options as parameters and returns the entries of the result.
Entries that are lists of rows are shown as the tables that the module declares. :data:`BENCHMARK` holds all this::

    def measure(run: Run, repetitions: Annotated[int, typer.Option(min=1, help="Draws of costs.")] = 7) -> Entries:
        run.begin(repetitions)
        ...
        return {"results": rows}

    BENCHMARK = Benchmark(measure, tables=(...), quick={"repetitions": 2})
"""

from __future__ import annotations

import datetime
import inspect
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import odc
from odc.bench.harness.ranks import CPU, Place, Rank, join, run_ranks
from odc.config import LaunchEnvironment

# What a result was measured on, and how it is written


def describe_environment() -> dict[str, object]:
    """Hardware, versions and date, for the ``environment`` entry of a result file."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "odc": odc.__version__,
        "threads_per_rank": torch.get_num_threads(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


WRITTEN = "bench/results"
"""The folder that benchmarks write into. Changes there do not make the code of a later run another one."""


WIDTH = 160
"""Largest width of a line of a result."""


def commit() -> str:
    """The commit of the tree in which this runs, with "-dirty" if its code was changed since; empty outside of git."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()

    try:
        name = git("describe", "--always", "--exclude=*")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", f":(top,exclude){WRITTEN}")
    except FileNotFoundError:
        return ""
    return f"{name}-dirty" if changed else name


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write the document as JSON, numbers with six digits, all or nothing: a process that is killed meanwhile leaves
    the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    rounded = json.loads(json.dumps(document), parse_float=lambda text: float(f"{float(text):.6g}"))
    unfinished.write_text(_lines(rounded) + "\n")
    unfinished.replace(path)


def _lines(value: Any, indent: str = "") -> str:
    """JSON in which what fits stands on one line: a row of a table is one in a diff."""
    line = json.dumps(value)
    if len(indent) + len(line) <= WIDTH or not value or not isinstance(value, dict | list):
        return line
    inner = indent + " "
    if isinstance(value, dict):
        entries = [f"{json.dumps(name)}: {_lines(entry, inner)}" for name, entry in value.items()]
    else:
        entries = [_lines(entry, inner) for entry in value]
    return f"\n{inner}".join([line[0], f",\n{inner}".join(entries)]) + f"\n{indent}{line[-1]}"


# What a benchmark declares


T = TypeVar("T")
Row = Mapping[str, Any]
Entries = dict[str, Any]
"""The entries of a result: lists of rows (numbers, texts, summaries, all of which JSON can hold), and single values."""

Figures = Iterator[tuple[str, str]]
"""Figures of a document: the fixed words before a figure, and the text with its numbers."""


class Numbers(tuple[int, ...]):
    """An option that takes several numbers: ``--ranks 2,4,8``."""

    def __new__(cls, *numbers: int) -> Numbers:
        return super().__new__(cls, numbers)

    def __str__(self) -> str:
        return ",".join(map(str, self))


def numbers(text: str | Numbers) -> Numbers:
    """Parse :class:`Numbers`; all are at least 1."""
    found = Numbers(*(int(word) for word in str(text).replace(",", " ").split()))
    if not found or min(found) < 1:
        raise ValueError(f"{text!r}: expected numbers of at least 1, with commas between them")
    return found


def check_known(**options: tuple[Iterable[str] | None, Iterable[str]]) -> None:
    """Check options that take names: of each the given names, and those that exist.

    Raises:
        ValueError: a given one is none of them.
    """
    for option, (given, known) in options.items():
        for name in given or ():
            if name not in known:
                raise ValueError(f"--{option.replace('_', '-')} {name!r}: expected one of {', '.join(known)}")


def as_settings(options: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Values of options as a result holds them."""
    return {
        name: value if isinstance(value, bool | int | float | str) else typed(value) for name, value in options.items()
    }


def typed(value: Any) -> str:
    """A value of an option as it is typed."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def summary(values: npt.ArrayLike) -> dict[str, float]:
    """Median, 20th and 80th percentile.

    >>> summary([3.0, 1.0, 2.0])
    {'median': 2.0, 'p20': 1.4, 'p80': 2.6}
    """
    p20, median, p80 = (float(value) for value in np.quantile(np.asarray(values, np.float64), (0.2, 0.5, 0.8)))
    return {"median": median, "p20": p20, "p80": p80}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and extremes, for few repetitions."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    heading: str
    key: str | Callable[[Row], str | dict[str, float]]
    """The value of a row, with dots into what is nested ("time_s", "operations.push.cpu_us"), or a text or summary made
    of it."""
    form: str = ""
    """How a number is written, as in ``format``."""
    scale: float = 1.0

    def value(self, row: Row) -> Any:
        """The value of a row; None if the row has none."""
        if callable(self.key):
            return self.key(row)
        found: Any = row
        for name in self.key.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def text(self, row: Row) -> str:
        """The value of a row as text; of a summary the median, with its spread in parentheses."""
        return self.written(self.value(row))

    def written(self, value: Any) -> str:
        if isinstance(value, Mapping):
            middle, low, high = (self.written(part) for part in parts(value))
            return f"{middle} ({low}-{high})"
        if value is None or isinstance(value, str | bool):
            return "" if value is None else str(value)
        return format(value * self.scale if self.scale != 1.0 else value, self.form)


def parts(value: Any) -> tuple[float, float, float]:
    """The middle value of a number or summary, and the spread around it."""
    if not isinstance(value, Mapping):
        return value, value, value
    low, high = ("p20", "p80") if "p20" in value else ("min", "max")
    return value["median"], value[low], value[high]


@dataclass(frozen=True)
class Table:
    """Rows of a result for people. ``odc bench compare`` shows what stands under ``columns``, matched by ``keys``."""

    rows: str
    """Name of the entry with the rows."""
    title: str
    """The title. Fields in braces are entries of the whole result: ``"{settings[ranks]} ranks"``."""
    keys: Sequence[Column]
    columns: Sequence[Column]
    caption: str = ""
    text: Callable[[Entries], str] | None = None
    """Makes a text of the whole result, which is shown in place of the table where readers know another form."""


@dataclass(frozen=True)
class Picture:
    """What ``--plot`` draws: a value of one table's rows, as lines over a number, or as bars."""

    rows: str
    value: Column
    series: Sequence[str]
    """Keys whose values name a line, or a group of bars."""
    x: Column | None = None
    """The value on the axis of lines, which is logarithmic; None for bars."""
    is_limit: Callable[[Row], bool] = lambda row: False
    """Whether a line is a limit that cannot be beaten."""


@dataclass(frozen=True)
class Benchmark:
    """What ``odc bench`` needs to know of a module."""

    measure: Callable[..., Entries]
    tables: Sequence[Table] = ()
    quick: Mapping[str, Any] = field(default_factory=dict)
    """Values of options that ``--quick`` sets, unless they are given."""
    picture: Picture | None = None
    figures: Sequence[tuple[str, Callable[..., Figures], Sequence[str]]] = ()
    """(document, function that makes its figures, names of the committed results that the function takes)."""

    @property
    def says(self) -> str:
        """The module's documentation."""
        return inspect.getdoc(inspect.getmodule(self.measure)) or ""


class Run:
    """What a benchmark is given while it measures: progress, ranks, and aims. It is quiet unless told otherwise."""

    def __init__(
        self,
        *,
        quick: bool = False,
        is_quiet: bool = True,
        json: Path | None = None,
        about: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.quick, self.json, self.about = quick, json, about
        self.status = 0
        """Of the command, if nothing was missed."""
        self.missed: list[str] = []
        self.environment: dict[str, object] = {}
        """What is to stand in the result's environment besides the machine."""
        launched = LaunchEnvironment.from_environment()
        self.launched = launched if launched.master_addr else None
        """By torchrun: this process is one of the ranks."""
        is_quiet = is_quiet or not self.is_first
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True, quiet=is_quiet, width=None if sys.stderr.isatty() else 140)
        self.progress = Progress(*columns, console=console, transient=True, disable=is_quiet)
        self._bar = self.progress.add_task("", total=None)

    @property
    def is_first(self) -> bool:
        """Whether this process shows and writes the result."""
        return self.launched is None or self.launched.rank == 0

    def begin(self, total: float, description: str = "") -> None:
        """Begin a progress bar of ``total`` steps."""
        self.progress.reset(self._bar, total=total, description=description)

    def advance(self, amount: float = 1.0) -> None:
        """Add steps to the progress bar."""
        self.progress.advance(self._bar, amount)

    def describe(self, description: str) -> None:
        """Show what is being done now."""
        self.progress.update(self._bar, description=description)

    def each(self, items: Collection[T], words: Callable[[T], str] = lambda item: "") -> Iterator[T]:
        """Go through ``items``, one step of the progress bar each; ``words`` describes an item."""
        self.begin(len(items))
        for item in items:
            self.describe(words(item))
            yield item
            self.advance()

    def miss(self, text: str) -> None:
        """Note that an aim was not reached; the command then ends with status 1. With ``--quick`` too little is
        measured for such a statement."""
        if not self.quick:
            self.missed.append(text)

    def document(self, found: Entries) -> Entries:
        """The whole result: what was found, on which machine, by which command."""
        environment = {**describe_environment(), **self.environment}
        return {**self.about, "commit": commit(), "environment": environment, **found}

    def keep(self, found: Entries, path: Path | None = None) -> Entries:
        """Write the result so far to the file of ``--json`` (or to ``path``), so that a command that ends early keeps
        it."""
        path = path or self.json
        if path is not None and self.is_first:
            write(path, self.document(found))
        return found

    def note(self, text: str) -> None:
        """Print a line on standard error that stays."""
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def ranks(
        self,
        world_size: int,
        body: Callable[..., Any],
        *arguments: Any,
        place: Place = CPU,
        enter: Callable[[int, int], object] | None = None,
    ) -> list[Any]:
        """Run ``body(rank, *arguments)`` on all ranks, which are new processes of this machine, or torchrun's own.
        Returns the values.

        Raises:
            RankFailedError: see :func:`odc.bench.harness.ranks.run_ranks`.
            ValueError: torchrun has started another number of ranks.
        """
        self.environment["threads_per_rank"] = 1
        if self.launched is None:
            return run_ranks(world_size, body, *arguments, place=place, on_progress=self.advance, enter=enter)
        if self.launched.world_size != world_size or enter is not None:
            wanted = f"{world_size} are asked for{', on hosts that they make' * (enter is not None)}"
            raise ValueError(f"torchrun has started {self.launched.world_size} ranks, and {wanted}")
        me = join(self.launched.rank, world_size, place, "", self.advance)
        return _gathered(me, body(me, *arguments))


def _gathered(me: Rank, value: Any) -> list[Any]:
    import torch.distributed as dist

    values: list[Any] = [None] * me.world_size
    group = None if me.device.type == "cpu" else dist.new_group(backend="gloo")
    dist.all_gather_object(values, value, group=group)
    return values
