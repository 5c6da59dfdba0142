"""Accumulation: `_accumulate_kernel` adds to a local sum, `_scatter_accumulate_kernel` adds to every owner's sum by
remote atomics. Each with its launcher and its plain-torch twin.
"""

# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
from __future__ import annotations

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
    tensor_aligned,
)
from odc.kernels.launching import BLOCK, DTYPES, LOCAL_PROGRAMS, NUM_WARPS, REMOTE_PROGRAMS, blocks, device_of, grid
from odc.kernels.peers import VECTOR_BYTES, PeerTable, rotated


# Nothing is specialized: see [Note: No argument is specialized] in gather.py.
@triton.jit(do_not_specialize=["accumulator", "addend", "numel"])
def _accumulate_kernel(
    accumulator: tl.tensor,
    addend: tl.tensor,
    numel: tl.int64,
    FIRST: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    lanes = tl.arange(0, BLOCK)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < numel:
        target = accumulator + start + lanes
        source = addend + start + lanes
        if ALIGNED:
            target = tl.multiple_of(target, 16)
            source = tl.multiple_of(source, 16)
        if start + BLOCK <= numel:  # unmasked, or the mask would forbid wide accesses
            total = tl.load(source).to(accumulator.dtype.element_ty)
            if not FIRST:
                total += tl.load(target)
            tl.store(target, total)
        else:
            inside = lanes < (numel - start).to(tl.int32)
            total = tl.load(source, mask=inside).to(accumulator.dtype.element_ty)
            if not FIRST:
                total += tl.load(target, mask=inside)
            tl.store(target, total, mask=inside)
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
            ALIGNED=tensor_aligned(accumulator) and tensor_aligned(addend),
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


@triton.jit(do_not_specialize=["table", "grads", "rank", "world_size", "num_steps", "numel", "offset"])
def _scatter_accumulate_kernel(
    table: tl.tensor,
    grads: tl.tensor,
    rank: tl.int32,
    world_size: tl.int32,
    num_steps: tl.int32,
    numel: tl.int64,
    offset: tl.int64,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    lanes = tl.arange(0, BLOCK)
    numel = numel.to(tl.int64)
    whole = (numel + BLOCK - 1) // BLOCK * BLOCK
    start = tl.program_id(0).to(tl.int64) * BLOCK
    owner = rank
    step = 0
    while step < num_steps:
        owner = tl.where(owner + 1 < world_size, owner + 1, 0)
        row = grads + owner * numel
        total = tl.load(table + owner).to(tl.pointer_type(tl.float32)) + offset.to(tl.int64)
        while start < numel:
            source = row + start + lanes
            target = total + start + lanes
            if ALIGNED:
                source = tl.multiple_of(source, 16)
                target = tl.multiple_of(target, 16)
            # Relaxed: the additions need no order among themselves, and the kernel's end publishes them. System scope:
            # the other clients of this owner are other GPUs.
            if start + BLOCK <= numel:
                tl.atomic_add(target, tl.load(source).to(tl.float32), sem="relaxed", scope="sys")
            else:
                inside = lanes < (numel - start).to(tl.int32)
                values = tl.load(source, mask=inside).to(tl.float32)
                tl.atomic_add(target, values, mask=inside, sem="relaxed", scope="sys")
            start += tl.num_programs(0).to(tl.int64) * BLOCK
        start -= whole  # the blocks of all rows are dealt out in turn
        step += 1


_GRADIENTS = (torch.bfloat16, torch.float16, torch.float32)


def _check_scatter(table: PeerTable, grads: torch.Tensor, rank: int, offset: int) -> int:
    check_flat("grads", grads, _GRADIENTS)
    check_rank(rank, table.world_size)
    if grads.numel() == 0 or grads.numel() % table.world_size:
        raise ValueError(
            f"grads has {grads.numel()} elements, expected a positive multiple of the world size {table.world_size}: "
            f"one row per owner"
        )
    check_same_device(grads=grads, table=table.tensor)
    check_peer_range(table, offset, torch.float32)
    return grads.numel() // table.world_size


def scatter_accumulate_direct(
    table: PeerTable, grads: torch.Tensor, *, rank: int, offset: int = 0, num_programs: int = REMOTE_PROGRAMS
) -> None:
    """Add row r of ``grads`` to elements ``offset`` .. ``offset + numel`` of rank r's fp32 accumulator, for every r.

    ``grads``: bf16, fp16 or fp32 [world_size * numel], dense; ``table`` holds the fp32 accumulators of all ranks.
    Owners are visited from ``rank + 1`` on, the own rank last. The own accumulator is added to by atomics as well,
    because the peers add to it at the same time. Concurrent clients' additions arrive in any order, so the last bits
    of the sum differ from run to run; where that matters, push into slots and let the owner `accumulate` in order.
    Atomics flush subnormal numbers (below 1.2e-38) to zero.

    On return the kernel is enqueued on the current stream, and what is enqueued there next finds all additions made,
    also at the peers. The owners' accumulators must be open for this push (the kernel waits for nobody), and nobody
    but atomics may write them meanwhile.

    Two ranks that both push [1, 2, 3, 4] add 2, 4 to the accumulator of rank 0 and 6, 8 to that of rank 1.

    Raises ValueError for wrong shapes, dtypes, devices, ranks or misaligned buffers, and launches nothing then.
    """
    numel = _check_scatter(table, grads, rank, offset)
    check_positive(num_programs=num_programs)
    aligned = (
        tensor_aligned(grads)
        and numel * grads.itemsize % VECTOR_BYTES == 0
        and table.aligned(offset * torch.float32.itemsize)
    )
    with device_of(_scatter_accumulate_kernel, grads, "use scatter_accumulate_direct_reference for host memory"):
        _scatter_accumulate_kernel[grid(table.world_size * blocks(numel), num_programs)](
            table.tensor,
            grads,
            rank,
            table.world_size,
            table.world_size,
            numel,
            offset,
            ALIGNED=aligned,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


def scatter_accumulate_direct_reference(table: PeerTable, grads: torch.Tensor, *, rank: int, offset: int = 0) -> None:
    """`scatter_accumulate_direct` in plain torch on host memory, for one client at a time; complete on return.

    >>> sums = [torch.zeros(2), torch.ones(2)]
    >>> scatter_accumulate_direct_reference(PeerTable.of(sums), torch.tensor([1.0, 2.0, 3.0, 4.0]), rank=0)
    >>> sums
    [tensor([1., 2.]), tensor([4., 5.])]
    """
    numel = _check_scatter(table, grads, rank, offset)
    for owner in rotated(rank, table.world_size):
        target = table.host_view(owner, offset * torch.float32.itemsize, numel, torch.float32)
        target.add_(grads[owner * numel : (owner + 1) * numel].to(torch.float32))


def aot_entries() -> list[AotEntry]:
    pairs = [(torch.float32, addend) for addend in _GRADIENTS] + [(torch.float64, addend) for addend in MASTER_FLOATS]
    rows = [
        entry(
            f"accumulate[{DTYPES[addend]}->{DTYPES[total]}, {'first' if first else 'add'}, {alignment(aligned)}]",
            _accumulate_kernel,
            {"accumulator": f"*{DTYPES[total]}", "addend": f"*{DTYPES[addend]}"},
            {"FIRST": first, "ALIGNED": aligned, "BLOCK": BLOCK},
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
            {"ALIGNED": aligned, "BLOCK": BLOCK},
            NUM_WARPS,
        )
        for grads in _GRADIENTS
        for aligned in (True, False)
    ]
