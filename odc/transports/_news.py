"""News between two ranks of different hosts: how they are doing, what has failed, that one has closed.

A few bytes a second, on a connection of their own. They never fill the other side's buffer. Whether the other host is
there at all is seen on a third connection, its pulse. Slow is not dead: a rank that computes, is stopped, or holds its
interpreter's lock has a pulse, which is its kernel's.

[Note: Nothing is sent on the pulse] While something is under way on a connection, the kernel sends it again after 0.2,
0.4, 0.8, ... seconds. After four seconds without a network the next attempt may come seconds after the network has come
back, so no limit of a few seconds tells a short cut from a lasting one. Where nothing is under way the kernels ask for
one another every second instead (keep-alive), however long there was no answer, and what is asked needs no process.
"""

from __future__ import annotations

import errno
import socket
import threading
from typing import Protocol

from odc.transports._frames import HEADER, MAX_RANKS, MAX_TEXT_BYTES, Frame, Kind

# Asked a second after the last answer, and every second; lost a second after the sixth question without an answer. So
# five seconds without a network change nothing, and seven (and some milliseconds of the kernel's timers) end the link.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 6))
_NEWS_SILENCE_MS = 60_000  # should the pulse be cut off by something that lets news through
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN)
NO_SIGN_OF_LIFE = "no sign of life from its host or the network"
_LARGEST = {Kind.STATUS: MAX_RANKS, Kind.ABORT: MAX_TEXT_BYTES, Kind.CLOSED: MAX_TEXT_BYTES}


class Listener(Protocol):
    """Who is interested."""

    def hear(self, frame: Frame, text: bytes) -> None:
        """A piece of news has come; ``text`` is that of an abort notice."""
        ...

    def news_ended(self, reason: str, *, is_lost: bool = False) -> None:
        """There will be no more; ``is_lost``: nor of anything else."""
        ...


class News:
    """One side of the connection. Read by one thread, told by any."""

    def __init__(self, connection: socket.socket, listener: Listener) -> None:
        self._connection = connection
        self._listener = listener
        self._telling = threading.Lock()
        self._heard = b""  # what is no whole frame yet
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _NEWS_SILENCE_MS)

    def fileno(self) -> int:
        return self._connection.fileno()

    def read(self) -> bool:
        """Take in what has come; whether more can come. Never waits."""
        try:
            data = self._connection.recv(1 << 16, socket.MSG_DONTWAIT)
            if not data:
                raise ConnectionError("its connection ended")
            self._heard += data
            while self._hear_one():
                continue
        except BlockingIOError:
            return True
        except (OSError, ValueError) as problem:
            is_lost = _is_silence(problem)
            self._listener.news_ended(NO_SIGN_OF_LIFE if is_lost else str(problem), is_lost=is_lost)
            return False
        return True

    def _hear_one(self) -> bool:
        """Pass on the first whole frame, if there is one."""
        if len(self._heard) < HEADER.size:
            return False
        frame = Frame.unpack(self._heard[: HEADER.size])
        if frame.b > _LARGEST.get(frame.kind, -1):
            raise ValueError(f"it sent news of kind {frame.kind.name} with {frame.b}, which cannot be")
        end = HEADER.size + (frame.b if frame.kind is Kind.ABORT else 0)
        if len(self._heard) < end:
            return False
        text, self._heard = self._heard[HEADER.size : end], self._heard[end:]
        self._listener.hear(frame, text)
        return True

    def tell(self, frame: Frame, text: bytes = b"") -> None:
        """Send; never waits, never raises. There is always room, unless the other side has long been lost."""
        data = frame.pack() + text
        with self._telling:
            try:
                sent = self._connection.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                return  # read() finds out why
        if sent < len(data):
            self._listener.news_ended("it has not taken in news for long", is_lost=True)

    def close(self) -> None:
        self._connection.close()


class Pulse:
    """One side of the connection on which nothing is sent."""

    def __init__(self, connection: socket.socket, listener: Listener) -> None:
        self._connection = connection
        self._listener = listener
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        return self._connection.fileno()

    def read(self) -> bool:
        """Whether it is still there. Never waits. If the other rank has ended, its news say so."""
        try:
            if self._connection.recv(1, socket.MSG_DONTWAIT):
                self._listener.news_ended("it sent something where nothing belongs")
        except BlockingIOError:
            return True
        except OSError as problem:
            if _is_silence(problem):
                self._listener.news_ended(NO_SIGN_OF_LIFE, is_lost=True)
        return False

    def close(self) -> None:
        self._connection.close()


def _is_silence(problem: Exception) -> bool:
    return isinstance(problem, OSError) and problem.errno in _SILENT
