"""How many tokens one JSON object of a dataset holds: which of its fields, and how they are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from odc.errors import shorten, shown

# Fields, or fields that belong together, in the order in which they are looked for.
_LENGTHS = (("length",), ("num_tokens",), ("seq_len",), ("seqlen",), ("input_length",), ("n_tokens",))
_TOKENS = (("input_ids",), ("tokens",), ("token_ids",))
_TEXTS = (
    ("messages",),
    ("conversations",),
    ("text",),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "input", "output"),
    ("instruction", "output"),
    ("content",),
)
_KNOWN = (*_LENGTHS, *_TOKENS, *_TEXTS)
# Of a message of a chat: OpenAI's form, and ShareGPT's.
_SAID = ("content", "value")

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
        """Tokens of one sample that consists of these texts: at least 1."""
        return max(1, sum(map(self._count, texts)))


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
    """Tokens of the objects of one file. All are counted in the same way, which :attr:`about` tells.

    Args:
        fields: which of their fields, added up; by default the first known ones that the first object has.
        count_tokens: of text.
    """

    def __init__(self, fields: Sequence[str], count_tokens: TokenCounter) -> None:
        self._fields = tuple(fields)
        self._count_tokens = count_tokens
        self._kinds: tuple[type, ...] = ()
        self._item_fields: dict[str, None] = {}

    @property
    def counts_text(self) -> bool:
        """Whether lengths were counted from text, which has no place for what encoders make; once an object was."""
        return str in self._kinds or dict in self._kinds

    @property
    def item_fields(self) -> tuple[str, ...]:
        """Fields of the objects so far that hold items of a modality, as :func:`item_fields` knows them."""
        return tuple(self._item_fields)

    @property
    def place(self) -> str:
        """The fields, for messages."""
        return f"field {' + '.join(map(shown, self._fields))}"

    @property
    def about(self) -> str:
        """The fields, and how they were counted; once an object was."""
        kinds = list(dict.fromkeys(_KINDS[kind] for kind in self._kinds))
        text = f"{self.place}: {' and '.join(kinds)}"
        return f"{text}; {self._count_tokens.about}" if self.counts_text else text

    def length(self, record: object, where: str) -> int:
        """Tokens of an object, not yet checked for being at least 1.

        Raises:
            ValueError: it is no object, lacks a field, or a field holds something else than in the first object, or
                what cannot be counted.
        """
        if not isinstance(record, dict):
            raise ValueError(f"{where} holds a {type(record).__name__}: expected an object")
        self._fields = self._fields or _find(record, where)
        self._item_fields.update(dict.fromkeys(item_fields(record)))
        total, texts, kinds = 0, [], []
        for field in self._fields:
            if field not in record:
                raise ValueError(f"{where} has no field {shown(field)}, only {_names(record)}")
            place = f"{where}, field {shown(field)}"
            if field in self._item_fields:
                raise ValueError(f"{place} holds items of a modality, not a length: {how_to_plan([field])}")
            kind, count, found = _read(record[field], place)
            total += count
            texts += found
            kinds.append(kind)
        if self._kinds and self._kinds != tuple(kinds):
            now, before = (" and ".join(_KINDS[kind] for kind in each) for each in (kinds, self._kinds))
            raise ValueError(f"{where} holds {now}, the lines before {before}: expected the same in every line")
        self._kinds = tuple(kinds)
        return total + (self._count_tokens(texts) if texts else 0)


def item_fields(record: dict[str, object]) -> list[str]:
    """The fields of an object that hold items of a modality: lists of pairs of integers, and nothing else does."""
    return [name for name, value in record.items() if isinstance(value, list) and value and all(map(_is_pair, value))]


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)


def how_to_plan(modalities: Sequence[str]) -> str:
    """What to do about fields that hold items of modalities, for messages."""
    options = " ".join(f"--modality {name}:..." for name in modalities)
    return f"odc plan {shorten(options)} plans their encoders (odc plan --help tells how)"


def _find(record: dict[str, object], where: str) -> tuple[str, ...]:
    """The known fields of an object. A prompt alone is part of a sample unless nothing else could be the rest of it."""
    for fields in _KNOWN:
        if all(field in record for field in fields):
            return fields
    others = [name for name, value in record.items() if name != "prompt" and isinstance(value, (str, list))]
    if "prompt" in record and not others:
        return ("prompt",)
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
    return shorten(", ".join(shown(name) for name in list(record)[:50]))


def _read(value: object, where: str) -> tuple[type, int, list[str]]:
    """What kind a field is of, its length if that is a number or tokens, and the texts in it."""
    if isinstance(value, str):
        return str, 0, [value]
    if isinstance(value, int) and not isinstance(value, bool):
        return int, value, []
    if isinstance(value, list):
        if all(type(entry) is int for entry in value):
            return list, len(value), []
        if all(isinstance(entry, dict) for entry in value):
            return dict, 0, [text for message in value for text in _texts(message, where)]
        kinds = ", ".join(sorted({type(entry).__name__ for entry in value}))
        raise ValueError(f"{where} is a list of {kinds}: expected tokens (integers), or the messages of a chat")
    raise ValueError(f"{where} is {shown(value)}: expected an integer, a list of tokens, text, or a chat")


def _texts(message: dict[str, object], where: str) -> Iterator[str]:
    """What a message of a chat says: its content, or the texts among the parts of it."""
    for name in _SAID:
        said = message.get(name)
        if isinstance(said, str):
            yield said
            return
        if isinstance(said, list) and said:
            parts = [part.get("text") if isinstance(part, dict) else None for part in said]
            texts = [text for text in parts if isinstance(text, str)]
            if len(texts) == len(said):
                yield from texts
                return
    raise ValueError(
        f"{where} holds the message {shown(message)}: expected text in its 'content'. Write the samples as your chat "
        "template makes them, or their lengths, into a file"
    )
