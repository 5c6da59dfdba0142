"""Plain-torch copy and accumulate on host memory, in chunks.

Chunks let a long transfer show progress, notice an abort and be interrupted by a fault test; they are large enough
(4 MiB) that the loop costs nothing measurable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

CHUNK_BYTES = 4 << 20
Tensors = tuple[torch.Tensor, ...] | list[torch.Tensor]


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


def copy_chunked(outs: Tensors, sources: Tensors, after_chunk: Callable[[], None] = _no_op) -> None:
    """``outs[i][:] = sources[i]`` for every i, of equal shapes, casting: small ones, up to a chunk, by one call.

    >>> outs = [torch.zeros(2), torch.zeros(1)]
    >>> copy_chunked(outs, [torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    >>> outs
    [tensor([1., 2.]), tensor([3.])]
    """
    if len(outs) == 1 and outs[0].nbytes <= CHUNK_BYTES:
        outs[0].copy_(sources[0])
        after_chunk()
        return
    for out_parts, source_parts in _pieces(outs, sources):
        torch._foreach_copy_(out_parts, source_parts)
        after_chunk()


def add_chunked(totals: Tensors, addends: Tensors, after_chunk: Callable[[], None] = _no_op) -> None:
    """``totals[i] += addends[i]`` for every i, of equal shapes, computed in the totals' dtype.

    >>> total = torch.tensor([1.0, 2.0])
    >>> add_chunked([total], [torch.tensor([0.5, 0.25], dtype=torch.bfloat16)])
    >>> total
    tensor([1.5000, 2.2500])
    """
    if len(totals) == 1 and totals[0].nbytes <= CHUNK_BYTES:
        totals[0].add_(addends[0])
        after_chunk()
        return
    for total_parts, addend_parts in _pieces(totals, addends):
        torch._foreach_add_(total_parts, addend_parts)
        after_chunk()


def zero_chunked(out: torch.Tensor, after_chunk: Callable[[], None] = _no_op) -> None:
    """``out[:] = 0``."""
    for (part,) in _chunks(out) if out.numel() else ():
        part.zero_()
        after_chunk()


def _pieces(outs: Tensors, sources: Tensors) -> Iterator[tuple[Tensors, Tensors]]:
    """Runs of tensors that are at most a chunk together, with those beside them; of a larger one piece by piece."""
    start = num_bytes = 0
    for index, out in enumerate(outs):
        if index > start and num_bytes + out.nbytes > CHUNK_BYTES:
            yield outs[start:index], sources[start:index]
            start, num_bytes = index, 0
        if out.nbytes > CHUNK_BYTES:
            for out_part, source_part in _chunks(out, sources[index]):
                yield [out_part], [source_part]
            start = index + 1
        else:
            num_bytes += out.nbytes
    if start < len(outs):
        yield outs[start:], sources[start:]
