"""What a loader gives for a sample, as bytes that any rank can turn back into tensors. (Needs torch.)"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from odc.balance.multimodal.lengths import SampleLengths
from odc.balance.rearrange.exchange import DTYPES
from odc.errors import shown

Tensors = tuple[torch.Tensor, ...]

_ALIGNED = 8


@dataclass(frozen=True)
class SampleParts:
    """One sample, taken apart: what the language model reads by itself, and the items of its encoders.

    Example:
        >>> parts = SampleParts(
        ...     text={"input_ids": torch.arange(6)},
        ...     items={"image": [(torch.randn(4, 6),)]},  # a tuple of tensors for each image
        ...     lengths=SampleLengths(6, {"image": [ItemLengths(encoder=4, output=2)]}),
        ... )
        >>> parts.lengths.length
        6
    """

    text: Mapping[str, torch.Tensor]
    """Columns of the sequence, such as ``input_ids`` and ``labels``; in any shape."""

    items: Mapping[str, Sequence[Tensors]]
    """What encoders read: for each modality one tuple of tensors per item, in the order of the sequence."""

    lengths: SampleLengths
    """Of the sequence and of all items."""


def check_parts(parts: SampleParts, where: str) -> None:
    """Check that a sample has a length for each of its items, and that all of it can be moved: also a sample that stays
    where it is, so that it does not depend on the plan whether a sample is refused.

    Raises:
        ValueError: it has not, an item is no tuple of tensors, or a tensor has a dtype or a name that cannot travel;
            sample and phase are named.
    """
    if not isinstance(parts, SampleParts):
        raise ValueError(f"{where} was taken apart into {shown(parts)}: expected a SampleParts")
    for name, tensor in parts.text.items():
        if "\n" in name:
            raise ValueError(f"{where}: a column is called {shown(name)}: expected a name of one line")
        check_kind(tensor, f"{where}: column {name!r}")
    for name in {**parts.items, **parts.lengths.items}:
        items, lengths = parts.items.get(name, ()), parts.lengths.items.get(name, ())
        if len(items) != len(lengths):
            raise ValueError(
                f"{where}, phase {name!r}: it has {len(items)} items and {len(lengths)} lengths of items: expected a "
                "length for each item"
            )
        for place, item in enumerate(items):
            if not isinstance(item, tuple) or not all(isinstance(tensor, torch.Tensor) for tensor in item):
                raise ValueError(f"{where}, phase {name!r}: item {place} is {shown(item)}: expected a tuple of tensors")
            for tensor in item:
                check_kind(tensor, f"{where}, phase {name!r}: item {place}")


def check_kind(tensor: object, what: str) -> None:
    """Check that it is a tensor of a dtype that can travel.

    Raises:
        ValueError: it is something else, called ``what``.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{what} is {shown(tensor)}: expected a tensor")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{what} has dtype {tensor.dtype}: expected one of {', '.join(map(str, DTYPES))}")


def count_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """How many bytes :func:`to_bytes` makes of them."""
    header = 1 + sum(2 + tensor.dim() for tensor in tensors)
    return header * _ALIGNED + sum(tensor.nbytes + -tensor.nbytes % _ALIGNED for tensor in tensors)


def to_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors as one row of bytes, (n,) uint8: how many, for each dtype and shape, and then what is in them.

    Raises:
        ValueError: of a dtype that cannot travel.
    """
    header = [len(tensors)]
    for tensor in tensors:
        check_kind(tensor, "a tensor")
        header += [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    parts = [torch.from_numpy(np.array(header, dtype="<i8").view(np.uint8))]
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        parts += [data, torch.zeros(-data.numel() % _ALIGNED, dtype=torch.uint8, device="cpu")]
    return torch.cat(parts)


def from_bytes(data: torch.Tensor) -> list[torch.Tensor]:
    """What :func:`to_bytes` has made, in host memory."""
    data = data.cpu()
    words = data[: data.numel() // _ALIGNED * _ALIGNED].view(torch.int64)
    count, at = int(words[0]), 1
    kinds = []
    for _ in range(count):
        number, num_dims = int(words[at]), int(words[at + 1])
        kinds.append((DTYPES[number], words[at + 2 : at + 2 + num_dims].tolist()))
        at += 2 + num_dims
    start, found = _ALIGNED * at, []
    for dtype, shape in kinds:
        size = math.prod(shape) * dtype.itemsize
        found.append(data[start : start + size].clone().view(dtype).view(shape))
        start += size + -size % _ALIGNED
    return found


def named(columns: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Named tensors as tensors alone, the first of which holds the names."""
    names = bytearray("\n".join(columns).encode())
    first = torch.frombuffer(names, dtype=torch.uint8) if names else torch.empty(0, dtype=torch.uint8, device="cpu")
    return [first, *columns.values()]


def from_named(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What :func:`named` has made them of."""
    names, *values = tensors
    return dict(zip(bytes(names.tolist()).decode().split("\n") if values else [], values, strict=True))
