"""The figures of README.md and of documents, from the committed results: ``odc bench figures``.

A figure is a sentence or a row of a table with numbers in it. Which numbers it has now does not matter for finding it;
words that a result would change (how many repetitions) have to be changed by hand. What is said of a result stands in
the module of its benchmark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from odc.bench.harness import catalogue

RESULTS = Path("bench/results")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Figure:
    """What ``document`` has to say: ``fixed`` finds the place, the numbers in ``text`` come from ``source``."""

    document: Path
    source: str
    fixed: str
    text: str

    @property
    def words(self) -> str:
        return self.fixed + self.text

    def pattern(self) -> re.Pattern[str]:
        """Matches the words with any numbers behind ``fixed``."""
        return re.compile(re.escape(self.fixed) + _NUMBER.pattern.join(map(re.escape, _NUMBER.split(self.text))))


def figures(results: Path = RESULTS) -> Iterator[Figure]:
    """All of them, benchmark by benchmark."""
    for benchmark in catalogue.all_of_them():
        for document, make, names in benchmark.figures:
            for fixed, text in make(*(json.loads((results / f"{name}.json").read_text()) for name in names)):
                yield Figure(Path(document), f"{names[0]}.json", fixed, text)


def update(texts: dict[Path, str], wanted: Iterable[Figure]) -> tuple[list[Figure], list[Figure]]:
    """Put the figures into the ``texts`` of the documents; those that were other ones, and those whose place is not
    there once."""
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
