"""The real ``NvshmemHeap`` on a real OpenSHMEM: an nvshmem4py that stands on it, and its kernels in the interpreter.

What a kernel asks of NVSHMEM's device functions is done as late as their documentation permits: a transfer that does
not block happens when its stream comes to a ``quiet``, in reverse order. So a ``quiet`` that is missing is seen, also
where memory is shared and a put would be done at once.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases import _number, interpreted
from openshmem_heap import OpenshmemHeap, library

from odc.cuda import nvshmem
from odc.cuda.nvshmem import NvshmemHeap

SIGNAL_ADD, CMP_GE = 10, 5  # nvshmemx_signal_op_t and nvshmemx_cmp_type_t
_STATES = ("NOT_INITIALIZED", "IS_BOOTSTRAPPED", "IS_INITIALIZED", "LIMITED_MPG", "FULL_MPG")
_interpreter = threading.Lock()  # one for the process; streams are threads
_here = threading.local()  # what a stream has started and not completed


def _call(name: str, *arguments: int) -> int:
    OpenshmemHeap.calls[name] += 1
    return int(getattr(library(), name)(*arguments) or 0)


def _pending() -> list[Callable[[], object]]:
    if not hasattr(_here, "pending"):
        _here.pending = []
    pending: list[Callable[[], object]] = _here.pending
    return pending


# NVSHMEM's device functions


def getmem_nbi_block(local: Any, remote: Any, nbytes: Any, pe: Any) -> None:
    arguments = [_number(value) for value in (local, remote, nbytes, pe)]
    _pending().append(lambda: _call("shmem_getmem", *arguments))


def putmem_nbi_block(remote: Any, local: Any, nbytes: Any, pe: Any) -> None:
    arguments = [_number(value) for value in (remote, local, nbytes, pe)]
    _pending().append(lambda: _call("shmem_putmem_nbi", *arguments))


def putmem_signal_block(remote: Any, local: Any, nbytes: Any, signal: Any, value: Any, operation: Any, pe: Any) -> None:
    to, source, size, word, number, rank = map(_number, (remote, local, nbytes, signal, value, pe))
    assert not _pending(), "signalled while chunks of this put are still on their way"

    def put() -> None:
        _call("shmem_putmem_nbi", to, source, size, rank)
        _call("shmem_quiet")
        _call("shmem_long_atomic_set", word, number, rank)

    _pending().append(put)


def quiet() -> None:
    for transfer in reversed(_pending()):
        transfer()
    _pending().clear()
    _call("shmem_quiet")


class Modules:
    """In the place of ``KernelModules``: a launch is interpreted when its stream comes to it."""

    def __init__(self, run: Callable[[Callable[[], object]], None]) -> None:
        self._run = run

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
        def work() -> None:
            with _interpreter:
                kernel[grid](*arguments, **options)
            OpenshmemHeap.calls[kernel.__name__] += 1

        self._run(work)


# nvshmem4py


class Heap(NvshmemHeap):
    """The real one, but for what loads kernels into a GPU and asks torch for its streams."""

    current: Heap | None = None

    def __init__(self, transport: Any) -> None:
        fake = transport.fake
        super().__init__(torch.device("cpu"), fake.tensor, 30.0)
        self.run, self.waiting = fake.engine().run, OpenshmemHeap(fake.engine().run)
        Heap.current = self

    def _load_kernels(self) -> None:
        self._modules = Modules(self.run)

    @property
    def _stream(self) -> int:
        return 0


def _on_stream(work: Callable[[], object]) -> None:
    assert Heap.current is not None
    Heap.current.run(work)


def _signal_op(sig_addr: int, signal: int, sig_op: int, pe: int, cstrm: int) -> None:
    assert sig_op == SIGNAL_ADD
    _on_stream(lambda: _call("shmem_long_atomic_add", sig_addr, signal, pe))


def _signal_wait_until(sig_addr: int, cmp: int, cmp_value: int, cstream: int) -> None:
    assert cmp == CMP_GE
    assert Heap.current is not None
    Heap.current.waiting.wait(sig_addr, cmp_value)


@contextmanager
def nvshmem_on_openshmem() -> Iterator[SimpleNamespace]:
    """Until the end of the block; the modules of the interpreted kernels."""
    bindings: Any = types.ModuleType("nvshmem.bindings")
    bindings.Init_status = SimpleNamespace(**{f"STATUS_{name}": number for number, name in enumerate(_STATES)})
    bindings.Signal_op, bindings.Cmp_type = SimpleNamespace(SIGNAL_ADD=SIGNAL_ADD), SimpleNamespace(CMP_GE=CMP_GE)
    bindings.init_status = lambda: 2
    bindings.my_pe, bindings.n_pes = lambda: _call("shmem_my_pe"), lambda: _call("shmem_n_pes")
    bindings.ptr = lambda dest, pe: _call("shmem_ptr", dest, pe)
    bindings.signal_op_on_stream, bindings.signal_wait_until_on_stream = _signal_op, _signal_wait_until
    package: Any = types.ModuleType("nvshmem")
    package.bindings, package.core = bindings, types.ModuleType("nvshmem.core")
    package.core.get_version = lambda: None
    host = SimpleNamespace(nvshmem_calloc=library().shmem_calloc)
    with interpreted() as modules, pytest.MonkeyPatch.context() as patch:
        for name, module in (("nvshmem", package), ("nvshmem.bindings", bindings), ("nvshmem.core", package.core)):
            patch.setitem(sys.modules, name, module)
        for module in (modules.transfer, modules.signals):
            for function in (getmem_nbi_block, putmem_nbi_block, putmem_signal_block, quiet):
                if hasattr(module, function.__name__):
                    patch.setattr(module, function.__name__, function)
        patch.setattr(nvshmem, "ctypes", SimpleNamespace(**{**vars(nvshmem.ctypes), "CDLL": lambda name: host}))
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        yield modules
