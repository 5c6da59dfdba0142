"""Data between hosts: `_nvshmem_gather_kernel` and `_nvshmem_put_signal_kernel` with their launchers and plans.

Their twins are plans (`gather_plan`, `put_plan`): which transfers a launch makes, since plain torch cannot make them.
"""

# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from odc.kernels.aot_entry import AotEntry, entry
from odc.kernels.arguments import check_flat, check_positive, check_rank, check_same_device
from odc.kernels.launching import device_of, grid
from odc.kernels.nvshmem.device import SIGNAL_SET, getmem_nbi_block, putmem_nbi_block, putmem_signal_block, quiet
from odc.kernels.nvshmem.modules import KernelModules
from odc.kernels.peers import VECTOR_BYTES, rotated

CHUNK_BYTES = 1 << 20
"""Payload of one transfer: limiting it keeps traffic steady when many clients read one owner (paper, Appendix B)."""
CHUNKS_IN_FLIGHT = 4
"""Transfers that a program starts before it waits for them."""
PROGRAMS = 16
NUM_WARPS = 4

_NO_TWIN = "NVSHMEM has no symmetric heap in host memory"


# Nothing is specialized: see [Note: No argument is specialized] in ../launching.py.
@triton.jit(do_not_specialize=["out", "source", "pes", "rank", "world_size", "nbytes", "chunk_bytes", "in_flight"])
def _nvshmem_gather_kernel(
    out: tl.int64,
    source: tl.int64,
    pes: tl.tensor,
    rank: tl.int32,
    world_size: tl.int32,
    nbytes: tl.int64,
    chunk_bytes: tl.int64,
    in_flight: tl.int32,
) -> None:
    nbytes = nbytes.to(tl.int64)
    chunk_bytes = chunk_bytes.to(tl.int64)
    whole = (nbytes + chunk_bytes - 1) // chunk_bytes * chunk_bytes
    low = tl.program_id(0) * chunk_bytes
    free = in_flight
    owner = rank
    step = 0
    while step < world_size:
        owner = tl.where(owner + 1 < world_size, owner + 1, 0)
        while low < nbytes:
            size = tl.minimum(chunk_bytes, nbytes - low)
            getmem_nbi_block(out + owner * nbytes + low, source + low, size, tl.load(pes + owner))
            free -= 1
            if free == 0:
                quiet()
                free = in_flight
            low += tl.num_programs(0) * chunk_bytes
        low -= whole  # the chunks of all owners in one row are dealt out in turn
        step += 1
    tl.debug_barrier()  # quiet is per thread: no thread may be past it before all have issued their part
    quiet()


# [Note: A put is signalled once, after all of it]
# Chunks travel on several connections and overtake each other, so no chunk's signal may speak for another chunk.
# Each program completes its chunks (quiet: they are in the owner's memory) and then takes a ticket. Whoever takes the
# last ticket knows that all chunks but the final one, which nobody has sent yet, are in place, and sends that one with
# the signal. A put that ends anywhere before leaves the signal word as it was. The word is set, not added to: it
# commits the push by one word, as on a host, and cannot drift after an abandoned push.
@triton.jit(
    do_not_specialize=["source", "slot", "nbytes", "signal", "value", "pe", "ticket", "chunk_bytes", "in_flight"]
)
def _nvshmem_put_signal_kernel(
    source: tl.int64,
    slot: tl.int64,
    nbytes: tl.int64,
    signal: tl.int64,
    value: tl.int64,
    pe: tl.int32,
    ticket: tl.tensor,
    chunk_bytes: tl.int64,
    in_flight: tl.int32,
) -> None:
    nbytes = nbytes.to(tl.int64)
    chunk_bytes = chunk_bytes.to(tl.int64)
    final = (nbytes - 1) // chunk_bytes * chunk_bytes
    low = tl.program_id(0) * chunk_bytes
    free = in_flight
    while low < final:
        putmem_nbi_block(slot + low, source + low, chunk_bytes, pe)
        free -= 1
        if free == 0:
            quiet()
            free = in_flight
        low += tl.num_programs(0) * chunk_bytes
    tl.debug_barrier()
    quiet()
    tl.debug_barrier()  # the ticket is taken by one thread, for all
    arrived = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(0) - 1:
        tl.store(ticket, 0)  # for the next launch; nobody of this one looks any more
        putmem_signal_block(
            slot + final, source + final, nbytes - final, signal.to(tl.int64), value.to(tl.int64), SIGNAL_SET, pe
        )


def _check_chunks(chunk_bytes: int, chunks_in_flight: int, num_programs: int) -> None:
    check_positive(chunk_bytes=chunk_bytes, chunks_in_flight=chunks_in_flight, num_programs=num_programs)
    if chunk_bytes % VECTOR_BYTES:
        raise ValueError(f"chunk_bytes={chunk_bytes}, expected a multiple of {VECTOR_BYTES}: chunks start aligned")


def gather_plan(
    *, rank: int, world_size: int, nbytes: int, chunk_bytes: int, num_programs: int
) -> list[list[tuple[int, int, int]]]:
    """The gets of each program of `gather_from_pes`, in its order: (owner, first byte, number of bytes).

    >>> gather_plan(rank=0, world_size=2, nbytes=40, chunk_bytes=32, num_programs=3)
    [[(1, 0, 32), (0, 32, 8)], [(1, 32, 8)], [(0, 0, 32)]]
    """
    lows = range(0, nbytes, chunk_bytes)
    items = [(owner, low, min(chunk_bytes, nbytes - low)) for owner in rotated(rank, world_size) for low in lows]
    (programs,) = grid(len(items), num_programs)
    return [items[program::programs] for program in range(programs)]


def gather_from_pes(
    modules: KernelModules,
    out: torch.Tensor,
    source: torch.Tensor,
    pes: torch.Tensor,
    *,
    rank: int,
    chunk_bytes: int = CHUNK_BYTES,
    chunks_in_flight: int = CHUNKS_IN_FLIGHT,
    num_programs: int = PROGRAMS,
) -> None:
    """Row r of ``out`` = ``source`` of rank r, for every r.

    ``source``: [n], any dtype, dense, in the symmetric heap: the same object on every PE. ``out``: [world_size * n] of
    that dtype, dense, in the symmetric heap or registered with NVSHMEM. ``pes``: int32 [world_size], the PE of each
    rank. Owners are visited from ``rank + 1`` on, the own rank last. No transfer is larger than ``chunk_bytes``, and at
    most ``num_programs * chunks_in_flight`` are under way at a time.

    On return the kernel is enqueued on the current stream; ``out`` is complete for whatever is enqueued there next. The
    owners' sources must be readable (published) until then; the kernel waits for nobody.

    With n = 2 on 2 ranks that hold [1, 2] and [3, 4], ``out`` is [1, 2, 3, 4] on both.

    Raises ValueError for wrong shapes, dtypes, devices or ranks, and launches nothing then.
    """
    world_size = pes.numel()
    check_flat("pes", pes, [torch.int32])
    check_rank(rank, world_size)
    check_flat("source", source, [source.dtype])
    check_positive(source_numel=source.numel())
    check_flat("out", out, [source.dtype], world_size * source.numel())
    check_same_device(out=out, source=source, pes=pes)
    _check_chunks(chunk_bytes, chunks_in_flight, num_programs)
    nbytes = source.numel() * source.itemsize
    with device_of(_nvshmem_gather_kernel, out, _NO_TWIN):
        modules.launch(
            _nvshmem_gather_kernel,
            grid(world_size * -(-nbytes // chunk_bytes), num_programs),
            out.data_ptr(),
            source.data_ptr(),
            pes,
            rank,
            world_size,
            nbytes,
            chunk_bytes,
            chunks_in_flight,
            num_warps=NUM_WARPS,
        )


def put_plan(
    *, nbytes: int, chunk_bytes: int, num_programs: int
) -> tuple[list[list[tuple[int, int]]], tuple[int, int]]:
    """The puts of each program of `put_with_signal`, (first byte, number of bytes), and the one with the signal.

    >>> put_plan(nbytes=100, chunk_bytes=32, num_programs=2)
    ([[(0, 32), (64, 32)], [(32, 32)]], (96, 4))
    """
    lows = list(range(0, nbytes, chunk_bytes))
    (programs,) = grid(len(lows) - 1, num_programs)
    plain = [(low, chunk_bytes) for low in lows[:-1]]
    return [plain[program::programs] for program in range(programs)], (lows[-1], nbytes - lows[-1])


def put_with_signal(
    modules: KernelModules,
    source: torch.Tensor,
    slot: torch.Tensor,
    signal: torch.Tensor,
    value: int,
    ticket: torch.Tensor,
    *,
    pe: int,
    chunk_bytes: int = CHUNK_BYTES,
    chunks_in_flight: int = CHUNKS_IN_FLIGHT,
    num_programs: int = PROGRAMS,
) -> None:
    """Copy ``source`` to ``slot`` of ``pe``, then set ``signal`` there to ``value``: never the signal before all data.

    ``source``: [n], dense, in the symmetric heap or registered with NVSHMEM. ``slot``: [n] of the same dtype and
    ``signal``: int64 [1], both symmetric. ``value``: more than all before it, from 1. ``ticket``: int32 [1], zero,
    local; it is zero again when the kernel has ended, so launches on one stream may share it.

    On return the kernel is enqueued on the current stream. For what is enqueued there next, ``source`` is free;
    ``slot`` is complete at the owner when the owner sees the signal, which may be later.

    Putting [1, 2] with value 7 leaves [1, 2] in the owner's slot and then 7 in its signal.

    Raises ValueError for wrong shapes, dtypes, devices or values, and launches nothing then.
    """
    check_flat("source", source, [source.dtype])
    check_positive(source_numel=source.numel(), value=value)
    check_flat("slot", slot, [source.dtype], source.numel())
    check_flat("signal", signal, [torch.int64], 1)
    check_flat("ticket", ticket, [torch.int32], 1)
    check_same_device(source=source, slot=slot, signal=signal, ticket=ticket)
    if pe < 0:
        raise ValueError(f"pe={pe}, expected 0 or more")
    _check_chunks(chunk_bytes, chunks_in_flight, num_programs)
    nbytes = source.numel() * source.itemsize
    with device_of(_nvshmem_put_signal_kernel, source, _NO_TWIN):
        modules.launch(
            _nvshmem_put_signal_kernel,
            grid(-(-nbytes // chunk_bytes) - 1, num_programs),
            source.data_ptr(),
            slot.data_ptr(),
            nbytes,
            signal.data_ptr(),
            value,
            pe,
            ticket,
            chunk_bytes,
            chunks_in_flight,
            num_warps=NUM_WARPS,
        )


def aot_entries() -> list[AotEntry]:
    return [
        entry("nvshmem_gather", _nvshmem_gather_kernel, {"pes": "*i32"}, {}, NUM_WARPS, nvshmem=True),
        entry("nvshmem_put_signal", _nvshmem_put_signal_kernel, {"ticket": "*i32"}, {}, NUM_WARPS, nvshmem=True),
    ]
