"""Samples of a loader as bytes, from which any rank can restore the tensors. (Needs torch.)

Samples may have any form: tensors and numbers in dicts, lists and tuples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from odc.balance.multimodal.lengths import SampleLengths
from odc.balance.rearrange.exchange import DTYPES
from odc.errors import shown

Tensors = tuple[torch.Tensor, ...]

_ALIGNED = 8
_TENSOR, _DICT, _LIST, _TUPLE = "tensor", "dict", "list", "tuple"


@dataclass(frozen=True)
class SampleParts:
    """One sample, split into the language model's inputs and the items of encoders.

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
    """Columns of the sequence, such as ``input_ids`` and ``labels``; any shape."""

    items: Mapping[str, Sequence[Tensors]]
    """Inputs of encoders: for each modality one tuple of tensors per item, in the order of the sequence."""

    lengths: SampleLengths
    """Lengths of the sequence and of all items."""


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


def check_sample(sample: object, where: str) -> None:
    """Check that a sample can change ranks.

    Raises:
        ValueError: it holds something else than tensors and numbers, a tensor that has a gradient or whose dtype cannot
            travel; its place is named.
    """
    _flatten(sample, [], where)


def to_row(sample: object, device: torch.device) -> torch.Tensor:
    """A sample as bytes, (n,) uint8, on the device on which ranks exchange."""
    tensors: list[torch.Tensor] = []
    text = json.dumps(_flatten(sample, tensors, "the sample")).encode()
    return to_bytes([torch.frombuffer(bytearray(text), dtype=torch.uint8), *tensors]).to(device)


def from_row(row: torch.Tensor) -> Any:
    """What :func:`to_row` has made a row of. A tensor is on the kind of device that it was on, of this process."""
    text, *tensors = from_bytes(row)
    return _unflatten(json.loads(text.numpy().tobytes()), tensors)


def _flatten(value: object, tensors: list[torch.Tensor], where: str) -> Any:
    """The value for JSON; its tensors are appended."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            raise ValueError(
                f"{where} requires a gradient, which would not come back from another rank: expected data; detach() it"
            )
        check_kind(value, where)
        tensors.append(value)
        return {_TENSOR: value.device.type}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        if bad := [name for name in value if not isinstance(name, str)]:
            raise ValueError(f"{where} has an entry named {shown(bad[0])}: expected names that are str")
        return {_DICT: {name: _flatten(part, tensors, f"{where}[{name!r}]") for name, part in value.items()}}
    if type(value) in (list, tuple):
        parts = [_flatten(part, tensors, f"{where}[{i}]") for i, part in enumerate(value)]  # type: ignore[arg-type, var-annotated]
        return {_LIST if type(value) is list else _TUPLE: parts}
    raise ValueError(
        f"{where} is a {type(value).__name__}: expected tensors, numbers and texts, in dicts, lists and tuples "
        "(torch.as_tensor makes a tensor of an array)"
    )


def _unflatten(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The inverse; takes the tensors off, in order."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == _TENSOR:
        return tensors.pop(0).to(content)
    if kind == _DICT:
        return {name: _unflatten(part, tensors) for name, part in content.items()}
    parts = [_unflatten(part, tensors) for part in content]
    return parts if kind == _LIST else tuple(parts)
