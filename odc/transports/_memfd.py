"""Anonymous shared memory: memfd, reserved, sealed, mapped.

Not ``multiprocessing.shared_memory``: that leaves files behind on SIGKILL, unlinks them when a mere reader exits, and
dies of SIGBUS on a full /dev/shm. A memfd has no name to leak, does not count against the size of /dev/shm, is freed
with its last mapping, and ``posix_fallocate`` turns "no memory" into a clean error before anything is written.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import resource
import weakref
from pathlib import Path

import torch

from odc.errors import OUR_FAULT, SetupError

# From linux/fcntl.h; the names exist in the fcntl module only since Python 3.11 or on some builds.
_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_SEALS = 0x0001 | 0x0002 | 0x0004  # SEAL, SHRINK, GROW: nobody can cut the memory away under a reader
_MADV_DONTFORK = 10
_MAP_POPULATE = 0x8000
_MAP_FAILED = ctypes.c_void_p(-1).value
# (limit, usage) files of this process's control group as a container sees it, version 2 and version 1.
_CGROUP_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


@functools.cache
def libc() -> ctypes.CDLL:
    """The process's own C library. Calls release the GIL; ``ctypes.get_errno()`` has their errno."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def require_available(num_bytes: int, label: str) -> None:
    """Refuse what the machine has not got, before the kernel starts to hand out pages.

    A memfd has no size limit of its own: reserving more than there is would wake the OOM killer instead of failing.

    Raises:
        SetupError: ``num_bytes`` exceed the free memory of the machine or of this process's control group.
    """
    free = available_bytes()
    if free is not None and num_bytes > free:
        raise SetupError(
            f"cannot reserve {num_bytes / 2**20:.1f} MiB of shared memory for {label!r} on this host: "
            f"{free / 2**20:.1f} MiB are available. Free memory, raise the container's memory limit, or use more hosts."
        )


def available_bytes() -> int | None:
    """Memory that can be had now: the machine's, or less where a control group (a container) has a limit."""
    candidates = [_meminfo_available(), *(_cgroup_headroom(*files) for files in _CGROUP_FILES)]
    known = [value for value in candidates if value is not None]
    return min(known) if known else None


def _meminfo_available() -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_headroom(limit_file: Path, usage_file: Path) -> int | None:
    limit, usage = _lines(limit_file), _lines(usage_file)
    if not limit or not usage or not limit[0].isdigit():
        return None  # no control group here, or "max"
    return max(int(limit[0]) - int(usage[0]) + _reclaimable(limit_file.with_name("memory.stat")), 0)


def _reclaimable(stat_file: Path) -> int:
    """File cache that counts as usage but goes when memory is wanted (a checkpoint just read, say)."""
    for line in _lines(stat_file):
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def create(num_bytes: int, label: str) -> int:
    """A sealed memfd of ``num_bytes`` reserved zero bytes.

    Raises:
        SetupError: the machine has not that much memory.
    """
    fd = -1
    try:
        fd = os.memfd_create(f"odc-{label}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, num_bytes)
        os.posix_fallocate(fd, 0, num_bytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise SetupError(
            f"cannot reserve {num_bytes / 2**20:.1f} MiB of shared memory for {label!r}: {error.strerror}. "
            "Free memory, raise the container's memory limit, or use more ranks."
        ) from None
    return fd


def check(fd: int, num_bytes: int) -> None:
    """Refuse a received descriptor that could shrink under us or has the wrong size."""
    size, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, _F_GET_SEALS)
    if size != num_bytes or seals & _SEALS != _SEALS:
        raise SetupError(
            f"received a buffer of {size} bytes with seals {seals:#x}: expected {num_bytes}, sealed. {OUR_FAULT}"
        )


def map_bytes(fd: int, num_bytes: int) -> torch.Tensor:
    """Map a memfd, page tables filled, as a uint8 tensor; unmapped when the last tensor on it is gone.

    Not by Python's ``mmap``, which keeps a descriptor of its own: forked children inherit that, and a DataLoader worker
    would keep gigabytes alive after its parent died. The mapping itself is not inherited (``MADV_DONTFORK``).

    Raises:
        SetupError: the address space or the memory does not suffice.
    """
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_POPULATE
    address = libc().mmap(None, num_bytes, protection, flags, fd, 0)
    if address in (None, _MAP_FAILED):
        reason = os.strerror(ctypes.get_errno())
        raise SetupError(f"cannot map {num_bytes / 2**20:.1f} MiB of shared memory: {reason}{_address_space()}")
    libc().madvise(address, num_bytes, _MADV_DONTFORK)
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    # The tensor holds the array, the array's end unmaps. At interpreter exit the kernel does it.
    weakref.finalize(memory, _unmap, address, num_bytes, os.getpid()).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def _address_space() -> str:
    """What to do about it, if it may be the limit of address space."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return ""
    return f". The address space of a process is limited to {limit / 2**20:.0f} MiB here: `ulimit -v unlimited`"


def _unmap(address: int, num_bytes: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child has no such mapping: something of its own may lie there
        libc().munmap(address, num_bytes)
