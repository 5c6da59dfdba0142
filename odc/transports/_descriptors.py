"""File descriptors: whether there are enough, before any is taken."""

from __future__ import annotations

import os
import resource

from odc.errors import SetupError

PER_PEER = 3  # pidfd, and during set-up a socket and a passed descriptor
PER_LINK = 3
SPARE = 32  # more than strangers at the door can hold
_FOLDER = "/proc/self/fd"
_GUESS = 64  # where there is no such folder


def require_descriptors(num_here: int, num_elsewhere: int = 0, *, now: int | None = None) -> None:
    """For a group with so many ranks on this host, and on others.

    Args:
        now: how many have to be free at present; default: all that will be needed.

    Raises:
        SetupError: the process may not have so many beside those in use.
    """
    needed = PER_PEER * num_here + PER_LINK * num_elsewhere + SPARE
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return
    used = _num_used(limit)
    if used + (needed if now is None else now) > limit:
        raise SetupError(
            f"too few file descriptors: {used} in use, {needed} needed, limit {limit}. Raise it with "
            f"`ulimit -n {max(4096, used + needed)}`."
        )


def _num_used(limit: int) -> int:
    if not os.path.isdir(_FOLDER):
        return _GUESS
    try:
        return len(os.listdir(_FOLDER))
    except OSError:
        return limit  # none is left to look with
