"""Reads the lengths of a dataset in any of several formats, draws samples, and checks that these are enough."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import stat
import sys
import tokenize
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from odc.balance import even_lengths, law_names
from odc.balance.checks import IntArray, as_lengths
from odc.balance.random_numbers import random_generator
from odc.cli.records import RecordReader, how_to_plan
from odc.errors import shorten, shown

# Sums of lengths stay exact far above this.
MOST_TOKENS = 10**12
# What is read is held in memory, with a few copies of it: some GB at most.
MOST_SAMPLES = 10**8
# Characters of one line: of a number, and of a sample as JSON; and of a whole document.
_LONGEST_LINE, _LONGEST_OBJECT, _LONGEST_DOCUMENT = 2**20, 2**26, 2**32
_ROWS_AT_ONCE = 1000  # that are read of columns
_LARGEST_SIZE = 64  # of a minibatch, that is looked at

_RECORDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
RECORDS = f"{', '.join(_RECORDS)} (the text among them also as .gz), or a folder of datasets' save_to_disk"
"""What holds an object or a row for each sample, for messages."""

_SAVED = ("state.json", "dataset_dict.json")  # in a folder, by datasets.save_to_disk


@dataclass(frozen=True)
class Lengths:
    """The lengths of a dataset."""

    tokens: IntArray
    """Of each sample, (num_samples,)."""

    about: str
    """Where they come from, and how tokens were counted, for people."""


def read_lengths(source: str, reader: RecordReader, *, num_samples: int) -> Lengths:
    """Lengths (tokens) from ``source``.

    Args:
        source: ``.npy`` (integers); what :func:`read_records` reads, an object per sample with a length, a list of
            tokens, text or a chat; any other file: one integer per line, blank lines and lines starting with #
            ignored; ``-`` is standard input in that form; or the name of a length law.
        reader: of objects.
        num_samples: how many samples of a law.

    Raises:
        ValueError: there is no such file or law, it is no file that ends, something in it is not a length, or what
            reads its format is not installed.
        OSError: the file cannot be read.
    """
    if source == "-":
        return Lengths(_from_lines(sys.stdin, "standard input"), "one length per line of standard input")
    path = Path(source)
    if not path.exists():
        if source in law_names():
            return Lengths(even_lengths(source, num_samples), f"drawn from the law {source}")
        raise ValueError(f"{shown(source)} is neither a file nor a length law: laws are {', '.join(law_names())}")
    named, form = shorten(source), _format_of(path)
    if holds_records(path):
        found = _checked(_as_array(_from_records(path, reader), named), named)
        items = reader.item_fields
        note = f"; {how_to_plan(items)}, here they count for nothing" if items else ""
        return Lengths(found, reader.about + note)
    check_ends(path)
    if form == ".npy":
        return Lengths(_checked(_load_npy(path), named), f"the numbers in {named}")
    with open_text(path) as lines:
        try:
            return Lengths(_from_lines(lines, named), f"one length per line of {named}")
        except ValueError as error:
            if form in ("", ".txt"):
                raise
            raise ValueError(
                f"{error}. A {form} file is read as one length per line: samples are read from {RECORDS}"
            ) from None


def _format_of(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix


def holds_records(path: Path) -> bool:
    """Whether :func:`read_records` reads it."""
    return any((path / name).exists() for name in _SAVED) or _format_of(path) in _RECORDS


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a file of lines. Bytes that are not UTF-8 become surrogates, so that its reader can say in which line.

    Raises:
        ValueError: it was compressed by gzip, and is damaged.
    """
    check_ends(path)
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", errors="surrogateescape") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{shorten(str(path))} is not whole, or not by gzip: {error}") from None


def check_ends(path: Path) -> None:
    """Refuse what cannot be read to its end: a device (/dev/zero), a socket, a folder. A pipe is read as it comes.

    Raises:
        ValueError: it is one of these.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise ValueError(f"{shown(str(path))} is a folder: expected a file")
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        raise ValueError(f"{shown(str(path))} is a device or a socket: expected a file")


def _load_npy(path: Path) -> IntArray:
    """The array in a file, without the memory that its header may claim: only what is there is mapped."""
    named = shorten(str(path))
    if not path.is_file():
        raise ValueError(f"{named} is no file: .npy cannot be read from a pipe")
    try:
        values: IntArray = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError, TypeError, OverflowError, SyntaxError, RecursionError, tokenize.TokenError) as error:
        raise ValueError(
            f"{named} cannot be read as an array of lengths ({shorten(str(error))}): expected integers in a file that "
            "is whole, saved with numpy.save"
        ) from None
    if values.dtype.kind == "f":
        raise ValueError(f"{named} has dtype {values.dtype}: expected integers; save it with .astype(int)")
    if values.dtype.kind not in "iu":
        dtype = shorten(str(values.dtype))
        raise ValueError(f"{named} has dtype {dtype}: expected integers, the tokens of each sample")
    _check_count(values.size, named)
    return values


def _check_count(num_samples: int, source: str) -> None:
    if num_samples > MOST_SAMPLES:
        raise ValueError(f"{source} holds more than {MOST_SAMPLES:,} lengths: give a part of them, drawn at random")


def _lines(file: TextIO, source: str, longest: int) -> Iterator[str]:
    """The lines of a file, of which none is longer than ``longest`` characters."""
    number = 0
    try:
        while line := file.readline(longest + 1):
            number += 1
            if len(line) > longest:
                raise ValueError(
                    f"{source}, line {number} starts with {shown(line[:40])} and is longer than {longest:,} "
                    "characters: expected one integer per line, or .jsonl with one object per line"
                )
            line.encode()
            yield line.removeprefix("\ufeff") if number == 1 else line
    except UnicodeError as error:
        number += isinstance(error, UnicodeDecodeError)  # then this line has not come
        raise ValueError(
            f"{source}, line {number} is not text in UTF-8: expected one integer per line, .jsonl or .npy"
        ) from None


def _numbered(lines: Iterable[str], source: str) -> Iterator[tuple[str, str]]:
    """Each line that is not blank, and where it is."""
    for number, line in enumerate(lines, 1):
        if text := line.strip():
            yield text, f"{source}, line {number}"


def _from_lines(file: TextIO, source: str) -> IntArray:
    numbered = _numbered(_lines(file, source, _LONGEST_LINE), source)
    return _checked(_as_array((_as_integer(text, where) for text, where in numbered if text[0] != "#"), source), source)


def _as_array(values: Iterable[int], source: str) -> IntArray:
    array = np.fromiter(itertools.islice(values, MOST_SAMPLES + 1), dtype=np.int64)
    _check_count(array.size, source)
    return array


def _as_integer(text: str, where: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{where}: {text[:40]!r} is not an integer; expected one length in tokens per line") from None
    return in_range(value, where)


def in_range(value: int, where: str) -> int:
    """A length, if it is one.

    Raises:
        ValueError: it is less than 1, or absurdly large.
    """
    if value < 1:
        raise ValueError(f"{where} is {shown(value)}: expected a length of at least 1 token")
    if value > MOST_TOKENS:
        raise ValueError(f"{where} is {str(value)[:20]}...: expected a length in tokens, at most {MOST_TOKENS:,}")
    return value


def read_records(path: Path) -> Iterator[tuple[object, str]]:
    """What each sample of a dataset holds, and where it is, for messages. Blank lines are left out.

    Raises:
        ValueError: it is not in its format, or what reads that is not installed.
        OSError: the file cannot be read.
    """
    named, form = shorten(str(path)), _format_of(path)
    if path.is_dir() or form == ".parquet":
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in _batches(path, named))
        yield from ((row, f"{named}, row {number}") for number, row in enumerate(rows, 1))
        return
    with open_text(path) as file:
        lines: Iterable[str] = _lines(file, named, _LONGEST_DOCUMENT if form == ".json" else _LONGEST_OBJECT)
        if form in (".csv", ".tsv"):
            yield from _from_csv(lines, named, "," if form == ".csv" else "\t")
            return
        if form == ".json":
            lines = list(lines)
            with suppress(ValueError, RecursionError):  # or it has an object per line, all the same
                document = json.loads("".join(lines))
                if isinstance(document, list):
                    yield from ((record, f"{named}, sample {number}") for number, record in enumerate(document, 1))
                    return
        for line, where in _numbered(lines, named):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where} is not JSON: {shorten(str(error))}") from None
            yield record, where


def _batches(path: Path, named: str) -> Any:
    """Some rows of columns at a time, as pyarrow has them."""
    try:
        if not path.is_dir():
            from pyarrow.parquet import ParquetFile

            check_ends(path)
            return ParquetFile(path).iter_batches(_ROWS_AT_ONCE)
        from datasets import load_from_disk

        saved = load_from_disk(str(path))
    except ImportError as error:
        package = str(error.name).partition(".")[0]
        raise ValueError(f"{named} needs the package {package}: pip install {package}") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{named} cannot be read: {shorten(str(error))}") from None
    if isinstance(saved, dict):
        raise ValueError(f"{named} holds the splits {', '.join(saved)}: expected one, as {path / next(iter(saved))}")
    return saved.with_format("arrow").iter(_ROWS_AT_ONCE)


def _from_csv(lines: Iterable[str], source: str, delimiter: str) -> Iterator[tuple[object, str]]:
    """The rows by the names in the first line; without names, a column of lengths."""
    csv.field_size_limit(_LONGEST_OBJECT)
    lines = iter(lines)
    first = next(lines, "")
    names = ["length"] if first.strip().isdecimal() else None
    rows = csv.DictReader(itertools.chain([first], lines), names, delimiter=delimiter, strict=True)
    try:
        for row in rows:
            where = f"{source}, line {rows.line_num}"
            if None in row:
                raise ValueError(f"{where} has more values than the first line has names")
            yield row, where
    except csv.Error as error:
        raise ValueError(f"{source}, line {rows.line_num} is not in the CSV format: {error}") from None


def _from_records(path: Path, reader: RecordReader) -> Iterator[int]:
    for record, where in read_records(path):
        yield in_range(reader.length(record, where), f"{where}, {reader.place}")


def _checked(values: IntArray, source: str) -> IntArray:
    lengths = as_lengths(values, name=f"{source}: lengths")
    if lengths.size == 0:
        raise ValueError(f"{source} holds no lengths: expected at least one")
    in_range(int(lengths.max()), f"the longest sample of {source}")
    return lengths


# Which samples


def shuffled(num_samples: int, seed: int) -> IntArray:
    """The indices of all samples in random order."""
    return np.argsort(random_generator("some", seed).random_raw(num_samples), kind="stable")


def draw(num_samples: int, most: int, seed: int) -> IntArray:
    """The indices of at most so many of the samples, drawn at random, rising."""
    if num_samples <= most:
        return np.arange(num_samples)
    return np.sort(shuffled(num_samples, seed)[:most])


def some_of(lengths: IntArray, most: int, seed: int) -> IntArray:
    """At most so many of the samples, drawn at random."""
    return lengths[draw(lengths.size, most, seed)]


def larger_sizes(minibatch_size: int, world_size: int, num_samples: int) -> Iterator[int]:
    """A few larger minibatch sizes, up to 64, or as far as the samples go."""
    size = 2 * minibatch_size
    while size <= _LARGEST_SIZE and size * world_size <= num_samples:
        yield size
        size *= 2


def cut(lengths: IntArray, max_tokens: int | None, *, truncate: bool, devices: int = 1) -> IntArray:
    """The lengths, none above what ``devices`` together hold, ``max_tokens`` each.

    Raises:
        ValueError: a sample is longer and is not to be truncated, or there is nothing to truncate to.
    """
    if max_tokens is None:
        if truncate:
            raise ValueError("--set truncate=yes needs --max-tokens: the length to cut samples to")
        return lengths
    if truncate:
        return np.minimum(lengths, max_tokens * devices)
    if too_long := int((lengths > max_tokens * devices).sum()):
        longest = int(lengths.max())
        on_each, its_part = (f" on each of {devices} devices", f"1/{devices} of ") if devices > 1 else ("", "")
        raise ValueError(
            f"{too_long:,} of {lengths.size:,} samples are longer than --max-tokens {max_tokens}{on_each}: raise "
            f"--max-tokens to {-(-longest // devices)}, {its_part}the longest sample, or cut them with --set "
            "truncate=yes"
        )
    return lengths


def check_enough(num_samples: int, source: str, minibatch_size: int, world_size: int, wanted_by: str = "") -> None:
    """Check that there is at least one minibatch.

    Args:
        num_samples: how many there are.
        source: where they are from: of a law, there can be more.
        minibatch_size: samples per rank.
        world_size: number of ranks.
        wanted_by: which of many settings wants so many, for people.

    Raises:
        ValueError: there is none.
    """
    if num_samples < minibatch_size * world_size:
        more = ", or raise samples" if source in law_names() else ""
        raise ValueError(
            f"{num_samples} samples make no minibatch of {minibatch_size} samples on each of {world_size} ranks"
            f"{wanted_by}: lower --minibatch-size or --world-size{more}"
        )


def describe(lengths: IntArray) -> str:
    """How many, and how long."""
    shortest, median, longest = np.percentile(lengths, [0, 50, 100]).astype(int)
    return (
        f"{lengths.size:,} samples, {lengths.sum():,} tokens; shortest {shortest:,}, median {median:,}, longest "
        f"{longest:,}"
    )
