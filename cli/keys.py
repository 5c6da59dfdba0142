"""Reads options that say names, or KEY=VALUE.

Keys are the fields of a dataclass, and the annotation of a field says how its value is read:
``seed: Annotated[int, COUNT, "Of the shuffle"] = 0`` makes ``seed=`` a key with a help. Hyphens stand for underscores.
What reads a value raises a ValueError that says what the value may be.
"""

from __future__ import annotations

import contextlib
import math
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from odc.errors import shown

T = TypeVar("T")


def number(least: float, most: float = math.inf, as_type: Callable[[str], float] = float) -> Callable[[str], float]:
    """A finite number, or an integer where ``as_type`` is int."""
    limits = f"from {least} to {most}" if most < math.inf else f"of at least {least}"

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = as_type(text)
            if least <= value <= most and value < math.inf:
                return value
        raise ValueError(f"expected {'an integer' if as_type is int else 'a finite number'} {limits}")

    return read


def one_of(values: Mapping[str, T]) -> Callable[[str], T]:
    """One of these names."""

    def read(text: str) -> T:
        if text not in values:
            raise ValueError(f"expected one of {', '.join(values)}")
        return values[text]

    return read


COUNT, NOT_NEGATIVE = number(1, as_type=int), number(0)
YES_OR_NO = one_of({"yes": True, "no": False})
FLAG = one_of({"": True})
"""Of a key that stands alone, without = behind it."""


def chosen(option: str, given: Sequence[str] | None, default: Sequence[str], known: Collection[str]) -> list[str]:
    """The names that a repeatable option says, each once.

    Raises:
        ValueError: a name is not known.
    """
    names = list(dict.fromkeys(given or default))
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{option} {unknown[0]!r} is not known: expected of {', '.join(known)}")
    return names


def keys_of(form: Any) -> dict[str, tuple[Any, ...]]:
    """Of each key: what reads its value, and its help if it has one."""
    hints = typing.get_type_hints(form, include_extras=True)
    return {name.replace("_", "-"): hint.__metadata__ for name, hint in hints.items()}


def read_keys(form: type[T], option: str, parts: Iterable[str], names: Collection[str] | None = None) -> T:
    """What ``parts`` of an option say; of a key that is said twice, the last.

    Args:
        names: keys that are known; all of ``form`` unless given.

    Raises:
        ValueError: a key is not known, or its value is not what it should be.
    """
    known = {name: about[0] for name, about in keys_of(form).items() if names is None or name in names}
    values = {}
    for part in parts:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in known or bool(equals) == (known[key] is FLAG):
            expected = ", ".join(name if read is FLAG else f"{name}=" for name, read in known.items())
            raise ValueError(f"{option}: {shown(part)} is not known: expected of {expected}")
        try:
            values[key.replace("-", "_")] = known[key](value)
        except ValueError as error:
            raise ValueError(f"{option}: {key} is {shown(value)}, {error}") from None
    return form(**values)
