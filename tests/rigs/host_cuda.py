"""torch.cuda on host memory: streams that do their work later, in an order that a test chooses.

The real :class:`odc.engines.cuda.CudaEngine` runs on it. Device memory is host memory, known by its storage. While a
thread is inside :meth:`HostCuda.here`, what torch does to such memory goes to the thread's current stream of that
device, as do Triton's kernels, which are interpreted. A stream does nothing of its own accord: a test lets all run in
one order or another (:meth:`HostCuda.run`), or a thread does at random (:meth:`HostCuda.running`). So a wait that is
missing is seen as a wrong number.

Device memory begins as NaN. When the last tensor on it is gone, it becomes NaN again in the order of the stream that it
was allocated for, and after the streams of ``record_stream``, as if torch's allocator had used it for something else.
An operation that would make the host wait for its device raises.

What this cannot show: that torch's streams and events, the compiled kernels, or a card do the same.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import random
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from kernel_cases import amended_interpreter, interpreted
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from odc.bench.fake.cuda import FakeCuda, FakeCudaTransport
from odc.cuda.runtime import CudaRuntime

KERNEL_MODULES = ("accumulate", "slots", "parts", "fill")
_ALIGNED = 512  # as cudaMalloc aligns
_PAUSE_S, _SLOW_S = 50e-6, 2e-3
_FACTORIES = ("empty", "zeros", "ones", "full", "arange", "tensor")


def always() -> bool:
    return True


class Mark:
    """A place in a stream."""

    def __init__(self) -> None:
        self.is_passed = False

    def passed(self) -> bool:
        return self.is_passed

    def set(self) -> None:
        self.is_passed = True


class _Step(NamedTuple):
    work: Callable[[], object]
    is_ready: Callable[[], bool]


@dataclass
class _Memory:
    device: int
    stream: Stream
    used_by: set[Stream] = field(default_factory=set)
    """Of record_stream."""


class Stream:
    """As much of torch.cuda.Stream as is used."""

    def __init__(self, cuda: HostCuda, handle: int, device: torch.device, name: str) -> None:
        self.cuda, self.cuda_stream, self.device, self.name = cuda, handle, device, name
        self.steps: deque[_Step] = deque()

    def __repr__(self) -> str:
        return f"<stream {self.cuda_stream} {self.name} of {self.device}, {len(self.steps)} steps>"

    def mark(self) -> Mark:
        mark = Mark()
        self.cuda.submit(self, mark.set)
        return mark

    def record_event(self) -> Event:
        event = Event(self.cuda)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.mark is not None:
            self.cuda.submit(self, lambda: None, event.mark.passed)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Event:
    """As much of torch.cuda.Event. One that was never recorded has happened."""

    def __init__(self, cuda: HostCuda) -> None:
        self.cuda = cuda
        self.mark: Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.mark = (stream or self.cuda.current_stream()).mark()

    def query(self) -> bool:
        self.cuda.on_query(self)
        return self.mark is None or self.mark.is_passed


class _Deferring(TorchDispatchMode):
    def __init__(self, cuda: HostCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._cuda.dispatch(func, args, kwargs or {})


class _Kernel:
    """An interpreted kernel whose launches go to the current stream of the current device."""

    def __init__(self, cuda: HostCuda, kernel: Any) -> None:
        self._cuda, self._kernel, self.__name__ = cuda, kernel, kernel.__name__

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **words: self._cuda.launch(self._kernel, grid, arguments, words)


class HostCuda:
    """See above. All streams of all devices."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.launches: list[str] = []
        self.errors: list[BaseException] = []
        self.on_query: Callable[[Event], object] = lambda event: None
        """Called by each query of an event, before its answer."""
        self._lock = threading.RLock()
        self._handles = itertools.count(1)
        self._defaults: dict[int, Stream] = {}
        self._here = threading.local()
        self._memory: dict[int, _Memory] = {}  # by storage
        self._freed: deque[tuple[_Memory, int, int]] = deque()
        self._kept: list[object] = []  # memory stays: work that comes too late must find some
        self._pinned: list[torch.Tensor] = []

    # Streams

    def new_stream(self, device: int, name: str = "") -> Stream:
        return self._add(next(self._handles), device, name)

    def _add(self, handle: int, device: int, name: str) -> Stream:
        with self._lock:
            self.streams.append(stream := Stream(self, handle, torch.device("cuda", device), name))
        return stream

    def default_stream(self, device: int) -> Stream:
        with self._lock:
            if device not in self._defaults:
                self._defaults[device] = self._add(0, device, "main")
            return self._defaults[device]

    def current_device(self) -> int:
        return getattr(self._here, "device", 0)

    def set_device(self, device: Any) -> None:
        self._here.device = self._index(device)

    def _index(self, device: Any) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return self.current_device() if index is None else index

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def current_stream(self, device: Any = None) -> Stream:
        index = self._index(device)
        found: dict[int, Stream] = self._here.__dict__.setdefault("streams", {})
        return found.get(index) or self.default_stream(index)

    def set_stream(self, stream: Stream) -> None:
        self.set_device(stream.device)
        self._here.__dict__.setdefault("streams", {})[stream.device.index] = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """As torch's: the stream's device becomes the current one, too."""
        before, there = self.current_stream(), self.current_stream(stream.device)
        self.set_stream(stream)
        try:
            with self.here():
                yield
        finally:
            if before.device != stream.device:
                self.set_stream(there)
            self.set_stream(before)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Inside, what this thread has torch do to device memory goes to a stream."""
        if getattr(self._here, "is_deferring", False):
            yield
            return
        self._here.is_deferring = True
        try:
            with _Deferring(self):
                yield
        finally:
            self._here.is_deferring = False

    def submit(self, stream: Stream, work: Callable[[], object], is_ready: Callable[[], bool] = always) -> None:
        """Have ``stream`` do ``work`` after all before, as soon as ``is_ready``."""
        with self._lock:
            self._use_freed_memory()
            stream.steps.append(_Step(work, is_ready))

    def step(self, order: Sequence[Stream]) -> bool:
        """Let the first stream of ``order`` that can go on do one thing; whether there was one."""
        with self._lock, _disable_current_modes():
            for stream in order:
                if stream.steps and stream.steps[0].is_ready():
                    step = stream.steps.popleft()
                    try:
                        step.work()
                    except BaseException as error:  # the test looks at them
                        self.errors.append(error)
                    return True
        return False

    def run(self, *first: Stream, last: Sequence[Stream] = ()) -> None:
        """Let all streams come to their end. A stream goes on only when none of those before it can."""
        self._use_freed_memory()
        others = [one for one in self.streams if one not in (*first, *last)]
        while self.step([*first, *others, *last]):
            pass
        if self.errors:
            raise self.errors[0]
        assert not any(one.steps for one in self.streams), f"streams wait for ever: {self.streams}"

    @contextmanager
    def running(self, seed: int, slow: str | None = None) -> Iterator[None]:
        """Inside, a thread lets the streams go on: for some steps one has precedence, then another one. Those named
        ``slow`` do one thing each few milliseconds."""
        is_over, chooser = threading.Event(), random.Random(seed)

        def work() -> None:
            while not is_over.is_set():
                order = chooser.sample(self.streams, len(self.streams))
                late, order = [o for o in order if o.name == slow], [o for o in order if o.name != slow]
                started = time.monotonic()
                for _ in range(chooser.randint(1, 40)):
                    while not self.step(order) and time.monotonic() - started < _SLOW_S * bool(late):
                        time.sleep(_PAUSE_S)
                if not self.step(late):
                    time.sleep(_PAUSE_S)

        thread = threading.Thread(target=work, name="host-cuda", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    # Memory

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """The device whose memory it is, or None: the host's."""
        found = self._memory.get(tensor.untyped_storage()._cdata)
        return None if found is None else found.device

    def empty(self, size: Sequence[int], dtype: torch.dtype, device: int) -> torch.Tensor:
        """Memory of the device for its current stream."""
        numel = int(np.prod(size, dtype=np.int64))
        block = np.full(numel * dtype.itemsize + 2 * _ALIGNED, 0xFF, np.uint8)
        start = -block.ctypes.data % _ALIGNED
        handed_out = block[start : start + max(numel * dtype.itemsize, 1)]
        with _disable_current_modes():
            flat = torch.from_numpy(handed_out)
            key, memory = flat.untyped_storage()._cdata, _Memory(device, self.current_stream(device))
            self._memory[key] = memory
            self._kept.append(block)
            weakref.finalize(handed_out, self._free, key, handed_out.ctypes.data, flat.numel()).atexit = False
            return flat[: numel * dtype.itemsize].view(dtype).view(size)

    def put(self, values: torch.Tensor, device: int, shift: int = 0) -> torch.Tensor:
        """On the device at once; ``shift`` elements behind an aligned address."""
        room = self.empty((values.numel() + shift,), values.dtype, device)
        with _disable_current_modes():
            return room[shift:].copy_(values.reshape(-1)).view(values.shape)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is there now."""
        with _disable_current_modes():
            return tensor.clone()

    def at(self, address: int, num_bytes: int, device: int, keep: object = None) -> torch.Tensor:
        """Somebody else's memory that ``device`` sees as its own: flat uint8."""
        raw = np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), np.uint8)
        with _disable_current_modes():
            tensor = torch.from_numpy(raw)
            key = tensor.untyped_storage()._cdata
        self._memory[key] = _Memory(device, self.default_stream(device))
        self._kept.append(keep)
        weakref.finalize(raw, self._memory.pop, key).atexit = False
        return tensor

    def _free(self, key: int, address: int, num_bytes: int) -> None:
        self._freed.append((self._memory.pop(key), address, num_bytes))

    def _use_freed_memory(self) -> None:
        while self._freed:
            memory, address, num_bytes = self._freed.popleft()
            for mark in [stream.mark() for stream in memory.used_by]:
                memory.stream.steps.append(_Step(lambda: None, mark.passed))
            memory.stream.steps.append(_Step(functools.partial(ctypes.memset, address, 0xFF, num_bytes), always))

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        self._memory[tensor.untyped_storage()._cdata].used_by.add(stream)

    def is_pinned(self, address: int) -> bool:
        return any(t.data_ptr() <= address < t.data_ptr() + t.nbytes for t in self._pinned)

    @staticmethod
    def _alias(tensor: torch.Tensor) -> torch.Tensor:
        """The same elements by their address: a device keeps no memory alive."""
        if not tensor.numel():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        raw = (ctypes.c_uint8 * (extent * tensor.itemsize)).from_address(tensor.data_ptr())
        flat = torch.frombuffer(raw, dtype=torch.uint8).view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())

    # What torch, Triton and the driver are told to do

    def copy_memory(self, device: int, *copies: Sequence[int]) -> None:
        """As :meth:`odc.cuda.runtime.CudaRuntime.copy_memory` of ``device``: steps of its current stream."""
        self.launches.append("copies")
        for copy in zip(*copies, strict=True):
            self.submit(self.current_stream(device), functools.partial(ctypes.memmove, *copy))

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        places = {self.device_of(tensor) for tensor in tensors}
        returned = func._schema.returns
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in returned)
        if is_view or places <= {None}:
            return func(*args, **kwargs)
        if None in places or len(places) > 1 or any(str(one.type) != "Tensor" for one in returned):
            raise AssertionError(f"{func} of memory of {places}: the host would wait for its device")
        device, is_mutating = places.pop(), func._schema.is_mutable
        assert device is not None
        aliases = pytree.tree_map_only(torch.Tensor, self._alias, (args, kwargs))
        if is_mutating:
            self.submit(self.current_stream(device), lambda: func(*aliases[0], **aliases[1]))
            return args[0] if returned else None
        metas = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), aliases)
        shape = func(*metas[0], **metas[1])
        result = self.empty(shape.shape, shape.dtype, device)
        if "empty" not in func._schema.name:
            out = self._alias(result)
            self.submit(self.current_stream(device), lambda: out.copy_(func(*aliases[0], **aliases[1])))
        return result

    def launch(self, kernel: Any, grid: Any, arguments: Any, words: Any) -> None:
        device = self.current_device()
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                where = self.device_of(argument)
                assert where == device, f"{kernel.__name__} on device {device} is given memory of {where}"
        reads_host = "slots" in kernel.__name__ or "parts" in kernel.__name__
        assert not reads_host or self.is_pinned(arguments[0])
        aliases = [self._alias(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        self.launches.append(kernel.__name__)
        self.submit(self.current_stream(), lambda: kernel[grid](*aliases, **words))

    def _factory(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*args: Any, device: Any = None, pin_memory: bool = False, **words: Any) -> torch.Tensor:
            if pin_memory:
                self._pinned.append(original(*args, **words))
                return self._pinned[-1]
            if device is None or torch.device(device).type != "cuda":
                return original(*args, device=device, **words)
            with _disable_current_modes():
                values = original(*args, **words)
            index = self._index(device)
            result = self.empty(values.shape, values.dtype, index)
            out = self._alias(result)
            if original.__name__ == "tensor":  # from the host, which may go on when it has been copied
                out.copy_(values)
            elif original.__name__ != "empty":
                self.submit(self.current_stream(index), lambda: out.copy_(values))
            return result

        return make

    @contextmanager
    def installed(self, kernels: SimpleNamespace | None = None) -> Iterator[HostCuda]:
        """Inside, torch.cuda is this; and the kernels of these modules are launched on it."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("current_stream", "current_device", "set_device", "device", "stream"):
                patch.setattr(torch.cuda, name, getattr(self, name))
            patch.setattr(torch.cuda, "Event", functools.partial(Event, self))
            patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
            patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.record_stream(tensor, stream))
            for name in _FACTORIES:
                patch.setattr(torch, name, self._factory(getattr(torch, name)))
            for module in () if kernels is None else (getattr(kernels, name) for name in KERNEL_MODULES):
                self._install_kernels(patch, module)
            with self.here():
                yield self

    def _install_kernels(self, patch: pytest.MonkeyPatch, module: ModuleType) -> None:
        patch.setattr(module, "device_of", lambda kernel, tensor, advice: self.device(self.device_of(tensor)))
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                patch.setattr(module, name, _Kernel(self, kernel))


@contextmanager
def interpreted_engine() -> Iterator[SimpleNamespace]:
    """Copies of the kernel modules for Triton's interpreter, and ``engine``: of odc.engines.cuda, which uses them. To
    whoever imports these modules inside, they are as ever."""
    name, package = "odc.engines.cuda", importlib.import_module("odc.engines")
    with interpreted() as kernels:
        before = sys.modules.pop(name, None)
        kernels.engine = importlib.import_module(name)
        del sys.modules[name], package.cuda
        if before is not None:
            sys.modules[name] = package.cuda = before
    with amended_interpreter():
        yield kernels


class HostCudaRuntime(FakeCuda):
    """Memory as FakeCuda has it, streams as HostCuda has them, the real engine."""

    def __init__(self, cuda: HostCuda, rank: int, engine_class: Any) -> None:
        self.cuda, self.index = cuda, rank
        self.given_back: list[Stream] = []
        self.device = torch.device("cuda", rank)
        new_stream = functools.partial(cuda.new_stream, rank, "engine")
        copy_memory = functools.partial(cuda.copy_memory, rank)
        super().__init__(engine_class(self.device, new_stream, self.given_back.append, copy_memory))

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        return self.cuda.at(address, num_bytes, self.index, keep=super().tensor(address, num_bytes))

    def wait_values(self, words: Sequence[tuple[int, int]]) -> None:
        self.waits += 1

        def is_there(address: int, value: int) -> bool:
            return (ctypes.c_uint32.from_address(address).value - value) % (1 << 32) < 1 << 31

        self._submit(lambda: None, lambda: all(is_there(*word) for word in words))

    def write_values(self, words: Sequence[tuple[int, int]]) -> None:
        def write() -> None:
            for address, value in words:
                self._write(address, value)

        self._submit(write, lambda: True)

    def _submit(self, work: Callable[[], object], is_ready: Callable[[], bool]) -> None:
        self.cuda.submit(self.cuda.current_stream(self.device), work, is_ready)


class HostCudaTransport(FakeCudaTransport):
    """``cuda_ipc`` on it; each rank has a device of its own."""

    name: ClassVar[str] = "host_cuda"
    cuda: ClassVar[HostCuda]
    engine_class: ClassVar[Any]

    def _make_runtime(self) -> CudaRuntime:
        made = HostCudaRuntime(self.cuda, self._rank, self.engine_class)
        self.fake: Any = made
        return made

    def _release_all(self) -> None:
        super(FakeCudaTransport, self)._release_all()
        self.leaked = [*self.fake.leaks(), *(["streams"] if len(set(self.fake.given_back)) != 2 else [])]
        self.fake.end_of_process()


class Violation(AssertionError):
    """A stream saw what it must not see."""
