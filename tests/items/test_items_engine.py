"""Layer 2: ranks as threads. Items over the real CudaEngine, on the streams of ``host_cuda.py``.

The transport, the exchange of items and the engine are the real ones. Memory that is given back becomes NaN in the
order of its stream, so a copy from memory that nobody holds any more is seen, too. ``test_items_streams.py`` shows that
each order is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_cuda import HostCuda, interpreted_engine
from test_cuda_engine_ranks import HostCudaTransport, Violation
from thread_ranks import ThreadExchange, run_threads, values

from odc import ItemExchange, RuntimeConfig
from odc.transports import registry

ROWS, COLUMNS = 3, 4
NUM_ROUNDS = 4


@pytest.fixture(scope="module")
def k() -> Iterator[SimpleNamespace]:
    with pytest.MonkeyPatch.context() as patch, interpreted_engine() as modules:
        patch.setitem(registry._LOCATIONS, "host_cuda", "test_cuda_engine_ranks:HostCudaTransport")
        yield modules


def value(number: int, producer: int, item: int) -> float:
    return float(100 * number + 10 * producer + item)


class RankRun:
    """One rank's part: two items for the next rank, one for itself, from two streams, read on a third, done on a
    fourth."""

    def __init__(self, exchange: ThreadExchange) -> None:
        self.exchange, self.rank, self.world_size = exchange, exchange.rank, exchange.world_size
        self.cuda = HostCudaTransport.cuda
        self.cuda.set_device(self.rank)
        self.device = torch.device("cuda", self.rank)
        config = RuntimeConfig(transport="host_cuda", timeout_s=15)
        # The third round needs more than there is at first.
        self.items = ItemExchange.create(exchange, ["c"], config, capacity_bytes=256)
        names = ("encode", "encode too", "read", "step")
        self.streams = {name: self.cuda.new_stream(self.rank, name) for name in names}
        self.seen: list[tuple[str, torch.Tensor, float]] = []

    def routes(self, number: int) -> list[Any]:
        size = self.numel(number) * 4
        ranks = range(self.world_size)
        return [
            [[(3 * r, size, (r + 1) % self.world_size)], [(3 * r + 1, size, r), (3 * r + 2, size, (r + 1) % 2)]]
            for r in ranks
        ]

    @staticmethod
    def numel(number: int) -> int:
        return ROWS * COLUMNS * (1 if number < 3 else 8)

    def run(self) -> int:
        """Checks made."""
        with self.items:
            with self.cuda.here():
                for number in range(1, NUM_ROUNDS + 1):
                    self.round(number)
            assert self.items._transport.engine.synchronize(20)
            self.exchange.all_gather(b"")
        for what, found, wanted in self.seen:
            if not found.eq(wanted).all():
                raise Violation(f"rank {self.rank}: {what}: {found.tolist()}, expected {wanted}")
        if self.cuda.errors:
            raise Violation(f"rank {self.rank}: {self.cuda.errors[0]!r}")
        return len(self.seen)

    def round(self, number: int) -> None:
        one = self.items.begin("c", self.routes(number))
        for part, name in enumerate(("encode", "encode too")):
            with self.cuda.stream(self.streams[name]):
                items = [0] if part == 0 else [1, 2]
                one.publish(part, [self.encoded(number, item) for item in items])  # which nobody holds any more
        with self.cuda.stream(self.streams["read"]):
            before = (self.rank - 1) % self.world_size
            for producer, item in ((before, 2), (self.rank, 1), (before, 0)):
                out = torch.full((self.numel(number),), -1.0, device=self.device)
                one.read(3 * producer + item, out)
                what = f"item {item} of rank {producer} in round {number}"
                self.seen.append((what, out.clone(), value(number, producer, item)))
        with self.cuda.stream(self.streams["step"]):
            one.done()

    def encoded(self, number: int, item: int) -> torch.Tensor:
        """Item 2 is not contiguous."""
        tensor = torch.full((ROWS, self.numel(number) // ROWS), value(number, self.rank, item), device=self.device)
        return tensor.t() if item == 2 else tensor


def run_case(k: SimpleNamespace, slow: str | None) -> None:
    cuda = HostCuda()
    HostCudaTransport.cuda, HostCudaTransport.engine_class = cuda, k.engine.CudaEngine
    with ExitStack() as stack:
        stack.enter_context(cuda.installed(k))
        stack.enter_context(cuda.running(0, slow))
        checks = values(run_threads(2, lambda exchange: RankRun(exchange).run(), 60))
    assert checks == [3 * NUM_ROUNDS] * 2


@pytest.mark.parametrize("slow", [None, "encode", "read"])
def test_items_on_streams_of_the_engine(k: SimpleNamespace, slow: str | None) -> None:
    run_case(k, slow)
