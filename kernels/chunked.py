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


def _step(tensor: torch.Tensor) -> int:
    """Elements of a chunk."""
    return max(1, CHUNK_BYTES // tensor.itemsize)


def copy_chunked(out: torch.Tensor, source: torch.Tensor, after_chunk: Callable[[], None] = _no_op) -> None:
    """``out[:] = source`` for flat tensors of equal length, casting to ``out.dtype``.

    >>> out = torch.zeros(3)
    >>> copy_chunked(out, torch.tensor([1.0, 2.0, 3.0]))
    >>> out
    tensor([1., 2., 3.])
    """
    if out.nbytes <= CHUNK_BYTES:
        out.copy_(source)
        after_chunk()
        return
    step = _step(out)
    for low in range(0, out.numel(), step):
        out[low : low + step].copy_(source[low : low + step])
        after_chunk()


def add_chunked(total: torch.Tensor, addend: torch.Tensor, after_chunk: Callable[[], None] = _no_op) -> None:
    """``total += addend`` for flat tensors of equal length, computed in the total's dtype.

    >>> total = torch.tensor([1.0, 2.0])
    >>> add_chunked(total, torch.tensor([0.5, 0.25], dtype=torch.bfloat16))
    >>> total
    tensor([1.5000, 2.2500])
    """
    if total.nbytes <= CHUNK_BYTES:
        total.add_(addend)
        after_chunk()
        return
    step = _step(total)
    for low in range(0, total.numel(), step):
        total[low : low + step].add_(addend[low : low + step])
        after_chunk()


def zero_chunked(out: torch.Tensor, after_chunk: Callable[[], None] = _no_op) -> None:
    """``out[:] = 0``."""
    step = _step(out)
    for low in range(0, out.numel(), step):
        out[low : low + step].zero_()
        after_chunk()
