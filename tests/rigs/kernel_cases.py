"""What the kernel tests share: kernels for Triton's interpreter, sparse memory, one program of many, fake PEs."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

MODULES = ("peers", "arguments", "launching", "accumulate", "slots", "parts", "fill")
NVSHMEM_MODULES = ("nvshmem.modules", "nvshmem.transfer", "nvshmem.signals")


@contextlib.contextmanager
def interpreted() -> Iterator[SimpleNamespace]:
    """Fresh copies of the kernel modules whose kernels Triton interprets; the process is as before afterwards.

    Triton decides when a kernel is decorated, so the variable is set for the import of these copies only: no other
    test and no child process sees it. Triton itself is imported before, or its own library would be interpreted too.
    """
    importlib.import_module("triton.language")
    package = importlib.import_module("odc")
    before = {name: module for name, module in sys.modules.items() if _ours(name)}
    attribute = getattr(package, "kernels", None)
    variable = os.environ.get("TRITON_INTERPRET")
    for name in before:
        del sys.modules[name]
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        loaded = {name: importlib.import_module(f"odc.kernels.{name}") for name in (*MODULES, *NVSHMEM_MODULES)}
        _restore_variable(variable)
        with amended_interpreter():
            yield SimpleNamespace(**{name.rpartition(".")[2]: module for name, module in loaded.items()})
    finally:
        _restore_variable(variable)
        for name in [name for name in sys.modules if _ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)
        if attribute is None:
            del package.kernels
        else:
            package.kernels = attribute  # type: ignore[attr-defined]


@contextlib.contextmanager
def amended_interpreter() -> Iterator[None]:
    """Inside, interpreted kernels do what compiled ones do.

    Casts from fp32 to bf16 round to nearest even: the interpreter's own cut the low bits off. Compiled kernels round
    (``cvt.rn.bf16``, which test_kernels_aot.py looks for). And what of Triton's own library is written in Triton's
    language, which nobody interprets (see `interpreted`), is written in Python.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.cast_impl

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            rounded = torch.from_numpy(source.data.astype("float32")).to(torch.bfloat16)
            return TensorHandle(rounded.view(torch.uint16).numpy(), target.scalar)
        return original(self, source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
        patch.setattr(tl, "sum", lambda values, axis: tl.reduce(values, axis, tl.standard._sum_combine))
        patch.setattr(tl, "max", lambda values, axis: tl.reduce(values, axis, tl.standard._elementwise_max))
        patch.setattr(tl, "cumsum", lambda values, axis: tl.associative_scan(values, axis, tl.standard._sum_combine))
        yield


def _ours(name: str) -> bool:
    return name == "odc.kernels" or name.startswith("odc.kernels.")


def _restore_variable(value: str | None) -> None:
    if value is None:
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = value


@contextlib.contextmanager
def only_program(index: int, count: int) -> Iterator[None]:
    """A launch on grid (1,) is program ``index`` of ``count``: one program of a grid too large to interpret."""
    from triton.runtime.interpreter import interpreter_builder as builder

    def set_grid_dim(*_: int) -> None:
        type(builder).set_grid_dim(builder, count, 1, 1)

    def set_grid_idx(*_: int) -> None:
        type(builder).set_grid_idx(builder, index, 0, 0)

    builder.set_grid_dim, builder.set_grid_idx = set_grid_dim, set_grid_idx
    try:
        yield
    finally:
        del builder.set_grid_dim, builder.set_grid_idx


class SparseMemory:
    """Address space of ``nbytes`` zeros of which only touched pages exist; use as a context manager.

    An address that was computed in 32 bits lands elsewhere inside it, on zeros, and not on somebody else's memory.
    """

    def __init__(self, nbytes: int) -> None:
        no_reserve = 0x4000  # MAP_NORESERVE, which mmap does not name before Python 3.13
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
        self.address, self.nbytes = ctypes.addressof(ctypes.c_char.from_buffer(self._map)), nbytes

    def __enter__(self) -> SparseMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()

    def view(self, position: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor on ``numel`` elements at byte ``position``; its storage is no larger than that."""
        return view(self.address + position, numel, dtype)


def view(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    raw = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype)


def _number(scalar: Any) -> int:
    """The value of a scalar of the interpreter."""
    return int(scalar.handle.data.item())


class FakePes:
    """Symmetric heaps of several PEs in one process, as seen by programs on PE ``me``; stands in for NVSHMEM.

    Non-blocking transfers happen at their own program's `quiet` and not before, in reverse order: a kernel that forgets
    to wait leaves wrong data, as on a real network. ``log`` has the transfers by program, ``quiet`` included.
    """

    def __init__(self, num_pes: int, heap_bytes: int, me: int) -> None:
        self._memory = torch.zeros(num_pes * heap_bytes + 64, dtype=torch.uint8)
        self._heap_bytes = heap_bytes
        self._base = -(-self._memory.data_ptr() // 64) * 64
        self.me = me
        self.log: list[tuple[Any, ...]] = []
        self.pending: dict[int, list[Callable[[], None]]] = {}
        self.most_pending = 0

    def tensor(self, pe: int, position: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        assert position + numel * dtype.itemsize <= self._heap_bytes
        return view(self._base + pe * self._heap_bytes + position, numel, dtype)

    def at(self, pe: int, address: int) -> int:
        """Where the object that is at ``address`` here is on ``pe``."""
        return address + (pe - self.me) * self._heap_bytes

    def install(self, module: ModuleType, monkeypatch: Any) -> None:
        for name in ("getmem_nbi_block", "putmem_nbi_block", "putmem_signal_block", "quiet"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(self, name))

    @staticmethod
    def program() -> int:
        from triton.runtime.interpreter import interpreter_builder

        return int(interpreter_builder.grid_idx[0])

    def _later(self, kind: str, to: int, source: int, nbytes: int, pe: int, low: int) -> None:
        queue = self.pending.setdefault(self.program(), [])
        queue.append(lambda: ctypes.memmove(to, source, nbytes) and None)
        self.most_pending = max(self.most_pending, len(queue))
        self.log.append((self.program(), kind, pe, low, nbytes))

    def getmem_nbi_block(self, local: Any, remote: Any, nbytes: Any, pe: Any) -> None:
        local, remote, nbytes, pe = map(_number, (local, remote, nbytes, pe))
        self._later("get", local, self.at(pe, remote), nbytes, pe, remote)

    def putmem_nbi_block(self, remote: Any, local: Any, nbytes: Any, pe: Any) -> None:
        remote, local, nbytes, pe = map(_number, (remote, local, nbytes, pe))
        self._later("put", self.at(pe, remote), local, nbytes, pe, remote)

    def putmem_signal_block(
        self, remote: Any, local: Any, nbytes: Any, signal: Any, value: Any, operation: Any, pe: Any
    ) -> None:
        remote, local, nbytes, signal, value, pe = map(_number, (remote, local, nbytes, signal, value, pe))
        self.log.append((self.program(), "signal", pe, remote, nbytes, operation.value))
        assert not any(self.pending.values()), "signalled while chunks of this put are still on their way"
        ctypes.memmove(self.at(pe, remote), local, nbytes)
        ctypes.c_int64.from_address(self.at(pe, signal)).value = value

    def quiet(self) -> None:
        for transfer in reversed(self.pending.pop(self.program(), [])):
            transfer()
        self.log.append((self.program(), "quiet"))


def some_of(*axes: Sequence[Any]) -> list[Any]:
    """All combinations, for ``parametrize``. Every run has those in which each value comes, and of three axes each pair
    of values; the others are extended."""
    fewest = min(map(len, axes))
    return [
        pytest.param(*(value for _, value in combination), marks=pytest.mark.extended if sum(places) % fewest else ())
        for combination in itertools.product(*map(enumerate, axes))
        for places in [[place for place, _ in combination]]
    ]


def numbers(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Of both signs and many magnitudes, none of them tidy in a narrower dtype."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, dtype=torch.float64, generator=generator)
    return (values * torch.logspace(-3, 3, numel, dtype=torch.float64)).to(dtype)


def shifted(values: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values, starting ``elements`` elements after a 64-byte boundary."""
    room = torch.zeros(values.numel() + elements + 64 // values.itemsize, dtype=values.dtype)
    start = -room.data_ptr() % 64 // values.itemsize + elements
    return room[start : start + values.numel()].copy_(values)
