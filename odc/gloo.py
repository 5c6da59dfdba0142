"""Ending collectives of gloo that wait for a rank which will not come.

Torch has no way to take one back: ``abort()`` does not wake who waits (torch 2.9 to 2.13), a time limit of the process
group is thirty minutes by default, and a process whose collective is pending cannot even end, because the destructor of
the group joins the thread that waits. But gloo ends with an error as soon as its connections do.

[Note: Gloo's connections] Gloo's loop thread watches them with an epoll instance, in which there are also its listening
socket and a pipe that wakes it, and nothing else. Libraries with a loop of their own wake it by an eventfd or a socket
pair (libuv, asyncio, gRPC, ZeroMQ), so such an instance is gloo's, and the connections in it are those of this
process's process groups.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

_FDS, _FDINFO = Path("/proc/self/fd"), Path("/proc/self/fdinfo")
_WATCHED = re.compile(r"^tfd:\s*(\d+)\s.*\bino:([0-9a-f]+)", re.MULTILINE)


def end_connections() -> int:
    """Shut down every connection of gloo in this process; how many there were.

    Collectives that are under way or begin later raise "Connection closed by peer", here and at the other ranks. Never
    raises.
    """
    ended = 0
    for watched in _loops():
        for fd, inode in watched.items():
            ended += _shut_down(fd, inode)
    return ended


def num_connections() -> int | None:
    """How many connections of gloo there are in this process, which closes those whose other end has ended; None where
    there is no descriptor left to look with."""
    try:
        return sum(_is_connection(fd) for watched in _loops() for fd in watched)
    except OSError as problem:
        if problem.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return None


def _is_connection(fd: int) -> bool:
    with contextlib.suppress(OSError), _as_socket(fd) as connection:
        connection.getpeername()
        return True
    return False


@contextlib.contextmanager
def _as_socket(fd: int) -> Iterator[socket.socket]:
    """Raises OSError if it is none."""
    copy = os.dup(fd)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with connection:
        yield connection


def is_of_collective(error: BaseException) -> bool:
    """Whether a process group has raised it. Gloo's errors have no type of their own: they name its source files."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def _loops() -> list[dict[int, int]]:
    """Descriptors and inodes that each loop of gloo watches. See [Note: Gloo's connections]."""
    found = []
    for name in os.listdir(_FDS):
        with contextlib.suppress(OSError):  # closed since it was listed
            if os.readlink(_FDS / name) != "anon_inode:[eventpoll]":
                continue
            watched = {int(fd): int(inode, 16) for fd, inode in _WATCHED.findall((_FDINFO / name).read_text())}
            kinds = [os.readlink(_FDS / str(fd)).partition(":")[0] for fd in watched]
            if kinds.count("pipe") == 1 and kinds.count("socket") == len(kinds) - 1:
                found.append(watched)
    return found


def _shut_down(fd: int, inode: int) -> bool:
    """Whether ``fd`` was a connection, and still the one that was meant."""
    # An OSError: it is a pipe, it listens, or it has ended already.
    with contextlib.suppress(OSError), _as_socket(fd) as connection:
        if os.fstat(connection.fileno()).st_ino == inode:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False
