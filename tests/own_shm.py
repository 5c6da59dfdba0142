"""A /dev/shm of the tests' own, and what is left there.

A module of its own because each folder's conftest is loaded under the one name ``conftest``.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

_CLONE_NEWNS = 0x20000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
is_private = False
outside: int | None = None
"""The machine's own mount namespace, as a descriptor, where this process has left it."""


def leave_dev_shm() -> None:
    """Give this process and all that descend from it a /dev/shm of their own, where the machine permits it (root).

    What is left there by any of them is then known to be theirs, and nothing that another program does is seen.
    """
    global is_private, outside
    libc, room = ctypes.CDLL(None, use_errno=True), Path("/dev/shm")
    if not room.is_dir():
        return
    machine = os.open("/proc/self/ns/mnt", os.O_RDONLY) if outside is None else outside
    if libc.unshare(_CLONE_NEWNS) != 0:
        if outside is None:
            os.close(machine)
        return
    size = os.statvfs(room).f_blocks * os.statvfs(room).f_frsize
    _mount(libc, None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    _mount(libc, b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={size},mode=1777".encode())
    is_private, outside = True, machine


def _mount(libc: ctypes.CDLL, *arguments: object) -> None:
    if libc.mount(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"mount{arguments}: {os.strerror(error)}")


def shared_memory(alone: bool | None = None) -> set[str]:
    """Files in /dev/shm that this process, or one that descends from it, has made; without semaphores (DataLoader
    workers').

    Where /dev/shm is shared with other programs (``alone`` false), only files named after a maker, as torch's for
    tensors in transit are, can be told from theirs.
    """
    if not os.path.isdir("/dev/shm"):
        return set()
    names = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}
    return names if (is_private if alone is None else alone) else {n for n in names if _descends_maker(n)}


def _descends_maker(name: str) -> bool:
    """Whether the maker of the file `torch_<pid>_...` is this process or descends from it. One that is dead may have
    been anybody's."""
    match = re.match(r"torch_(\d+)_", name)
    pid = int(match[1]) if match else 0
    while pid not in (0, os.getpid()):
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended since, or an ancestor of the maker has
            return False
    return pid == os.getpid()
