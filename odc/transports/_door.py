"""A door that is open while set-up lasts: ranks come in side by side, and no stranger holds anybody up.

Anybody can connect: a port scanner, a rank of another job, somebody who says nothing or one byte a second. Whoever
does not prove within the first bytes that it belongs here costs one descriptor, for as long as there is room.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Callable
from functools import partial

from odc.leaving import run_all
from odc.threads import HelperThread
from odc.transports._neighbours import ring

MOST_WAITING = 16  # connections that have not proved anything yet; the oldest goes when another one comes
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Door:
    """A thread that accepts connections from :meth:`open` to :meth:`close`."""

    def __init__(self, listener: socket.socket, num_bytes: int, admit: Callable[[socket.socket, bytes], bool]) -> None:
        """
        Args:
            listener: bound and listening; the door's from now on.
            num_bytes: of the greeting with which every rank begins.
            admit: given a connection, which does not block, and its greeting: answers it, and keeps it or not. Called
                by the thread.
        """
        self._listener = listener
        self._num_bytes = num_bytes
        self._admit = admit
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._waiting: dict[int, tuple[socket.socket, bytearray]] = {}  # by descriptor, the oldest first
        self._thread = HelperThread(self._serve, "odc-door")
        self._closed = False
        self.problem: OSError | None = None
        """Why nobody is accepted any more."""

    def open(self) -> None:
        """
        Raises:
            SetupError: no thread can be started.
        """
        self._listener.setblocking(False)
        try:
            self._thread.start()
        except BaseException:
            self.close()  # who calls is refused, instead of waiting for an answer
            raise

    def _serve(self) -> None:
        door_fd = self._listener.fileno()
        for fd in (self._stop_fd, door_fd):
            self._poll.register(fd, select.POLLIN)
        try:
            while True:
                ready = [fd for fd, _ in self._poll.poll()]
                if self._stop_fd in ready:
                    return
                for fd in ready:
                    if fd in self._waiting:
                        self._listen_to(fd)
                if door_fd in ready:
                    self._accept_some()
        except OSError as problem:
            self.problem = problem
        finally:  # a door that nobody looks after must not seem open
            self._listener.close()
            while self._waiting:
                self._send_oldest_away()

    def _accept_some(self) -> None:
        """Those who knock; not so many that those who are in have to wait."""
        for _ in range(MOST_WAITING):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as problem:
                if problem.errno in _EXHAUSTED:
                    if not self._waiting:
                        raise
                    self._send_oldest_away()
                continue  # any other error is that of a connection that has ended already
            connection.setblocking(False)
            fd = connection.fileno()
            self._waiting[fd] = connection, bytearray()
            self._poll.register(fd, select.POLLIN)
            self._listen_to(fd)
            if len(self._waiting) > MOST_WAITING:
                self._send_oldest_away()

    def _listen_to(self, fd: int) -> None:
        connection, greeting = self._waiting[fd]
        try:
            part = connection.recv(self._num_bytes - len(greeting))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        greeting += part
        if part and len(greeting) < self._num_bytes:
            return
        del self._waiting[fd]
        self._poll.unregister(fd)
        if len(greeting) < self._num_bytes or not self._admit(connection, bytes(greeting)):
            connection.close()

    def _send_oldest_away(self) -> None:
        fd = next(iter(self._waiting))
        connection, _ = self._waiting.pop(fd)
        self._poll.unregister(fd)
        connection.close()

    def close(self) -> None:
        """Local, idempotent. Connections that were kept are not touched."""
        if self._closed:
            return
        self._closed = True
        ring(self._stop_fd)
        run_all([self._thread.end, self._listener.close, partial(os.close, self._stop_fd)])
