"""What ``--set KEY=VALUE`` says: settings of plans and studies that are rarely changed, each described here, once."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from odc.errors import shown


@dataclass(frozen=True)
class Kind:
    """What a value may be."""

    expected: str
    """For messages."""

    read: Callable[[str], object]
    """Raises ValueError or KeyError for anything else."""


def _number(least: float, most: float = math.inf, as_type: Callable[[str], float] = float) -> Kind:
    def read(text: str) -> float:
        value = as_type(text)
        if not (least <= value <= most and value < math.inf):
            raise ValueError(text)
        return value

    what = "an integer" if as_type is int else "a finite number"
    return Kind(f"{what} from {least} to {most}" if most < math.inf else f"{what} of at least {least}", read)


def _read_speeds(text: str) -> tuple[float, ...]:
    speeds = tuple(map(float, text.split(",")))
    if not all(0 < speed < math.inf for speed in speeds):
        raise ValueError(text)
    return speeds


_COUNT = _number(1, as_type=int)
_NOT_NEGATIVE = _number(0)
_YES_OR_NO = Kind("yes or no", {"yes": True, "no": False}.__getitem__)
_PANELS = Kind("all or minibatch", {name: name for name in ("all", "minibatch")}.__getitem__)
_SPEEDS = Kind("a number for each rank, separated by commas, all finite and greater than 0", _read_speeds)
_FILE = Kind("a file", Path)


@dataclass(frozen=True)
class Settings:
    """Each is a key of ``--set``, with hyphens for underscores."""

    timings: Annotated[Path | None, _FILE, "CSV of measured 'length,seconds' to fit the costs to, not FLOPs"] = None
    mfu: Annotated[float, _number(0.01, 1), "Model FLOPs utilization: achieved over peak FLOPs"] = 0.4
    microbatch_cost: Annotated[
        float | None, _NOT_NEGATIVE, "Fixed seconds per microbatch, besides its samples; default: from timings, else 0"
    ] = None
    chars_per_token: Annotated[float, _number(0.1), "Characters of a token, in text without --tokenizer"] = 4.0
    seed: Annotated[int, _number(0, as_type=int), "Of the shuffle"] = 0
    minibatches: Annotated[int, _COUNT, "Maximum number of minibatches to plan"] = 200
    recompute: Annotated[bool, _YES_OR_NO, "Whether activations are recomputed in the backward"] = True
    samples: Annotated[int, _COUNT, "How many to draw from a length law; files are read completely"] = 10_000
    truncate: Annotated[bool, _YES_OR_NO, "Whether samples longer than --max-tokens are cut"] = False
    batch_size: Annotated[int | None, _COUNT, "Samples per rank that verl-native balances together"] = None
    noise: Annotated[float, _NOT_NEGATIVE, "Relative error of the cost estimates, e.g. 0.2"] = 0.0
    speeds: Annotated[tuple[float, ...] | None, _SPEEDS, "Of each rank, e.g. 1,1,1,0.8"] = None
    gather_ms: Annotated[
        float | None,
        _NOT_NEGATIVE,
        "Time to gather one layer with collectives; default: computed from its bytes over NVLink, for up to 8 ranks "
        "without timings, else 0",
    ] = None
    scatter_ms: Annotated[float | None, _NOT_NEGATIVE, "Time to reduce-scatter one layer; default: likewise"] = None
    odc_slower: Annotated[float, _NOT_NEGATIVE, "Factor by which ODC's transfers within a host take longer"] = 1.0
    overlap: Annotated[float, _number(0, 1), "Fraction of transfer time that compute can hide"] = 1.0
    panel: Annotated[str, _PANELS, "What --plot draws: all pictures, or what ranks do in one minibatch"] = "all"
    reorder: Annotated[
        bool,
        _YES_OR_NO,
        "Also compare orders that change which samples share a step: similar lengths grouped (group_by_length of "
        "transformers), and TRL's packing (bfd)",
    ] = True


@dataclass(frozen=True)
class Key:
    """A field of :class:`Settings`."""

    name: str
    default: object
    kind: Kind
    help: str


_HINTS = typing.get_type_hints(Settings, include_extras=True)
KEYS = {
    field.name.replace("_", "-"): Key(field.name, field.default, *_HINTS[field.name].__metadata__)
    for field in dataclasses.fields(Settings)
}

OF_COSTS = ("timings", "mfu", "microbatch-cost", "chars-per-token", "seed")
"""What every plan and every study looks at."""


def all_but(*names: str) -> tuple[str, ...]:
    """The other keys."""
    return tuple(name for name in KEYS if name not in names)


def describe(names: Iterable[str]) -> str:
    """For the end of a command's help: a line for each key."""
    return "\n".join(f"--set {name}=...: {KEYS[name].help}" for name in names)


def read_settings(given: Sequence[str], names: Sequence[str]) -> Settings:
    """What the options say; of a key that is said twice, the last.

    Args:
        given: ``KEY=VALUE`` each.
        names: of the keys that the command looks at.

    Raises:
        ValueError: a key is not known, or its value is not what it should be.
    """
    values = {}
    for text in given:
        name, equals, value = text.partition("=")
        if name not in names or not equals:
            raise ValueError(f"--set {shown(text)}: expected KEY=VALUE, with a key of {', '.join(names)}")
        key = KEYS[name]
        try:
            values[key.name] = key.kind.read(value)
        except (ValueError, KeyError):
            raise ValueError(f"--set {shown(text)}: expected {name} to be {key.kind.expected}") from None
    return Settings(**values)  # type: ignore[arg-type]
