"""Loaders of options that stand beside each other: tests say by name what differs, and each goes to its object."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from odc.balance import Grouping, MinibatchLoader, MinibatchSampler, Order, ReadOptions, StreamLoader
from odc.balance.grouping.alignment import ALIGNMENTS, Alignment


def known_loader(
    dataset: Any, lengths: Any, collate: Any, rank: int | None = None, world_size: Any = None, **options: Any
) -> MinibatchLoader[Any, Any]:
    """Of samples whose lengths are known."""
    if options.get("mesh") is not None and world_size is None:
        world_size = options["mesh"].size()
    sampler = MinibatchSampler(lengths, world_size=world_size, **_of(MinibatchSampler, options))
    read = ReadOptions(**_of(ReadOptions, options))
    return MinibatchLoader(dataset, sampler, collate, rank, read=read, **options)


def stream_loader(
    dataset: Any,
    collate: Any,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    grouping: Any = "token-budget",
    align: str = "dgap",
    **options: Any,
) -> StreamLoader[Any, Any]:
    """Of samples whose lengths are known once they are read."""
    objects = stream_objects(grouping, align, options)
    return StreamLoader(dataset, collate, rank, world_size, **objects, **options)


def stream_objects(grouping: Any, align: str, options: dict[str, Any]) -> dict[str, Any]:
    """The objects of a stream; ``options`` keeps what is of none of them."""
    order = Order(**_of(Order, options))
    alignment: type[Alignment] = ALIGNMENTS[align]
    if not alignment.uses_cost:
        options.pop("cost", None)
    return {
        "order": order,
        "grouping": Grouping(grouping, shuffle=order.shuffle, **_of(Grouping, options)),
        "align": alignment(**_of(alignment, options)),
        "read": ReadOptions(**_of(ReadOptions, options)),
    }


def _of(kind: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    return {name: options.pop(name) for name in inspect.signature(kind).parameters if name in options}
