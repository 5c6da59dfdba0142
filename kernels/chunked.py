"""Plain-torch copy and accumulate on host memory, in chunks.

Chunks let a long transfer show progress, notice an abort and be interrupted by a fault test; they are large enough
(4 MiB) that the loop costs nothing measurable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

CHUNK_BYTES = 4 << 20


def _no_op() -> None:
    return None


def _chunks(tensor: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Pieces of at most a chunk, and those beside them of tensors of equal shape."""
    row_bytes = tensor[0].nbytes
    if row_bytes > CHUNK_BYTES:
        for rows in zip(tensor, *others, strict=True):
            yield from _chunks(*rows)
        return
    step = CHUNK_BYTES // row_bytes
    for low in range(0, tensor.shape[0], step):
        yield tuple(one[low : low + step] for one in (tensor, *others))


def copy_chunked(out: torch.Tensor, source: torch.Tensor, after_chunk: Callable[[], None] = _no_op) -> None:
    """``out[:] = source`` for tensors of equal shape, casting to ``out.dtype``.

    >>> out = torch.zeros(3)
    >>> copy_chunked(out, torch.tensor([1.0, 2.0, 3.0]))
    >>> out
    tensor([1., 2., 3.])
    """
    if out.nbytes <= CHUNK_BYTES:
        out.copy_(source)
        after_chunk()
        return
    for part, source_part in _chunks(out, source):
        part.copy_(source_part)
        after_chunk()


def add_chunked(total: torch.Tensor, addend: torch.Tensor, after_chunk: Callable[[], None] = _no_op) -> None:
    """``total += addend`` for tensors of equal shape, computed in the total's dtype.

    >>> total = torch.tensor([1.0, 2.0])
    >>> add_chunked(total, torch.tensor([0.5, 0.25], dtype=torch.bfloat16))
    >>> total
    tensor([1.5000, 2.2500])
    """
    if total.nbytes <= CHUNK_BYTES:
        total.add_(addend)
        after_chunk()
        return
    for part, addend_part in _chunks(total, addend):
        part.add_(addend_part)
        after_chunk()


def zero_chunked(out: torch.Tensor, after_chunk: Callable[[], None] = _no_op) -> None:
    """``out[:] = 0``."""
    for (part,) in _chunks(out) if out.numel() else ():
        part.zero_()
        after_chunk()


def copy_all_chunked(
    outs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], after_chunk: Callable[[], None] = _no_op
) -> None:
    """``outs[i][:] = sources[i]`` for every i, of equal shapes: small ones, up to a chunk, by one call.

    >>> outs = [torch.zeros(2), torch.zeros(1)]
    >>> copy_all_chunked(outs, [torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    >>> outs
    [tensor([1., 2.]), tensor([3.])]
    """
    outs, sources = list(outs), list(sources)
    for part in _together(outs):
        if part.stop - part.start == 1:
            copy_chunked(outs[part.start], sources[part.start], after_chunk)
        else:
            torch._foreach_copy_(outs[part], sources[part])
            after_chunk()


def add_all_chunked(
    totals: Sequence[torch.Tensor], addends: Sequence[torch.Tensor], after_chunk: Callable[[], None] = _no_op
) -> None:
    """``totals[i] += addends[i]`` for every i, of equal shapes, computed in the totals' dtype."""
    totals, addends = list(totals), list(addends)
    for part in _together(totals):
        if part.stop - part.start == 1:
            add_chunked(totals[part.start], addends[part.start], after_chunk)
        else:
            torch._foreach_add_(totals[part], addends[part])
            after_chunk()


def _together(tensors: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Runs of tensors that are at most a chunk together; larger ones alone."""
    start = num_bytes = 0
    for index, tensor in enumerate(tensors):
        if index > start and num_bytes + tensor.nbytes > CHUNK_BYTES:
            yield slice(start, index)
            start, num_bytes = index, 0
        num_bytes += tensor.nbytes
    if start < len(tensors):
        yield slice(start, len(tensors))
