"""Triton's own way of a launch, on a GPU that nobody has: kernels are compiled for it, loaded and launched nowhere."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget

from odc.kernels import aot_list


class NoGpu:
    """What Triton asks its driver."""

    DEVICE = 4242

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self._modules = itertools.count(1)
        self.compiled: list[str] = []
        """Names of kernels that were compiled, or found on disk, one entry per variant."""
        self.loaded: list[str] = []
        self.launched: list[str] = []
        self.utils = SimpleNamespace(
            load_binary=self._load, get_device_properties=lambda device: {"max_shared_mem": 1 << 17}
        )

    def get_current_device(self) -> int:
        return self.DEVICE

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments, **words: self.launched.append(metadata.name)

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        self.loaded.append(name)
        return next(self._modules), 1, 32, 0, 1024


@contextlib.contextmanager
def no_gpu(
    monkeypatch: pytest.MonkeyPatch,
    cache: Path,
    capability: int = 90,
    others: Sequence[Any] = (),
    driver: NoGpu | None = None,
) -> Iterator[NoGpu]:
    """The driver while Triton has it; afterwards Triton and the kernels, ODC's and ``others``, are as before."""
    driver = driver or NoGpu(capability)
    for kernel in {entry.kernel for entry in aot_list.entries()} | set(others):
        monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.device_caches.default_factory))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)  # Triton can set one, but not unset it again

    def note(**words: Any) -> None:
        driver.compiled.append(words["fn"].name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(cache)
        yield driver
