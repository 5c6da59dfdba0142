"""Units of communication: the static description of one FSDP unit, the same on every rank."""

from __future__ import annotations

import itertools
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
    """Elements per rank, including padding (FSDP pads dim 0 so that all shards are equal)."""


@dataclass(frozen=True)
class UnitSpec:
    """One unit, usually an FSDP unit: a gather reads its shard from each owner, and a push adds gradients at each
    owner.

    Each rank publishes ``shard_numel`` elements of ``dtype``. ``params`` are the trainable parameters, in the order of
    their gradients in a push. Gradients are sent in ``grad_dtype``, or in the narrower dtype in which they were
    computed.

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

    def pushed_numel(self, present: Sequence[bool] | None) -> int:
        """Elements of one owner's slice of the gradients of the ``present`` parameters; None: of all."""
        if present is None:
            return self.grad_numel
        return sum(param.numel for param, here in zip(self.params, present, strict=True) if here)

    def describe(self) -> str:
        """One line that is equal on two ranks exactly if the units are."""
        params = ", ".join(f"{p.name}[{p.numel}]" for p in self.params)
        return f"{self.shard_numel} x {self.dtype} per rank; gradients {self.grad_dtype}: {params or 'none'}"


class Destination:
    """The memory that a gather fills, separately for each part of the shards. Flat memory is one part, with one row per
    rank.

    Args:
        outs: one tensor for each part of a shard, in order, all of one dtype: [world_size, ...], row r for the shard of
            rank r. Between gathers their memory may be freed.

    Example:
        >>> from odc.units import Destination
        >>> there = Destination([torch.empty(2, 3), torch.empty(2, 1)])
        >>> there.shard_numel, there.nbytes
        (4, 32)
    """

    def __init__(self, outs: Sequence[torch.Tensor]) -> None:
        self.outs = outs
        self.dtype = outs[0].dtype
        self.shapes = [out.shape[1:] for out in outs]
        """Of a row of each."""
        self.nbytes = sum([out.nbytes for out in outs])
        self.shard_numel = self.nbytes // self.dtype.itemsize // outs[0].shape[0]

    @cached_property
    def rows(self) -> list[tuple[torch.Tensor, ...]]:
        """By rank: the row of each part."""
        return list(zip(*[out.unbind() for out in self.outs], strict=True))

    @cached_property
    def flat(self) -> list[torch.Tensor | None]:
        """Each of them as one dense row of elements; None where its rows are not dense."""
        return [out.view(-1) if out.is_contiguous() else None for out in self.outs]

    def parts_of(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a flat shard, each shaped as a row."""
        parts = shard.split_with_sizes([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class Rows(NamedTuple):
    """What a push holds of one parameter, or of several that follow each other in :attr:`UnitSpec.params`."""

    grads: torch.Tensor
    """[world_size, ...], row r for rank r; or flat and too short for all rows: what the last ones lack is padding."""
    numel: int
    """Elements of a whole row."""

    @classmethod
    def of_flat(
        cls, grads: torch.Tensor, unit: UnitSpec, present: Sequence[bool] | None, world_size: int
    ) -> list[Rows]:
        """Of memory that has the gradients of the ``present`` parameters (None: of all) back to back in each row.

        >>> spec = UnitSpec("u", 8, torch.float32, (ParamSlice("a", 2), ParamSlice("b", 3), ParamSlice("c", 1)))
        >>> [rows.grads.tolist() for rows in Rows.of_flat(torch.arange(6), spec, [True, False, True], 2)]
        [[[0, 1], [3, 4]], [[2], [5]]]
        """
        whole = grads.view(world_size, -1)
        if present is None:
            return [cls(whole, whole.shape[1])]
        runs = [(source, numel) for _, numel, source in segments(unit, present) if source is not None]
        return [cls(whole[:, source : source + numel], numel) for source, numel in runs]

    def unbind(self, world_size: int) -> Sequence[torch.Tensor]:
        """Row by row; rows that are padding alone are empty.

        >>> [row.tolist() for row in Rows(torch.tensor([1.0, 2.0, 3.0]), 2).unbind(3)]
        [[1.0, 2.0], [3.0], []]
        """
        if self.grads.dim() > 1:
            return self.grads.unbind()
        numels = [self.numel] * (self.grads.numel() // self.numel)
        rows = self.grads.split_with_sizes([*numels, self.grads.numel() - sum(numels)])
        return [*rows, *[self.grads[:0]] * (world_size - len(rows))]


class Segment(NamedTuple):
    """``numel`` elements at ``offset`` of an accumulator, fed from ``source`` of a push (None: not in this push)."""

    offset: int
    numel: int
    source: int | None


class Layout(NamedTuple):
    """Where in the unit's accumulator the parts of a push go."""

    present: tuple[bool, ...] | None
    """Which parameters the push holds, if not all."""
    numels: tuple[int, ...]
    """Elements of a whole row of each part."""
    offsets: tuple[int, ...]
    gaps: tuple[tuple[int, int], ...]
    """Offset and length of what the push lacks."""

    @classmethod
    def of(cls, unit: UnitSpec, numels: Sequence[int], present: Sequence[bool] | None) -> Layout:
        """
        Args:
            numels: of the parts, none of which spans a parameter that is left out.

        >>> spec = UnitSpec("u", 8, torch.float32, (ParamSlice("a", 2), ParamSlice("b", 3), ParamSlice("c", 1)))
        >>> Layout.of(spec, [2, 1], [True, False, True]).offsets
        (0, 5)
        """
        found = segments(unit, present or [True] * len(unit.params))
        filled = [(source, offset) for offset, _, source in found if source is not None]
        gaps = tuple((offset, numel) for offset, numel, source in found if source is None)
        starts = itertools.accumulate(numels[:-1], initial=0)
        offsets = [
            max((source, offset + start - source) for source, offset in filled if source <= start)[1]
            for start in starts
        ]
        return cls(None if present is None else tuple(present), tuple(numels), tuple(offsets), gaps)


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
