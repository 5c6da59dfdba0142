"""Counts the tokens of one object of a dataset, and says which columns it counts, and how."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from odc.errors import shorten, shown

# Columns that hold a sample, in the order in which they are looked for.
_LENGTHS = ("length", "num_tokens", "seq_len", "seqlen", "input_length", "n_tokens")
_TOKENS = ("input_ids", "tokens", "token_ids")
# What a chat template shows beside messages, or beside a question and its answer.
_OF_CHATS = ("system", "tools", "functions", "documents")
_OF_ANSWERS = (*_OF_CHATS, "history", "input", "context")
# Columns that make a sample together, and what is counted beside them where it is there. Both sequences of a pair have
# the prompt.
_TEXTS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("conversations", "chosen", "conversations", "rejected"): _OF_CHATS,
    ("messages",): _OF_CHATS,
    ("conversations",): _OF_CHATS,
    ("conversation",): _OF_CHATS,
    ("text",): (),
    ("prompt", "chosen", "prompt", "rejected"): _OF_CHATS,
    ("instruction", "chosen", "instruction", "rejected"): _OF_ANSWERS,
    ("question", "chosen", "question", "rejected"): _OF_ANSWERS,
    ("chosen", "rejected"): _OF_CHATS,
    ("prompt", "completion"): _OF_ANSWERS,
    ("prompt", "response"): _OF_ANSWERS,
    ("instruction", "output"): _OF_ANSWERS,
    ("instruction", "response"): _OF_ANSWERS,
    ("problem", "solution"): _OF_ANSWERS,
    ("question", "answer"): _OF_ANSWERS,
    ("query", "response"): _OF_ANSWERS,
    ("content",): (),
}
# These hold no text: a string is JSON in them, since a CSV file, for one, has nothing else.
_NO_TEXT = {*_LENGTHS, *_TOKENS, "messages", "conversations", "conversation"}
# Of a message of a chat: what it says, in OpenAI's form and in ShareGPT's, and what it calls. Who says it is no text.
_SAID = ("reasoning_content", "reasoning", "thinking", "content", "value")
_CALLED = ("tool_calls", "function_call")
_OF_MESSAGES = {*_SAID, *_CALLED, "role", "from"}
_MOST_NAMES = 50  # of columns that are kept for people to read

_KINDS = {
    int: "the length that it says",
    list: "its tokens, counted",
    str: "text",
    dict: "chats: the text of their messages, without what a chat template adds",
}


class TokenCounter:
    """Counts the tokens of a text: exactly with a ``tokenizer.json``, else an estimate by its characters.

    Raises:
        ValueError: the tokenizer cannot be read, or ``tokenizers`` is not installed.
    """

    def __init__(self, tokenizer: Path | None, chars_per_token: float) -> None:
        if tokenizer is None:
            self.about = f"{chars_per_token:g} characters per token, an estimate (--tokenizer counts)"
            self._count: Callable[[str], int] = lambda text: round(len(text) / chars_per_token)
        else:
            self.about = f"tokens of {shorten(str(tokenizer))}"
            self._count = _load(tokenizer)

    def __call__(self, texts: Sequence[str]) -> int:
        """Tokens of one sample that consists of these texts."""
        return sum(map(self._count, texts))


def _load(tokenizer: Path) -> Callable[[str], int]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError("--tokenizer needs the package tokenizers: pip install tokenizers") from None
    if not tokenizer.is_file():
        raise ValueError(f"--tokenizer {shorten(str(tokenizer))} is no file: expected a tokenizer.json")
    try:
        loaded = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the bindings raise bare Exception
        problem = shorten(str(error))
        raise ValueError(f"{shorten(str(tokenizer))} cannot be read as a tokenizer.json: {problem}") from None
    return lambda text: len(loaded.encode(text).ids)


class RecordReader:
    """Tokens of the objects of one dataset. All are counted in the same way, which :attr:`about` tells.

    Args:
        fields: which of their columns, added up; by default the first known ones that the first object has, and what
            a chat template shows beside them.
        count_tokens: of text.
    """

    def __init__(self, fields: Sequence[str], count_tokens: TokenCounter) -> None:
        self._fields = tuple(fields)
        self._beside: tuple[str, ...] = ()
        self._no_text = _NO_TEXT
        self._count_tokens = count_tokens
        self._kinds: tuple[type, ...] = ()
        self._item_fields: dict[str, None] = {}
        self._counted: dict[str, None] = {}
        self._seen: dict[str, None] = {}
        self._num_empty = 0

    @property
    def counts_text(self) -> bool:
        """Whether lengths were counted from text, which has no place for what encoders make; once an object was."""
        return str in self._kinds or dict in self._kinds

    @property
    def columns(self) -> tuple[str, ...]:
        """What the objects so far have, the first of them."""
        return tuple(self._seen)

    @property
    def item_fields(self) -> tuple[str, ...]:
        """Columns of the objects so far that hold items of a modality, as :func:`item_fields` knows them."""
        return tuple(self._item_fields)

    @property
    def place(self) -> str:
        """The columns, for messages."""
        return f"field {' + '.join(map(shown, self._fields))}"

    @property
    def about(self) -> str:
        """The columns, how they were counted, and what was not; once an object was."""
        kinds = list(dict.fromkeys(_KINDS[kind] for kind in self._kinds))
        beside = f", and {', '.join(map(shown, self._counted))}" if self._counted else ""
        parts = [f"{self.place}{beside}: {' and '.join(kinds)}"]
        if self.counts_text:
            parts.append(self._count_tokens.about)
        if len(self._fields) > len(set(self._fields)):
            parts.append("both sequences of a pair count as one")
        known = {*self._fields, *self._counted, *self._item_fields}
        if left_out := [shown(name) for name in self._seen if name not in known]:
            parts.append(f"not counted: {shorten(', '.join(left_out))}")
        if self._num_empty:
            parts.append(f"{self._num_empty:,} of the samples have no text for a token, and count as 1")
        return "; ".join(parts)

    def length(self, record: object, where: str) -> int:
        """Tokens of an object, not yet checked for being at least 1, except where text was counted.

        Raises:
            ValueError: it is no object, lacks a column, or a column holds something else than in the first object, or
                what cannot be counted.
        """
        if not isinstance(record, dict):
            raise ValueError(f"{where} holds a {type(record).__name__}: expected an object")
        if not self._kinds:
            self._choose(record, where)
        self._item_fields.update(dict.fromkeys(item_fields(record)))
        self._see(record)
        total, texts, kinds = 0, [], []
        for field in self._fields:
            kind, count, found = self._read(record, field, where)
            total += count
            texts += found
            kinds.append(kind)
        if self._kinds and self._kinds != tuple(kinds):
            now, before = (" and ".join(_KINDS[kind] for kind in each) for each in (kinds, self._kinds))
            raise ValueError(f"{where} holds {now}, those before it {before}: expected the same in every sample")
        self._kinds = tuple(kinds)
        for name in self._beside:
            if record.get(name):
                self._counted[name] = None
                texts += _plain_texts(record[name]) * self._fields.count(self._fields[0])
        if not self.counts_text:
            return total
        total += self._count_tokens(texts)
        self._num_empty += not total
        return max(1, total)

    def _choose(self, record: dict[str, Any], where: str) -> None:
        """By the first object: the columns, and whether strings in them are numbers or lists, as in a CSV file."""
        if not self._fields:
            self._fields, self._beside = _find(record, where)
        elif all(isinstance(_from_json(record.get(field)), int | list) for field in self._fields):
            self._no_text = {*self._fields}

    def _see(self, record: dict[str, Any], of: str = "") -> None:
        if len(self._seen) < _MOST_NAMES:
            self._seen.update((of + name, None) for name, value in record.items() if value is not None)

    def _read(self, record: dict[str, Any], field: str, where: str) -> tuple[type, int, list[str]]:
        """What kind a column is of, its length if that is a number or tokens, and the texts in it."""
        if field not in record:
            raise ValueError(f"{where} has no field {shown(field)}, only {_names(record)}")
        place, value = f"{where}, field {shown(field)}", record[field]
        if field in self._item_fields:
            raise ValueError(f"{place} holds items of a modality, not a length: {how_to_plan([field])}")
        if field in self._no_text:
            value = _from_json(value)
        elif self._is_text and isinstance(value, int | float):
            value = str(value)  # an answer that is a number
        if isinstance(value, str) and field not in (*_LENGTHS, *_TOKENS):
            return str, 0, [value]
        if isinstance(value, int) and not isinstance(value, bool):
            return int, value, []
        messages = [value] if isinstance(value, dict) and self._is_text else value
        if isinstance(messages, list):
            if all(type(entry) is int for entry in messages):
                return list, len(messages), []
            if all(isinstance(entry, dict) for entry in messages):
                for message in messages:
                    self._see({name: said for name, said in message.items() if name not in _OF_MESSAGES}, f"{field}.")
                return dict, 0, [text for message in messages for text in _texts(message, place)]
            kinds = ", ".join(sorted({type(entry).__name__ for entry in messages}))
            raise ValueError(f"{place} is a list of {kinds}: expected tokens (integers), or the messages of a chat")
        raise ValueError(f"{place} is {shown(value)}: expected an integer, a list of tokens, text, or a chat")

    @property
    def _is_text(self) -> bool:
        """Whether the columns are known to hold text."""
        return self._fields in _TEXTS


def item_fields(record: dict[str, object]) -> list[str]:
    """The fields of an object that hold items of a modality: lists of pairs of integers, and nothing else does."""
    return [name for name, value in record.items() if isinstance(value, list) and value and all(map(_is_pair, value))]


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)


def how_to_plan(modalities: Sequence[str]) -> str:
    """What to do about fields that hold items of modalities, for messages."""
    options = " ".join(f"--modality {name}:..." for name in modalities)
    return f"odc plan modalities {shorten(options)} plans their encoders (odc plan modalities --help tells how)"


def _find(record: dict[str, Any], where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The known columns of an object, and what is counted beside them."""
    if found := [name for name in (*_LENGTHS, *_TOKENS) if name in record]:
        return (found[0],), ()
    for fields, beside in _TEXTS.items():
        if all(field in record for field in fields) and not (
            fields[1:2] == ("chosen",) and _has_prompt(record[fields[0]], record["chosen"])
        ):
            return fields, beside
    # A prompt alone is part of a sample unless nothing else could be the rest of it.
    others = [name for name, value in record.items() if name != "prompt" and isinstance(value, str | list)]
    if "prompt" in record and not others:
        return ("prompt",), ()
    if items := item_fields(record):
        raise ValueError(
            f"{where} has the fields {_names(record)}: {shorten(', '.join(map(shown, items)))} looks like items of a "
            "modality, and none holds the length of the whole interleaved sequence; add it as 'length' (or name its "
            f"field with --field). {how_to_plan(items)}"
        )
    whole = "a whole sample: 'prompt' is a part of one" if "prompt" in record else "a length, tokens or text"
    raise ValueError(
        f"{where} has the fields {_names(record)}: none of them is known to hold {whole}; name it with --field, or "
        "all that make a sample with one --field each"
    )


def _names(record: dict[str, object]) -> str:
    return shorten(", ".join(shown(name) for name in list(record)[:_MOST_NAMES]))


def _from_json(value: Any) -> Any:
    """What a string says, if that is JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _has_prompt(prompt: Any, chosen: Any) -> bool:
    """Whether what is preferred is a whole sequence, the prompt in it."""
    if isinstance(chosen, str):
        return isinstance(prompt, str) and chosen.startswith(prompt)
    return json.dumps(prompt, default=str).strip("[]") in json.dumps(chosen, default=str)


def _texts(message: dict[str, Any], where: str) -> list[str]:
    """What a message of a chat says, or the texts among the parts of that; then the calls of tools that it has."""
    said = [message[name] for name in _SAID if message.get(name) is not None]
    parts = [part for value in said for part in (value if isinstance(value, list) else [value])]
    forms = [[part.get("text"), part.get("thinking")] if isinstance(part, dict) else [part] for part in parts]
    texts = [text for form in forms for text in form if isinstance(text, str)]
    calls = [text for name in _CALLED if message.get(name) for text in _plain_texts(message[name])]
    if len(texts) < len(parts) or not texts + calls:
        raise ValueError(
            f"{where} holds the message {shown(message)}: expected text in its 'content'. Write the samples as your "
            "chat template makes them, or their lengths, into a file"
        )
    return texts + calls


def _plain_texts(value: Any) -> list[str]:
    """The texts in a list of texts or of lists of them; of objects, as of tools, what templates print: their JSON."""
    if isinstance(value, list):
        return [text for entry in value for text in _plain_texts(entry)]
    if isinstance(value, str):
        return [value]
    # Arguments of a call may be JSON within JSON, and are printed as they are.
    return [json.dumps(_without_none(value), ensure_ascii=False, default=str).replace('\\"', '"')]


def _without_none(value: Any) -> Any:
    """Without what is not there: Parquet has each name in every object."""
    if isinstance(value, dict):
        return {name: _without_none(one) for name, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value
