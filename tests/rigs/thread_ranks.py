"""Ranks as threads of one process: the real shm transport and protocol, without process start-up.

Everything except death works as between processes: descriptors pass over sockets, locks and semaphores lie in shared
memory. The rendezvous over a process group is replaced by :class:`ThreadExchange`.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from odc import AbortedError, ParamSlice, Runtime, RuntimeConfig, UnitSpec

T = TypeVar("T")


class _Board:
    """Payloads by round; a round is complete when every rank has written it."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.rounds: dict[int, dict[int, bytes]] = {}
        self.changed = threading.Condition()
        self.broken = False


class ThreadExchange:
    """An :class:`odc.setup.agreement.Exchange` between threads."""

    def __init__(self, board: _Board, rank: int) -> None:
        self._board = board
        self._round = 0
        self.rank = rank
        self.world_size = board.world_size
        self.global_ranks = range(board.world_size)

    def all_gather(self, payload: bytes, check: Callable[[], None] = lambda: None) -> list[bytes]:
        self._round += 1
        board = self._board
        with board.changed:
            row = board.rounds.setdefault(self._round, {})
            row[self.rank] = payload
            board.changed.notify_all()
            deadline = time.monotonic() + board.timeout_s
            while len(row) < self.world_size and not board.broken and time.monotonic() < deadline:
                check()
                board.changed.wait(0.05)
            if len(row) < self.world_size:
                raise threading.BrokenBarrierError
            return [row[rank] for rank in range(self.world_size)]

    def break_off(self) -> None:
        with self._board.changed:
            self._board.broken = True
            self._board.changed.notify_all()


def run_threads(
    world_size: int, body: Callable[[ThreadExchange], T], timeout_s: float = 120.0
) -> list[T | BaseException]:
    """Run ``body(exchange)`` on every rank; the results, or the exceptions, in rank order."""
    board = _Board(world_size, timeout_s)
    results: list[Any] = [None] * world_size
    has_ended = [False] * world_size

    def run(rank: int) -> None:
        exchange = ThreadExchange(board, rank)
        try:
            results[rank] = body(exchange)
        except BaseException as error:
            results[rank] = error
            exchange.break_off()
        has_ended[rank] = True

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        thread.join(timeout_s)
        frame = sys._current_frames().get(thread.ident or 0)
        if not has_ended[rank]:
            place = "".join(traceback.format_stack(frame)) if frame is not None else ""
            results[rank] = TimeoutError(f"rank {rank} did not end within {timeout_s} s:\n{place}")
    return results


def values(results: list[T | BaseException]) -> list[T]:
    """The results if no rank failed; otherwise the first failure that is not a mere consequence is raised."""
    failures = [r for r in results if isinstance(r, BaseException)]
    for failure in failures:
        if not isinstance(failure, (threading.BrokenBarrierError, AbortedError)):
            raise failure
    if failures:
        raise failures[0]
    return [r for r in results if not isinstance(r, BaseException)]


ONE_UNIT = [UnitSpec("u", 4, torch.float32, (ParamSlice("w", 4),))]


def of_one_unit(exchange: ThreadExchange, numel: int = 4, *, timeout_s: float = 10, **options: Any) -> Runtime:
    """Of one parameter."""
    unit = UnitSpec("u", numel, torch.float32, (ParamSlice("w", numel),))
    return Runtime.create(exchange, [unit], RuntimeConfig(timeout_s=timeout_s, **options))


def create(exchange: ThreadExchange, units: Sequence[UnitSpec], *, hosts: int = 1, **options: Any) -> Runtime:
    """Ranks pose as those of so many hosts."""
    host_id = f"host{exchange.rank * hosts // exchange.world_size}" if hosts > 1 else ""
    return Runtime.create(exchange, units, RuntimeConfig(timeout_s=20, host_id=host_id, **options))


def run_runtimes(
    world_size: int,
    units: Sequence[UnitSpec],
    body: Callable[[Runtime, ThreadExchange], T],
    **options: Any,
) -> list[T]:
    """What ``body`` returns on each rank, with a runtime of :func:`create` that is closed behind it. The first failure
    is raised."""

    def run(exchange: ThreadExchange) -> T:
        with create(exchange, units, **options) as runtime:
            return body(runtime, exchange)

    return values(run_threads(world_size, run))


def sum_of(runtime: Runtime, unit: int = 0) -> torch.Tensor:
    """To which some rank has pushed in the minibatch that has ended."""
    found = runtime.gradient(unit)
    assert found is not None
    return found[0]


def publish_all(runtime: Runtime) -> None:
    """Each unit is filled with the number of the coming minibatch."""
    for unit in range(len(runtime.units)):
        runtime.publish(unit, lambda out: out.fill_(runtime.minibatch + 1.0))


def begin(runtime: Runtime) -> None:
    """A minibatch, with such parameters."""
    publish_all(runtime)
    runtime.begin()
