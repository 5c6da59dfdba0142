"""Signals as POSIX semaphores in shared memory: counters with release/acquire order and no lock.

``sem_post`` releases and ``sem_trywait`` acquires by POSIX, on every architecture. Unlike a flag guarded by a mutex,
neither can be blocked by a process that was stopped or killed in the middle.
"""

from __future__ import annotations

import ctypes

from odc.transports._libc import libc

SEMAPHORE_BYTES = 32  # sizeof(sem_t) on 64-bit Linux, glibc and musl


class SignalCounter:
    """One semaphore, read by draining it into a Python counter."""

    __slots__ = ("_at", "_post", "_seen", "_try")

    def __init__(self, address: int) -> None:
        self._at = ctypes.c_void_p(address)
        self._post = libc().sem_post
        self._try = libc().sem_trywait
        self._seen = 0

    def initialise(self) -> None:
        """Set to 0. Called once, by the owner of the memory, before anybody else can see it."""
        if libc().sem_init(self._at, 1, 0):
            raise OSError("sem_init failed")

    def post(self) -> None:
        if self._post(self._at):
            raise OverflowError("a signal was posted 2**31 times without being read")

    def count(self) -> int:
        while self._try(self._at) == 0:
            self._seen += 1
        return self._seen
