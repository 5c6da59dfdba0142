"""Triton's own way of a launch, up to a driver that runs the compiled kernel on the CPU: launchers run as they are."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from kernel_cases import MODULES
from kernel_driver import NoGpu, no_gpu
from ptx_cpu import Program
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from odc.kernels import aot_list

NOT_COVERED = {
    entry.name: "calls functions of NVSHMEM's device library, which talk to network cards and other GPUs"
    for entry in aot_list.entries()
    if entry.nvshmem
}
COVERED = [entry for entry in aot_list.entries() if not entry.nvshmem]


class _Memory(TorchDispatchMode):
    """The memory of all tensors that an operation of torch has seen since, as long as it is in use."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[tuple[int, int]] = []
        """Where launches may read and write besides, from and to."""
        self._storages: dict[StorageWeakRef, tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._storages[StorageWeakRef(storage)] = (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        return result

    def of_launch(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
        """Of the memory that an argument is a part of, that part; of other memory, which tables may lead to, all."""
        self._storages = {ref: place for ref, place in self._storages.items() if not ref.expired()}
        whole = {t.untyped_storage().data_ptr() for t in tensors}
        parts = [(t.data_ptr(), t.data_ptr() + t.numel() * t.itemsize) for t in tensors]
        others = [place for place in self._storages.values() if place[0] not in whole]
        return parts + others + self.others


class PtxDriver(NoGpu):
    """Runs what is launched, at once, on host memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__(90)
        self.change: Callable[[str], str] = lambda ptx: ptx
        """What becomes of the PTX of kernels that are loaded from now on."""
        self.only: tuple[int, int] | None = None
        """A program and how many there are: what the next launches run instead of their grid."""
        self.ran: set[str] = set()
        """Names in the list of kernels that are compiled ahead of time."""
        self.memory = _Memory()
        self._folder, self._ptx = folder, ""
        self._names = {_variant(e.kernel, e.signature, e.constants): e.name for e in COVERED}

    def note_ptx(self, module: Any, function: Any, name: str, files: dict[str, str], *_: Any) -> None:
        """Triton's hook for what is about to be loaded: the driver itself is given the binary only."""
        self._ptx = Path(files[f"{name}.ptx"]).read_text()

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        module, _, *rest = super()._load(name, binary, shared, device)
        return module, Program(self.change(self._ptx), self._folder, shared), *rest

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        constants = {source.fn.arg_names[path[0]]: value for path, value in source.constants.items()}
        name = self._names.get(_variant(source.fn, source.signature, constants))
        kinds = list(source.signature.values())

        def launch(x: int, y: int, z: int, stream: int, program: Program, *rest: Any) -> None:
            given = [value for value, kind in zip(rest[4:], kinds, strict=True) if kind != "constexpr"]
            assert y == z == 1
            self.launched.append(metadata.name)
            self.ran |= {name} if name else set()
            tensors = [value for value in given if isinstance(value, torch.Tensor)]
            arguments = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in given]
            # Behind the kernel's own parameters Triton has two of its own: scratch memory, of which there is none.
            arguments += [0] * (len(program.params) - len(arguments))
            only, programs = ((self.only[0], self.only[0] + 1), self.only[1]) if self.only else (None, x)
            program.run(arguments, self.memory.of_launch(tensors), programs, only)

        return launch

    @contextlib.contextmanager
    def only_program(self, index: int, count: int) -> Iterator[None]:
        """As that of kernel_cases.py, which is for the interpreter."""
        self.only = index, count
        try:
            yield
        finally:
            self.only = None


def _variant(kernel: Any, signature: Any, constants: Any) -> tuple[Any, ...]:
    return kernel.__name__, tuple(signature.items()), tuple(sorted((n, str(c)) for n, c in constants.items()))


@contextlib.contextmanager
def compiled(folder: Path) -> Iterator[PtxDriver]:
    """Launchers of ODC's kernels compile them, for sm_90, and run them on host memory; ``folder`` keeps binaries."""
    driver, hooks = PtxDriver(folder), triton.knobs.runtime.kernel_load_start_hook
    with pytest.MonkeyPatch.context() as monkeypatch, no_gpu(monkeypatch, folder, driver=driver):
        for name, module in list(sys.modules.items()):
            if name.startswith("odc.kernels.") and hasattr(module, "device_of"):
                monkeypatch.setattr(module, "device_of", lambda kernel, tensor, advice: contextlib.nullcontext())
        hooks.add(driver.note_ptx)
        try:
            with driver.memory:
                yield driver
        finally:
            hooks.remove(driver.note_ptx)


def modules() -> SimpleNamespace:
    """The kernel modules, named as `kernel_cases.interpreted` names its copies."""
    return SimpleNamespace(**{name: sys.modules[f"odc.kernels.{name}"] for name in MODULES})
