"""Layer 2: ranks as threads. Pushes to a daemon that looks for arrivals, where these could be told wrongly.

The streams are those of ``bench/fake/cuda.py``; the transport, the protocol and the daemon are the real ones. Each test
is of one way in which a push could be taken for arrived, or a slot for free, before it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_nvshmem import AsynchronousFakeNvshmemTransport
from thread_ranks import ThreadExchange, of_one_unit, run_threads, sum_of, values

from odc import Runtime
from odc.bench.fake.cuda import FakeEngine
from odc.errors import AbortedError
from odc.transports.cuda_ipc import CudaIpcTransport

pytestmark = pytest.mark.usefixtures("fakes")

NUMEL = 20


def with_daemon(exchange: ThreadExchange, **options: Any) -> Runtime:
    chosen = {"transport": "fake_cuda_streams", "accumulate": "daemon", **options}
    return of_one_unit(exchange, NUMEL, timeout_s=15, **chosen)


def run_two(hosts: int, push: Callable[[Runtime, FakeEngine, ThreadExchange], object]) -> None:
    """One minibatch of two ranks, in which one of them pushes 1, 10, 100, 1000. Both sums must be 1111."""
    assert AsynchronousFakeNvshmemTransport.staging_bytes // 2 >= 4 * NUMEL  # a push takes one half, not both

    def body(exchange: ThreadExchange) -> list[float]:
        far = {"transport": "fake_nvshmem_streams", "host_id": f"host{exchange.rank}"}
        with with_daemon(exchange, **(far if hosts > 1 else {})) as runtime:
            engine = runtime._transport.engine
            assert isinstance(engine, FakeEngine)
            runtime.publish(0, lambda shard: shard.zero_())
            runtime.begin()
            exchange.all_gather(b"")
            push(runtime, engine, exchange)
            runtime.finish()
            found = sum_of(runtime)
            assert engine.synchronize(15)
            return sorted(set(found.tolist()))

    assert values(run_threads(2, body)) == [[1111.0]] * 2


@pytest.mark.parametrize("hosts", [1, 2])
def test_pushes_of_several_streams_arrive_in_the_order_of_their_numbers(hosts: int) -> None:
    """FSDP has a stream for each root. The word that says that a push has arrived says so of all before it, so a stream
    that is late must not be overtaken by another one."""

    def push(runtime: Runtime, engine: FakeEngine, exchange: ThreadExchange) -> None:
        for number in range(4) if exchange.rank == 0 else ():
            grads = torch.zeros(2 * NUMEL)
            with engine.on(f"push {number}"):
                engine.run(lambda number=number: time.sleep(0.05 * (4 - number)))  # type: ignore[misc]
                engine.run(lambda grads=grads, number=number: grads.fill_(10.0**number))  # type: ignore[misc]
                runtime.scatter_accumulate(0, grads)

    run_two(hosts, push)


def test_without_memory_to_keep_a_push_in_it_waits_for_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(*_: Any) -> torch.Tensor:
        asked.append(1)
        raise torch.OutOfMemoryError("none left")

    def push(runtime: Runtime, engine: FakeEngine, exchange: ThreadExchange) -> None:
        if exchange.rank == 1:
            with engine.background():
                engine.run(lambda: time.sleep(0.3))  # the owner does not come to adding
        exchange.all_gather(b"")
        for number in range(4) if exchange.rank == 0 else ():
            runtime.scatter_accumulate(0, torch.full((2 * NUMEL,), 10.0**number))

    monkeypatch.setattr("odc.limits.DAEMON_PATIENCE_S", 0.01)
    monkeypatch.setattr("odc.minibatch.daemon.torch.empty_like", refuse)
    run_two(1, push)
    assert asked


def test_words_that_were_set_free_are_no_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watchdog tells of the failure, and then sets the words free: for who looks for arrivals all are there."""
    original = CudaIpcTransport.has_arrived

    def body(exchange: ThreadExchange) -> None:
        with with_daemon(exchange) as runtime:
            transport, looks = runtime._transport, list[int]()

            def has_arrived(self: CudaIpcTransport, rank: int, index: int, count: int) -> bool:
                if self is transport and threading.current_thread() is thread and runtime.minibatch == 1:
                    looks.append(1)
                    if len(looks) == 3:  # the first two were in vain
                        self.peers.own.leave_abort("rank 0: lost")
                        self.release_streams()
                        time.sleep(0.1)  # in which the thread adds what seems to be there
                return original(self, rank, index, count)

            thread = threading.current_thread()
            runtime.publish(0, lambda shard: shard.zero_())
            runtime.begin()
            if exchange.rank == 1:
                monkeypatch.setattr(CudaIpcTransport, "has_arrived", has_arrived)
            exchange.all_gather(b"")
            if exchange.rank == 0:
                engine = runtime._transport.engine
                engine.run(lambda: time.sleep(0.5))
                runtime.scatter_accumulate(0, torch.ones(2 * NUMEL))
            runtime.finish()

    results = run_threads(2, body)
    assert isinstance(results[1], AbortedError), results


def test_however_many_ranks_set_words_free_they_hold_nobody_back() -> None:
    """All that are left do so after a death, and each of them again at its end."""

    def body(exchange: ThreadExchange) -> list[bool]:
        with with_daemon(exchange) as runtime:
            transport, reached = runtime._transport, list[bool]()
            for _ in range(2):
                runtime.publish(0, lambda shard: shard.zero_())
                runtime.begin()
                runtime.finish()
            assert transport.engine.synchronize(15)
            for rank in range(5):
                exchange.all_gather(b"")
                if rank == exchange.rank:
                    transport.release_streams()
                exchange.all_gather(b"")
                reached += [transport.has_arrived(other, 0, count) for other in range(5) for count in (1, 2, 3)]
            return reached

    assert values(run_threads(5, body)) == [[True] * 75] * 5
