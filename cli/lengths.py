"""Read the lengths of a dataset from what people have."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from odc.balance import even_lengths, law_names
from odc.balance.checks import IntArray, as_lengths

# Field names, in the order in which they are looked for.
_LENGTH_FIELDS = ("length", "num_tokens", "seq_len", "seqlen", "input_length", "n_tokens")
_TOKEN_FIELDS = ("input_ids", "tokens", "token_ids")
_TEXT_FIELDS = ("text", "content", "prompt")

CountTokens = Callable[[str], int]


def read_lengths(source: str, *, num_samples: int, field: str | None, count_tokens: CountTokens) -> IntArray:
    """Lengths (tokens) from ``source``.

    Args:
        source: ``.npy`` (integers); ``.jsonl`` (an object per line with a length, a list of tokens, or text);
            any other file: one integer per line, blank lines and lines starting with # ignored; ``-`` is
            standard input in that form; or the name of a length law.
        num_samples: how many samples of a law.
        field: of JSONL objects; by default the first known one that the first object has.
        count_tokens: counts the tokens of a text.

    Raises:
        ValueError: there is no such file or law, or something in it is not a length.
    """
    if source == "-":
        return _from_lines(sys.stdin, "standard input")
    path = Path(source)
    if not path.exists():
        if source in law_names():
            return even_lengths(source, num_samples)
        raise ValueError(f"{source!r} is neither a file nor a length law: laws are {', '.join(law_names())}")
    if path.is_dir():
        raise ValueError(f"{source!r} is a folder: expected a file with lengths")
    if path.suffix == ".npy":
        return _checked(_load_npy(path), source)
    with path.open(encoding="utf-8") as lines:
        if path.suffix in (".jsonl", ".ndjson"):
            return _checked(np.array(list(_from_objects(lines, source, field, count_tokens))), source)
        return _from_lines(lines, source)


def _load_npy(path: Path) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as an array of lengths: {error}") from None


def _from_lines(lines: Iterable[str], source: str) -> IntArray:
    values = []
    try:
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if text and not text.startswith("#"):
                values.append(_as_integer(text, f"{source}, line {number}"))
    except UnicodeDecodeError:
        raise ValueError(f"{source} is not text: expected one integer per line, .jsonl or .npy") from None
    return _checked(np.array(values, dtype=np.int64), source)


def _as_integer(text: str, where: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{where}: {text[:40]!r} is not an integer; expected one length in tokens per line") from None


def _from_objects(lines: Iterable[str], source: str, field: str | None, count_tokens: CountTokens) -> Iterator[int]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where} holds a {type(record).__name__}: expected an object")
        field = field or _find_field(record, where)
        if field not in record:
            raise ValueError(f"{where} has no field {field!r}, only {', '.join(map(repr, record))}")
        yield _length_of(record[field], f"{where}, field {field!r}", count_tokens)


def _find_field(record: dict[str, object], where: str) -> str:
    known = (*_LENGTH_FIELDS, *_TOKEN_FIELDS, *_TEXT_FIELDS)
    for name in known:
        if name in record:
            return name
    raise ValueError(
        f"{where} has the fields {', '.join(map(repr, record))}: none of them is known to hold a length, tokens or "
        "text; name it with --field"
    )


def _length_of(value: object, where: str, count_tokens: CountTokens) -> int:
    if isinstance(value, str):
        return count_tokens(value)
    if isinstance(value, list):
        return len(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{where} is {value!r}: expected an integer, a list of tokens, or text")
    return value


def _checked(values: Any, source: str) -> IntArray:
    lengths = as_lengths(values, name=f"{source}: lengths")
    if lengths.size == 0:
        raise ValueError(f"{source} holds no lengths")
    return lengths


def token_counter(tokenizer: Path | None, chars_per_token: float) -> CountTokens:
    """A function that counts the tokens of a text: exactly with a ``tokenizer.json``, else by its characters.

    Raises:
        ValueError: the tokenizer cannot be read, or ``tokenizers`` is not installed.
    """
    if tokenizer is None:
        return lambda text: max(1, round(len(text) / chars_per_token))
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError("--tokenizer needs the package tokenizers: pip install tokenizers") from None
    try:
        loaded = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the bindings raise bare Exception
        raise ValueError(f"{tokenizer} cannot be read as a tokenizer.json: {error}") from None
    return lambda text: max(1, len(loaded.encode(text).ids))
