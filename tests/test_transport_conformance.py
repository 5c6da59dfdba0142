"""Layer 2: ranks as threads. What every transport must do; a new transport adds its name to ``TRANSPORTS``."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from thread_ranks import ThreadExchange, run_threads, values

from odc.errors import ConfigError
from odc.topology import Topology
from odc.transports import registry
from odc.transports.base import LockOutcome, PeerState, Transport

TRANSPORTS = registry.names()
T = TypeVar("T")


def on_transport(
    name: str,
    world_size: int,
    body: Callable[[Transport, ThreadExchange], T],
    signals: int = 8,
    locks: int = 2,
) -> list[T]:
    def run(exchange: ThreadExchange) -> T:
        topology = Topology.discover(exchange)
        transport = registry.choose(name, topology, torch.device("cpu"))(exchange, topology, 10.0)
        try:
            transport.open(num_signals=signals, num_locks=locks)
            result = body(transport, exchange)
            exchange.all_gather(b"")
            return result
        finally:
            transport.close()

    return values(run_threads(world_size, run))


@pytest.fixture(params=TRANSPORTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_symmetric_memory_is_zeroed_and_addressed_by_rank(name: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> list[list[int]]:
        buffer = transport.allocate(64, "test")
        assert not buffer.local.any()
        exchange.all_gather(b"")
        for rank in range(3):
            buffer.peer(rank)[exchange.rank] = 10 * exchange.rank + rank + 1
        exchange.all_gather(b"")
        return [buffer.peer(rank)[:3].tolist() for rank in range(3)]

    for seen in on_transport(name, 3, body):
        assert seen == [[10 * writer + owner + 1 for writer in range(3)] for owner in range(3)]


def test_a_released_buffer_says_so(name: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> None:
        buffer = transport.allocate(8, "gone")
        buffer.release()
        with pytest.raises(ValueError, match="'gone' of rank"):
            _ = buffer.local

    on_transport(name, 2, body)


def test_signals_count_every_post_and_show_the_memory_before_them(name: str) -> None:
    rounds = 200

    def body(transport: Transport, exchange: ThreadExchange) -> int:
        buffer = transport.allocate(8 * rounds, "data")
        peer = 1 - exchange.rank
        mistakes = 0
        for i in range(rounds):
            buffer.peer(peer).view(torch.int64)[i] = i + 1
            transport.post(peer, 3)
            while transport.count(3) <= i:
                transport.block(1.0, [peer])
            mistakes += int(buffer.local.view(torch.int64)[i]) != i + 1
        return mistakes

    assert on_transport(name, 2, body) == [0, 0]


def test_block_returns_at_a_signal_and_not_much_before(name: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> tuple[float, float]:
        if exchange.rank == 1:
            exchange.all_gather(b"")
            time.sleep(0.3)
            transport.post(0, 0)
            return 0.0, 0.0
        transport.block(0.0, [1])  # nothing rings: returns at once
        start = time.monotonic()
        exchange.all_gather(b"")
        while not transport.count(0):
            transport.block(10.0, [1])
        woken = time.monotonic() - start
        transport.block(0.0, [1])  # the bell may ring on after the signal was counted
        start = time.monotonic()
        transport.block(0.2, [1])
        return woken, time.monotonic() - start

    woken, timed_out = on_transport(name, 2, body)[0]
    assert 0.2 < woken < 5.0
    assert timed_out > 0.1


def test_locks_exclude(name: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> int:
        buffer = transport.allocate(8, "counter")
        counter = buffer.peer(0).view(torch.int64)
        for _ in range(100):
            while transport.lock(0, 1, 1.0) is LockOutcome.TIMED_OUT:
                continue
            value = int(counter[0])
            time.sleep(0)
            counter[0] = value + 1
            transport.unlock(0, 1)
        exchange.all_gather(b"")
        return int(counter[0])

    assert on_transport(name, 3, body) == [300] * 3


def test_a_held_lock_times_out_and_other_locks_are_free(name: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> None:
        if exchange.rank == 0:
            assert transport.lock(0, 0, 1.0) is LockOutcome.ACQUIRED
        exchange.all_gather(b"")
        if exchange.rank == 1:
            assert transport.lock(0, 0, 0.05) is LockOutcome.TIMED_OUT
            assert transport.lock(0, 1, 0.05) is LockOutcome.ACQUIRED
            transport.unlock(0, 1)
        exchange.all_gather(b"")
        if exchange.rank == 0:
            transport.unlock(0, 0)

    on_transport(name, 2, body)


def test_a_lock_survives_its_holder(name: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> LockOutcome | None:
        if exchange.rank == 0:
            holder = threading.Thread(target=lambda: transport.lock(1, 0, 1.0))
            holder.start()
            holder.join()  # a robust mutex belongs to a thread: its end is the holder's death
        exchange.all_gather(b"")
        if exchange.rank == 0:
            return None
        outcome = transport.lock(1, 0, 1.0)
        transport.unlock(1, 0)
        assert transport.lock(1, 0, 1.0) is LockOutcome.ACQUIRED
        transport.unlock(1, 0)
        return outcome

    assert on_transport(name, 2, body)[1] is LockOutcome.RECOVERED


def test_progress_and_waiting_are_visible(name: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> None:
        before = transport.progress(1)
        exchange.all_gather(b"")
        if exchange.rank == 1:
            transport.tick()
            transport.set_waiting_on(0)
        exchange.all_gather(b"")
        assert transport.progress(1) == before + 1
        assert transport.waiting_on(1) == 0
        assert transport.waiting_on(0) is None

    on_transport(name, 2, body)


def test_the_first_abort_notice_stays(name: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> str | None:
        assert transport.abort_notice() is None
        exchange.all_gather(b"")
        if exchange.rank == 2:
            transport.abort_peers("rank 2: ValueError: é" + "x" * 20000)
            transport.abort_peers("rank 2: a later thought")
        exchange.all_gather(b"")
        return transport.abort_notice()

    first, second, own = on_transport(name, 3, body)
    assert first == second
    assert first is not None
    assert first.startswith("rank 2: ValueError: é")
    assert own is None


def test_a_closed_peer_is_told_from_a_living_one(name: str) -> None:
    def body(transport: Transport, exchange: ThreadExchange) -> None:
        assert transport.peer_state(1) is PeerState.ALIVE
        exchange.all_gather(b"")
        if exchange.rank == 1:
            transport.close()
            transport.close()
        exchange.all_gather(b"")
        if exchange.rank == 0:
            assert transport.peer_state(1) is PeerState.CLOSED

    on_transport(name, 2, body)


def test_nothing_stays_open_after_close(name: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        on_transport(name, 3, lambda transport, exchange: transport.seal())
    assert len(os.listdir("/proc/self/fd")) <= before


def open_files() -> list[str]:
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
    return targets


def test_a_forked_child_neither_keeps_nor_unmaps_nor_closes(name: str) -> None:
    """A DataLoader worker forked after set-up: it may drop the objects, its parent must not notice."""

    def body(transport: Transport, exchange: ThreadExchange) -> bool:
        buffer = transport.allocate(1 << 20, "forked")
        exchange.all_gather(b"")
        if exchange.rank == 0:
            child = os.fork()
            if child == 0:
                transport.close()
                buffer.release()  # drops the mapping's last reference
                os._exit(3 if any("memfd:odc-forked" in target for target in open_files()) else 0)
            assert os.waitpid(child, 0)[1] == 0
        exchange.all_gather(b"")
        return bool(buffer.local.eq(0).all())

    assert on_transport(name, 2, body) == [True, True]


def test_an_unknown_transport_is_named_with_the_known_ones() -> None:
    topology = Topology(0, ("h",), ("h",), (1,))
    with pytest.raises(ConfigError, match="transport='pigeon' is unknown: expected auto or one of shm"):
        registry.choose("pigeon", topology, torch.device("cpu"))
