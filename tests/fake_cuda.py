"""A CUDA runtime without a GPU: what the ``cuda_ipc`` transport asks of a device, on host memory.

Device memory is a memfd, an IPC handle names it by process and descriptor, and a stream is a thread that does what it
is given in order, later, and after random delays. Everything above :class:`odc.cuda.runtime.CudaRuntime` is the real
code: the transport, its set-up and its end, the order of streams, the protocol, the daemon. What this cannot show: that
CUDA, cupy and the kernels do what their documentation says; ``python -m odc.bench.gpu_check`` shows that.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import queue
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch

from odc.cuda.runtime import HANDLE_BYTES, CudaRuntime
from odc.engine import AfterChunk, Engine, no_op
from odc.errors import OdcError, SetupError
from odc.kernels import add_chunked, copy_chunked, zero_chunked
from odc.topology import Topology
from odc.transports import _memfd
from odc.transports.cuda_ipc import CudaIpcTransport

_HANDLE = struct.Struct("=8sQQQ")
_MAGIC = b"fakecuda"
_WAIT_LIMIT_S = 20.0
_ATOMIC = threading.Lock()  # of the ranks that are threads of one process


class FakeStream:
    """Work in order, in a thread of its own."""

    def __init__(self, delay_s: float, seed: int) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._delay_s = delay_s
        self._random = random.Random(seed)
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, name="fake-stream", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> None:
        self._queue.put(work)

    def event(self) -> threading.Event:
        """Set when the stream has done all it was given."""
        done = threading.Event()
        self.submit(done.set)
        return done

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if self._delay_s:
                time.sleep(self._random.random() * self._delay_s)
            try:
                work()
            except BaseException as error:  # the test looks at them
                self.errors.append(error)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


class FakeEngine(Engine):
    """Streams by name; a thread's current one is "main" unless it says otherwise."""

    has_streams = True

    def __init__(self, delay_s: float | None, seed: int) -> None:
        self._delay_s, self._seed = delay_s, seed
        self._streams: dict[str, FakeStream] = {}
        self._here = threading.local()
        self._used: set[str] = set()
        self._taken: dict[str, threading.Event] = {}

    @property
    def is_asynchronous(self) -> bool:
        return self._delay_s is not None

    def _stream(self, name: str) -> FakeStream:
        if name not in self._streams:
            self._streams[name] = FakeStream(self._delay_s or 0.0, self._seed * 97 + len(self._streams))
        return self._streams[name]

    @property
    def current(self) -> str:
        name: str = getattr(self._here, "name", "main")
        return name

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        before, self._here.name = self.current, name
        try:
            yield
        finally:
            self._here.name = before

    def run(self, work: Callable[[], object]) -> None:
        if self.is_asynchronous:
            self._stream(self.current).submit(work)
        else:
            work()

    def copy(self, out: torch.Tensor, source: torch.Tensor, after_chunk: AfterChunk = no_op) -> None:
        self.run(lambda: copy_chunked(out, source))
        after_chunk()

    def add(self, total: torch.Tensor, addend: torch.Tensor, after_chunk: AfterChunk = no_op) -> None:
        self.run(lambda: add_chunked(total, addend))
        after_chunk()

    def add_atomically(self, accumulator: torch.Tensor, addend: torch.Tensor, after_chunk: AfterChunk = no_op) -> None:
        self.run(lambda: self._add_alone(accumulator, addend))
        after_chunk()

    @staticmethod
    def _add_alone(accumulator: torch.Tensor, addend: torch.Tensor) -> None:
        with _ATOMIC, open(__file__) as file:  # ranks may be threads of one process, or processes
            fcntl.flock(file, fcntl.LOCK_EX)
            accumulator.add_(addend)

    def zero(self, out: torch.Tensor, after_chunk: AfterChunk = no_op) -> None:
        self.run(lambda: zero_chunked(out))
        after_chunk()

    @contextmanager
    def background(self) -> Iterator[None]:
        with self.on("daemon"):
            yield

    @contextmanager
    def aside(self) -> Iterator[None]:
        with self.on("aside"):
            yield

    def note_use(self) -> None:
        self._used.add(self.current)

    def join(self) -> None:
        for name in self._used - {self.current} if self.is_asynchronous else ():
            event = self._stream(name).event()
            self.run(lambda event=event: event.wait(_WAIT_LIMIT_S))
        self._used.clear()

    def at_home(self) -> AbstractContextManager[object]:
        assert not self.is_asynchronous, "torch's own operations have no stream here"
        return nullcontext()

    @contextmanager
    def take(self, memory: str) -> Iterator[None]:
        before = self._taken.get(memory)
        if before is not None:
            self.run(lambda: before.wait(_WAIT_LIMIT_S))
        yield
        if self.is_asynchronous:
            self._taken[memory] = self._stream(self.current).event()

    def synchronize(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        events = [stream.event() for stream in list(self._streams.values())]
        return all(event.wait(max(deadline - time.monotonic(), 0)) for event in events)

    @property
    def errors(self) -> Sequence[BaseException]:
        return [error for stream in self._streams.values() for error in stream.errors]

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


class FakeCuda:
    """A :class:`odc.cuda.runtime.CudaRuntime`."""

    def __init__(self, delay_s: float | None, seed: int, limit_bytes: int, refuses: str | None, isolated: bool) -> None:
        self._engine = FakeEngine(delay_s, seed)
        self._limit_bytes = limit_bytes
        self._refuses = refuses
        self._isolated = isolated
        self._memory: dict[int, tuple[int, torch.Tensor]] = {}  # address -> descriptor, mapping
        self._mapped: dict[int, torch.Tensor] = {}
        self.registered: set[int] = set()
        self.waits = 0

    device = torch.device("cpu")

    def engine(self) -> FakeEngine:
        return self._engine

    def identity(self) -> str:
        return f"fake:{os.getpid()}:{threading.get_ident() if self._isolated else 0}"

    def cannot_share(self) -> str | None:
        return self._refuses

    def cannot_reach(self, identity: str) -> str | None:
        if self._isolated and identity != self.identity():
            return f"device {self.identity()} has no peer access to {identity}"
        return None

    def malloc(self, num_bytes: int) -> int:
        if num_bytes > self._limit_bytes:
            raise SetupError(f"cudaMalloc of {num_bytes} bytes failed: {self._limit_bytes} are free")
        fd = _memfd.create(num_bytes, "fake-device")
        memory = _memfd.map_bytes(fd, num_bytes)
        self._memory[memory.data_ptr()] = (fd, memory)
        return memory.data_ptr()

    def free(self, address: int) -> None:
        os.close(self._memory.pop(address)[0])

    def export(self, address: int) -> tuple[bytes, int]:
        fd, memory = self._memory[address]
        return _HANDLE.pack(_MAGIC, os.getpid(), fd, memory.numel()).ljust(HANDLE_BYTES, b"\0"), 0

    def open(self, handle: bytes) -> int:
        magic, pid, fd, num_bytes = _HANDLE.unpack(handle[: _HANDLE.size])
        if magic != _MAGIC or pid == os.getpid():
            raise OdcError("invalid resource handle")
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = _memfd.map_bytes(opened, num_bytes)
        finally:
            os.close(opened)
        self._mapped[memory.data_ptr()] = memory
        return memory.data_ptr()

    def unmap(self, base: int) -> None:
        del self._mapped[base]

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)

    def register(self, address: int, num_bytes: int) -> int:
        self.registered.add(address)
        return address

    def unregister(self, address: int) -> None:
        self.registered.remove(address)

    def wait_value(self, address: int, value: int) -> None:
        self.waits += 1
        self._engine.run(lambda: self._wait(address, value))

    @staticmethod
    def _wait(address: int, value: int) -> None:
        deadline = time.monotonic() + _WAIT_LIMIT_S
        while (ctypes.c_uint32.from_address(address).value - value) % (1 << 32) >= 1 << 31:
            if time.monotonic() > deadline:
                raise TimeoutError(f"a stream waited {_WAIT_LIMIT_S} s for {value}")
            time.sleep(20e-6)

    def write_value(self, address: int, value: int) -> None:
        self._engine.run(lambda: self._write(address, value))

    @staticmethod
    def _write(address: int, value: int) -> None:
        ctypes.c_uint32.from_address(address).value = value

    def end_of_process(self) -> None:
        """What the end of a process gives back: after an error the transport leaves everything to it."""
        for address in list(self._memory):
            self.free(address)
        self._mapped.clear()
        self.registered.clear()

    def leaks(self) -> list[str]:
        """What was not given back."""
        found = {"memory": self._memory, "mapped": self._mapped, "registered": self.registered}
        return [f"{len(what)} x {name}" for name, what in found.items() if what]


class FakeCudaTransport(CudaIpcTransport):
    """``cuda_ipc`` on CPU tensors. Streams do their work within the call: plain torch code may be in between."""

    name: ClassVar[str] = "fake_cuda"
    delay_s: ClassVar[float | None] = None
    """None: no threads; else the longest pause before each piece of work of a stream."""
    limit_bytes: ClassVar[int] = 1 << 34
    refuses: ClassVar[str | None] = None
    isolated: ClassVar[bool] = False

    @classmethod
    def unavailable(cls, topology: Topology, device: torch.device) -> str | None:
        return (
            f"it poses as a GPU on CPU tensors, not {device.type}"
            if device.type != "cpu"
            else cls.not_on_this_host(topology)
        )

    def _make_runtime(self) -> CudaRuntime:
        cls = type(self)
        self.fake = FakeCuda(cls.delay_s, self._rank + 1, cls.limit_bytes, cls.refuses, cls.isolated)
        return self.fake

    def _release_all(self) -> None:
        super()._release_all()
        end_of_fake(self)


def end_of_fake(transport: Any) -> None:
    """After a transport's close(): note what it has not given back, and end its streams."""
    if hasattr(transport, "fake"):
        transport.fake.engine().close()
        transport.leaked = transport.fake.leaks()
        transport.fake.end_of_process()


class AsynchronousFakeCudaTransport(FakeCudaTransport):
    """With streams that lag behind the host."""

    name: ClassVar[str] = "fake_cuda_streams"
    delay_s: ClassVar[float | None] = 2e-4


FAKES = {
    "fake_cuda": "fake_cuda:FakeCudaTransport",
    "fake_cuda_streams": "fake_cuda:AsynchronousFakeCudaTransport",
    "fake_nvshmem": "fake_nvshmem:FakeNvshmemTransport",
    "fake_nvshmem_streams": "fake_nvshmem:AsynchronousFakeNvshmemTransport",
}


@contextmanager
def registered_fakes() -> Iterator[None]:
    """The fake transports by name, until the end of the block; never part of "auto"."""
    from odc.transports import registry

    before = dict(registry._LOCATIONS)
    registry._LOCATIONS.update(FAKES)
    try:
        yield
    finally:
        registry._LOCATIONS.clear()
        registry._LOCATIONS.update(before)
