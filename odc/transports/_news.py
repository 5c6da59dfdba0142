"""News between two ranks of different hosts: how they are doing, what has failed, that one has closed.

A few bytes a second, on a connection of their own. They never fill the other side's buffer, so the kernel of a rank
that computes, is stopped, or holds its interpreter's lock acknowledges them all the same; five seconds without an
acknowledgement mean that its host or the network is gone. Slow is not dead.
"""

from __future__ import annotations

import socket
import threading
from typing import Protocol

from odc.transports._frames import HEADER, MAX_TEXT_BYTES, Frame, Kind

_SILENCE_MS = 5000
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 5))
_KINDS = (Kind.STATUS, Kind.ABORT, Kind.CLOSED)


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

    def __init__(self, connection: socket.socket, listener: Listener, world_size: int) -> None:
        self._connection = connection
        self._listener = listener
        self._largest = max(MAX_TEXT_BYTES, world_size)
        self._telling = threading.Lock()
        self._heard = b""  # what is no whole frame yet
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)

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
        except TimeoutError:
            self._listener.news_ended("no sign of life from its host or the network", is_lost=True)
            return False
        except (OSError, ValueError) as problem:
            self._listener.news_ended(str(problem))
            return False
        return True

    def _hear_one(self) -> bool:
        """Pass on the first whole frame, if there is one."""
        if len(self._heard) < HEADER.size:
            return False
        frame = Frame.unpack(self._heard[: HEADER.size])
        if frame.kind not in _KINDS or frame.b > self._largest:
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
