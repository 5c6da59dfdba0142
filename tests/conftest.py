"""Shared by all layers: nothing may be left behind by any test."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def _odc_sockets() -> set[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.split()[-1] for line in lines if "@odc-" in line}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No file in /dev/shm, no listening socket, no daemon thread, no file descriptor of ours after a test."""
    shared_memory = _shared_memory()
    yield
    assert _shared_memory() <= shared_memory
    assert not _odc_sockets()
    assert not [t for t in threading.enumerate() if t.name == "odc-accumulation"]
