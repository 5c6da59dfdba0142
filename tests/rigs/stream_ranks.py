"""Ranks of a stream as threads of one process: the loader as it is, its exchange over a board instead of gloo."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import pytest
from thread_ranks import run_threads, values

from odc.balance import StreamLoader
from odc.balance.checks import FloatArray

T = TypeVar("T")


class BoardExchange:
    """In place of :class:`odc.balance.data.exchange.VectorExchange`: ranks as threads, each late at random."""

    def __init__(self, exchange: Any, delay_s: float) -> None:
        self._exchange = exchange
        self._delay_s = delay_s
        self._random = random.Random(exchange.rank)
        self.rank: int = exchange.rank
        self.number = 1
        self._iteration = 0
        self.sizes: list[int] = []
        """Numbers in each vector so far: every rank must have sent the same."""

    has_failed = False

    def begin(self, identity: Mapping[str, int | str], position: Mapping[str, int]) -> int:
        mine = repr((identity, position)).encode()
        assert self._exchange.all_gather(mine) == [mine] * self._exchange.world_size
        self._iteration += 1
        return self._iteration

    def gather(self, vector: FloatArray) -> FloatArray:
        time.sleep(self._delay_s * self._random.random())
        self.sizes.append(vector.size)
        rows = self._exchange.all_gather(vector.astype(np.float64).tobytes())
        return np.array([np.frombuffer(row) for row in rows])

    def tell_left(self, iteration: int, num_done: int) -> None: ...

    def tell_failure(self, error: BaseException) -> None:
        self._exchange.break_off()

    def close(self) -> None: ...


def run_streams(
    world_size: int,
    make: Callable[[int], StreamLoader[Any, Any]],
    use: Callable[[StreamLoader[Any, Any]], T],
    delay_s: float = 0.0,
) -> list[T]:
    """``use(make(rank))`` on every rank; the results. Fails if ranks have exchanged different numbers of vectors."""
    exchanges: list[BoardExchange] = []
    lock = threading.Lock()

    def body(board: Any) -> T:
        exchange = BoardExchange(board, delay_s)
        with lock:
            exchanges.append(exchange)
        loader = make(board.rank)
        with pytest.MonkeyPatch.context() as patch:
            if world_size > 1 and loader.alignment.name != "none":
                patch.setattr(loader, "_own_exchange", lambda: exchange)
            return use(loader)

    found = values(run_threads(world_size, body, 60.0))
    assert len({tuple(exchange.sizes) for exchange in exchanges}) == 1
    return found
