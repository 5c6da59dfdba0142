"""Shared by all layers: nothing may be left behind by any test."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def _odc_descriptors() -> set[str]:
    """memfds of ours that this process still holds."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(entry.readlink().as_posix())
    return {target for target in found if "memfd:odc-" in target}


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
    assert _shared_memory() <= shared_memory
    if _odc_descriptors():
        gc.collect()  # tracebacks of expected failures hold on to buffers; too slow to do after every test
    assert not _odc_descriptors()
    assert not multiprocessing.active_children()
    assert not [t for t in threading.enumerate() if t.name == "odc-accumulation"]
