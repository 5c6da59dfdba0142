"""The real ``CudaRuntime`` and ``CudaIpcTransport`` on a driver that is a stub: ``stub_libcuda.c`` and a stand-in cupy.

Streams are the threads of ``bench/fake/cuda.py``: what the runtime tells the driver to do on a stream is called when
that stream comes to it. So the driver sees the calls, the handles and the addresses of the real code, and the words
that one process writes are those that another one waits for. The engine is not the real one: it needs torch's streams.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from odc.bench.fake.cuda import FakeEngine
from odc.cuda import runtime
from odc.cuda.runtime import CudaRuntime
from odc.setup.topology import Topology
from odc.transports import registry
from odc.transports.base import not_on_this_host
from odc.transports.cuda_ipc import CudaIpcTransport

_HERE = Path(__file__).parent
_LINE = re.compile(r"(\d+) (\w+) (.*) -> (\d+)")


def header() -> Path | None:
    """NVIDIA's cuda.h: that of ``ODC_TEST_CUDA_HEADER`` or the one that Triton brings along."""
    if os.environ.get("ODC_TEST_CUDA_HEADER"):
        return Path(os.environ["ODC_TEST_CUDA_HEADER"])
    spec = importlib.util.find_spec("triton")
    found = Path(str(spec.origin)).parent / "backends/nvidia/include/cuda.h" if spec is not None else None
    return found if found is not None and found.is_file() else None


def why_not() -> str | None:
    """Why the stub cannot be built or must not be loaded here, or None."""
    if shutil.which("gcc") is None:
        return "gcc, which builds the stub, is not installed"
    if header() is None:
        return "cuda.h, which Triton brings along, is not installed"
    return "there is a GPU here, and so another libcuda" if torch.cuda.is_available() else None


def build(folder: Path) -> Path:
    """The stub; a compiler holds it to the header's prototypes."""
    library = folder / "libcuda.so.1"
    options = ["-O1", "-Wall", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-pthread"]
    source, includes = str(_HERE / "stub_libcuda.c"), str(Path(str(header())).parent)
    subprocess.run(["gcc", *options, "-I", includes, source, "-o", str(library)], check=True, timeout=120)
    return library


@dataclass(frozen=True)
class Call:
    """One line of the stub's log."""

    time_ns: int
    name: str
    text: str
    code: int

    @property
    def arguments(self) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S+)", self.text))


def calls(log: Path) -> list[Call]:
    """What a process has called, in this order."""
    lines = [_LINE.fullmatch(line) for line in log.read_text().splitlines()]
    return [Call(int(m[1]), m[2], m[3], int(m[4])) for m in lines if m is not None]


class StubEngine(FakeEngine):
    """Its streams have handles of the driver's, made as the real engine makes its own."""

    def __init__(self, delay_s: float, seed: int, owner: CudaRuntime) -> None:
        super().__init__(delay_s, seed)
        self._owner, self._handles, self._making = owner, dict[str, Any](), threading.Lock()

    @property
    def handle(self) -> SimpleNamespace:
        """Of the current stream, as torch has them; the main one is the default stream."""
        with self._making:
            if self.current not in self._handles:
                own = self.current != "main"
                self._handles[self.current] = self._owner._new_stream() if own else SimpleNamespace(cuda_stream=0)
            return self._handles[self.current]  # type: ignore[no-any-return]

    def close(self) -> None:
        super().close()
        for name, stream in self._handles.items():
            if name != "main":
                self._owner._give_back_stream(stream)
        self._handles.clear()


class StubRuntime(CudaRuntime):
    """On host memory."""

    def __init__(self, index: int, delay_s: float, seed: int) -> None:
        super().__init__(torch.device("cuda", index))
        self._stub_engine = StubEngine(delay_s, seed, self)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def engine(self) -> StubEngine:  # type: ignore[override]
        return self._stub_engine


class StubCudaTransport(CudaIpcTransport):
    """``cuda_ipc`` on :class:`StubRuntime`."""

    name: ClassVar[str] = "fake_cuda_streams"
    delay_s: ClassVar[float] = 2e-4
    current: ClassVar[StubEngine | None] = None

    @classmethod
    def unavailable(cls, topology: Topology, device: torch.device) -> str | None:
        return runtime.unavailable(torch.device("cuda", 0)) or not_on_this_host(topology)

    def _make_runtime(self) -> CudaRuntime:
        made = StubRuntime(self._rank % 2, self.delay_s, self._rank + 1)  # the stub has two devices
        StubCudaTransport.current = made.engine()
        return made


@contextmanager
def stub_driver(library: str, log: str) -> Iterator[ctypes.CDLL]:
    """In a process of its own: the stub for driver, cupy and torch's view of them, until the end of the block."""
    os.environ["ODC_STUB_CUDA_LOG"] = log
    loaded = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)  # who asks for libcuda.so.1 from now on gets this one
    original = runtime._call_driver

    def call_driver(name: str, *arguments: Any) -> None:
        engine = StubCudaTransport.current
        if name == "cuStreamBatchMemOp_v2" and engine is not None:
            engine.run(lambda: original(name, *arguments))  # when the stream comes to it
        else:
            original(name, *arguments)

    def current_stream(device: object = None) -> SimpleNamespace:
        assert StubCudaTransport.current is not None
        return StubCudaTransport.current.handle

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(_HERE / "stub_modules"))
        patch.setattr(runtime, "_call_driver", call_driver)
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        patch.setattr(torch.cuda, "get_device_name", lambda device: "Stub")
        patch.setattr(torch.cuda, "current_stream", current_stream)
        patch.setattr(torch.cuda, "ExternalStream", lambda handle, device: SimpleNamespace(cuda_stream=handle))
        patch.setitem(registry._LOCATIONS, StubCudaTransport.name, "stub_cuda:StubCudaTransport")
        yield loaded
        loaded.stub_leftovers()
    sys.modules.pop("cupy", None)
