"""Addition to a local sum: `_accumulate_kernel`, its launcher `accumulate`, its plain-torch twin."""

# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from odc.kernels.aot_entry import AotEntry, alignment, entry
from odc.kernels.arguments import FLOATS, MASTER_FLOATS, check_disjoint, check_flat, check_same_device
from odc.kernels.launching import BLOCK, DTYPES, LOCAL_PROGRAMS, NUM_WARPS, blocks, device_of, grid, move_block, vector


# See [Note: No argument is specialized] and, for VECTOR, [Note: Contiguous lanes] in launching.py.
@triton.jit(do_not_specialize=["accumulator", "addend", "numel"])
def _accumulate_kernel(
    accumulator: tl.tensor,
    addend: tl.tensor,
    numel: tl.int64,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < numel:
        left = tl.minimum(numel - start, BLOCK).to(tl.int32)
        move_block(accumulator + start, addend + start, left, "add", "", VECTOR, BLOCK)
        start += tl.num_programs(0).to(tl.int64) * BLOCK


def _check(accumulator: torch.Tensor, addend: torch.Tensor) -> None:
    check_flat("accumulator", accumulator, MASTER_FLOATS)
    check_flat("addend", addend, FLOATS, accumulator.numel())
    if addend.itemsize > accumulator.itemsize:
        raise ValueError(f"addend is {addend.dtype}, expected nothing wider than the accumulator's {accumulator.dtype}")
    check_same_device(accumulator=accumulator, addend=addend)
    check_disjoint(accumulator=accumulator, addend=addend)


def accumulate(accumulator: torch.Tensor, addend: torch.Tensor) -> None:
    """``accumulator += addend`` in the accumulator's dtype.

    ``accumulator``: fp32 or fp64 [n], dense; ``addend``: bf16, fp16, fp32 or (for fp64) fp64 [n], dense, elsewhere in
    memory. Both may be views at any element offset; wide accesses are used if both start at multiples of 16 bytes.
    One thread adds each element, so the result has the bits of the same addition on the host.

    On return the kernel is enqueued on the current stream; the sum is there for what is enqueued there next. Two
    launches that add to one accumulator must be on one stream.

    An accumulator [1, 2] and an addend [0.5, 0.25] give [1.5, 2.25].

    Raises ValueError for wrong shapes, dtypes or devices and for overlapping memory, and launches nothing then.
    """
    _check(accumulator, addend)
    if accumulator.numel() == 0:
        return
    with device_of(_accumulate_kernel, accumulator, "use accumulate_reference for host memory"):
        _accumulate_kernel[grid(blocks(accumulator.numel()), LOCAL_PROGRAMS)](
            accumulator,
            addend,
            accumulator.numel(),
            VECTOR=vector((accumulator.data_ptr(), accumulator.dtype), (addend.data_ptr(), addend.dtype)),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


def accumulate_reference(accumulator: torch.Tensor, addend: torch.Tensor) -> None:
    """`accumulate` in plain torch, on any device.

    >>> total = torch.tensor([1.0, 2.0])
    >>> accumulate_reference(total, torch.tensor([0.5, 0.25], dtype=torch.bfloat16))
    >>> total
    tensor([1.5000, 2.2500])
    """
    _check(accumulator, addend)
    accumulator.add_(addend.to(accumulator.dtype))


PAIRS = tuple((total, addend) for total in MASTER_FLOATS for addend in FLOATS if addend.itemsize <= total.itemsize)
"""Sum and addend."""


def aot_entries(pairs: Sequence[tuple[torch.dtype, torch.dtype]] = PAIRS) -> list[AotEntry]:
    return [
        entry(
            f"accumulate[{DTYPES[addend]}->{DTYPES[total]}, {alignment(aligned)}]",
            _accumulate_kernel,
            {"accumulator": f"*{DTYPES[total]}", "addend": f"*{DTYPES[addend]}"},
            {"VECTOR": vector((int(not aligned), total), (0, addend)), "BLOCK": BLOCK},
            NUM_WARPS,
        )
        for total, addend in pairs
        for aligned in (True, False)
    ]
