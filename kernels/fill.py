"""Local memory: `_fill_kernel` and `_copy_cast_kernel`, each with its launcher and its plain-torch twin."""

# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from odc.kernels.aot_entry import AotEntry, alignment, entry
from odc.kernels.arguments import (
    FLOATS,
    check_cast,
    check_disjoint,
    check_flat,
    check_same_device,
)
from odc.kernels.launching import BLOCK, DTYPES, LOCAL_PROGRAMS, NUM_WARPS, blocks, device_of, grid, move_block, vector


# See [Note: No argument is specialized] and, for VECTOR, [Note: Contiguous lanes] in launching.py.
@triton.jit(do_not_specialize=["out", "value", "numel"])
def _fill_kernel(out: tl.tensor, value: tl.float32, numel: tl.int64, VECTOR: tl.constexpr, BLOCK: tl.constexpr) -> None:
    lanes = tl.arange(0, BLOCK)
    values = tl.full([BLOCK], 0.0, tl.float32) + value
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < numel:
        left = tl.minimum(numel - start, BLOCK).to(tl.int32)
        whole = left // VECTOR * VECTOR
        target = tl.multiple_of(out + start + lanes, VECTOR * out.dtype.element_ty.primitive_bitwidth // 8)
        tl.store(target, values.to(out.dtype.element_ty), mask=tl.max_constancy(lanes < whole, VECTOR))
        if VECTOR > 1 and whole < left:
            rest = whole + tl.arange(0, VECTOR)
            last = tl.full([VECTOR], 0.0, tl.float32) + value
            tl.store(out + start + rest, last.to(out.dtype.element_ty), mask=rest < left)
        start += tl.num_programs(0).to(tl.int64) * BLOCK


def _check_fill(out: torch.Tensor, value: float) -> None:
    check_flat("out", out, FLOATS)
    if value == value and torch.tensor(value, dtype=torch.float32, device="cpu").item() != value:
        raise ValueError(f"value={value!r} is not an fp32 number, expected one: the kernel takes it in fp32")


def fill(out: torch.Tensor, value: float = 0.0) -> None:
    """``out[:] = value``, cast to ``out``'s dtype.

    ``out``: bf16, fp16, fp32 or fp64 [n], dense, at any element offset. ``value`` must be a number that fp32 holds.
    On return the kernel is enqueued on the current stream.

    A buffer of three elements filled with 0.5 is [0.5, 0.5, 0.5].

    Raises ValueError for a wrong shape, dtype or value, and launches nothing then.
    """
    _check_fill(out, value)
    if out.numel() == 0:
        return
    with device_of(_fill_kernel, out, "use fill_reference for host memory"):
        _fill_kernel[grid(blocks(out.numel()), LOCAL_PROGRAMS)](
            out, float(value), out.numel(), VECTOR=vector((out.data_ptr(), out.dtype)), BLOCK=BLOCK, num_warps=NUM_WARPS
        )


def fill_reference(out: torch.Tensor, value: float = 0.0) -> None:
    """`fill` in plain torch, on any device.

    >>> out = torch.zeros(2, dtype=torch.bfloat16)
    >>> fill_reference(out, 0.5)
    >>> out
    tensor([0.5000, 0.5000], dtype=torch.bfloat16)
    """
    _check_fill(out, value)
    out.fill_(value)


@triton.jit(do_not_specialize=["out", "source", "numel"])
def _copy_cast_kernel(
    out: tl.tensor, source: tl.tensor, numel: tl.int64, VECTOR: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < numel:
        left = tl.minimum(numel - start, BLOCK).to(tl.int32)
        move_block(out + start, source + start, left, "copy", "", VECTOR, BLOCK)
        start += tl.num_programs(0).to(tl.int64) * BLOCK


def _check_copy(out: torch.Tensor, source: torch.Tensor) -> None:
    check_flat("out", out, FLOATS)
    check_flat("source", source, FLOATS, out.numel())
    check_cast(source.dtype, out.dtype)
    check_same_device(out=out, source=source)
    check_disjoint(out=out, source=source)


def copy_cast(out: torch.Tensor, source: torch.Tensor) -> None:
    """``out[:] = source``, rounded to the nearest value of ``out``'s dtype (ties to even).

    ``out``, ``source``: bf16, fp16, fp32 or fp64 [n], dense, in separate memory, at any element offset. ``out`` may be
    memory of a peer. fp64 is not cast to 16 bits: that would be rounded twice.

    On return the kernel is enqueued on the current stream; ``out`` is complete for what is enqueued there next.

    fp32 [1.0, 1.00390625] becomes bf16 [1.0, 1.0], and [1.01171875] becomes [1.015625]: both are halfway.

    Raises ValueError for wrong shapes, dtypes or devices and for overlapping memory, and launches nothing then.
    """
    _check_copy(out, source)
    if out.numel() == 0:
        return
    with device_of(_copy_cast_kernel, out, "use copy_cast_reference for host memory"):
        _copy_cast_kernel[grid(blocks(out.numel()), LOCAL_PROGRAMS)](
            out,
            source,
            out.numel(),
            VECTOR=vector((out.data_ptr(), out.dtype), (source.data_ptr(), source.dtype)),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


def copy_cast_reference(out: torch.Tensor, source: torch.Tensor) -> None:
    """`copy_cast` in plain torch, on any device.

    >>> out = torch.zeros(3, dtype=torch.bfloat16)
    >>> copy_cast_reference(out, torch.tensor([1.0, 1.00390625, 1.01171875]))
    >>> out
    tensor([1.0000, 1.0000, 1.0156], dtype=torch.bfloat16)
    """
    _check_copy(out, source)
    out.copy_(source)


CASTS = (
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float64, torch.float32),
    *((dtype, dtype) for dtype in FLOATS),
)
"""Source and destination: publish in half precision, push back in full, and plain copies."""


def aot_entries(
    dtypes: Sequence[torch.dtype] = FLOATS, casts: Sequence[tuple[torch.dtype, torch.dtype]] = CASTS
) -> list[AotEntry]:
    fills = [
        entry(
            f"fill[{DTYPES[out]}, {alignment(aligned)}]",
            _fill_kernel,
            {"out": f"*{DTYPES[out]}"},
            {"VECTOR": vector((int(not aligned), out)), "BLOCK": BLOCK},
            NUM_WARPS,
        )
        for out in dtypes
        for aligned in (True, False)
    ]
    return fills + [
        entry(
            f"copy_cast[{DTYPES[source]}->{DTYPES[out]}, {alignment(aligned)}]",
            _copy_cast_kernel,
            {"out": f"*{DTYPES[out]}", "source": f"*{DTYPES[source]}"},
            {"VECTOR": vector((int(not aligned), out), (0, source)), "BLOCK": BLOCK},
            NUM_WARPS,
        )
        for source, out in casts
        for aligned in (True, False)
    ]
