"""Ranks as threads of one process: the real shm transport and protocol, without process start-up.

Everything except death works as between processes: descriptors pass over sockets, locks and semaphores lie in shared
memory. The rendezvous over a process group is replaced by :class:`ThreadExchange`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class _Board:
    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.slots: list[bytes] = [b""] * world_size
        self.barrier = threading.Barrier(world_size, timeout=timeout_s)


class ThreadExchange:
    """An :class:`odc.exchange.Exchange` between threads."""

    def __init__(self, board: _Board, rank: int) -> None:
        self._board = board
        self.rank = rank
        self.world_size = len(board.slots)

    def all_gather(self, payload: bytes) -> list[bytes]:
        self._board.slots[self.rank] = payload
        self._board.barrier.wait()
        rows = list(self._board.slots)
        self._board.barrier.wait()
        return rows

    def break_off(self) -> None:
        self._board.barrier.abort()


def run_threads(
    world_size: int, body: Callable[[ThreadExchange], T], timeout_s: float = 30.0
) -> list[T | BaseException]:
    """Run ``body(exchange)`` on every rank; the results, or the exceptions, in rank order."""
    board = _Board(world_size, timeout_s)
    results: list[Any] = [TimeoutError(f"rank did not end within {timeout_s} s")] * world_size

    def run(rank: int) -> None:
        exchange = ThreadExchange(board, rank)
        try:
            results[rank] = body(exchange)
        except BaseException as error:
            results[rank] = error
            exchange.break_off()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    return results


def values(results: list[T | BaseException]) -> list[T]:
    """The results if no rank failed; otherwise the first failure that is not a mere consequence is raised."""
    failures = [r for r in results if isinstance(r, BaseException)]
    for failure in failures:
        if not isinstance(failure, threading.BrokenBarrierError):
            raise failure
    if failures:
        raise failures[0]
    return [r for r in results if not isinstance(r, BaseException)]
