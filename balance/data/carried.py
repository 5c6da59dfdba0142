"""A sample as tensors that can change ranks: tensors and numbers, in dicts, lists and tuples. (Needs torch.)"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from odc.balance.multimodal.payload import check_kind, from_bytes, to_bytes
from odc.errors import shown

_TENSOR, _DICT, _LIST, _TUPLE = "tensor", "dict", "list", "tuple"


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
