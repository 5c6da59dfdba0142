"""Layer 2: ranks as threads. What every transport must do; a new transport adds its name to ``NEAR`` or ``FAR``.

``shm`` and ``tcp`` run everywhere (the latter between ranks that pose as hosts), ``cuda_ipc`` where there is a GPU,
which all ranks share. Without one its host logic runs against the fake CUDA runtime of ``bench/fake``, whose streams
work within the call (``fake_cuda``) or behind it (``fake_cuda_streams``), and that of ``nvshmem`` against the heap of
``bench/fake``: that shows what a transport asks for and in which order, not that a device does it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from fake_nvshmem import FakeNvshmemTransport, registered_fakes
from process_ranks import run_ranks
from thread_ranks import ThreadExchange, run_threads, values
from watching import until

from odc.engines.base import Part
from odc.errors import ConfigError, SetupError
from odc.setup.agreement import ProcessGroupExchange
from odc.setup.topology import Topology
from odc.transports import registry
from odc.transports._peers import IN_COLLECTIVE, PeerState
from odc.transports.base import Transport
from odc.transports.shm import ShmTransport

HAS_GPU = torch.cuda.is_available()
NEEDS_GPU = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU; its host logic runs as fake_cuda")
NEAR = ["shm", "fake_cuda", "fake_cuda_streams", pytest.param("cuda_ipc", marks=NEEDS_GPU)]  # all ranks on one host
FAR = ["tcp", "fake_nvshmem", "fake_nvshmem_streams"]  # ranks pose as hosts
PROMPT = ("fake_cuda", "fake_nvshmem")
"""Extended: in every run there are those whose streams lag behind."""
T = TypeVar("T")


@pytest.fixture(autouse=True, scope="module")
def fakes() -> Iterator[None]:
    with registered_fakes(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeNvshmemTransport, "staging_bytes", 1 << 20)
        yield


def run_of(names: Sequence[Any]) -> list[Any]:
    """Parameters of a fixture or test."""
    return [pytest.param(name, marks=pytest.mark.extended) if name in PROMPT else name for name in names]


def device_of(name: str) -> torch.device:
    return torch.device("cuda", 0) if name == "cuda_ipc" else torch.device("cpu")


def on_transport(
    name: str,
    world_size: int,
    body: Callable[[Transport, ThreadExchange], T],
    signals: int = 8,
    locks: int = 2,
) -> list[T]:
    def run(exchange: ThreadExchange) -> T:
        # Of three ranks two share a host, so both ways occur.
        lone = exchange.world_size == 2
        host = f"host{exchange.rank if lone else max(exchange.rank, 1)}"
        topology = Topology.discover(exchange, host if name in FAR else "")
        transport = registry.choose(name, topology, device_of(name), exchange)(
            exchange, topology, 30.0, device_of(name)
        )
        try:
            transport.open(num_signals=signals, num_locks=locks, num_bytes=1 << 20)
            result = body(transport, exchange)
            meet(transport, exchange)
            return result
        finally:
            transport.close()

    return values(run_threads(world_size, run))


def meet(transport: Transport, exchange: ThreadExchange) -> None:
    """All ranks are here, and what their streams were given is done."""
    assert transport.engine.synchronize(30.0)
    exchange.all_gather(b"")


def await_signal(transport: Transport, rank: int, index: int, count: int) -> None:
    while transport.count(rank, index) < count:
        word = transport.peers.sleep_word(rank)
        ticket = word.ticket
        if transport.count(rank, index) < count:
            word.sleep(ticket, 1.0)


def all_are_told(transport: Transport) -> bool:
    transport.forward_arrivals()
    return not transport.to_forward


eventually = partial(until, otherwise="the other rank's news do not come", timeout_s=20.0)
"""News of another host takes a moment."""


@pytest.fixture(params=run_of([*NEAR, *FAR]))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=run_of(NEAR))
def near(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("kind", ["allocate", "allocate_host"])
def test_symmetric_memory_is_zeroed_and_addressed_by_rank(near: str, kind: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> list[list[int]]:
        buffer = getattr(transport, kind)(64, "test")
        assert buffer.num_bytes == 64
        assert not buffer.local.any()
        meet(transport, exchange)
        for rank in range(3):
            buffer.peer(rank)[exchange.rank] = 10 * exchange.rank + rank + 1
        meet(transport, exchange)
        return [buffer.peer(rank)[:3].tolist() for rank in range(3)]

    written = [[10 * writer + owner + 1 for writer in range(3)] for owner in range(3)]
    assert on_transport(near, 3, body) == [written] * 3


def test_memory_is_read_and_written_at_any_rank(name: str) -> None:
    """Whatever host it is on: offsets, dtypes, more than one chunk, many at a time, in one piece and in several."""
    numel = (5 << 20) // 2 + 3
    cuts = [1, numel // 3, 0, numel - numel // 3 - 6, 5]

    def body(transport: Transport, exchange: ThreadExchange) -> list[bool]:
        device, rank = device_of(name), exchange.rank
        buffer = transport.allocate(3 * 2 * numel + 64, "test")
        mine = torch.full((numel,), rank + 1.5, dtype=torch.bfloat16, device=device)
        chunks = []
        apart = [one.clone() for one in mine.split_with_sizes(cuts)]
        for owner in transport.topology.rotation():
            sources = apart if owner else [mine]
            transport.write(buffer, owner, 64 + rank * 2 * numel, sources, lambda: chunks.append(1))
        transport.post(5)
        for owner in range(3):
            await_signal(transport, owner, 5, 1)
            transport.order_after([owner], 5, 1)
        meet(transport, exchange)
        out = torch.empty(numel * 3, dtype=torch.bfloat16, device=device)
        found = []
        for owner in transport.topology.rotation():
            transport.read([([out], owner)], buffer, 64)
            assert transport.engine.synchronize(30.0)
            found.append(out.view(3, -1).eq(torch.tensor([[1.5], [2.5], [3.5]], device=device)).all().item())
        rows = torch.zeros(3, numel, dtype=torch.bfloat16, device=device)
        offset = 64 + 2 * numel * ((rank + 1) % 3)  # where another rank wrote to all of them
        pieces = [row.split_with_sizes(cuts[::-1] if owner else [numel]) for owner, row in enumerate(rows)]
        transport.read([(pieces[owner], owner) for owner in transport.topology.rotation()], buffer, offset)
        assert transport.engine.synchronize(30.0)
        found.append(rows.eq((rank + 1) % 3 + 1.5).all().item())
        meet(transport, exchange)
        return [*found, len(chunks) >= 3]

    assert on_transport(name, 3, body) == [[True] * 5] * 3


def test_host_memory_is_written_at_any_rank(name: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> bytes:
        buffer = transport.allocate_host(16, "header")
        for owner in range(3):
            transport.write_host(buffer, owner, 4 * exchange.rank, bytes([exchange.rank, owner, 7, 7]))
        transport.post(0)
        for owner in range(3):
            await_signal(transport, owner, 0, 1)
        return bytes(buffer.local.tolist())

    for rank, found in enumerate(on_transport(name, 3, body)):
        assert found == b"".join(bytes([client, rank, 7, 7]) for client in range(3)) + bytes(4)


def test_tensors_lie_where_the_model_computes(near: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> list[str]:
        buffers = transport.allocate(64, "device"), transport.allocate_host(64, "host")
        return [buffer.peer(1 - exchange.rank).device.type for buffer in buffers]

    assert on_transport(near, 2, body) == [[device_of(near).type, "cpu"]] * 2


@pytest.mark.parametrize("far", run_of(FAR))
def test_a_rank_of_another_host_has_no_address_and_no_lock(far: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> None:
        buffer = transport.allocate(8, "far")
        other = 1 - exchange.rank
        assert not buffer.reaches(other)
        with pytest.raises(ValueError, match=f"'far' of rank {other} is not addressable from rank {exchange.rank}"):
            buffer.peer(other)
        assert not transport.peers.blocks[other].try_lock(0, exchange.rank)

    on_transport(far, 2, body)


def test_a_released_buffer_says_so(name: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> None:
        buffer = transport.allocate(8, "gone")
        buffer.release()
        with pytest.raises(ValueError, match="'gone' of rank"):
            _ = buffer.local

    on_transport(name, 2, body)


def test_memory_is_added_when_set_up_is_over_and_old_memory_given_back(name: str) -> None:
    """Beside memory that is in use, several times, also by ranks of other hosts."""

    def body(transport: Transport, exchange: ThreadExchange) -> list[list[int]]:
        first = transport.allocate(24, "first")
        transport.seal()
        found = []
        for turn, num_bytes in enumerate([24, 4096, 1 << 18], start=1):
            added = transport.allocate(num_bytes, "added")
            assert added.num_bytes == num_bytes
            assert not added.local.any()
            meet(transport, exchange)
            mine = torch.full((8,), 10 * turn + exchange.rank, dtype=torch.uint8, device=device_of(name))
            for owner in range(3):
                transport.write(added, owner, 8 * exchange.rank, [mine])
                transport.write(first, owner, 8 * exchange.rank, [mine])
            # What has been written is there once a post behind it is.
            transport.post(0)
            for client in range(3):
                await_signal(transport, client, 0, turn)
            transport.order_after(range(3), 0, turn)
            meet(transport, exchange)
            for buffer in (added, first):
                row = torch.zeros(24, dtype=torch.uint8, device=device_of(name))
                transport.read([([row], (exchange.rank + 1) % 3)], buffer, 0)
                meet(transport, exchange)
                found.append(row.unique().tolist())
            transport.release(added)
            with pytest.raises(ValueError, match="'added' of rank"):
                _ = added.local
        return found

    turns = [[10 * turn + rank for rank in range(3)] for turn in (1, 1, 2, 2, 3, 3)]
    assert on_transport(name, 3, body) == [turns] * 3


def test_signals_count_every_post_and_show_the_memory_before_them(near: str) -> None:
    rounds = 200

    def body(transport: Transport, exchange: ThreadExchange) -> int:
        buffer = transport.allocate_host(8 * rounds, "data")
        peer = 1 - exchange.rank
        mistakes = 0
        for i in range(rounds):
            buffer.peer(peer).view(torch.int64)[i] = i + 1
            transport.post(3)
            await_signal(transport, peer, 3, i + 1)
            mistakes += int(buffer.local.view(torch.int64)[i]) != i + 1
        return mistakes

    assert on_transport(near, 2, body) == [0, 0]


def test_a_post_carries_the_order_of_streams(near: str) -> None:
    """Each rank adds to what the other one's stream has written before, without the host ever looking at it."""
    rounds = 50

    def body(transport: Transport, exchange: ThreadExchange) -> list[int]:
        buffer = transport.allocate(8 * (rounds + 1), "data")
        local, peer = buffer.local.view(torch.int64), buffer.peer(1 - exchange.rank).view(torch.int64)
        meet(transport, exchange)
        for i in range(rounds):
            if exchange.rank == i % 2:
                transport.engine.run(lambda i=i: torch.add(local[i : i + 1], 1, out=peer[i + 1 : i + 2]))  # type: ignore[misc]
                transport.post(2)
                continue
            await_signal(transport, 1 - exchange.rank, 2, i // 2 + 1)
            transport.order_after([1 - exchange.rank], 2, i // 2 + 1)
        meet(transport, exchange)
        return local.tolist()

    first, second = on_transport(near, 2, body)
    assert [max(pair) for pair in zip(first, second, strict=True)] == list(range(rounds + 1))


def test_the_engine_copies_casts_adds_and_zeroes(near: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> list[list[float]]:
        engine, device = transport.engine, device_of(near)
        buffer = transport.allocate(64, "sums")
        sums = buffer.peer(1 - exchange.rank).view(torch.float32)
        addend = torch.tensor([0.5, 1.5, -2.5], dtype=torch.bfloat16, device=device)
        engine.copy([sums[1:4]], [addend])
        engine.add([sums[1:4]], [addend])
        engine.zero(sums[2:3])
        rows = torch.full((4,), -1.0, device=device)
        shards = [torch.tensor([1.0, 2.0], device=device), torch.tensor([3.0, 4.0], device=device)]
        engine.read_rows([rows], shards, exchange.rank, own_in_place=exchange.rank == 1)
        meet(transport, exchange)
        return [buffer.local.view(torch.float32)[:5].tolist(), rows.tolist()]

    first, second = on_transport(near, 2, body)
    assert first == [[0.0, 1.0, 0.0, -5.0, 0.0], [1.0, 2.0, 3.0, 4.0]]
    assert second == [[0.0, 1.0, 0.0, -5.0, 0.0], [1.0, 2.0, -1.0, -1.0]]


def test_the_engine_moves_parameters_of_their_own(near: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> list[list[float]]:
        engine, device, me = transport.engine, device_of(near), exchange.rank
        buffer = transport.allocate(64, "slots")
        shards = [torch.tensor([1.0, 2.0, 3.0], device=device) + 10 * owner for owner in range(2)]
        outs = [torch.full((2 * numel,), -1.0, device=device) for numel in (1, 2)]
        engine.read_rows(outs, shards, me)
        grads = [torch.tensor([1.0, 2.0], device=device), torch.tensor([3.0, 4.0, 5.0], device=device)]
        parts = [Part(grads[0], 32 * me, 1), Part(grads[1], 32 * me + 8, 2)]
        engine.write_rows([buffer.peer(owner) for owner in range(2)], parts, me)
        meet(transport, exchange)
        return [*(out.tolist() for out in outs), buffer.local.view(torch.float32)[:12].tolist()]

    first, second = on_transport(near, 2, body)
    assert first[:2] == second[:2] == [[1.0, 11.0], [2.0, 3.0, 12.0, 13.0]]
    assert first[2] == [1.0, 0.0, 3.0, 4.0, *[0.0] * 4, 1.0, 0.0, 3.0, 4.0]
    assert second[2] == [2.0, 0.0, 5.0, 0.0, *[0.0] * 4, 2.0, 0.0, 5.0, 0.0]


def test_a_signal_for_one_rank_is_counted_there(name: str) -> None:
    """The other ranks of its host may see it too."""

    def body(transport: Transport, exchange: ThreadExchange) -> int:
        word = transport.peers.sleep_word(2)
        ticket = word.ticket
        exchange.all_gather(b"")
        if exchange.rank == 2:
            transport.post(6, to=1)
        if exchange.rank == 1:
            await_signal(transport, 2, 6, 1)
            assert word.ticket != ticket
        exchange.all_gather(b"")
        return transport.count(2, 6)

    assert on_transport(name, 3, body)[1] == 1


def test_daemons_are_woken_by_what_is_announced_and_see_it_arrive(name: str) -> None:
    """Rank 2 writes to everybody and announces it, three times; the others acknowledge each to it alone."""
    rounds = 3

    def body(transport: Transport, exchange: ThreadExchange) -> list[int]:
        buffer, device = transport.allocate(8, "announced"), device_of(name)
        own = torch.zeros(rounds, dtype=torch.int64, device=device)
        meet(transport, exchange)
        for number in range(1, rounds + 1):
            if exchange.rank == 2:
                value = torch.zeros(1, dtype=torch.int64, device=device)
                transport.engine.run(lambda value=value, number=number: value.fill_(number))  # type: ignore[misc]
                for rank in (0, 1):
                    transport.write(buffer, rank, 0, [value])
                transport.post(4, daemon=True)
                eventually(lambda: all_are_told(transport))
                for rank in (0, 1):
                    eventually(lambda rank=rank, number=number: transport.has_arrived(rank, 5, number))  # type: ignore[misc]
                continue
            while not transport.has_arrived(2, 4, number):
                word = transport.peers.sleep_word(None)
                ticket = word.ticket
                if transport.count(2, 4) < number:
                    word.sleep(ticket, 20.0)
            transport.engine.copy([own[number - 1 : number]], [buffer.local.view(torch.int64)])
            transport.acknowledge([(5, 2)])
            eventually(lambda: all_are_told(transport))
        meet(transport, exchange)
        return own.tolist()

    first, second, _ = on_transport(name, 3, body)
    assert first == second == [1, 2, 3]


def test_sleep_returns_at_a_signal_and_not_much_before(name: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> tuple[float, float]:
        if exchange.rank == 1:
            exchange.all_gather(b"")
            time.sleep(0.3)
            transport.post(0)
            return 0.0, 0.0
        word = transport.peers.sleep_word(1)
        word.sleep(word.ticket, 0.0)  # nothing has come: returns at once
        start = time.monotonic()
        exchange.all_gather(b"")
        while not transport.count(1, 0):
            ticket = word.ticket
            if not transport.count(1, 0):
                word.sleep(ticket, 25.0)
        woken = time.monotonic() - start
        timed_out = 0.0
        for _ in range(3):  # it may be woken for other news
            start = time.monotonic()
            word.sleep(word.ticket, 0.2)
            timed_out = max(timed_out, time.monotonic() - start)
        return woken, timed_out

    woken, timed_out = on_transport(name, 2, body)[0]
    assert 0.2 < woken < 15.0
    assert timed_out > 0.1


def test_sleep_with_a_ticket_from_before_a_signal_returns_at_once(near: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> float:
        word = transport.peers.sleep_word(1 - exchange.rank)
        ticket = word.ticket
        exchange.all_gather(b"")
        transport.post(0)
        exchange.all_gather(b"")
        start = time.monotonic()
        word.sleep(ticket, 30.0)
        return time.monotonic() - start

    assert max(on_transport(near, 2, body)) < 15.0


def test_locks_exclude(near: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> int:
        buffer = transport.allocate_host(8, "counter")
        counter, block = buffer.peer(0).view(torch.int64), transport.peers.blocks[0]
        for _ in range(100):
            while not block.lock(1, exchange.rank, 1.0):
                continue
            value = int(counter[0])
            time.sleep(0)
            counter[0] = value + 1
            block.unlock(1)
        exchange.all_gather(b"")
        return int(counter[0])

    assert on_transport(near, 3, body) == [300] * 3


def test_a_held_lock_times_out_and_other_locks_are_free(near: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> None:
        block = transport.peers.blocks[0]
        if exchange.rank == 0:
            assert block.try_lock(0, 0)
        exchange.all_gather(b"")
        if exchange.rank == 1:
            assert block.holder(0) == 0
            assert not block.try_lock(0, 1)
            assert not block.lock(0, 1, 0.05)
            assert block.lock(1, 1, 0.05)
            assert block.holder(1) == 1
            block.unlock(1)
            assert block.holder(1) is None
        exchange.all_gather(b"")
        if exchange.rank == 0:
            block.unlock(0)

    on_transport(near, 2, body)


def test_progress_and_waiting_are_visible(name: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> None:
        peers = transport.peers
        before = peers.by_rank[1].heartbeats.progress
        exchange.all_gather(b"")
        if exchange.rank == 1:
            peers.tick()
        for awaited in (0, IN_COLLECTIVE):
            if exchange.rank == 1:
                peers.set_waiting_on(awaited)
            eventually(lambda: peers.by_rank[1].waiting_on == awaited)  # noqa: B023  # called at once
            exchange.all_gather(b"")
        eventually(lambda: peers.by_rank[1].heartbeats.progress == before + 1)
        assert peers.by_rank[0].waiting_on is None

    on_transport(name, 2, body)


def test_the_first_abort_notice_stays(name: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> str | None:
        assert transport.peers.abort_notice() is None
        exchange.all_gather(b"")
        if exchange.rank == 2:
            transport.peers.abort("rank 2: ValueError: é" + "x" * 20000)
            transport.peers.abort("rank 2: a later thought")
        exchange.all_gather(b"")
        if exchange.rank != 2:
            eventually(lambda: transport.peers.abort_notice() is not None)
        return transport.peers.abort_notice()

    first, second, own = on_transport(name, 3, body)
    assert first == second
    assert first is not None
    assert first.startswith("rank 2: ValueError: é")
    assert own is None


def test_what_a_rank_has_refused_is_shown_until_it_has_gone_on(name: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> None:
        other = 1 - exchange.rank
        assert transport.peers.by_rank[other].refusal == ""
        exchange.all_gather(b"")
        for text in ("é" + "x" * 1000, "x" * 20_000, "short", "", "to stay"):
            if exchange.rank == 1:
                transport.peers.set_refusal(text)
            else:
                eventually(lambda told=text: transport.peers.by_rank[1].refusal[:1000] == told[:1000])
            exchange.all_gather(b"")
        assert transport.peers.by_rank[other].state is PeerState.ALIVE
        assert transport.peers.abort_notice() is None
        exchange.all_gather(b"")
        if exchange.rank == 1:
            transport.close()
        else:
            eventually(lambda: transport.peers.by_rank[1].state is PeerState.CLOSED)
            assert transport.peers.by_rank[1].refusal == "to stay"

    on_transport(name, 2, body)


def test_a_closed_peer_is_told_from_a_living_one(name: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> None:
        assert transport.peers.by_rank[1].state is PeerState.ALIVE
        exchange.all_gather(b"")
        if exchange.rank == 1:
            transport.close()
            transport.close()
        exchange.all_gather(b"")
        if exchange.rank == 0:
            eventually(lambda: transport.peers.by_rank[1].state is PeerState.CLOSED)

    on_transport(name, 2, body)


def test_nothing_stays_open_after_close(name: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        on_transport(name, 3, lambda transport, exchange: transport.seal())
    assert len(os.listdir("/proc/self/fd")) <= before


def open_files() -> list[str]:
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
    return targets


def fork_after_set_up(rank: int, world_size: int, name: str) -> bool:
    """Rank 0 forks a child that drops all it inherited; whether that left this rank's memory as it was."""
    with registered_fakes():
        return _fork_after_set_up(rank, name)


def _fork_after_set_up(rank: int, name: str) -> bool:
    exchange = ProcessGroupExchange()
    topology = Topology.discover(exchange)
    transport = registry.choose(name, topology, device_of(name), exchange)(exchange, topology, 30.0, device_of(name))
    try:
        transport.open(num_signals=8, num_locks=2)
        buffer = transport.allocate(1 << 20, "forked")
        exchange.all_gather(b"")
        if rank == 0:
            child = os.fork()
            if child == 0:
                transport.close()
                buffer.release()  # drops the mapping's last reference
                os._exit(3 if any("memfd:odc-forked" in target for target in open_files()) else 0)
            assert os.waitpid(child, 0)[1] == 0
        exchange.all_gather(b"")
        return bool(buffer.local.eq(0).all())
    finally:
        transport.close()


def test_a_forked_child_neither_keeps_nor_unmaps_nor_closes(near: str) -> None:
    """A DataLoader worker forked after set-up: it may drop the objects, its parent must not notice.

    In processes of its own: a fork frees what other threads kept, and in this one the main thread may keep a gloo group
    of an earlier test, whose end waits for a thread that the child has not got.
    """
    assert run_ranks(2, fork_after_set_up, near, timeout_s=180) == [True, True]


def test_an_unknown_transport_is_named_with_the_known_ones() -> None:
    topology = Topology(0, ("h",), ("h",), (1,))
    with pytest.raises(ConfigError, match="transport='pigeon' is unknown: expected auto, one of shm"):
        registry.choose("pigeon", topology, torch.device("cpu"))


class ForeignTransport(ShmTransport):
    """Of another package, as its users name it."""


FOREIGN = f"{__name__}:ForeignTransport"


def test_a_transport_of_another_package_is_named_by_its_place() -> None:
    def chosen(exchange: ThreadExchange) -> type[Transport]:
        return registry.choose(FOREIGN, Topology.discover(exchange), torch.device("cpu"), exchange)

    assert values(run_threads(2, chosen)) == [ForeignTransport] * 2


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (
            "nowhere.at_all:Pigeon",
            "cannot be loaded: No module named 'nowhere'. Expected a class",
        ),
        (f"{__name__}:Pigeon", "cannot be loaded: module .* has no attribute 'Pigeon'"),
        (
            "odc.units:UnitSpec",
            "expected a subclass of odc.*Transport, got <class 'odc.units.UnitSpec'>",
        ),
    ],
)
def test_where_one_rank_cannot_load_a_transport_all_ranks_hear_why(place: str, reason: str) -> None:
    """The other rank asks for one that it has: without an answer it would wait."""

    def chosen(exchange: ThreadExchange) -> None:
        name = place if exchange.rank == 1 else FOREIGN
        with pytest.raises(SetupError, match=f"on rank 1: transport='{place}'.*{reason}"):
            registry.choose(name, Topology.discover(exchange), torch.device("cpu"), exchange)

    values(run_threads(2, chosen))
