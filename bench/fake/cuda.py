"""A stand-in for the CUDA runtime, on host memory: what the ``cuda_ipc`` transport asks of a device.

Device memory is a memfd, an IPC handle names the memory by process and descriptor, and a stream is a thread
(``streams.py``). Streams may share a number of hardware queues. A queue does one thing after the other, whichever
stream has asked for it. That is stricter than a device, which goes on with another stream while a kernel runs.

Everything above :class:`odc.cuda.runtime.CudaRuntime` is the real code: the transport, its set-up and its end, the
order of streams, the protocol, the daemon. Tests on this stand-in cannot show that CUDA, cupy and the kernels do what
their documentation says; ``odc bench gpu`` shows that.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch

from odc.bench.fake.streams import FakeDevice, FakeEvent, FakeStream
from odc.cuda.runtime import HANDLE_BYTES, CudaRuntime
from odc.engines.base import Addition, AfterChunk, Engine, Part, no_op
from odc.errors import OdcError, SetupError
from odc.kernels.chunked import Tensors, add_chunked, copy_chunked, zero_chunked
from odc.setup.topology import Topology
from odc.transports import _memfd
from odc.transports.base import not_on_this_host
from odc.transports.cuda_ipc import CudaIpcTransport

logger = logging.getLogger("odc")

_HANDLE = struct.Struct("=8sQQQ")
_MAGIC = b"fakecuda"
_BACKGROUND = "daemon"
_ATOMIC = threading.Lock()  # of the ranks that are threads of one process


_AT_ONCE = Engine()
_MAPPINGS: weakref.WeakValueDictionary[int, torch.Tensor] = (
    weakref.WeakValueDictionary()
)  # of all ranks of this process


class FakeEngine(Engine):
    """An engine whose streams have names. A thread's current stream is "main" unless it chooses another.

    Args:
        delay_s: None: work is done within the call; else the longest pause before each piece of work.
        num_queues: hardware queues that the streams share; None: each has its own.
    """

    has_streams = True

    def __init__(self, delay_s: float | None, seed: int, num_queues: int | None = None) -> None:
        self._delay_s, self._seed = delay_s, seed
        self._num_queues = num_queues
        self._queues: list[FakeStream] = []
        self._streams: dict[str, FakeStream] = {}
        self._making = threading.Lock()
        self._here = threading.local()
        self._used: set[str] = set()
        self._taken: dict[str, tuple[str, FakeEvent]] = {}
        self.fake_device = FakeDevice()

    @property
    def is_asynchronous(self) -> bool:
        return self._delay_s is not None

    def _stream(self, name: str) -> FakeStream:
        found = self._streams.get(name)
        if found is not None:
            return found
        with self._making:
            if name not in self._streams:
                number = len(self._streams)
                if self._num_queues is None or len(self._queues) < self._num_queues:
                    seed = self._seed * 97 + number
                    self._queues.append(FakeStream(self._delay_s or 0.0, seed, self.fake_device))
                self._streams[name] = self._queues[number % len(self._queues)]
            return self._streams[name]

    @property
    def current(self) -> str:
        return str(getattr(self._here, "name", "main"))

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        before, self._here.name = self.current, name
        try:
            yield
        finally:
            self._here.name = before

    def run(self, work: Callable[[], object]) -> None:
        self._here.launches = self.num_launches() + 1
        if self.is_asynchronous:
            self.fake_device.check()
            self._stream(self.current).submit(work)
        else:
            work()

    def await_condition(self, is_met: Callable[[], bool], what: str) -> None:
        """Have the current stream go on only when ``is_met``; see :meth:`FakeDevice.await_condition`."""
        waiting = f"stream {self.current!r} waits for {what}"
        self.run(lambda: self.fake_device.await_condition(is_met, waiting))

    def wait_for(self, name: str) -> None:
        """Have the current stream go on only when the stream of this name has done all that it was given so far."""
        self.await_condition(self._stream(name).event().has_come, f"stream {name!r}")

    def num_launches(self) -> int:
        """How many driver calls this thread would have made so far on a device."""
        return int(getattr(self._here, "launches", 0))

    def _launch(self, work: Callable[[], object], after_chunk: AfterChunk) -> None:
        """One, whatever it reaches."""
        self.run(work)
        after_chunk()

    def stream_key(self) -> int:
        return hash(self.current)

    def copy(self, outs: Tensors, sources: Tensors, after_chunk: AfterChunk = no_op) -> None:
        self._launch(lambda: copy_chunked(outs, sources), after_chunk)

    def add(self, totals: Tensors, addends: Tensors, after_chunk: AfterChunk = no_op) -> None:
        self._launch(lambda: add_chunked(totals, addends), after_chunk)

    def read_rows(
        self,
        outs: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        rank: int,
        own_in_place: bool = False,
        after_chunk: AfterChunk = no_op,
    ) -> None:
        self._launch(lambda: _AT_ONCE.read_rows(outs, shards, rank, own_in_place), after_chunk)

    def write_rows(
        self, buffers: Sequence[torch.Tensor], parts: Sequence[Part], rank: int, after_chunk: AfterChunk = no_op
    ) -> None:
        self._launch(lambda: _AT_ONCE.write_rows(buffers, parts, rank), after_chunk)

    def add_rows(
        self, buffers: Sequence[torch.Tensor], parts: Sequence[Part], rank: int, after_chunk: AfterChunk = no_op
    ) -> None:
        self._launch(lambda: self._add_alone(buffers, parts), after_chunk)

    @staticmethod
    def _add_alone(buffers: Sequence[torch.Tensor], parts: Sequence[Part]) -> None:
        with _ATOMIC, open(__file__) as file:  # ranks may be threads of one process, or processes
            fcntl.flock(file, fcntl.LOCK_EX)
            for owner, buffer in enumerate(buffers):
                for part in parts:
                    row = part.row(owner)
                    buffer[part.offset_bytes : part.offset_bytes + 4 * row.numel()].view(torch.float32).add_(row)

    def add_slots(
        self,
        slots: torch.Tensor,
        slot_bytes: int,
        dtype: torch.dtype,
        additions: Sequence[Addition],
        after_chunk: AfterChunk = no_op,
    ) -> None:
        self._launch(lambda: _AT_ONCE.add_slots(slots, slot_bytes, dtype, additions), after_chunk)

    def zero(self, out: torch.Tensor, after_chunk: AfterChunk = no_op) -> None:
        self._launch(lambda: zero_chunked(out), after_chunk)

    def background(self) -> AbstractContextManager[None]:
        return self.on(_BACKGROUND)

    def on_side_stream(self) -> AbstractContextManager[None]:
        return self.on("aside")

    def note_use(self) -> None:
        self._used.add(self.current)

    def join(self) -> None:
        for name in self._used - {self.current} if self.is_asynchronous else ():
            self.wait_for(name)
        self._used.clear()

    def join_background(self) -> None:
        if self.is_asynchronous:
            self.wait_for(_BACKGROUND)

    def at_home(self) -> AbstractContextManager[object]:
        assert not self.is_asynchronous, "torch's own operations have no stream here"
        return nullcontext()

    @contextmanager
    def take(self, memory: str) -> Iterator[None]:
        name, before = self._taken.get(memory, (self.current, None))
        if before is not None and name != self.current:
            self.await_condition(before.has_come, f"stream {name!r}, which has {memory!r}")
        yield
        if self.is_asynchronous:
            self._taken[memory] = self.current, self._stream(self.current).event()

    def synchronize(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        self.fake_device.check()
        events = [one.event() for one in list(self._queues)]
        return all(event.wait(max(deadline - time.monotonic(), 0)) for event in events)

    @property
    def errors(self) -> Sequence[BaseException]:
        return self.fake_device.errors

    def close(self) -> None:
        for one in self._queues:
            one.close()


class FakeCuda(CudaRuntime):
    """The runtime, on memory of the host."""

    def __init__(
        self,
        engine: FakeEngine,
        limit_bytes: int = 1 << 34,
        refuses: str | None = None,
        isolated: bool = False,
        atomics_missing: str | None = None,
    ) -> None:
        self._engine = engine
        self._atomics_missing = atomics_missing
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

    def no_atomics(self, identity: str) -> str | None:
        return self._atomics_missing

    def malloc(self, num_bytes: int) -> int:
        if num_bytes > self._limit_bytes:
            raise SetupError(f"cudaMalloc of {num_bytes} bytes failed: {self._limit_bytes} are free")
        fd = _memfd.create(num_bytes, "fake-device")
        memory = _memfd.map_bytes(fd, num_bytes)
        self._memory[memory.data_ptr()] = (fd, memory)
        _MAPPINGS[memory.data_ptr()] = memory
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
        _MAPPINGS[memory.data_ptr()] = memory
        return memory.data_ptr()

    def unmap(self, base: int) -> None:
        del self._mapped[base]

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        # A view where possible: a stream that goes wrong must find memory, however late it is.
        for memory in list(_MAPPINGS.values()):
            start = address - memory.data_ptr()
            if start >= 0 and start + num_bytes <= memory.numel():
                return memory[start : start + num_bytes]
        return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)

    def register(self, address: int, num_bytes: int) -> int:
        self.registered.add(address)
        return address

    def unregister(self, address: int) -> None:
        self.registered.remove(address)

    def wait_values(self, words: Sequence[tuple[int, int]]) -> None:
        self.waits += 1
        awaited = [(ctypes.c_uint32.from_address(address), value) for address, value in words]
        what = " and ".join(f"{value} in the word at {address:#x}" for address, value in words)
        self._engine.await_condition(partial(self._have_come, awaited), what)

    @staticmethod
    def _have_come(awaited: Sequence[tuple[ctypes.c_uint32, int]]) -> bool:
        if all((word.value - value) % (1 << 32) < 1 << 31 for word, value in awaited):
            return True
        time.sleep(20e-6)
        return False

    def write_values(self, words: Sequence[tuple[int, int]]) -> None:
        def write() -> None:
            for address, value in words:
                self._write(address, value)

        self._engine.run(write)

    @staticmethod
    def _write(address: int, value: int) -> None:
        ctypes.c_uint32.from_address(address).value = value

    def end_of_process(self) -> None:
        """Give back all memory, as the end of a process does. After an error the transport leaves everything to that
        end."""
        for address in list(self._memory):
            self.free(address)
        self._mapped.clear()
        self.registered.clear()

    def leaks(self) -> list[str]:
        """What was not given back, in words."""
        found = {"memory": len(self._memory), "mapped": len(self._mapped), "registered": len(self.registered)}
        return [f"{number} x {name}" for name, number in found.items() if number]


class FakeCudaTransport(CudaIpcTransport):
    """``cuda_ipc`` on CPU tensors. Streams do their work within the call, so plain torch code may come in between."""

    name: ClassVar[str] = "fake_cuda"
    delay_s: ClassVar[float | None] = None
    """None: no threads; else the longest pause before each piece of work of a stream."""
    limit_bytes: ClassVar[int] = 1 << 34
    refuses: ClassVar[str | None] = None
    isolated: ClassVar[bool] = False
    num_queues: ClassVar[int | None] = None
    """Hardware queues of each device; None: as many as streams."""
    atomics_missing: ClassVar[str | None] = None
    """Why additions to another device's memory may be lost, or None."""

    @classmethod
    def unavailable(cls, topology: Topology, device: torch.device) -> str | None:
        return (
            f"it poses as a GPU on CPU tensors, not {device.type}"
            if device.type != "cpu"
            else not_on_this_host(topology)
        )

    def _make_runtime(self) -> CudaRuntime:
        cls = type(self)
        engine = FakeEngine(cls.delay_s, self._rank + 1, cls.num_queues)
        self.fake = FakeCuda(engine, cls.limit_bytes, cls.refuses, cls.isolated, cls.atomics_missing)
        return self.fake

    def _release_all(self) -> None:
        super()._release_all()
        end_of_fake(self)


def end_of_fake(transport: Any) -> None:
    """After a transport's close(): note in ``leaked`` what it has not given back, and end its streams."""
    if hasattr(transport, "fake"):
        engine = transport.fake.engine()
        engine.close()
        for error in engine.errors:  # of a stream that close() has waited for, behind all calls that would tell of it
            logger.error("a stream of the fake has failed: %s", error)
        transport.leaked = transport.fake.leaks()
        transport.fake.end_of_process()


class AsynchronousFakeCudaTransport(FakeCudaTransport):
    """The same with streams that lag behind the host."""

    name: ClassVar[str] = "fake_cuda_streams"
    delay_s: ClassVar[float | None] = 2e-4


FAKES = {
    "fake_cuda": "odc.bench.fake.cuda:FakeCudaTransport",
    "fake_cuda_streams": "odc.bench.fake.cuda:AsynchronousFakeCudaTransport",
}


def register_fakes() -> None:
    """Register the fake transports for the rest of this process."""
    from odc.transports import registry

    registry._LOCATIONS.update(FAKES)


def register_prompt_fakes() -> None:
    """As :func:`register_fakes`, with streams that pause only where they are told to."""
    register_fakes()
    AsynchronousFakeCudaTransport.delay_s = 0.0
