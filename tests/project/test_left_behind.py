"""Layer 1: what the check behind every test sees: what descends from this process, and nothing of other programs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import own_shm
import pytest
from own_shm import shared_memory

LEAVE = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_bytes(b'left')"


@pytest.fixture
def left() -> Iterator[Path]:
    path = Path("/dev/shm", f"left-by-a-test-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_what_a_child_has_left_is_seen_after_its_death(left: Path) -> None:
    if not own_shm.is_private:
        pytest.skip("needs permission to mount a /dev/shm of its own (root)")
    subprocess.run([sys.executable, "-c", LEAVE, str(left)], check=True)
    assert left.name in shared_memory()


def test_what_another_program_leaves_is_not_seen(left: Path) -> None:
    """In the machine's own /dev/shm, or, where the tests share that one, by a process that is none of theirs."""
    if own_shm.outside is not None:
        enter = ["nsenter", f"--mount=/proc/{os.getpid()}/fd/{own_shm.outside}"]
        subprocess.run([*enter, sys.executable, "-c", LEAVE, str(left)], check=True)
        try:
            assert left.name not in shared_memory()
            assert subprocess.run([*enter, "test", "-e", str(left)], check=False).returncode == 0
        finally:
            subprocess.run([*enter, "rm", str(left)], check=True)
    else:
        left.write_bytes(b"")
        assert left.name not in shared_memory()


def test_files_are_known_by_their_maker_where_all_programs_share_the_room() -> None:
    names = [f"torch_{os.getpid()}_1_0", f"torch_{os.getppid()}_1_0", "torch_0_1_0", "another-program"]
    paths = [Path("/dev/shm", name) for name in names]
    try:
        for path in paths:
            path.write_bytes(b"")
        assert shared_memory(alone=False) & set(names) == {names[0]}
    finally:
        for path in paths:
            path.unlink()
