"""Read the lengths of a dataset from what people have."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from odc.balance import even_lengths, law_names
from odc.balance.checks import IntArray, as_lengths

# Field names, in the order in which they are looked for.
_LENGTH_FIELDS = ("length", "num_tokens", "seq_len", "seqlen", "input_length", "n_tokens")
_TOKEN_FIELDS = ("input_ids", "tokens", "token_ids")
_TEXT_FIELDS = ("text", "content", "prompt")

# Sums of lengths stay exact far above this.
MOST_TOKENS = 10**12

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
        OSError: the file cannot be read.
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
    if path.suffix == ".json":
        raise ValueError(f"{source} is one JSON document: expected .jsonl, one object per line")
    # Bytes that are not UTF-8 become surrogates, which _numbered finds: so the line is known.
    with path.open(encoding="utf-8", errors="surrogateescape") as lines:
        if path.suffix in (".jsonl", ".ndjson"):
            return _checked(_as_array(_from_objects(lines, source, field, count_tokens)), source)
        return _from_lines(lines, source)


def _load_npy(path: Path) -> IntArray:
    try:
        values = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as an array of lengths: {error}") from None
    if not isinstance(values, np.ndarray):
        raise ValueError(f"{path} holds several arrays: expected one, of lengths")
    if values.dtype.kind == "f":
        raise ValueError(f"{path} has dtype {values.dtype}: expected integers; save it with .astype(int)")
    return values


def _numbered(lines: Iterable[str], source: str) -> Iterator[tuple[str, str]]:
    """Each line that is not blank, and where it is."""
    number = 0
    try:
        for number, line in enumerate(lines, 1):
            text = line.removeprefix("\ufeff").strip() if number == 1 else line.strip()
            text.encode()
            if text:
                yield text, f"{source}, line {number}"
    except UnicodeDecodeError:
        raise _not_text(source, number + 1) from None
    except UnicodeEncodeError:
        raise _not_text(source, number) from None


def _not_text(source: str, number: int) -> ValueError:
    return ValueError(f"{source}, line {number} is not text in UTF-8: expected one integer per line, .jsonl or .npy")


def _from_lines(lines: Iterable[str], source: str) -> IntArray:
    numbered = _numbered(lines, source)
    return _checked(_as_array(_as_integer(text, where) for text, where in numbered if text[0] != "#"), source)


def _as_array(values: Iterable[int]) -> IntArray:
    return np.fromiter(values, dtype=np.int64)


def _as_integer(text: str, where: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{where}: {text[:40]!r} is not an integer; expected one length in tokens per line") from None
    return _in_range(value, where)


def _in_range(value: int, where: str) -> int:
    if value < 1:
        raise ValueError(f"{where} is {value}: expected a length of at least 1 token")
    if value > MOST_TOKENS:
        raise ValueError(f"{where} is {str(value)[:20]}...: expected a length in tokens, at most {MOST_TOKENS:,}")
    return value


def _from_objects(lines: Iterable[str], source: str, field: str | None, count_tokens: CountTokens) -> Iterator[int]:
    for line, where in _numbered(lines, source):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where} holds a {type(record).__name__}: expected an object")
        field = field or _find_field(record, where)
        if field not in record:
            raise ValueError(f"{where} has no field {field!r}, only {', '.join(map(repr, record))}")
        place = f"{where}, field {field!r}"
        yield _in_range(_length_of(record[field], place, count_tokens), place)


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


def _checked(values: IntArray, source: str) -> IntArray:
    lengths = as_lengths(values, name=f"{source}: lengths")
    if lengths.size == 0:
        raise ValueError(f"{source} holds no lengths")
    _in_range(int(lengths.max()), f"the longest sample of {source}")
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
