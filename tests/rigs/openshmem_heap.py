"""An NVSHMEM heap on a real OpenSHMEM: what the ``nvshmem`` transport asks of one, done by Open MPI's on host memory.

NVSHMEM is OpenSHMEM for GPUs: symmetric addresses, put, get, quiet, atomic additions, ``ptr``. Here the library behind
these calls is not ours: it looks up every symmetric address itself and refuses what does not lie in its heap. Streams
are those of ``bench/fake``. What this cannot show: that NVSHMEM, its kernels and a network do the same.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import torch

from odc.setup.agreement import Exchange, gather_json

VARIABLE = "ODC_TEST_OPENSHMEM"
_LIBRARY = "liboshmem.so.40"
_THREAD_MULTIPLE = 3
_CMP_GE = 5
_ADDRESS, _SIZE, _PE, _LONG = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_long
_PROTOTYPES = {
    "shmem_init_thread": (_PE, [_PE, ctypes.POINTER(ctypes.c_int)]),
    "shmem_my_pe": (_PE, []),
    "shmem_n_pes": (_PE, []),
    "shmem_calloc": (_ADDRESS, [_SIZE, _SIZE]),
    "shmem_ptr": (_ADDRESS, [_ADDRESS, _PE]),
    "shmem_addr_accessible": (_PE, [_ADDRESS, _PE]),
    "shmem_getmem": (None, [_ADDRESS, _ADDRESS, _SIZE, _PE]),
    "shmem_putmem_nbi": (None, [_ADDRESS, _ADDRESS, _SIZE, _PE]),
    "shmem_quiet": (None, []),
    "shmem_long_atomic_add": (None, [_ADDRESS, _LONG, _PE]),
    "shmem_long_atomic_set": (None, [_ADDRESS, _LONG, _PE]),
    "shmem_long_test": (_PE, [_ADDRESS, _PE, _LONG]),
    "shmem_finalize": (None, []),
}


def launcher() -> str | None:
    """Where ``oshrun`` is, or None."""
    return shutil.which("oshrun", path=launch_environment()["PATH"])


def why_not() -> str | None:
    """Why there is no OpenSHMEM here, or None."""
    if launcher() is not None:
        return None
    return (
        "Open MPI's OpenSHMEM is not installed (Debian: openmpi-bin with libopenmpi3); "
        f"{VARIABLE} names a folder with the unpacked packages"
    )


def launch_environment() -> dict[str, str]:
    """For ``oshrun`` and what it starts; where packages were unpacked into a folder, with what is found by path."""
    environment = {
        "PATH": os.defpath,
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_memory": "^patcher",  # it would put itself before the allocators of torch
        "OMPI_MCA_mca_base_component_show_load_errors": "0",  # of network cards that are not here
        "SHMEM_SYMMETRIC_SIZE": "1G",
        "OMP_NUM_THREADS": "1",
    }
    folder = os.environ.get(VARIABLE)
    if not folder:
        return environment
    usr = Path(folder).resolve() / "usr"
    libraries = usr / "lib" / f"{platform.machine()}-linux-gnu"
    openmpi = libraries / "openmpi/lib"
    return environment | {
        "PATH": f"{usr / 'bin'}:{environment['PATH']}",
        "LD_LIBRARY_PATH": f"{libraries}:{openmpi}",
        "OPAL_PREFIX": str(usr),
        "OPAL_LIBDIR": str(openmpi),
        "OPAL_PKGLIBDIR": str(openmpi / "openmpi3"),
        "OPAL_PKGDATADIR": str(usr / "share/openmpi"),
        "OPAL_SYSCONFDIR": str(usr.parent / "etc/openmpi"),
        "PMIX_INSTALL_PREFIX": str(usr),
        "PMIX_PKGLIBDIR": str(libraries / "pmix2/lib/pmix"),
        "UCX_MODULE_DIR": str(libraries / "ucx"),
    }


@functools.cache
def library() -> ctypes.CDLL:
    """OpenSHMEM, started: one per process, as NVSHMEM. Collective the first time."""
    shmem = ctypes.CDLL(_LIBRARY, mode=ctypes.RTLD_GLOBAL)
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(shmem, name)
        function.restype, function.argtypes = result, arguments
    provided = ctypes.c_int()
    assert shmem.shmem_init_thread(_THREAD_MULTIPLE, ctypes.byref(provided)) == 0
    assert provided.value == _THREAD_MULTIPLE, "the daemon and the script call from threads of their own"
    return shmem


class OpenshmemHeap:
    """A :class:`odc.cuda.nvshmem.NvshmemHeap`. ``run`` hands work to the current stream."""

    wait_limit_s: ClassVar[float] = 20.0
    calls: ClassVar[Counter[str]] = Counter()
    """Of all heaps of this process, by function of the library."""

    def __init__(self, run: Callable[[Callable[[], object]], None]) -> None:
        self._run = run
        self._rank = 0
        self._groups: list[list[int]] = []

    def _call(self, name: str, *arguments: int) -> int:
        self.calls[name] += 1
        return int(getattr(library(), name)(*arguments) or 0)

    def start(self, exchange: Exchange, needed_bytes: int) -> None:
        pes = gather_json(exchange, [self._call("shmem_my_pe"), self._call("shmem_n_pes")])
        assert pes == [[rank, exchange.world_size] for rank in range(exchange.world_size)]
        self._rank = exchange.rank

    def malloc(self, num_bytes: int) -> int:
        address = self._call("shmem_calloc", 1, num_bytes)
        assert address, f"the heap has no {num_bytes} bytes left"
        return address

    def address_at(self, address: int, rank: int) -> int | None:
        return self._call("shmem_ptr", address, rank) or None

    def announce(self, ranks: Sequence[int]) -> None:
        self._groups.append(list(ranks))

    def _require_symmetric(self, address: int) -> None:
        assert self._call("shmem_addr_accessible", address, self._rank), f"{address:#x} does not lie in the heap"

    def get(self, out: torch.Tensor, own: torch.Tensor, ranks: Sequence[int]) -> None:
        assert list(ranks) in self._groups, f"{ranks} were not announced"
        size = own.numel()
        assert out.numel() == size * len(ranks)
        target, source = out.data_ptr(), own.data_ptr()
        self._require_symmetric(target)

        def work() -> None:
            for row, rank in enumerate(ranks):
                self._call("shmem_getmem", target + row * size, source, size, rank)

        self._run(work)

    def put(self, source: torch.Tensor, own: torch.Tensor, rank: int) -> None:
        assert own.numel() == source.numel()
        target, address, size = own.data_ptr(), source.data_ptr(), source.numel()
        self._require_symmetric(address)

        def work() -> None:
            self._call("shmem_putmem_nbi", target, address, size, rank)
            self._call("shmem_quiet")

        self._run(work)

    def signal(self, address: int, rank: int) -> None:
        self._run(lambda: self._call("shmem_long_atomic_add", address, 1, rank))

    def wait(self, address: int, value: int) -> None:
        self._run(lambda: self._wait(address, value))

    def _wait(self, address: int, value: int) -> None:
        deadline = time.monotonic() + self.wait_limit_s
        while not self._call("shmem_long_test", address, _CMP_GE, value):
            if time.monotonic() > deadline:
                raise TimeoutError(f"a stream waited {self.wait_limit_s} s for {value}")
            time.sleep(20e-6)
