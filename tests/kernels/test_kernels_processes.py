"""Layer 3: ranks as processes. Kernels in Triton's interpreter that read and write the memory of other processes.

Three of them, no GPU. Each has a memfd of its own and maps those of all, at addresses of its own, as ranks of a host
map one another's GPU memory. It shows that kernels follow the addresses of their own process and touch what they should
in the others'. Interpreted atomics hold a lock of their own process only, so processes add one after the other; and
nothing is shown of the order in which GPUs see one another's writes.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases import numbers, view

WORLD_SIZE = 3
NUMEL = 4099
SHARD, SUM, ATOMIC_SUM, SLOTS = 0, 1 << 16, 2 << 16, 3 << 16
SLOT_BYTES = 8448
NBYTES = SLOTS + WORLD_SIZE * SLOT_BYTES
NUMELS = (64, 3, 4032)  # the same elements, as slices of three parameters
STARTS = (0, 64, 67)
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def memfds() -> Iterator[list[int]]:
    found = [os.memfd_create(f"rank{rank}") for rank in range(WORLD_SIZE)]
    for fd in found:
        os.ftruncate(fd, NBYTES + WORLD_SIZE * WORLD_SIZE * mmap.PAGESIZE)
    yield found
    for fd in found:
        os.close(fd)


def map_all(memfds: list[int], rank: int) -> tuple[list[int], list[mmap.mmap]]:
    """Addresses of everybody's memory here, and what keeps them mapped. Each process maps in another order, and other
    lengths: no two of them have all at the same places."""
    maps = {}
    for turn in range(len(memfds)):
        other = (rank + turn) % len(memfds)
        maps[other] = mmap.mmap(memfds[other], NBYTES + turn * (rank + 1) * mmap.PAGESIZE)
    kept = [maps[other] for other in range(len(memfds))]
    return [ctypes.addressof(ctypes.c_char.from_buffer(mapped)) for mapped in kept], kept


def shard(rank: int) -> torch.Tensor:
    return numbers(NUMEL, BF16, seed=rank)


def push(client: int) -> torch.Tensor:
    """One row per owner."""
    return numbers(WORLD_SIZE * NUMEL, BF16, seed=10 + client)


def expected_sum(owner: int) -> torch.Tensor:
    rows = [push(client)[owner * NUMEL : (owner + 1) * NUMEL].float() for client in range(WORLD_SIZE)]
    return (rows[0] + rows[1]) + rows[2]


def work(k: SimpleNamespace, rank: int, memfds: list[int], barrier: Any) -> None:
    addresses, _kept = map_all(memfds, rank)
    table = k.peers.PeerTable.build(addresses, "cpu")

    view(addresses[rank] + SHARD, NUMEL, BF16).copy_(shard(rank))
    barrier.wait(30)
    rows = k.parts.PartRows(torch.zeros(k.parts.MAX_PARTS, k.parts.COLUMNS, dtype=torch.int64))
    outs = [torch.zeros(WORLD_SIZE * numel, dtype=BF16) for numel in NUMELS]
    k.parts.gather_parts(rows, outs, table, rank=rank, num_programs=2)
    for parameter, low, numel in zip(outs, STARTS, NUMELS, strict=True):
        wanted = torch.cat([shard(owner)[low : low + numel] for owner in range(WORLD_SIZE)])
        assert torch.equal(parameter, wanted)

    grads = [
        push(rank).view(WORLD_SIZE, NUMEL)[:, low : low + n].flatten() for low, n in zip(STARTS, NUMELS, strict=True)
    ]
    slots = view(addresses[rank] + SLOTS, WORLD_SIZE * SLOT_BYTES, torch.uint8)
    where = ([2 * low for low in STARTS], NUMELS)
    place = SLOTS + rank * SLOT_BYTES
    k.parts.scatter_parts(rows, table, grads, *where, rank=rank, offset_bytes=place, num_programs=2)
    barrier.wait(30)
    words, dtypes = torch.zeros(1, 4, dtype=torch.int64), {"total_dtype": FP32, "addend_dtype": BF16}
    row = k.slots.SlotRow(addresses[rank] + SUM, 0, NUMEL, 0b111, first=True)
    aligned = k.slots.write_rows(words, [row], slots, SLOT_BYTES, **dtypes)
    how = {"aligned": aligned, "num_programs": 2} | dtypes
    k.slots.accumulate_slots(words.data_ptr(), 1, slots, SLOT_BYTES, **how)
    barrier.wait(30)

    where = ([4 * low for low in STARTS], NUMELS)
    for turn in range(WORLD_SIZE):
        if turn == rank:
            k.parts.scatter_accumulate_parts(
                rows, table, grads, *where, rank=rank, offset_bytes=ATOMIC_SUM, num_programs=2
            )
        barrier.wait(30)
    for owner in range(WORLD_SIZE):
        for place in (SUM, ATOMIC_SUM):
            assert torch.equal(view(addresses[owner] + place, NUMEL, FP32), expected_sum(owner))


def run(k: SimpleNamespace, rank: int, memfds: list[int], barrier: Any, failures: Any) -> None:
    try:
        work(k, rank, memfds, barrier)
    except BaseException:
        barrier.abort()
        failures.put(f"rank {rank}: {traceback.format_exc()}")
        raise SystemExit(1) from None


def test_kernels_reach_the_memory_of_other_processes(k: SimpleNamespace, memfds: list[int]) -> None:
    fork = multiprocessing.get_context("fork")  # the interpreter is on already, in the kernels of `k`
    barrier, failures = fork.Barrier(WORLD_SIZE), fork.SimpleQueue()
    ranks = [fork.Process(target=run, args=(k, rank, memfds, barrier, failures)) for rank in range(WORLD_SIZE)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        if process.is_alive():
            process.kill()
            process.join()
    found = []
    while not failures.empty():
        found.append(failures.get())
    assert [process.exitcode for process in ranks] == [0] * WORLD_SIZE, "\n".join(found)
    sums, _kept = map_all(memfds, 0)
    for owner in range(WORLD_SIZE):
        for place in (SUM, ATOMIC_SUM):
            assert torch.equal(view(sums[owner] + place, NUMEL, FP32), expected_sum(owner))
        rest = view(sums[owner] + SLOTS, WORLD_SIZE * SLOT_BYTES, torch.uint8).view(WORLD_SIZE, SLOT_BYTES)
        assert not rest[:, NUMEL * 2 :].any()  # behind the rows
