"""Scatter by writing peers' memory: `_scatter_kernel`, its launcher `scatter_to_peers`, its plain-torch twin."""

# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from odc.kernels.aot_entry import AotEntry, alignment, entry
from odc.kernels.arguments import FLOATS, check_flat, check_positive, check_rank, check_same_device
from odc.kernels.launching import BLOCK, NUM_WARPS, REMOTE_PROGRAMS, blocks, device_of, grid, vector
from odc.kernels.peers import PeerTable, rotated


# Nothing is specialized: see [Note: No argument is specialized] in gather.py; VECTOR: [Note: Contiguous lanes] in
# launching.py.
@triton.jit(do_not_specialize=["table", "source", "rank", "world_size", "numel", "offset"])
def _scatter_kernel(
    table: tl.tensor,
    source: tl.tensor,
    rank: tl.int32,
    world_size: tl.int32,
    numel: tl.int64,
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
    while step < world_size:
        owner = tl.where(owner + 1 < world_size, owner + 1, 0)
        row = source + owner * numel
        slot = tl.load(table + owner).to(source.dtype) + offset.to(tl.int64)
        while start < numel:
            left = tl.minimum(numel - start, BLOCK).to(tl.int32)
            whole = left // VECTOR * VECTOR
            origin = tl.multiple_of(row + start + lanes, VECTOR * source.dtype.element_ty.primitive_bitwidth // 8)
            target = tl.multiple_of(slot + start + lanes, VECTOR * source.dtype.element_ty.primitive_bitwidth // 8)
            inside = tl.max_constancy(lanes < whole, VECTOR)
            tl.store(target, tl.load(origin, mask=inside), mask=inside)
            if VECTOR > 1 and whole < left:
                rest = whole + tl.arange(0, VECTOR)
                tl.store(slot + start + rest, tl.load(row + start + rest, mask=rest < left), mask=rest < left)
            start += tl.num_programs(0).to(tl.int64) * BLOCK
        start -= blocks_numel  # the blocks of all rows are dealt out in turn
        step += 1


def _check(table: PeerTable, source: torch.Tensor, rank: int, offset_bytes: int) -> int:
    check_flat("source", source, FLOATS)
    check_rank(rank, table.world_size)
    if source.numel() % table.world_size:
        raise ValueError(
            f"source has {source.numel()} elements, expected a multiple of the world size {table.world_size}: "
            f"one row per owner"
        )
    check_same_device(source=source, table=table.tensor)
    if offset_bytes < 0:
        raise ValueError(f"offset_bytes={offset_bytes}, expected 0 or more")
    for owner, address in enumerate(table.addresses):
        if address % source.itemsize or offset_bytes % source.itemsize:
            raise ValueError(
                f"byte {offset_bytes} of the buffer of rank {owner} at {address:#x}, expected both to be multiples of "
                f"{source.itemsize} for {source.dtype}"
            )
    return source.numel() // table.world_size


def scatter_to_peers(
    table: PeerTable,
    source: torch.Tensor,
    *,
    rank: int,
    offset_bytes: int = 0,
    num_programs: int = REMOTE_PROGRAMS,
) -> None:
    """Copy row r of ``source``, bytes as they are, to byte ``offset_bytes`` of rank r's buffer, for every r.

    ``source``: bf16, fp16, fp32 or fp64 [world_size * numel], dense; ``table`` holds buffers of bytes. Owners are
    visited from ``rank + 1`` on, the own rank last.

    On return the kernel is enqueued on the current stream; what is enqueued there next finds all rows at the owners,
    and ``source`` free. The places must be this rank's to write until then; the kernel waits for nobody.

    Rank 0 that scatters [1, 2, 3, 4] leaves [1, 2] in rank 0's buffer and [3, 4] in rank 1's.

    Raises ValueError for wrong shapes, dtypes, devices, ranks or misaligned places, and launches nothing then.
    """
    numel = _check(table, source, rank, offset_bytes)
    check_positive(num_programs=num_programs)
    if numel == 0:
        return
    # One kernel for all dtypes, of words of 4 bytes, and one for rows of 2-byte elements at odd places.
    size = source.itemsize
    places = [source.data_ptr(), numel * size, offset_bytes, *table.addresses]
    words = source.view(torch.int16 if any(place % 4 for place in places) else torch.int32)
    numel = numel * size // words.itemsize
    with device_of(_scatter_kernel, source, "use scatter_to_peers_reference for host memory"):
        _scatter_kernel[grid(table.world_size * blocks(numel), num_programs)](
            table.tensor,
            words,
            rank,
            table.world_size,
            numel,
            offset_bytes // words.itemsize,
            VECTOR=vector(*((place, words.dtype) for place in places)),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


def scatter_to_peers_reference(table: PeerTable, source: torch.Tensor, *, rank: int, offset_bytes: int = 0) -> None:
    """`scatter_to_peers` in plain torch on host memory; complete on return.

    >>> slots = [torch.zeros(2), torch.zeros(2)]
    >>> scatter_to_peers_reference(PeerTable.of(slots), torch.tensor([1.0, 2.0, 3.0, 4.0]), rank=0)
    >>> slots
    [tensor([1., 2.]), tensor([3., 4.])]
    """
    numel = _check(table, source, rank, offset_bytes)
    if numel == 0:
        return
    for owner in rotated(rank, table.world_size):
        slot = table.host_view(owner, offset_bytes, numel, source.dtype)
        slot.copy_(source[owner * numel : (owner + 1) * numel])


def aot_entries() -> list[AotEntry]:
    return [
        entry(
            f"scatter[{short}, {alignment(elements > 1)}]",
            _scatter_kernel,
            {"table": "*i64", "source": f"*{short}"},
            {"VECTOR": elements, "BLOCK": BLOCK},
            NUM_WARPS,
        )
        for short, elements in (("i32", vector((0, torch.int32))), ("i32", 1), ("i16", 1))
    ]
