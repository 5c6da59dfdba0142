"""End gloo collectives that wait for a rank that will not come.

Torch cannot cancel such a collective: ``abort()`` does not wake the waiting thread (torch 2.9 to 2.13), the default
timeout of a process group is thirty minutes, and a process with a pending collective cannot even end, because the
group's destructor joins the waiting thread. But gloo's collectives fail as soon as its connections are closed.

[Note: Gloo's connections] Gloo's loop thread watches its connections with an epoll instance. Other libraries have such
instances too, with pipes and sockets that must not be touched. Gloo's instance is recognized by the user data of its
entries: gloo stores there the address of the C++ object that handles the entry. This object begins with the address of
its virtual function table, and before that table is the address of the type description, which torch exports. The user
data of other event loops (a descriptor, a number, another object) does not lead there. Memory is read through the
kernel, which refuses unmapped addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

_FDS, _FDINFO, _MEMORY = Path("/proc/self/fd"), Path("/proc/self/fdinfo"), Path("/proc/self/mem")
_WATCHED = re.compile(r"^tfd:\s*(\d+)\s.*\bdata:\s*([0-9a-f]+)\s.*\bino:([0-9a-f]+)", re.MULTILINE)
_TYPES = ("_ZTIN4gloo9transport3tcp4PairE", "_ZTIN4gloo9transport3tcp3tls4PairE")
"""Descriptions of ``gloo::transport::tcp::Pair`` and, where torch is built with it, ``...::tcp::tls::Pair``."""
_POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)


def end_connections() -> int:
    """Shut down every connection of gloo in this process, and nothing else; how many there were.

    Collectives that are under way or begin later raise "Connection closed by peer", here and at the other ranks. Never
    raises.

    Where gloo's connections cannot be told apart for certain (no /proc, or a torch that does not export their type),
    none is shut down. A collective then ends when the process of a rank in it does, or at the time limit of its process
    group.
    """
    ended = 0
    with contextlib.suppress(OSError):  # nothing to look with: see num_connections
        for connection in _connections():
            with contextlib.suppress(OSError):  # it has ended since
                connection.shutdown(socket.SHUT_RDWR)
                ended += 1
    return ended


def num_connections() -> int | None:
    """How many connections of gloo there are in this process, which closes those whose other end has ended; None where
    there is nothing to look with: no descriptor left, or no /proc."""
    try:
        return sum(1 for _ in _connections())
    except OSError:
        return None


def num_entered(group: dist.ProcessGroup | None) -> int:
    """How many collectives of ``group`` this rank has entered; 0 where its backend does not count, or there is none."""
    with contextlib.suppress(RuntimeError):
        return 0 if group is None else int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    return 0


def is_of_collective(error: BaseException) -> bool:
    """Whether a process group has raised it. Gloo's errors have no type of their own: they name its source files."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def _connections() -> Iterator[socket.socket]:
    """Those that are connected, each with a descriptor of its own that is closed before the next one.

    Raises:
        OSError: there is no descriptor left to look with, or no /proc.
    """
    for fd, inode in _watched():
        with _unless_closed():
            copy = os.dup(fd)
            if os.fstat(copy).st_ino != inode:  # the number has come to mean something else
                os.close(copy)
                continue
            with socket.socket(fileno=copy) as connection:
                if _is_connected(connection):
                    yield connection


def _is_connected(connection: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        connection.getpeername()
        return True
    return False


def _watched() -> list[tuple[int, int]]:
    """Descriptor and inode of every connection that gloo's loops watch. See [Note: Gloo's connections]."""
    found = []
    for name in os.listdir(_FDS):
        with _unless_closed():
            if os.readlink(_FDS / name) != "anon_inode:[eventpoll]":
                continue
            entries = _WATCHED.findall((_FDINFO / name).read_text())
            with _MEMORY.open("rb", buffering=0) as memory:
                found += [
                    (int(fd), int(inode, 16))
                    for fd, handler, inode in entries
                    if _is_of_gloo(memory.fileno(), int(handler, 16))
                ]
    return found


@contextlib.contextmanager
def _unless_closed() -> Iterator[None]:
    """Go on without a descriptor that has been closed since it was listed."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in (errno.ENOENT, errno.EBADF):
            raise


def _is_of_gloo(memory: int, handler: int) -> bool:
    """Whether ``handler`` is the address of a connection of torch's gloo; ``memory`` is this process's."""
    try:
        return _word(memory, _word(memory, handler) - _POINTER_BYTES) in _types()
    except (OSError, OverflowError):  # no address
        return False


def _word(memory: int, address: int) -> int:
    return int.from_bytes(os.pread(memory, _POINTER_BYTES, address), sys.byteorder)


@functools.cache
def _types() -> frozenset[int]:
    """Addresses of what :data:`_TYPES` names. None where torch does not export it."""
    library = ctypes.CDLL(torch._C.__file__)  # and what it is linked to
    found = set()
    for name in _TYPES:
        with contextlib.suppress(ValueError):
            found.add(ctypes.addressof(ctypes.c_char.in_dll(library, name)))
    return frozenset(found)
