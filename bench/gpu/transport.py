"""Checks ``transport`` and ``nvshmem``: memory, order and engine of a transport between processes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from odc.bench.gpu.device import on_a_stream
from odc.bench.gpu.protocol import check_protocol, check_soak
from odc.bench.gpu.setting import Report, Setting, require, run_ranks
from odc.bench.gpu.streams import streams_of
from odc.bench.harness.ranks import NotRunError, Rank
from odc.config import nvshmem_heap_bytes, set_nvshmem_heap_bytes
from odc.engines.base import COPY_ENGINE, Addition, Part, TransferTable
from odc.setup.agreement import ProcessGroupExchange
from odc.setup.topology import Topology
from odc.transports import registry
from odc.transports.base import Transport, aligned

ROUNDS = 200
ADDITIONS = 50
LEAK_TOLERANCE_BYTES = 32 << 20
_BUFFER_BYTES = 64 << 20
_CYCLES, _WARM_UP_CYCLES = 5, 2
_RESERVED_BYTES = 1 << 30  # for transports that must know beforehand
_TIMEOUT_S = 30.0
_KEEPS_ITS_MEMORY = ("nvshmem",)  # until the process ends: its heap is one per process


def check(setting: Setting) -> Report:
    """Check ``transport``: memory, order and engine of a transport between processes, and what it leaves behind.

    What threads of one process can show is shown on every run of the tests. Here every rank is a process with a CUDA
    context of its own: memory by IPC handles, words in registered host memory, kernels on peers' addresses.
    """
    data = {f"{world} ranks": run_ranks(setting, world, conformance)[0] for world in setting.worlds}
    kept = data[f"{max(setting.worlds)} ranks"]["kept_bytes"]
    memory = "nothing is asked" if kept is None else f"{kept / 2**20:.0f} MiB kept"
    return Report(f"{len(PARTS)} parts on {', '.join(map(str, setting.worlds))} ranks; after close {memory}", data)


def conformance(rank: Rank) -> dict[str, Any]:
    """Run all parts on one transport, then open and close it several times."""
    with open_transport(rank, _RESERVED_BYTES) as transport:
        for part in PARTS:
            part(rank, transport)
            rank.meet()
    return {"parts": [part.__name__ for part in PARTS], "kept_bytes": _kept_bytes(rank)}


@contextmanager
def open_transport(rank: Rank, reserved_bytes: int) -> Iterator[Transport]:
    """An open, sealed transport. On a GPU it reserves ``reserved_bytes``. Collective."""
    exchange = ProcessGroupExchange()
    topology = Topology.discover(exchange)
    chosen = registry.choose(rank.place.transport, topology, rank.device, exchange)
    transport = chosen(exchange, topology, _TIMEOUT_S)
    try:
        num_bytes = reserved_bytes if rank.device.type == "cuda" else 1 << 20
        transport.open(num_signals=8, num_locks=1, num_bytes=num_bytes)
        transport.seal()
        yield transport
    finally:
        transport.close()


def _idle(rank: Rank, transport: Transport) -> None:
    """All ranks are here, and all streams are done."""
    require(transport.engine.synchronize(_TIMEOUT_S), f"streams were not idle after {_TIMEOUT_S:g} s")
    rank.meet()


def memory_by_rank(rank: Rank, transport: Transport) -> None:
    """New memory is zero and has the size asked for. Every rank writes to the memory of every other."""
    world = range(rank.world_size)
    for num_bytes in (8 * rank.world_size, (2 << 20) + 8 * rank.world_size):
        buffer = transport.allocate(num_bytes, "memory")
        require(buffer.num_bytes == num_bytes, f"{buffer.num_bytes} bytes, expected {num_bytes}")
        require(buffer.local.device.type == rank.device.type, f"memory is on {buffer.local.device}")
        require(not bool(buffer.local.any()), "new memory is not zero")
        _idle(rank, transport)
        for owner in world:
            word = buffer.peer(owner)[-8 * rank.world_size :].view(torch.int64)[rank.rank]
            transport.engine.run(lambda word=word, owner=owner: word.fill_(100 * owner + rank.rank + 1))  # type: ignore[misc]
        _idle(rank, transport)
        for owner in world:
            found = buffer.peer(owner)[-8 * rank.world_size :].view(torch.int64).tolist()
            wanted = [100 * owner + writer + 1 for writer in world]
            require(found == wanted, f"memory of rank {owner}: {found}, expected {wanted}")


def order_of_streams(rank: Rank, transport: Transport) -> None:
    """A value goes round all ranks. Each adds to what its predecessor's busy stream has written."""
    streams = streams_of(transport.engine, rank.device)
    buffer = transport.allocate(8 * (ROUNDS + 1), "order")
    _idle(rank, transport)
    successor, before = (rank.rank + 1) % rank.world_size, (rank.rank - 1) % rank.world_size
    local, there = buffer.local.view(torch.int64), buffer.peer(successor).view(torch.int64)
    turns = 0
    for turn in range(ROUNDS):
        if turn % rank.world_size != rank.rank:
            continue
        if turn:
            turns += 1
            _await(transport, before, turns)
            transport.order_after([before], 2, turns)
        streams.delay(2e-4)
        source, target = local[turn : turn + 1], there[turn + 1 : turn + 2]
        transport.engine.run(lambda source=source, target=target: torch.add(source, 1, out=target))  # type: ignore[misc]
        transport.post(2)
    _idle(rank, transport)
    mine = [turn for turn in range(1, ROUNDS + 1) if turn % rank.world_size == rank.rank]
    found = local.tolist()
    wrong = [turn for turn in mine if found[turn] != turn]
    require(not wrong, f"after turn {wrong[:1]} the value is {[found[turn] for turn in wrong[:1]]}")


def _await(transport: Transport, poster: int, count: int) -> None:
    word = transport.peers.sleep_word(poster)
    for _ in range(int(_TIMEOUT_S)):
        ticket = word.ticket
        if transport.count(poster, 2) >= count:
            return
        word.sleep(ticket, 1.0)
    require(False, f"post {count} of rank {poster} did not come within {_TIMEOUT_S:g} s")


def engine_copies_and_adds(rank: Rank, transport: Transport) -> None:
    """The engine copies, casts, adds, zeroes and reads rows, to and from a peer's memory."""
    engine, device, peer = transport.engine, rank.device, (rank.rank + 1) % rank.world_size
    buffer = transport.allocate(64, "engine")
    _idle(rank, transport)
    sums = buffer.peer(peer).view(torch.float32)
    addend = torch.tensor([0.5, 1.5, -2.5], dtype=torch.bfloat16, device=device)
    engine.copy([sums[1:4]], [addend])
    engine.add([sums[1:4]], [addend])
    engine.zero(sums[2:3])
    _idle(rank, transport)
    found = buffer.local.view(torch.float32)[:5].tolist()
    require(found == [0.0, 1.0, 0.0, -5.0, 0.0], f"copy, add, zero left {found}")
    _idle(rank, transport)
    engine.copy([buffer.local.view(torch.float32)[:2]], [torch.full((2,), rank.rank + 1.0, device=device)])
    _idle(rank, transport)
    shards = [buffer.peer(owner).view(torch.float32)[:2] for owner in range(rank.world_size)]
    rows = torch.full((2 * rank.world_size,), -1.0, device=device)
    engine.read_rows([rows], shards, rank.rank, own_in_place=True)
    _idle(rank, transport)
    wanted = [-1.0 if owner == rank.rank else owner + 1.0 for owner in range(rank.world_size) for _ in range(2)]
    require(rows.tolist() == wanted, f"rows are {rows.tolist()}, expected {wanted}")


def atomic_additions(rank: Rank, transport: Transport) -> None:
    """All ranks add to all sums at once, and no addition is lost, where "auto" would rely on that. The numbers are
    whole, so any order is exact."""
    if transport.no_atomics() is not None:
        return
    numel, world_size = 10_007, rank.world_size
    buffer = transport.allocate(4 * numel, "atomics")
    everywhere = [buffer.peer(owner) for owner in range(world_size)]
    places = torch.arange(numel, device=rank.device).remainder_(7)
    rows = torch.stack([places + rank.rank + 3 * owner for owner in range(world_size)]).to(torch.float32)
    part = Part(rows.view(-1), 0, numel)
    _idle(rank, transport)
    for _ in range(ADDITIONS):
        transport.engine.add_rows(everywhere, [part], rank.rank)
    _idle(rank, transport)
    wanted = ((places + 3 * rank.rank) * world_size + sum(range(world_size))) * ADDITIONS
    found = buffer.local.view(torch.float32)
    require(torch.equal(found, wanted.to(torch.float32)), "concurrent atomic additions lose some")


def slots_filled_and_added(rank: Rank, transport: Transport) -> None:
    """Each rank fills its slot at every rank, of any dtype and at any alignment; each owner adds all in one call."""
    engine, world_size, numel = transport.engine, rank.world_size, 1003
    for dtype in (torch.bfloat16, torch.float32):
        slot_bytes = aligned(numel * dtype.itemsize)
        slots = transport.allocate(world_size * slot_bytes, f"slots of {dtype}")
        everywhere = [slots.peer(owner) for owner in range(world_size)]
        _idle(rank, transport)
        places = torch.arange(numel, device=rank.device).remainder_(5)
        rows = torch.stack([places + rank.rank + owner for owner in range(world_size)]).to(dtype).view(-1)
        engine.write_rows(everywhere, [Part(rows, rank.rank * slot_bytes, numel)], rank.rank)
        _idle(rank, transport)
        sums = torch.full((2, numel), 1.0, device=rank.device)
        own = [rank.rank]
        whole = Addition(sums[0], range(world_size), 0, True)
        tail = Addition(sums[1][3:], own, 3 * dtype.itemsize, False)
        engine.add_slots(slots.local, slot_bytes, dtype, [whole, tail, Addition(sums[1][:3], [], 0, True)])
        _idle(rank, transport)
        all_of_them = (places + rank.rank) * world_size + sum(range(world_size))
        require(torch.equal(sums[0], all_of_them.to(torch.float32)), f"the slots of {dtype} are not in the sum")
        one = torch.cat([torch.zeros_like(places[:3]), places[3:] + 2 * rank.rank + 1]).to(torch.float32)
        require(torch.equal(sums[1], one), f"a part of a slot of {dtype} is not in its part of a sum")


def parameters_of_their_own(rank: Rank, transport: Transport) -> None:
    """Each rank gathers into three parameters and pushes out of three gradients, of which one is short: into its slot
    at every rank, and to the sums where "auto" would rely on that."""
    engine, world_size, numels, device = transport.engine, rank.world_size, (5, 64, 1003), rank.device
    starts, length = (0, 5, 69), sum(numels)
    sizes = {"shards": length, "slots": world_size * length, "sums": length}
    buffers = {name: transport.allocate(4 * size, name) for name, size in sizes.items()}
    everywhere = {name: [buffer.peer(owner) for owner in range(world_size)] for name, buffer in buffers.items()}
    places = torch.arange(length, device=device)
    _idle(rank, transport)
    own = buffers["shards"].local.view(torch.float32)[:length]
    engine.copy([own], [(places + 2000 * rank.rank).to(torch.float32)])
    _idle(rank, transport)
    outs = [torch.full((world_size * numel,), -1.0, device=device) for numel in numels]
    shards = [shard.view(torch.float32)[:length] for shard in everywhere["shards"]]
    engine.read_rows(outs, shards, rank.rank)
    _idle(rank, transport)
    owners = 2000 * torch.arange(world_size, device=device)[:, None]
    for out, start, numel in zip(outs, starts, numels, strict=True):
        wanted = (owners + places[start : start + numel]).view(-1)
        require(torch.equal(out, wanted.to(torch.float32)), f"the parameter of {numel} elements was gathered wrongly")
    grads = [out[: out.numel() - 2 * (out.numel() == 64 * world_size)] + rank.rank for out in outs]
    parts = [Part(grad, 4 * start, numel) for grad, start, numel in zip(grads, starts, numels, strict=True)]
    in_slot = [Part(grad, low + 4 * length * rank.rank, numel) for grad, low, numel in parts]
    engine.write_rows(everywhere["slots"], in_slot, rank.rank)
    is_atomic = transport.no_atomics() is None
    if is_atomic:
        engine.add_rows(everywhere["sums"], parts, rank.rank)
    _idle(rank, transport)
    ranks = torch.arange(world_size, device=device)[:, None]
    pushed = (places + 2000 * rank.rank + ranks).to(torch.float32)
    if rank.rank == world_size - 1:
        pushed[:, 67:69] = 0  # what the second gradient lacks
    found = buffers["slots"].local.view(torch.float32)[: world_size * length].view(world_size, length)
    require(torch.equal(found, pushed), "what was pushed into slots is not there")
    sums = buffers["sums"].local.view(torch.float32)[:length]
    require(not is_atomic or torch.equal(sums, pushed.sum(0)), "what was pushed to the sums is not in them")


def parameters_by_copies(rank: Rank, transport: Transport) -> None:
    """The same by copies alone; many copies are one call where the driver takes that."""
    with on_a_stream(rank.device):
        transport.engine.choose_by(TransferTable(((0, COPY_ENGINE),)))
        parameters_of_their_own(rank, transport)
        transport.engine.choose_by(TransferTable.default())


PARTS: tuple[Callable[[Rank, Transport], None], ...] = (
    memory_by_rank,
    order_of_streams,
    engine_copies_and_adds,
    slots_filled_and_added,
    parameters_of_their_own,
    parameters_by_copies,
    atomic_additions,
)


def _kept_bytes(rank: Rank) -> int | None:
    """Device memory that is gone after opening and closing several times; None if there is nothing to ask.

    Raises:
        CheckFailedError: more than :data:`LEAK_TOLERANCE_BYTES`, or file descriptors.
    """
    if rank.place.transport in _KEEPS_ITS_MEMORY:
        return None
    for _ in range(_WARM_UP_CYCLES):  # contexts and modules are loaded, the driver has its pools
        _open_and_close(rank)
    free, descriptors = _free_bytes(rank), _num_descriptors()
    for _ in range(_CYCLES):
        _open_and_close(rank)
    kept = None if free is None else free - (_free_bytes(rank) or 0)
    more = _num_descriptors() - descriptors
    require(more <= 0, f"{more} file descriptors stay open after {_CYCLES} times open and close")
    if kept is not None:
        sharing = -(-rank.world_size // max(rank.place.num_gpus, 1))  # free memory is that of the GPU
        allocated = _CYCLES * _BUFFER_BYTES * sharing
        require(
            kept < LEAK_TOLERANCE_BYTES * sharing,
            f"{kept / 2**20:.0f} of {allocated / 2**20:.0f} MiB per GPU are not given back by close()",
        )
    return kept


def _num_descriptors() -> int:
    """Of this process, without those of the device driver, which opens more whenever it likes."""
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one this listing uses
            targets.append(entry.readlink().as_posix())
    return sum(not target.startswith("/dev/nvidia") for target in targets)


def _open_and_close(rank: Rank) -> None:
    num_bytes = _BUFFER_BYTES if rank.device.type == "cuda" else 1 << 16
    with open_transport(rank, _RESERVED_BYTES) as transport:
        transport.allocate(num_bytes, "leak")
        _idle(rank, transport)
    rank.meet()


def _free_bytes(rank: Rank) -> int | None:
    """Of this rank's GPU, while all ranks are at rest."""
    gc.collect()
    if rank.device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    rank.meet()
    free = torch.cuda.mem_get_info(rank.device)[0]
    rank.meet()
    return free


NAME = "nvshmem"
_SOAK_MINIBATCHES = 200
_HEAP_BYTES = 8 << 30  # it is never given back, and a check makes a runtime per case


def why_no_nvshmem(setting: Setting) -> str | None:
    """Why NVSHMEM cannot be checked here, or None."""
    return setting.lacks_gpus(" (several share one under MPS)")


def check_nvshmem(setting: Setting) -> Report:
    """Check ``nvshmem``: the checks of a transport's memory, order and protocol, for the transport of that name.

    On one host, where NVSHMEM maps its heap; what goes through a network card needs two hosts: bench/slurm.
    """
    reason = why_no_nvshmem(setting)
    if reason is not None:
        raise NotRunError(reason)
    worlds = tuple(world for world in setting.worlds if setting.owns_gpus(world))
    minibatches = min(setting.minibatches, _SOAK_MINIBATCHES)
    chosen = replace(setting, transport=NAME, worlds=worlds, minibatches=minibatches, quick=True)
    if nvshmem_heap_bytes() is None:
        set_nvshmem_heap_bytes(_HEAP_BYTES)
    checks = {"transport": check, "protocol": check_protocol, "soak": check_soak}
    parts = {name: run(chosen) for name, run in checks.items()}
    text = f"memory, order, protocol and soak on {', '.join(map(str, worlds))} ranks"
    return Report(text, {name: report.data for name, report in parts.items()})
