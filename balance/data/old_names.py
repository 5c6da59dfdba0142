"""Arguments of loaders that are options of objects now, for one more minor release. What is here goes with that
release, and with it the decorators of the loaders."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from odc.balance.checks import as_one_of
from odc.balance.data.order import Order
from odc.balance.data.place import Place
from odc.balance.data.reader import ReadOptions
from odc.balance.data.sampler import MinibatchSampler
from odc.balance.grouping.alignment import ALIGNMENTS, Alignment
from odc.balance.grouping.methods import Grouping
from odc.errors import shown

P = ParamSpec("P")
T = TypeVar("T")

_SAMPLER = inspect.signature(MinibatchSampler).parameters.keys() - {"lengths", "world_size"}
_ALIGNMENT = {
    "cost": None,
    "join": True,
    "gradient_accumulation_steps": 1,
    "minibatch_size": None,
    "comm": "auto",
    "late_binding": False,
    "microbatch_cost": 0.0,
    "timeout_s": 1800.0,
}
"""Options of alignments, and the values that each alignment was given by default."""

_HOMES = {
    "MinibatchSampler(...)": _SAMPLER | {"lengths", "world_size"},
    "read=ReadOptions(...)": {field.name for field in fields(ReadOptions)},
}
_STREAM_HOMES = {
    "grouping=Grouping(...)": {"max_tokens", "pool_size", "batch_size"},
    "the alignment, such as align=EqualMinibatches(...)": _ALIGNMENT.keys() | {"exchange_timeout_s"},
    "order=Order(...)": {field.name for field in fields(Order)},
    "read=ReadOptions(...)": _HOMES["read=ReadOptions(...)"],
}
"""Objects, and their options: what was an argument of a loader, and is none beside objects."""

_TEXT = "give {}: this release is the last one that takes these options as arguments of the loader"


def lengths_for_sampler(init: Callable[P, T]) -> Callable[P, T]:
    """A ``MinibatchLoader`` also takes what makes its sampler, in place of the sampler."""

    @wraps(init)
    def either(*args: Any, **kwargs: Any) -> T:
        # Each loader of lengths has a minibatch_size.
        if "minibatch_size" in kwargs and not any(
            isinstance(each, MinibatchSampler) for each in (*args, kwargs.get("sampler"))
        ):
            loader, *rest = args
            return init(loader, **_with_sampler(*rest, **kwargs))
        # The sixth was the world size, behind the rank.
        _refuse({**kwargs, **dict(zip(["world_size"], args[5:], strict=False))}, _HOMES)
        return init(*args, **kwargs)

    return either


def _with_sampler(
    dataset: Any,
    lengths: Any,
    collate: Any,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    mesh: Any = None,
    **given: Any,
) -> dict[str, Any]:
    """Arguments of a ``MinibatchLoader``, of those that it had when it made its sampler."""
    options = _popped(given, _SAMPLER)
    _warn(["MinibatchSampler(lengths, ...) for the options of a sampler", *_moved(given, "read", ReadOptions())])
    world_size = Place.of(rank, world_size, mesh).world_size
    sampler = MinibatchSampler(lengths, world_size=world_size, **options)
    return {"dataset": dataset, "sampler": sampler, "collate": collate, "rank": rank, "mesh": mesh, **given}


def names_for_objects(init: Callable[P, T]) -> Callable[P, T]:
    """A ``StreamLoader`` also takes the options of its grouping, alignment, order and reading as its own."""

    @wraps(init)
    def either(*args: Any, **kwargs: Any) -> T:
        return init(*args, **as_objects(kwargs))

    return either


def as_objects(given: dict[str, Any], order: Order | None = None, read: ReadOptions | None = None) -> dict[str, Any]:
    """Arguments of a stream without old names. Unchanged if there are none: each old stream has ``max_tokens``, and
    neither a grouping nor an alignment that is an object.

    Args:
        order, read: what old names change; default: the defaults.

    Raises:
        TypeError: there is an old name beside objects.
        ValueError: an option means nothing for the alignment.
    """
    has_objects = isinstance(given.get("grouping"), Grouping) or isinstance(given.get("align"), Alignment)
    if has_objects or "max_tokens" not in given:
        _refuse(given, _STREAM_HOMES)
        return given
    found = dict(given)
    changes = [*_moved(found, "read", read or ReadOptions()), *_moved(found, "order", order or Order())]
    sizes = _popped(found, {"max_tokens", "pool_size", "batch_size"})
    shuffle = found.get("order", order or Order()).shuffle
    found["grouping"] = Grouping(found.get("grouping", "token-budget"), shuffle=shuffle, **sizes)
    if "exchange_timeout_s" in found:
        found["timeout_s"] = found.pop("exchange_timeout_s")
    options = {name: value for name, value in _popped(found, _ALIGNMENT.keys()).items() if value is not None}
    name = as_one_of(found.get("align", "dgap"), "align", tuple(ALIGNMENTS))
    kind: Any = ALIGNMENTS[name]
    own = {field.name for field in fields(kind)}
    for option, value in options.items():
        if option not in {*own, "comm", "cost", "timeout_s"} and value != _ALIGNMENT[option]:
            raise ValueError(f"{option}={shown(value)} with align={name!r}, which has no such option: leave it out")
    kept = "" if shuffle else ", shuffle=False"
    changes += [f"grouping=Grouping(...{kept}) for its name and sizes", f"align={kind.__name__}(...) for {name!r}"]
    _warn(changes)
    found["align"] = kind(**{option: value for option, value in options.items() if option in own})
    return found


def _refuse(given: Mapping[str, Any], homes: Mapping[str, AbstractSet[str]]) -> None:
    """
    Raises:
        TypeError: one of these arguments is an option of an object now.
    """
    for home, options in homes.items():
        for name in given:
            if name in options:
                raise TypeError(f"{name}={shown(given[name])}, an option of {home}: give it there")


def _warn(changes: list[str]) -> None:
    """Where the loader is made: by the caller of what called the function that calls this one."""
    # Between them is typing, where a loader is given types: MinibatchLoader[int, list[int]](...).
    is_given_types = sys._getframe(3).f_globals["__name__"] == "typing"
    warnings.warn(_TEXT.format("; ".join(changes)), DeprecationWarning, stacklevel=5 if is_given_types else 4)


def _moved(given: dict[str, Any], name: str, whole: Any) -> list[str]:
    """Put an object in place of its options, if any are given; what to say of that."""
    options = _popped(given, {field.name for field in fields(whole)})
    if not options:
        return []
    given[name] = replace(given.get(name, whole), **options)
    return [f"{name}={type(whole).__name__}(...) for {', '.join(options)}"]


def _popped(given: dict[str, Any], names: Any) -> dict[str, Any]:
    """What is given of these."""
    return {name: given.pop(name) for name in list(given) if name in names}
