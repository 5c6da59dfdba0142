"""Accumulation: `_accumulate_kernel` adds to a local sum, `_scatter_accumulate_kernel` adds to every owner's sum by
remote atomics. Each with its launcher and its plain-torch twin.
"""

# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from odc.kernels.aot_entry import AotEntry, alignment, entry
from odc.kernels.arguments import (
    FLOATS,
    MASTER_FLOATS,
    check_disjoint,
    check_flat,
    check_peer_range,
    check_positive,
    check_rank,
    check_same_device,
)
from odc.kernels.launching import (
    BLOCK,
    DTYPES,
    LOCAL_PROGRAMS,
    NUM_WARPS,
    REMOTE_PROGRAMS,
    VECTOR_ATOMICS,
    blocks,
    device_of,
    grid,
    has_vector_atomics,
    vector,
)
from odc.kernels.peers import PeerTable, rotated


# Nothing is specialized: see [Note: No argument is specialized] in gather.py; VECTOR: [Note: Contiguous lanes] in
# launching.py.
@triton.jit(do_not_specialize=["accumulator", "addend", "numel"])
def _accumulate_kernel(
    accumulator: tl.tensor,
    addend: tl.tensor,
    numel: tl.int64,
    FIRST: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    lanes = tl.arange(0, BLOCK)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < numel:
        left = tl.minimum(numel - start, BLOCK).to(tl.int32)
        whole = left // VECTOR * VECTOR
        target = accumulator + start + lanes
        source = addend + start + lanes
        target = tl.multiple_of(target, VECTOR * accumulator.dtype.element_ty.primitive_bitwidth // 8)
        source = tl.multiple_of(source, VECTOR * addend.dtype.element_ty.primitive_bitwidth // 8)
        inside = tl.max_constancy(lanes < whole, VECTOR)
        total = tl.load(source, mask=inside).to(accumulator.dtype.element_ty)
        if not FIRST:
            total += tl.load(target, mask=inside)
        tl.store(target, total, mask=inside)
        if VECTOR > 1 and whole < left:
            rest = whole + tl.arange(0, VECTOR)
            last = tl.load(addend + start + rest, mask=rest < left).to(accumulator.dtype.element_ty)
            if not FIRST:
                last += tl.load(accumulator + start + rest, mask=rest < left)
            tl.store(accumulator + start + rest, last, mask=rest < left)
        start += tl.num_programs(0).to(tl.int64) * BLOCK


def _check(accumulator: torch.Tensor, addend: torch.Tensor) -> None:
    check_flat("accumulator", accumulator, MASTER_FLOATS)
    check_flat("addend", addend, FLOATS, accumulator.numel())
    if addend.itemsize > accumulator.itemsize:
        raise ValueError(f"addend is {addend.dtype}, expected nothing wider than the accumulator's {accumulator.dtype}")
    check_same_device(accumulator=accumulator, addend=addend)
    check_disjoint(accumulator=accumulator, addend=addend)


def accumulate(
    accumulator: torch.Tensor, addend: torch.Tensor, *, first: bool = False, num_programs: int = LOCAL_PROGRAMS
) -> None:
    """``accumulator += addend`` in the accumulator's dtype; with ``first``, ``accumulator = addend``.

    ``accumulator``: fp32 or fp64 [n], dense; ``addend``: bf16, fp16, fp32 or (for fp64) fp64 [n], dense, elsewhere in
    memory. Both may be views at any element offset; wide accesses are used if both start at multiples of 16 bytes.
    One thread adds each element, so the result has the bits of the same addition on the host.

    On return the kernel is enqueued on the current stream; the sum is there for what is enqueued there next. Two
    launches that add to one accumulator must be on one stream.

    An accumulator [1, 2] and an addend [0.5, 0.25] give [1.5, 2.25]; with ``first``, [0.5, 0.25].

    Raises ValueError for wrong shapes, dtypes or devices and for overlapping memory, and launches nothing then.
    """
    _check(accumulator, addend)
    check_positive(num_programs=num_programs)
    if accumulator.numel() == 0:
        return
    with device_of(_accumulate_kernel, accumulator, "use accumulate_reference for host memory"):
        _accumulate_kernel[grid(blocks(accumulator.numel()), num_programs)](
            accumulator,
            addend,
            accumulator.numel(),
            FIRST=first,
            VECTOR=vector((accumulator.data_ptr(), accumulator.dtype), (addend.data_ptr(), addend.dtype)),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


def accumulate_reference(accumulator: torch.Tensor, addend: torch.Tensor, *, first: bool = False) -> None:
    """`accumulate` in plain torch, on any device.

    >>> total = torch.tensor([1.0, 2.0])
    >>> accumulate_reference(total, torch.tensor([0.5, 0.25], dtype=torch.bfloat16))
    >>> total
    tensor([1.5000, 2.2500])
    """
    _check(accumulator, addend)
    if first:
        accumulator.copy_(addend)
    else:
        accumulator.add_(addend.to(accumulator.dtype))


@triton.jit(do_not_specialize=["table", "grads", "rank", "world_size", "num_steps", "numel", "stride", "offset"])
def _scatter_accumulate_kernel(
    table: tl.tensor,
    grads: tl.tensor,
    rank: tl.int32,
    world_size: tl.int32,
    num_steps: tl.int32,
    numel: tl.int64,
    stride: tl.int64,
    offset: tl.int64,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    lanes = tl.arange(0, BLOCK)
    numel = numel.to(tl.int64)
    blocks_numel = (numel + BLOCK - 1) // BLOCK * BLOCK
    start = tl.program_id(0).to(tl.int64) * BLOCK
    owner = rank
    step = 0
    while step < num_steps:
        owner = tl.where(owner + 1 < world_size, owner + 1, 0)
        row = grads + owner * stride.to(tl.int64)
        total = tl.load(table + owner).to(tl.pointer_type(tl.float32)) + offset.to(tl.int64)
        while start < numel:
            left = tl.minimum(numel - start, BLOCK).to(tl.int32)
            whole = left // VECTOR * VECTOR
            source = tl.multiple_of(row + start + lanes, VECTOR * grads.dtype.element_ty.primitive_bitwidth // 8)
            target = tl.multiple_of(total + start + lanes, VECTOR * 4)
            inside = tl.max_constancy(lanes < whole, VECTOR)
            # Relaxed: the additions need no order among themselves, and the kernel's end publishes them. System scope:
            # the other clients of this owner are other GPUs.
            values = tl.load(source, mask=inside).to(tl.float32)
            tl.atomic_add(target, values, mask=inside, sem="relaxed", scope="sys")
            if VECTOR > 1 and whole < left:
                rest = whole + tl.arange(0, VECTOR)
                last = tl.load(row + start + rest, mask=rest < left).to(tl.float32)
                tl.atomic_add(total + start + rest, last, mask=rest < left, sem="relaxed", scope="sys")
            start += tl.num_programs(0).to(tl.int64) * BLOCK
        start -= blocks_numel  # the blocks of all rows are dealt out in turn
        step += 1


GRADIENTS = (torch.bfloat16, torch.float16, torch.float32)
"""What can be added to fp32 by atomics."""


def _check_scatter(
    table: PeerTable, grads: torch.Tensor, rank: int, offset: int, stride: int | None, start: int, numel: int | None
) -> tuple[int, int]:
    """The distance of rows, and how much of each row is added."""
    check_flat("grads", grads, GRADIENTS)
    check_rank(rank, table.world_size)
    check_same_device(grads=grads, table=table.tensor)
    check_peer_range(table, offset, torch.float32)
    if stride is None:
        if grads.numel() == 0 or grads.numel() % table.world_size:
            raise ValueError(
                f"grads has {grads.numel()} elements, expected a positive multiple of the world size "
                f"{table.world_size}: one row per owner, or pass stride"
            )
        stride = grads.numel() // table.world_size
    if numel is None:
        numel = stride - start
    if start < 0 or numel < 0 or start + numel > stride:
        raise ValueError(f"elements {start} to {start + numel} of rows, expected a part of 0 to {stride} (stride)")
    needed = (table.world_size - 1) * stride + start + numel
    if grads.numel() < needed:
        raise ValueError(
            f"grads has {grads.numel()} elements, expected at least {needed}: {table.world_size} rows, "
            f"{stride} elements apart, up to element {start + numel} of the last"
        )
    return stride, numel


def scatter_accumulate_direct(
    table: PeerTable,
    grads: torch.Tensor,
    *,
    rank: int,
    offset: int = 0,
    stride: int | None = None,
    start: int = 0,
    numel: int | None = None,
    num_programs: int = REMOTE_PROGRAMS,
) -> None:
    """Add elements ``start`` .. ``start + numel`` of row r of ``grads`` to elements ``offset`` .. ``offset + numel`` of
    rank r's fp32 accumulator, for every r.

    ``grads``: bf16, fp16 or fp32, dense; row r begins at element ``r * stride``. Without ``stride``, rows are as long
    as `world_size` of them fit; without ``numel``, what follows ``start`` is added. ``table`` holds the fp32
    accumulators of all ranks. Owners are visited from ``rank + 1`` on, the own rank last. The own accumulator is added
    to by atomics as well, because the peers add to it at the same time. Concurrent clients' additions arrive in any
    order, so the last bits of the sum differ from run to run; where that matters, push into slots and let the owner
    `accumulate_slots`. Atomics flush subnormal numbers (below 1.2e-38) to zero.

    On return the kernel is enqueued on the current stream, and what is enqueued there next finds all additions made,
    also at the peers. The owners' accumulators must be open for this push (the kernel waits for nobody), and nobody
    but atomics may write them meanwhile.

    Two ranks that both push [1, 2, 3, 4] add 2, 4 to the accumulator of rank 0 and 6, 8 to that of rank 1; with
    ``start=1, offset=5`` they add 4 to element 5 of rank 0's and 8 to element 5 of rank 1's.

    Raises ValueError for wrong shapes, dtypes, devices, ranks or misaligned buffers, and launches nothing then.
    """
    stride, numel = _check_scatter(table, grads, rank, offset, stride, start, numel)
    check_positive(num_programs=num_programs)
    if numel == 0:
        return
    begin, size = offset * torch.float32.itemsize, grads.itemsize
    elements = vector(
        (grads.data_ptr() + start * size, grads.dtype),
        (stride * size, grads.dtype),
        *((address + begin, torch.float32) for address in table.addresses),
    )
    with device_of(_scatter_accumulate_kernel, grads, "use scatter_accumulate_direct_reference for host memory"):
        _scatter_accumulate_kernel[grid(table.world_size * blocks(numel), num_programs)](
            table.tensor,
            grads[start:],
            rank,
            table.world_size,
            table.world_size,
            numel,
            stride,
            offset,
            VECTOR=elements if has_vector_atomics(grads.device) else 1,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


def scatter_accumulate_direct_reference(
    table: PeerTable,
    grads: torch.Tensor,
    *,
    rank: int,
    offset: int = 0,
    stride: int | None = None,
    start: int = 0,
    numel: int | None = None,
) -> None:
    """`scatter_accumulate_direct` in plain torch on host memory, for one client at a time; complete on return.

    >>> sums = [torch.zeros(2), torch.ones(2)]
    >>> scatter_accumulate_direct_reference(PeerTable.of(sums), torch.tensor([1.0, 2.0, 3.0, 4.0]), rank=0)
    >>> sums
    [tensor([1., 2.]), tensor([4., 5.])]
    """
    stride, numel = _check_scatter(table, grads, rank, offset, stride, start, numel)
    if numel == 0:
        return
    for owner in rotated(rank, table.world_size):
        target = table.host_view(owner, offset * torch.float32.itemsize, numel, torch.float32)
        low = owner * stride + start
        target.add_(grads[low : low + numel].to(torch.float32))


PAIRS = tuple((total, addend) for total in MASTER_FLOATS for addend in FLOATS if addend.itemsize <= total.itemsize)
"""Sum and addend."""


def aot_entries(
    pairs: Sequence[tuple[torch.dtype, torch.dtype]] = PAIRS, atomic: Sequence[torch.dtype] = GRADIENTS
) -> list[AotEntry]:
    rows = [
        entry(
            f"accumulate[{DTYPES[addend]}->{DTYPES[total]}, {'first' if first else 'add'}, {alignment(aligned)}]",
            _accumulate_kernel,
            {"accumulator": f"*{DTYPES[total]}", "addend": f"*{DTYPES[addend]}"},
            {"FIRST": first, "VECTOR": vector((int(not aligned), total), (0, addend)), "BLOCK": BLOCK},
            NUM_WARPS,
        )
        for total, addend in pairs
        for first in (False, True)
        for aligned in (True, False)
    ]
    return rows + [
        entry(
            f"scatter_accumulate[{DTYPES[grads]}->fp32, {alignment(aligned)}]",
            _scatter_accumulate_kernel,
            {"table": "*i64", "grads": f"*{DTYPES[grads]}"},
            {"VECTOR": vector((int(not aligned), torch.float32), (0, grads)), "BLOCK": BLOCK},
            NUM_WARPS,
            since=VECTOR_ATOMICS if aligned else (8, 0),
        )
        for grads in atomic
        for aligned in (True, False)
    ]
