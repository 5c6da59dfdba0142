"""An NVSHMEM heap without NVSHMEM: what the ``nvshmem`` transport asks of it, on the host memory of
``bench/fake/cuda.py``, for tests alone. They find all fakes by name inside :func:`registered_fakes`.

Ranks pose as hosts. The heap reaches all of them behind the transport's back; the transport itself is given addresses
of its own host's ranks only, and has to get, put and signal for the others. What this cannot show: that NVSHMEM, its
kernels and a network do what their documentation says.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

import torch

from odc.bench.fake.cuda import FAKES, FakeCuda, FakeEngine, end_of_fake
from odc.cuda.nvshmem import NvshmemHeap, heap_problem
from odc.errors import SetupError
from odc.setup.agreement import Exchange, gather_json, raise_together
from odc.setup.topology import Topology
from odc.transports import _memfd, registry
from odc.transports.base import not_on_this_kernel
from odc.transports.nvshmem import NvshmemTransport


class FakeHeap(NvshmemHeap):
    """On memory of the host."""

    def __init__(self, fake: FakeCuda, heap_bytes: int | None) -> None:
        self._fake = fake
        self._heap_bytes = heap_bytes
        self._exchange: Exchange | None = None
        self._rank = 0
        self._memory: list[tuple[int, int, list[torch.Tensor]]] = []  # own address, bytes, every rank's copy
        self.moved: list[tuple[str, int, int]] = []  # (get or put, rank, bytes)
        self.gets: list[list[int]] = []  # ranks of each call
        self._groups: list[list[int]] = []

    def start(self, exchange: Exchange, needed_bytes: int) -> None:
        problem = heap_problem(needed_bytes, self._heap_bytes)
        raise_together(exchange, SetupError(problem) if problem else None)
        self._exchange, self._rank = exchange, exchange.rank

    def malloc(self, num_bytes: int) -> int:
        assert self._exchange is not None
        fd = _memfd.create(num_bytes, "fake-heap")
        rows = gather_json(self._exchange, [os.getpid(), fd, num_bytes])
        assert len({row[2] for row in rows}) == 1, "not symmetric"
        copies = [self._map(int(pid), int(number), num_bytes) for pid, number, _ in rows]
        self._exchange.all_gather(b"")  # everybody has mapped it
        os.close(fd)
        self._memory.append((copies[self._rank].data_ptr(), num_bytes, copies))
        return copies[self._rank].data_ptr()

    @staticmethod
    def _map(pid: int, number: int, num_bytes: int) -> torch.Tensor:
        opened = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return _memfd.map_bytes(opened, num_bytes)
        finally:
            os.close(opened)

    def _at(self, address: int, rank: int, num_bytes: int) -> torch.Tensor:
        """``rank``'s copy of what lies at ``address`` here; all of it must be in the heap."""
        for start, size, copies in self._memory:
            if start <= address and address + num_bytes <= start + size:
                return copies[rank][address - start : address - start + num_bytes]
        raise AssertionError(f"{num_bytes} bytes at {address:#x} do not lie in the heap")

    def announce(self, ranks: Sequence[int]) -> None:
        self._groups.append(list(ranks))

    def address_at(self, address: int, rank: int) -> int | None:
        return self._at(address, rank, 1).data_ptr()

    def _require_own(self, tensor: torch.Tensor) -> None:
        self._at(tensor.data_ptr(), self._rank, tensor.numel())

    def get(self, out: torch.Tensor, own: torch.Tensor, ranks: Sequence[int]) -> None:
        assert list(ranks) in self._groups, f"{ranks} were not announced"
        self._require_own(out)
        size = own.numel()
        assert out.numel() == size * len(ranks)
        sources = [self._at(own.data_ptr(), rank, size) for rank in ranks]
        self.gets.append(list(ranks))
        self.moved += [("get", rank, size) for rank in ranks]
        self._fake.engine().run(lambda: out.copy_(torch.cat(sources)))

    def put(self, source: torch.Tensor, own: torch.Tensor, rank: int) -> None:
        self._require_own(source)
        assert own.numel() == source.numel()
        target = self._at(own.data_ptr(), rank, source.numel())
        self.moved.append(("put", rank, source.numel()))
        self._fake.engine().run(lambda: target.copy_(source))

    def signal(self, address: int, rank: int) -> None:
        word = self._at(address, rank, 8).view(torch.int64)
        self._fake.engine().run(lambda: word.add_(1))

    def wait(self, address: int, value: int) -> None:
        self._fake.waits += 1
        has_come = partial(self._has_come, ctypes.c_int64.from_address(address), value)
        self._fake.engine().await_condition(has_come, f"{value} in the word at {address:#x}")

    @staticmethod
    def _has_come(word: ctypes.c_int64, value: int) -> bool:
        if word.value >= value:
            return True
        time.sleep(20e-6)
        return False


class FakeNvshmemTransport(NvshmemTransport):
    """``nvshmem`` on CPU tensors. Streams do their work within the call."""

    name: ClassVar[str] = "fake_nvshmem"
    delay_s: ClassVar[float | None] = None
    heap_bytes: ClassVar[int | None] = None
    num_queues: ClassVar[int | None] = None
    staging_bytes: ClassVar[int] = 200  # small, so that transfers take several turns

    @classmethod
    def unavailable(cls, topology: Topology, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it poses as GPUs on CPU tensors, not {device.type}"
        return not_on_this_kernel()

    def _make_runtime(self) -> FakeCuda:
        self.fake = FakeCuda(FakeEngine(type(self).delay_s, self._rank + 1, type(self).num_queues))
        return self.fake

    def _make_heap(self) -> NvshmemHeap:
        self.heap = FakeHeap(self.fake, type(self).heap_bytes)
        return self.heap

    def _release_all(self) -> None:
        super()._release_all()
        end_of_fake(self)


class AsynchronousFakeNvshmemTransport(FakeNvshmemTransport):
    """With streams that lag behind the host."""

    name: ClassVar[str] = "fake_nvshmem_streams"
    delay_s: ClassVar[float | None] = 2e-4


@contextmanager
def registered_fakes() -> Iterator[None]:
    """The fake transports by name, until the end of the block; never part of "auto"."""
    before = dict(registry._LOCATIONS)
    registry._LOCATIONS.update(FAKES)
    registry._LOCATIONS["fake_nvshmem"] = f"{__name__}:FakeNvshmemTransport"
    registry._LOCATIONS["fake_nvshmem_streams"] = f"{__name__}:AsynchronousFakeNvshmemTransport"
    try:
        yield
    finally:
        registry._LOCATIONS.clear()
        registry._LOCATIONS.update(before)
