"""Results as tables, two results side by side, and the figures of documents.

``odc bench figures`` writes the figures of README.md and of documents from the committed results. A figure is a
sentence or a row of a table with numbers in it. The place of a figure is found by its words, whatever its numbers are
now. Words that depend on a result (how many repetitions) have to be changed by hand. The module of a benchmark says
which figures its result has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from odc.bench.harness import catalogue
from odc.bench.harness.benchmark import Benchmark, Column, Entries, Row, Table, parts


def read(path: Path) -> Entries:
    """Read a result.

    Raises:
        ValueError: it is none, or of no benchmark that there is.
    """
    try:
        document = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(document, dict) or "benchmark" not in document:
        raise ValueError(f"{path} is no result of odc bench: it has no entry 'benchmark'")
    return document


def tables_of(benchmark: Benchmark, document: Entries) -> Iterator[RichTable | Text]:
    """The benchmark's tables for which the document has rows."""
    for table in benchmark.tables:
        rows = document.get(table.rows)
        if rows:
            yield shown(table, rows, document) if table.text is None else Text(table.text(document), no_wrap=True)


def shown(table: Table, rows: Sequence[Row], document: Entries) -> RichTable:
    """One table; columns without any value are left out."""
    made = RichTable(title=escape(table.title.format_map(document)), caption=table.caption, caption_justify="left")
    made.box = box.SIMPLE_HEAD
    texts = _cells(table, rows)
    for column, cells in texts:
        is_name = column in table.keys and not all(cell.isdigit() for cell in cells)
        made.add_column(column.heading, justify="left" if is_name else "right")
    for line in zip(*(cells for _, cells in texts), strict=True):
        made.add_row(*map(escape, line))
    return made


def markdown(table: Table, rows: Sequence[Row], document: Entries) -> str:
    """The same table as Markdown: its title in bold, the table, its caption."""
    texts = _cells(table, rows)
    lines = [[column.heading for column, _ in texts], ["---"] * len(texts), *zip(*(c for _, c in texts), strict=True)]
    written = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    title = table.title.format_map(document)
    return "\n\n".join(filter(None, (f"**{title}**", "\n".join(written), table.caption)))


def _cells(table: Table, rows: Sequence[Row]) -> list[tuple[Column, list[str]]]:
    """Columns that have a value, and what stands in them."""
    texts = [(column, [column.text(row) for row in rows]) for column in (*table.keys, *table.columns)]
    return [(column, cells) for column, cells in texts if any(cells)]


def compare(before: Entries, after: Entries) -> Iterator[RichTable]:
    """Each value of two results of one benchmark, and by how much it has changed.

    A change in bold is beyond the spread of both: their 20th to 80th percentiles, or extremes, do not meet.

    Raises:
        ValueError: they are of different benchmarks, or have no row in common.
    """
    name = after["benchmark"]
    if before["benchmark"] != name:
        raise ValueError(f"results of {before['benchmark']} and of {name}: expected two of one benchmark")
    found = 0
    for table in catalogue.find(name).tables:
        rows, old = after.get(table.rows) or [], {_key(table, row): row for row in before.get(table.rows) or []}
        made = RichTable(title=escape(table.title.format_map(after)), box=box.SIMPLE_HEAD)
        for heading in (*(column.heading for column in table.keys), "value"):
            made.add_column(heading)
        for heading in ("before", "after", "after/before"):
            made.add_column(heading, justify="right")
        for row in rows:
            key = _key(table, row)
            for number, column in enumerate(table.columns if key in old else ()):
                values = column.value(old[key]), column.value(row)
                if not all(isinstance(v, Mapping | int | float) for v in values):
                    continue
                names = key if number == 0 else [""] * len(key)
                made.add_row(*names, column.heading, *(column.written(v) for v in values), _change(*values))
        if made.row_count:
            found += made.row_count
            yield made
    if not found:
        raise ValueError(f"these results of {name} have no row in common")


def differences(before: Entries, after: Entries) -> Iterator[str]:
    """What differs in the environments and settings of two results."""
    for entry in ("environment", "settings"):
        old, new = before.get(entry) or {}, after.get(entry) or {}
        for name in dict.fromkeys([*old, *new]):
            if old.get(name) != new.get(name):
                yield f"{name}: {old.get(name)} -> {new.get(name)}"


def _key(table: Table, row: Row) -> tuple[str, ...]:
    return tuple(column.text(row) for column in table.keys)


def _change(before: Any, after: Any) -> str:
    """After over before; in bold beyond the spread of both."""
    (old, least, most), (new, low, high) = (parts(value) for value in (before, after))
    if old == new:
        return "="
    ratio = f"{new / old:.2f}" if old else "-"
    return f"[bold]{ratio}[/bold]" if low > most or high < least else f"~{ratio}"


# Figures of README.md and of documents


RESULTS = Path("bench/results")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Figure:
    """A figure that ``document`` has to contain. ``fixed`` finds the place; the numbers in ``text`` come from
    ``source``."""

    document: Path
    source: str
    fixed: str
    text: str

    @property
    def words(self) -> str:
        return self.fixed + self.text

    def pattern(self) -> re.Pattern[str]:
        """A pattern that matches the words with any numbers after ``fixed``."""
        return re.compile(re.escape(self.fixed) + _NUMBER.pattern.join(map(re.escape, _NUMBER.split(self.text))))


def figures(results: Path = RESULTS) -> Iterator[Figure]:
    """All figures, benchmark by benchmark."""
    for benchmark in catalogue.all_of_them():
        for document, make, names in benchmark.figures:
            for fixed, text in make(*(json.loads((results / f"{name}.json").read_text()) for name in names)):
                yield Figure(Path(document), f"{names[0]}.json", fixed, text)


def update(texts: dict[Path, str], wanted: Iterable[Figure]) -> tuple[list[Figure], list[Figure]]:
    """Put the figures into the ``texts`` of the documents. Returns the figures that have changed, and those whose place
    is not found exactly once."""
    changed, lost = [], []
    for figure in wanted:
        text = texts[figure.document]
        found = figure.pattern().findall(text)
        if len(found) != 1:
            lost.append(figure)
        elif found[0] != figure.words:
            changed.append(figure)
            texts[figure.document] = text.replace(found[0], figure.words)
    return changed, lost
