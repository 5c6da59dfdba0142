"""Plain-torch copy and accumulate on host memory, in chunks.

Chunks let a long transfer show progress, notice an abort and be interrupted by a fault test; they are large enough
(4 MiB) that the loop costs nothing measurable.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

CHUNK_BYTES = 4 << 20


def _no_op() -> None:
    return None


def _bounds(tensor: torch.Tensor) -> range:
    return range(0, tensor.numel(), max(1, CHUNK_BYTES // tensor.itemsize))


def copy_chunked(out: torch.Tensor, source: torch.Tensor, after_chunk: Callable[[], None] = _no_op) -> None:
    """``out[:] = source`` for flat tensors of equal length, casting to ``out.dtype``.

    >>> out = torch.zeros(3)
    >>> copy_chunked(out, torch.tensor([1.0, 2.0, 3.0]))
    >>> out
    tensor([1., 2., 3.])
    """
    step = _bounds(out).step
    for low in _bounds(out):
        out[low : low + step].copy_(source[low : low + step])
        after_chunk()


def add_chunked(
    out: torch.Tensor,
    accumulator: torch.Tensor,
    addend: torch.Tensor,
    after_chunk: Callable[[], None] = _no_op,
) -> None:
    """``out[:] = accumulator + addend``, computed in the accumulator's dtype; ``out`` may be the accumulator.

    >>> out = torch.zeros(2)
    >>> add_chunked(out, torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25], dtype=torch.bfloat16))
    >>> out
    tensor([1.5000, 2.2500])
    """
    step = _bounds(out).step
    for low in _bounds(out):
        part = slice(low, low + step)
        torch.add(accumulator[part], addend[part], out=out[part])
        after_chunk()


def zero_chunked(out: torch.Tensor, after_chunk: Callable[[], None] = _no_op) -> None:
    """``out[:] = 0``."""
    step = _bounds(out).step
    for low in _bounds(out):
        out[low : low + step].zero_()
        after_chunk()
