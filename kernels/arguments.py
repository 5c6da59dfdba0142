"""Checks of launcher arguments: everything is refused here, before anything has been launched."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MASTER_FLOATS = (torch.float32, torch.float64)


def check_flat(name: str, tensor: torch.Tensor, dtypes: Collection[torch.dtype], numel: int | None = None) -> None:
    """``tensor`` is one-dimensional, dense, of one of ``dtypes`` and, if given, of ``numel`` elements.

    >>> check_flat("out", torch.zeros(2, 3), FLOATS)
    Traceback (most recent call last):
    ValueError: out has shape (2, 3) and strides (3, 1), expected a flat dense tensor: pass a contiguous view(-1)
    """
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, "
            f"expected a flat dense tensor: pass a contiguous view(-1)"
        )
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, expected one of {', '.join(map(str, dtypes))}")
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements, expected {numel}")


def check_cast(source: torch.dtype, out: torch.dtype) -> None:
    """
    >>> check_cast(torch.float64, torch.bfloat16)
    Traceback (most recent call last):
    ValueError: torch.float64 to torch.bfloat16 would be rounded twice, expected fp32 in between: cast to it first
    """
    if source == torch.float64 and out.itemsize == 2:
        raise ValueError(f"{source} to {out} would be rounded twice, expected fp32 in between: cast to it first")


def check_same_device(**tensors: torch.Tensor) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        places = ", ".join(f"{name} is on {device}" for name, device in devices.items())
        raise ValueError(f"{places}, expected one device for all")


def check_disjoint(**tensors: torch.Tensor) -> None:
    """No two of ``tensors`` share memory: programs run in any order, so one could read what another has written."""
    ranges = [(t.data_ptr(), t.data_ptr() + t.numel() * t.itemsize, name) for name, t in tensors.items() if t.numel()]
    ranges.sort()
    for (_, end, first), (start, _, second) in itertools.pairwise(ranges):
        if start < end:
            raise ValueError(f"{first} and {second} overlap in memory, expected separate buffers: clone one of them")


def check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}, expected 0 <= rank < {world_size} (the table's world size)")


def check_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if number <= 0:
            raise ValueError(f"{name}={number}, expected more than 0")
