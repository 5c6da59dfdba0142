"""Frames between ranks of different hosts, and sending and receiving them with non-blocking sockets.

A frame has a fixed header and, for some kinds, a payload of stated length. Only numbers are parsed, and every number is
checked before use. No pickle.
"""

from __future__ import annotations

import enum
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

import torch

HEADER = struct.Struct("=BxxxIQQQ")
KEY_BYTES = 16
WIRE_VERSION = 4  # of what travels between hosts, greetings included
MAX_TEXT_BYTES = 8192
MAX_RANKS = 1 << 24
CHUNK_BYTES = 4 << 20
"""At most so much is sent or received at a time, and is in one frame of an answer."""
_MOST_PIECES = 512  # of a call that sends; Linux takes 1024

Flat = TypeVar("Flat", memoryview, torch.Tensor)


def cut(parts: Sequence[Flat], start: int, length: int) -> Iterator[Flat]:
    """What lies in ``parts``, which are flat, from ``start`` on, if one is thought behind the other.

    >>> [bytes(piece) for piece in cut([memoryview(b"abc"), memoryview(b""), memoryview(b"defg")], 1, 4)]
    [b'bc', b'de']
    """
    for part in parts:
        piece = part[start : start + length]
        if len(piece):
            yield piece
        start, length = max(start - len(part), 0), length - len(piece)


class Kind(enum.IntEnum):
    """Kinds of frames, with the meaning of their numbers."""

    HELLO = 1  # number: rank; a: what the connection is for; b: the rank that is called; c: version; see _rendezvous
    POST = 2  # number: the poster's signal; a: 1 to wake the daemon
    WRITE = 3  # number: buffer; a: offset; b: bytes, which follow
    READ = 4  # number: buffer; a: offset; b: bytes; c: request
    DATA = 5  # a: offset in what was asked for; b: bytes, which follow; c: request
    STATUS = 6  # a: progress; b: the rank of the job that is waited for, plus 1; c: looks
    ABORT = 7  # b: bytes of text, which follow
    CLOSED = 8  # a: how
    WELCOME = 9  # the answer to HELLO
    REFUSED = 10  # or this one; b: bytes of text, which follow
    BYE = 11  # no POST and no WRITE comes behind it; READ is still answered
    REFUSAL = 12  # b: bytes of text, which follow: what the sender has refused of its own script; none: that is over


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
    def unpack(cls, data: bytes | bytearray) -> Frame:
        """Raises ValueError for a kind that does not exist."""
        kind, *numbers = HEADER.unpack(data)
        return cls(Kind(kind), *numbers)


# Receiving


def fill(target: memoryview, receive_into: Callable[[memoryview], int]) -> Iterator[None]:
    """Fill ``target`` as bytes come: yields when there are none for now, to be resumed when there are, and behind each
    chunk, so that other connections get their turn.

    Args:
        receive_into: ``recv_into`` of a socket that does not block.

    Raises:
        ConnectionError, OSError: the connection ended before.
    """
    room = CHUNK_BYTES
    while target:
        try:
            count = receive_into(target[:room])
        except BlockingIOError:
            room = 0
        else:
            if not count:
                raise ConnectionError("its connection ended")
            target, room = target[count:], room - count
        if target and not room:
            yield
            room = CHUNK_BYTES


def receive_until(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Exactly so many bytes, all of them before ``deadline`` on the monotonic clock.

    Raises:
        TimeoutError: they did not come in time.
        ConnectionError, OSError: the connection ended before.
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


# Sending


class Outgoing:
    """A frame on its way out, and those that follow it: each goes to the end of the queue when the one before is sent,
    so that a long answer lets others pass."""

    def __init__(
        self,
        frame: Frame,
        payload: Sequence[memoryview] = (),
        rest: Iterator[tuple[Frame, Sequence[memoryview]]] | None = None,
    ) -> None:
        self.header = memoryview(frame.pack())
        self.left = sum(map(len, payload))
        """Bytes of the payload."""
        self._payload, self._num_bytes = payload, self.left
        self.rest = rest

    @property
    def has_begun(self) -> bool:
        return len(self.header) < HEADER.size

    @property
    def is_sent(self) -> bool:
        return not self.header and not self.left

    def pieces(self) -> list[memoryview]:
        """What comes next, at most a chunk of it."""
        payload = cut(self._payload, self._num_bytes - self.left, CHUNK_BYTES)
        return [self.header, *islice(payload, _MOST_PIECES)]

    def advance(self, num_bytes: int) -> None:
        """So many bytes of it were sent."""
        of_header = min(num_bytes, len(self.header))
        self.header = self.header[of_header:]
        self.left -= num_bytes - of_header


class SendQueue:
    """Frames on their way out of one connection: each whole, in order, whichever thread sends them.

    A thread that waits until its frame is sent (between :meth:`enter` and :meth:`leave`) sends what is in front of it,
    too. What nobody waits for is sent by the thread that serves the connection, while no other one sends:
    :attr:`needs_service`.
    """

    def __init__(self, connection: socket.socket, ask_for_service: Callable[[], None]) -> None:
        """
        Args:
            connection: does not block.
            ask_for_service: called, by any thread, when :attr:`needs_service` has become true.
        """
        self._connection = connection
        self._fd = connection.fileno()
        self._ask_for_service = ask_for_service
        self._lock = threading.Lock()  # held for as long as it takes to copy a chunk
        self._frames: deque[Outgoing] = deque()
        self._awaited: set[Outgoing] = set()
        self._is_torn = False
        self.num_sent = 0
        """In bytes: grows while the other side takes something in."""
        self.problem: str | None = None
        """Why nothing is sent any more."""

    def enter(self, outgoing: Outgoing) -> None:
        """Put a frame at the end. The caller goes on to :meth:`send_some` until it is sent."""
        with self._lock:
            self._awaited.add(outgoing)
            if self.problem is None:
                self._frames.append(outgoing)

    def leave(self, outgoing: Outgoing) -> None:
        """Behind each :meth:`enter`."""
        with self._lock:
            self._awaited.discard(outgoing)
        # Not before the lock is free: what serve() finds it taken for is left to whoever has it.
        if self.needs_service:
            self._ask_for_service()

    def withdraw(self, outgoing: Outgoing) -> bool:
        """Send nothing more of a frame. Whether that spoils the connection, because some of it was sent."""
        with self._lock:
            if outgoing in self._frames:
                if outgoing.has_begun:
                    self._tear()
                else:
                    self._frames.remove(outgoing)
            return self._is_torn

    def put(self, outgoing: Outgoing) -> None:
        """Put a frame at the end for which nobody waits, and :meth:`serve`."""
        self._frames.append(outgoing)
        self.serve()

    @property
    def needs_service(self) -> bool:
        """Whether there are frames that no waiting thread sends."""
        return bool(self._frames) and not self._awaited

    def serve(self) -> None:
        """By the one thread that serves this connection, which waits for nothing: send a piece of what is in front, if
        there is room and nobody else is sending."""
        if self._lock.acquire(blocking=False):
            try:
                self._send_front()
            finally:
                self._lock.release()

    def send_some(self) -> bool:
        """Send a piece of what is in front; whether there was room for it. Does not wait for the other side."""
        with self._lock:
            return self._send_front()

    def _send_front(self) -> bool:
        if self.problem is not None or not self._frames:
            self._frames.clear()
            return False
        front = self._frames[0]
        try:
            count = self._connection.sendmsg(front.pieces(), (), socket.MSG_NOSIGNAL)
            self.num_sent += count
            front.advance(count)
            if front.is_sent:
                self._frames.popleft()
                following = None if front.rest is None else next(front.rest, None)
                if following is not None:
                    self._frames.append(Outgoing(*following, front.rest))
        except BlockingIOError:
            return False
        except OSError as problem:
            self.problem = f"its connection ended: {problem.strerror}"
            self._frames.clear()
            return False
        except BaseException:  # Ctrl-C: nobody knows how much was sent
            self._tear()
            raise
        return True

    def _tear(self) -> None:
        self._is_torn, self.problem = True, "a frame was given up in the middle"
        self._frames.clear()

    def wait_for_room(self, timeout_s: float) -> bool:
        """Whether there is some, or the connection has ended."""
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        """Nothing is sent any more, and nobody's payload is read."""
        with self._lock:
            self.problem = self.problem or "it was closed"
            self._frames.clear()
