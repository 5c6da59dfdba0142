"""The transport's small interface to NVSHMEM, implemented with nvshmem4py and ODC's kernels.

A process has one NVSHMEM: it is initialized once, by unique id over a process group, and its PEs are the ranks of that
group. Start, allocation, freeing and end are collective and have no time limit. This module adds a limit to start and
allocation. It never frees memory and never ends NVSHMEM, because an error path must not wait for a dead rank; the end
of the process does both.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from odc.config import NVSHMEM_IBGDA, ibgda_problem, nvshmem_folder, nvshmem_heap_bytes, set_nvshmem_heap_bytes
from odc.cuda import runtime
from odc.cuda.runtime import extra
from odc.errors import SetupError
from odc.kernels.nvshmem import find_bitcode
from odc.liveness.threads import HelperThread, Reminder
from odc.setup.agreement import Exchange, gather_json, together


def unavailable(device: torch.device) -> str | None:
    """Why this rank cannot use NVSHMEM on ``device``, or None. Makes no context, initialises nothing."""
    reason = runtime.unavailable(device)
    if reason is not None:
        return reason
    python_side = "is the Python side of NVSHMEM (nvshmem4py)"
    reason = (
        runtime.module_problem("nvshmem.bindings", python_side, extra())
        or runtime.module_problem("nvshmem.core", python_side, extra())
        or runtime.module_problem("cuda.core", "nvshmem4py takes devices from", extra(), needs="Device")
    )
    if reason is not None:
        return reason
    try:
        bitcode_for(device)
    except FileNotFoundError as problem:
        return str(problem)
    return None


def bitcode_for(device: torch.device) -> Path:
    """NVSHMEM's device library for a device: that of ``NVSHMEM_LIB_DIR``, or the installed one.

    Raises:
        FileNotFoundError: there is none; says what to install.
    """
    major, minor = torch.cuda.get_device_capability(device)
    return find_bitcode(f"sm_{major}{minor}", nvshmem_folder())


def heap_problem(needed_bytes: int, heap_bytes: int | None) -> str | None:
    """Why a heap of ``heap_bytes`` (None: not set by the user) will not do for ``needed_bytes``, or None."""
    if heap_bytes is None or heap_bytes >= needed_bytes:
        return None
    return (
        f"the NVSHMEM heap is too small: NVSHMEM_SYMMETRIC_SIZE={heap_bytes} ({heap_bytes / 2**20:.0f} MiB), and this "
        f"model on this many ranks needs NVSHMEM_SYMMETRIC_SIZE={needed_bytes} ({needed_bytes / 2**20:.0f} MiB). Set "
        "it to that, or unset it: ODC then asks for what it needs"
    )


logger = logging.getLogger("odc")

_ADVICE = (
    "A rank has not come so far, or hosts do not reach each other: NVSHMEM_DEBUG=INFO tells more, "
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME chooses the network"
)


@contextmanager
def time_limit(what: str, limit_s: float) -> Iterator[None]:
    """Warn of a call inside that takes long, and end this process if it has not returned after ``limit_s``.

    No exception could end it: the call is inside NVSHMEM, which never looks. The other ranks hang in the same call, or
    notice that this one is gone. The call must release the interpreter's lock.
    """
    returned = threading.Event()
    watch = HelperThread(_watch, "odc-nvshmem-limit", (returned, what, limit_s))
    watch.start()
    try:
        yield
    finally:
        returned.set()
        watch.join()


def _watch(returned: threading.Event, what: str, limit_s: float) -> None:
    started, reminder = time.monotonic(), Reminder()
    while not returned.wait(min(reminder.due_s, limit_s) - (time.monotonic() - started)):
        waited_s = time.monotonic() - started
        if waited_s >= limit_s and not returned.is_set():
            logger.critical("odc: %s has not returned for %.0f s; ending this process. %s", what, waited_s, _ADVICE)
            os._exit(1)
        if reminder.is_due(waited_s):
            logger.warning("odc: %s has not returned for %.0f s. %s", what, waited_s, _ADVICE)


_LIBRARY = "libnvshmem_host.so.3"  # which nvshmem4py has loaded
_MARGIN_BYTES = 64 << 20  # NVSHMEM keeps some of its heap for itself


class NvshmemHeap:
    """One process's part of the symmetric heap. Addresses are this process's own; PEs are ranks."""

    def __init__(self, device: torch.device, tensor: Callable[[int, int], torch.Tensor], timeout_s: float) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._tensor = tensor  # flat uint8 tensor on (address, bytes)
        self._pes: dict[tuple[int, ...], torch.Tensor] = {}
        self._modules: Any = None
        self._bindings: Any = None
        self._core: Any = None
        self._scratch: torch.Tensor | None = None  # the word that a put's own signal goes to
        self._ticket: torch.Tensor | None = None
        self._puts = 0

    # Set-up

    def start(self, exchange: Exchange, needed_bytes: int) -> None:
        """Initialise NVSHMEM with room for so many bytes more. Collective.

        Raises:
            SetupError: it cannot serve this group.
        """
        together(exchange, lambda: self._load(needed_bytes + _MARGIN_BYTES))
        if not all(gather_json(exchange, self._is_initialised())):
            self._initialise(exchange)
        together(exchange, self._require_own_gpu)
        self._require_own_pes(exchange)
        together(exchange, self._load_kernels)
        self._scratch = self._tensor(self.malloc(8), 8).view(torch.int64)
        self._ticket = torch.zeros(1, dtype=torch.int32, device=self._device)
        torch.cuda.synchronize(self._device)

    def _load(self, needed_bytes: int) -> None:
        """Load NVSHMEM, and see to it that its heap will be large enough."""
        refusal = ibgda_problem()
        if refusal is not None:
            raise SetupError(f"{refusal}. Unset {NVSHMEM_IBGDA} on all hosts: a thread of NVSHMEM drives the card then")
        try:
            import nvshmem.bindings
            import nvshmem.core

            self._bindings, self._core = nvshmem.bindings, nvshmem.core
            self._core.get_version()  # loads the library, which the bindings take for granted
        except Exception as problem:  # a package of another version, or the loader's own kinds of error
            raise SetupError(
                f"the NVSHMEM library cannot be loaded: {problem}. pip install {extra()}; `odc doctor` tells more"
            ) from problem
        if self._is_initialised():
            return
        heap_bytes = nvshmem_heap_bytes()
        refusal = heap_problem(needed_bytes, heap_bytes)
        if refusal is not None:
            raise SetupError(refusal)
        # In plain bytes, also what the user has set: over "1 GB", with a blank, NVSHMEM ends the process.
        set_nvshmem_heap_bytes(needed_bytes if heap_bytes is None else heap_bytes)

    def _is_initialised(self) -> bool:
        states = self._bindings.Init_status
        ready = (states.STATUS_IS_INITIALIZED, states.STATUS_LIMITED_MPG, states.STATUS_FULL_MPG)
        return int(self._bindings.init_status()) in [int(state) for state in ready]

    def _initialise(self, exchange: Exchange) -> None:
        """Start NVSHMEM by unique id. Collective, by NVSHMEM itself too."""
        if any(gather_json(exchange, self._is_initialised())):
            raise SetupError("NVSHMEM is running in the processes of some ranks and not of others: start all alike")
        is_first = exchange.rank == 0
        uid = together(exchange, lambda: self._unique_id(is_first))
        shared = exchange.all_gather(uid._data.tobytes() if is_first else b"")[0]
        uid._data.view(np.uint8)[:] = np.frombuffer(shared, dtype=np.uint8)
        device = together(exchange, self._own_device)
        with time_limit("NVSHMEM's start", self._timeout_s):
            self._init(device, uid, exchange)
        together(exchange, self._require_initialised)

    def _unique_id(self, is_first: bool) -> Any:
        """A new one on the first rank, room for it on the others."""
        try:
            return self._core.get_unique_id(empty=not is_first)
        except Exception as problem:  # nvshmem4py's own kinds of error
            raise SetupError(
                f"NVSHMEM finds no network to start by ({problem}; its reason is on standard error). "
                "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME chooses one (`ip addr` shows their names), else unset it"
            ) from problem

    def _own_device(self) -> Any:
        """This rank's GPU, as nvshmem4py wants it; the thread's current one from now on."""
        try:
            from cuda.core import Device

            own = Device(self._device.index)
            own.set_current()
        except Exception as problem:  # its own kinds of error, also of the loader of the driver
            raise SetupError(
                f"cuda.core, by which nvshmem4py is told the GPU, cannot use {self._device}: "
                f"{type(problem).__name__}: {problem}. pip install {extra()}; `odc doctor` tells more"
            ) from problem
        return own

    def _init(self, device: Any, uid: Any, exchange: Exchange) -> None:
        rank, size = exchange.rank, exchange.world_size
        try:
            self._core.init(device=device, uid=uid, rank=rank, nranks=size, initializer_method="uid")
        except Exception as problem:
            # At once, and not together: the others may be inside, where nothing but their time limit ends them.
            raise SetupError(
                f"NVSHMEM did not start: {problem}; its reason is on standard error, NVSHMEM_DEBUG=WARN tells more"
            ) from problem

    def _require_initialised(self) -> None:
        if not self._is_initialised():
            status = int(self._bindings.init_status())
            is_met = status == int(self._bindings.Init_status.STATUS_IS_BOOTSTRAPPED)
            what = "the ranks have met, but it cannot use their GPUs" if is_met else f"its status is {status}"
            raise SetupError(f"NVSHMEM did not start: {what}. NVSHMEM_DEBUG=WARN tells more")

    def _require_own_gpu(self) -> None:
        if int(self._bindings.init_status()) == int(self._bindings.Init_status.STATUS_LIMITED_MPG):
            raise SetupError(
                "several ranks share one GPU, where NVSHMEM works in a limited way only (its waits would end the "
                "process). Give each rank a GPU of its own, or start the MPS daemon; on one GPU use "
                "transport='cuda_ipc'"
            )

    def _require_own_pes(self, exchange: Exchange) -> None:
        pes = gather_json(exchange, [self._bindings.my_pe(), self._bindings.n_pes()])
        if pes != [[rank, exchange.world_size] for rank in range(exchange.world_size)]:
            raise SetupError(
                f"NVSHMEM is one per process and was started for another group: its PEs are {pes}, the ranks of this "
                f"one are 0 to {exchange.world_size - 1}. Shard all models of a process over the same ranks"
            )

    def _load_kernels(self) -> None:
        from odc.kernels.nvshmem import signals, transfer  # they need triton
        from odc.kernels.nvshmem.modules import KernelModules

        self._modules = KernelModules(bitcode_for(self._device), self._initialise_module)
        # Now: what a step would compile holds up all ranks, and takes seconds.
        self._modules.prepare([*transfer.aot_entries(), *signals.aot_entries()])

    def _initialise_module(self, module: int) -> None:
        code = self._bindings.cumodule_init(module)
        if code:
            raise SetupError(f"nvshmemx_cumodule_init failed with code {code}")

    def malloc(self, num_bytes: int) -> int:
        """Zeroed symmetric memory. Collective, in the same order on all ranks.

        Raises:
            SetupError: the heap has not that much.
        """
        # Not by nvshmem4py, which keeps the interpreter's lock meanwhile: nobody could watch the time.
        library = ctypes.CDLL(_LIBRARY)
        library.nvshmem_calloc.restype = ctypes.c_void_p
        library.nvshmem_calloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
        with time_limit(f"NVSHMEM's allocation of {num_bytes} bytes", self._timeout_s):
            address = int(library.nvshmem_calloc(1, num_bytes) or 0)
        if not address:
            raise SetupError(
                f"the NVSHMEM heap has no {num_bytes / 2**20:.1f} MiB left. Raise NVSHMEM_SYMMETRIC_SIZE by as much: "
                "it has to hold what all sessions of a process need, also of those that are closed"
            )
        return address

    def address_at(self, address: int, rank: int) -> int | None:
        """Where ``rank``'s copy can be read and written from here, or None: only by :meth:`get` and :meth:`put`."""
        return int(self._bindings.ptr(address, rank)) or None

    def announce(self, ranks: Sequence[int]) -> None:
        """In set-up: :meth:`get` will be called for these ranks."""
        if tuple(ranks) not in self._pes:
            self._pes[tuple(ranks)] = torch.tensor(ranks, dtype=torch.int32, device=self._device)
            torch.cuda.synchronize(self._device)  # in the step another stream could read it before it is filled

    # On the current stream

    def get(self, out: torch.Tensor, own: torch.Tensor, ranks: Sequence[int]) -> None:
        """Row i of ``out`` from ``ranks[i]``'s copy of what ``own`` is here. Both are flat, of bytes, in the heap."""
        from odc.kernels.nvshmem.transfer import gather_from_pes

        # "rank" is the row after which the kernel begins: the last one, so that it takes them in their order.
        gather_from_pes(self._modules, out, own, self._pes[tuple(ranks)], rank=len(ranks) - 1)

    def put(self, source: torch.Tensor, own: torch.Tensor, rank: int) -> None:
        """Put ``source`` to ``rank``'s copy of what ``own`` is here; it is there when this is done. Both are flat, of
        bytes, in the heap."""
        from odc.kernels.nvshmem.signals import quiet_on_stream
        from odc.kernels.nvshmem.transfer import put_with_signal

        assert self._scratch is not None
        assert self._ticket is not None
        self._puts += 1
        put_with_signal(self._modules, source, own, self._scratch, self._puts, self._ticket, pe=rank)
        quiet_on_stream(self._modules, self._device)

    @property
    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def signal(self, address: int, rank: int) -> None:
        """Add one to the 64-bit word at ``rank``'s copy of ``address``. (Numbers could overtake each other.)"""
        operation = int(self._bindings.Signal_op.SIGNAL_ADD)
        self._bindings.signal_op_on_stream(address, 1, operation, rank, self._stream)

    def wait(self, address: int, value: int) -> None:
        """The stream goes on when the word here has reached ``value``."""
        reached = int(self._bindings.Cmp_type.CMP_GE)
        self._bindings.signal_wait_until_on_stream(address, reached, value, self._stream)
