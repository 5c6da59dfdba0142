"""Waiting for processes to come so far, and having them do something where they come."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from process_ranks import RankGroup
from process_ranks import wait_until as until


def wait_for_all(path: Path, world_size: int) -> None:
    """Return when each rank has made a file: this path and its number."""
    files = [Path(f"{path}{rank}") for rank in range(world_size)]
    until(lambda: all(file.exists() for file in files), f"not every rank has made {path.name}")


def written(path: Path) -> str:
    """The content of a file that another process writes, once it ends with a blank."""
    until(lambda: path.exists() and path.read_text().endswith(" "), f"{path.name} was not written")
    return path.read_text()


def do_before(owner: type, name: str, action: Callable[[], object]) -> None:
    """Have this process do something each time it comes to a method."""
    original = getattr(owner, name)

    def act(*args: Any) -> Any:
        action()
        return original(*args)

    setattr(owner, name, act)


@contextlib.contextmanager
def killed_on_error(group: RankGroup) -> Iterator[None]:
    try:
        yield
    except BaseException:
        group.join(0.0, expendable=range(len(group.pids)))
        raise


def scheduler_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
