"""Shared by all layers: nothing may be left behind by any test."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def _shared_memory() -> set[str]:
    """Files in /dev/shm, without semaphores (DataLoader workers') and without what other live test runs hold there.

    The tests run in two processes side by side, and torch names a file for a tensor in transit after its maker.
    """
    if not os.path.isdir("/dev/shm"):
        return set()
    names = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}
    return {name for name in names if not _another_runs(name)}


def _another_runs(name: str) -> bool:
    """Whether the file `torch_<pid>_...` was made by a live process that does not descend from this one."""
    match = re.match(r"torch_(\d+)_", name)
    if match is None:
        return False
    pid = int(match[1])
    if not Path(f"/proc/{pid}").exists():
        return not Path("/dev/shm", name).exists()  # gone together with its maker since the listing
    while pid not in (0, os.getpid()):
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended since, or an ancestor of the maker has
            return not Path("/dev/shm", name).exists()
    return pid != os.getpid()


def _odc_descriptors() -> set[str]:
    """memfds of ours that this process still holds."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(entry.readlink().as_posix())
    return {target for target in found if "memfd:odc-" in target}


def _odc_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name in ("odc-accumulation", "odc-copy")]


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


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No file in /dev/shm, no rank process, no daemon thread, no descriptor of ours after a test."""
    shared_memory = _shared_memory()
    yield
    _soon(lambda: _shared_memory() <= shared_memory)  # those of another run may be going just now
    assert _shared_memory() <= shared_memory
    if _odc_descriptors() or _odc_threads():
        gc.collect()  # tracebacks of expected failures hold on to buffers; too slow to do after every test
    assert not _odc_descriptors()
    assert not multiprocessing.active_children()
    assert not _odc_threads()
