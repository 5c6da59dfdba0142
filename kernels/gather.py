"""Gather by reading peers' memory: `_gather_kernel`, its launcher `gather_from_peers`, its plain-torch twin."""

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
    check_flat,
    check_peer_range,
    check_positive,
    check_rank,
    check_same_device,
)
from odc.kernels.launching import BLOCK, DTYPES, NUM_WARPS, REMOTE_PROGRAMS, blocks, device_of, grid, vector
from odc.kernels.peers import PeerTable, rotated


# [Note: No argument is specialized]
# Triton would compile another kernel for integers that are 1 or multiples of 16, and for integers that need 64 bits.
# All are declared 64-bit and unspecialized, and alignment is the constexpr VECTOR: one kernel per pair of dtypes and
# alignment, which `aot_list` compiles beforehand, and no compilation in the middle of a training step.
@triton.jit(do_not_specialize=["out", "table", "rank", "world_size", "num_steps", "numel", "out_stride", "offset"])
def _gather_kernel(
    out: tl.tensor,
    table: tl.tensor,
    rank: tl.int32,
    world_size: tl.int32,
    num_steps: tl.int32,
    numel: tl.int64,
    out_stride: tl.int64,
    offset: tl.int64,
    SOURCE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    lanes = tl.arange(0, BLOCK)
    numel = numel.to(tl.int64)
    blocks_numel = (numel + BLOCK - 1) // BLOCK * BLOCK
    start = tl.program_id(0).to(tl.int64) * BLOCK
    owner = rank
    step = 0
    # All programs are with the same owner, then with the next: what the ranks do is in step if the ranks are.
    while step < num_steps:
        owner = tl.where(owner + 1 < world_size, owner + 1, 0)
        shard = tl.load(table + owner).to(tl.pointer_type(SOURCE)) + offset.to(tl.int64)
        row = out + owner * out_stride.to(tl.int64)
        while start < numel:
            left = tl.minimum(numel - start, BLOCK).to(tl.int32)
            whole = left // VECTOR * VECTOR
            source = tl.multiple_of(shard + start + lanes, VECTOR * SOURCE.primitive_bitwidth // 8)
            target = tl.multiple_of(row + start + lanes, VECTOR * out.dtype.element_ty.primitive_bitwidth // 8)
            inside = tl.max_constancy(lanes < whole, VECTOR)
            # .cg: the owner writes this memory, so this GPU's L1 must not keep what it read for an earlier minibatch.
            values = tl.load(source, mask=inside, cache_modifier=".cg")
            tl.store(target, values.to(out.dtype.element_ty), mask=inside)
            if VECTOR > 1 and whole < left:
                rest = whole + tl.arange(0, VECTOR)
                last = tl.load(shard + start + rest, mask=rest < left, cache_modifier=".cg")
                tl.store(row + start + rest, last.to(out.dtype.element_ty), mask=rest < left)
            start += tl.num_programs(0).to(tl.int64) * BLOCK
        start -= blocks_numel  # the blocks of all shards in one row are dealt out in turn
        step += 1


def _check(
    out: torch.Tensor, table: PeerTable, shard_numel: int, rank: int, source_dtype: torch.dtype, offset: int
) -> None:
    check_positive(shard_numel=shard_numel)
    check_rank(rank, table.world_size)
    if source_dtype not in FLOATS:
        raise ValueError(f"source_dtype is {source_dtype}, expected one of {', '.join(map(str, FLOATS))}")
    check_flat("out", out, FLOATS, table.world_size * shard_numel)
    check_cast(source_dtype, out.dtype)
    check_same_device(out=out, table=table.tensor)
    check_peer_range(table, offset, source_dtype)


def gather_from_peers(
    out: torch.Tensor,
    table: PeerTable,
    shard_numel: int,
    *,
    rank: int,
    source_dtype: torch.dtype,
    offset: int = 0,
    own_in_place: bool = False,
    num_programs: int = REMOTE_PROGRAMS,
) -> None:
    """``out[r * shard_numel : (r + 1) * shard_numel] = buffer of rank r [offset : offset + shard_numel]`` for every r.

    ``out``: float [world_size * shard_numel], dense, of any of bf16, fp16, fp32, fp64; ``table`` holds buffers of
    ``source_dtype``, and values are cast on the way (to nearest, ties to even; not from fp64 to 16 bits).
    Owners are visited from ``rank + 1`` on, the own rank last; with ``own_in_place`` the own row of ``out`` is left as
    it is.

    On return the kernel is enqueued on the current stream; ``out`` is complete for whatever is enqueued there next. The
    caller has made sure that every owner's buffer is readable (published) until then; the kernel waits for nobody.

    With shards [1, 2] and [3, 4] of ranks 0 and 1, ``out`` is [1, 2, 3, 4] on both ranks.

    Raises ValueError for wrong shapes, dtypes, devices, ranks or misaligned buffers, and launches nothing then.
    """
    _check(out, table, shard_numel, rank, source_dtype, offset)
    check_positive(num_programs=num_programs)
    steps = table.world_size - own_in_place
    begin = offset * source_dtype.itemsize
    with device_of(_gather_kernel, out, "use gather_from_peers_reference for host memory"):
        _gather_kernel[grid(steps * blocks(shard_numel), num_programs)](
            out,
            table.tensor,
            rank,
            table.world_size,
            steps,
            shard_numel,
            shard_numel,
            offset,
            SOURCE=DTYPES[source_dtype],
            VECTOR=vector(
                (out.data_ptr(), out.dtype),
                (shard_numel * out.itemsize, out.dtype),
                *((address + begin, source_dtype) for address in table.addresses),
            ),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


def gather_from_peers_reference(
    out: torch.Tensor,
    table: PeerTable,
    shard_numel: int,
    *,
    rank: int,
    source_dtype: torch.dtype,
    offset: int = 0,
    own_in_place: bool = False,
) -> None:
    """`gather_from_peers` in plain torch on host memory; complete on return.

    >>> shards = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    >>> out = torch.zeros(4, dtype=torch.bfloat16)
    >>> gather_from_peers_reference(out, PeerTable.of(shards), 2, rank=0, source_dtype=torch.float32)
    >>> out
    tensor([1., 2., 3., 4.], dtype=torch.bfloat16)
    """
    _check(out, table, shard_numel, rank, source_dtype, offset)
    for owner in rotated(rank, table.world_size):
        if own_in_place and owner == rank:
            continue
        source = table.host_view(owner, offset * source_dtype.itemsize, shard_numel, source_dtype)
        out[owner * shard_numel : (owner + 1) * shard_numel].copy_(source)


PAIRS = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
)
"""Source and destination of the casts that training needs: same dtype, or fp32 shards used in half precision."""


def aot_entries(pairs: Sequence[tuple[torch.dtype, torch.dtype]] = PAIRS) -> list[AotEntry]:
    return [
        entry(
            f"gather[{DTYPES[source]}->{DTYPES[out]}, {alignment(aligned)}]",
            _gather_kernel,
            {"out": f"*{DTYPES[out]}", "table": "*i64"},
            {"SOURCE": DTYPES[source], "VECTOR": vector((int(not aligned), source), (0, out)), "BLOCK": BLOCK},
            NUM_WARPS,
        )
        for source, out in pairs
        for aligned in (True, False)
    ]
