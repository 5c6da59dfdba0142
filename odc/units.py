"""What is communicated together: the static description of one FSDP unit, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from odc.errors import OUR_FAULT


@dataclass(frozen=True)
class ParamSlice:
    """The part of a unit's flat gradient shard that belongs to one trainable parameter.

    Example:
        >>> odc.ParamSlice("layers.0.weight", numel=1024)
        ParamSlice(name='layers.0.weight', numel=1024)
    """

    name: str
    numel: int
    """Elements per rank, padding included (FSDP pads dim 0 so that all shards are equal)."""


@dataclass(frozen=True)
class UnitSpec:
    """One unit: what a gather reads from each owner and what a push adds at each owner.

    ``shard_numel`` elements of ``dtype`` are published per rank. ``params`` are the trainable parameters in the
    order in which their gradients lie in a push; gradients travel in ``grad_dtype``.

    Example:
        >>> params = (odc.ParamSlice("weight", 8), odc.ParamSlice("bias", 4))
        >>> unit = odc.UnitSpec("layers.0", 12, torch.bfloat16, params)
        >>> unit.shard_bytes, unit.grad_numel
        (24, 12)
        >>> unit.describe()
        '12 x torch.bfloat16 per rank; gradients torch.float32: weight[8], bias[4]'
    """

    name: str
    shard_numel: int
    dtype: torch.dtype
    params: tuple[ParamSlice, ...] = ()
    grad_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.shard_numel <= 0:
            raise ValueError(f"unit {self.name!r}: shard_numel={self.shard_numel}, expected at least 1. {OUR_FAULT}")
        for param in self.params:
            if param.numel <= 0:
                raise ValueError(f"unit {self.name!r}: parameter {param.name!r} has numel={param.numel}. {OUR_FAULT}")

    @property
    def shard_bytes(self) -> int:
        return self.shard_numel * self.dtype.itemsize

    @cached_property
    def grad_numel(self) -> int:
        """Elements of one owner's slice of this unit's gradient."""
        return sum(param.numel for param in self.params)

    def describe(self) -> str:
        """One line that is equal on two ranks exactly if the units are."""
        params = ", ".join(f"{p.name}[{p.numel}]" for p in self.params)
        return f"{self.shard_numel} x {self.dtype} per rank; gradients {self.grad_dtype}: {params or 'none'}"


class Segment(NamedTuple):
    """``numel`` elements at ``offset`` of an accumulator, fed from ``source`` of a push (None: not in this push)."""

    offset: int
    numel: int
    source: int | None


def segments(unit: UnitSpec, present: Sequence[bool]) -> list[Segment]:
    """How a push that holds only the gradients of the ``present`` parameters maps onto the unit's accumulator.

    Neighbours of the same kind are merged, so a complete push is one segment.

    >>> spec = UnitSpec("u", 8, torch.float32, (ParamSlice("a", 2), ParamSlice("b", 3), ParamSlice("c", 1)))
    >>> [(s.offset, s.numel, s.source) for s in segments(spec, [True, False, True])]
    [(0, 2, 0), (2, 3, None), (5, 1, 2)]
    """
    if len(present) != len(unit.params):
        raise ValueError(
            f"unit {unit.name!r} has {len(unit.params)} trainable parameters, got {len(present)} flags. {OUR_FAULT}"
        )
    rows: list[Segment] = []
    offset = source = 0
    for param, here in zip(unit.params, present, strict=True):
        last = rows[-1] if rows else None
        if last is not None and (last.source is not None) == here:
            rows[-1] = Segment(last.offset, last.numel + param.numel, last.source)
        else:
            rows.append(Segment(offset, param.numel, source if here else None))
        offset += param.numel
        source += param.numel if here else 0
    return rows
