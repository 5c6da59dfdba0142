"""What travels between two ranks of different hosts: a fixed header, and for some kinds a payload of stated length.

Nothing is parsed but numbers, and every number is checked where it is used. No pickle.
"""

from __future__ import annotations

import enum
import socket
import struct
import time
from typing import NamedTuple

HEADER = struct.Struct("=BxxxIQQQ")
KEY_BYTES = 16
MAX_TEXT_BYTES = 8192
MAX_RANKS = 1 << 24


class Kind(enum.IntEnum):
    """Kinds of frames, with the meaning of their numbers."""

    HELLO = 1  # number: rank; a: what the connection is for; b: the rank that is called; c: version; see _links
    POST = 2  # number: signal; a: 1 for the daemon's doorbell
    WRITE = 3  # number: buffer; a: offset; b: bytes, which follow
    READ = 4  # number: buffer; a: offset; b: bytes; c: request
    DATA = 5  # a: offset in what was asked for; b: bytes, which follow; c: request
    STATUS = 6  # a: progress; b: the rank of the job that is waited for, plus 1; c: looks
    ABORT = 7  # b: bytes of text, which follow
    CLOSED = 8  # a: how
    WELCOME = 9  # the answer to HELLO
    REFUSED = 10  # or this one; b: bytes of text, which follow
    BYE = 11  # no POST and no WRITE comes behind it; READ is still answered


class Frame(NamedTuple):
    """A header."""

    kind: Kind
    number: int = 0
    a: int = 0
    b: int = 0
    c: int = 0

    def pack(self) -> bytes:
        return HEADER.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Frame:
        """Raises ValueError for a kind that does not exist."""
        kind, *numbers = HEADER.unpack(data)
        return cls(Kind(kind), *numbers)


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill ``target``.

    Raises:
        ConnectionError, OSError: the connection ended before.
    """
    while target:
        count = connection.recv_into(target)
        if not count:
            raise ConnectionError("its connection ended")
        target = target[count:]


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Exactly so many bytes; see :func:`receive_into`."""
    data = bytearray(num_bytes)
    receive_into(connection, memoryview(data))
    return bytes(data)


def receive_until(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """As :func:`receive`, all of it before ``deadline`` on the monotonic clock.

    Raises:
        TimeoutError: it did not come in time.
    """
    data = b""
    while len(data) < num_bytes:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise ConnectionError("its connection ended")
        data += part
        if time.monotonic() > deadline:
            raise TimeoutError
    return data
