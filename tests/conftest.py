"""Shared by all layers: nothing may be left behind by any test."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from odc.bench.harness.warm_launch import WarmLauncher

import sharing  # noqa: F401  its tests find it, though this folder is on no path below

# `python -m pytest` puts the repository's root here, and pytest this file's folder. Both have folders named like the
# rooms, which would be found by a second name: `kernels` is what transformers calls a distribution that it looks for.
_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) not in (_HERE, os.path.dirname(_HERE))]

# Before anything imports torch. On few cores, threads of several processes that wait for one another busily take most
# of the time; torchrun sets the same.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_CLONE_NEWNS = 0x20000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_is_private = False
outside: int | None = None
"""The machine's own mount namespace, as a descriptor, where this process has left it."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not _is_private:
        leave_dev_shm()


def leave_dev_shm() -> None:
    """Give this process and all that descend from it a /dev/shm of their own, where the machine permits it (root).

    What is left there by any of them is then known to be theirs, and nothing that another program does is seen.
    """
    global _is_private, outside
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
    _is_private, outside = True, machine


def _mount(libc: ctypes.CDLL, *arguments: object) -> None:
    if libc.mount(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"mount{arguments}: {os.strerror(error)}")


def shared_memory(is_private: bool | None = None) -> set[str]:
    """Files in /dev/shm that this process, or one that descends from it, has made; without semaphores (DataLoader
    workers').

    Where /dev/shm is shared with other programs (``is_private`` false), only files named after a maker, as torch's for
    tensors in transit are, can be told from theirs.
    """
    if not os.path.isdir("/dev/shm"):
        return set()
    names = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}
    return names if (_is_private if is_private is None else is_private) else {n for n in names if _descends_maker(n)}


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


def _odc_descriptors() -> set[str]:
    """memfds of ours that this process still holds."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(entry.readlink().as_posix())
    return {target for target in found if "memfd:odc-" in target}


def _odc_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("odc-")]


def _soon(condition: Callable[[], bool]) -> None:
    """Give it some time to become true. What is left behind stays."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def pytest_sessionfinish() -> None:
    """Wait for multiprocessing's own helpers to end: no process may outlive the tests, not even for a moment."""
    from multiprocessing import forkserver, resource_tracker

    # Children that a failed test left hold the helpers' pipes, which would then be waited for without end.
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    # What CPython's own tests use; the fork server first, because it holds the tracker's pipe.
    for helper in (forkserver._forkserver, resource_tracker._resource_tracker):  # type: ignore[attr-defined]
        helper._stop()


@pytest.fixture(scope="session")
def warm_launcher() -> Iterator[WarmLauncher]:
    """For scripts that use torch and ODC and nothing else."""
    from odc.bench.harness.warm_launch import WarmLauncher  # only here: it imports torch

    libraries = ["torch._dynamo", "torch.distributed.fsdp", "odc.launch.main", "odc.transports.shm"]
    with contextlib.closing(WarmLauncher(libraries, {**os.environ, "ODC_TIMEOUT": "60"})) as launcher:
        yield launcher


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Collections, and looks at all objects, take the longer the more there are: what was there before a file is left
    out of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No file in /dev/shm, no rank process, no daemon thread, no descriptor of ours after a test."""
    before = shared_memory()
    yield
    _soon(lambda: shared_memory() <= before)  # of processes that are ending just now
    assert shared_memory() <= before
    if _odc_descriptors() or _odc_threads():
        gc.collect()  # tracebacks of expected failures hold on to buffers; too slow to do after every test
        _soon(lambda: not _odc_threads())  # those that end just now
    assert not _odc_descriptors()
    assert not multiprocessing.active_children()
    assert not _odc_threads()
