"""POSIX robust, process-shared mutexes, placed in shared memory by ctypes.

Why these: a flag written from Python orders nothing between processes (x86 forgives, Arm does not), while
``pthread_mutex_lock`` is an acquire and ``pthread_mutex_unlock`` a release by POSIX; and a robust mutex whose holder
dies hands itself to the next locker with ``EOWNERDEAD`` instead of blocking everyone for ever. libc has them on every
Linux, without a compiled extension.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time

from odc.transports._libc import libc
from odc.transports.base import LockOutcome

MUTEX_BYTES = 64  # sizeof(pthread_mutex_t) is 40 on x86-64, 48 on aarch64; one cache line each
_ATTR_BYTES = 64
_PTHREAD_PROCESS_SHARED = 1
_PTHREAD_MUTEX_ROBUST = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def _check(code: int, call: str) -> None:
    if code:
        raise OSError(code, f"{call}: {os.strerror(code)}")


class RobustMutex:
    """A mutex at a fixed address of shared memory. The memory must outlive the object."""

    def __init__(self, address: int) -> None:
        self._at = ctypes.c_void_p(address)
        c = libc()
        self._lock = c.pthread_mutex_lock
        self._unlock = c.pthread_mutex_unlock
        self._try = c.pthread_mutex_trylock
        self._clocklock = getattr(c, "pthread_mutex_clocklock", None)  # glibc >= 2.30

    def initialise(self) -> None:
        """Make the mutex. Called once, by the owner of the memory, before anybody else can see it."""
        c = libc()
        attr = ctypes.create_string_buffer(_ATTR_BYTES)
        _check(c.pthread_mutexattr_init(attr), "pthread_mutexattr_init")
        _check(c.pthread_mutexattr_setpshared(attr, _PTHREAD_PROCESS_SHARED), "pthread_mutexattr_setpshared")
        _check(c.pthread_mutexattr_setrobust(attr, _PTHREAD_MUTEX_ROBUST), "pthread_mutexattr_setrobust")
        _check(c.pthread_mutex_init(self._at, attr), "pthread_mutex_init")
        c.pthread_mutexattr_destroy(attr)

    def acquire(self, timeout_s: float) -> LockOutcome:
        """Take the mutex, waiting for up to ``timeout_s`` seconds."""
        code = self._try(self._at)
        if code == errno.EBUSY and timeout_s > 0:
            code = self._wait(timeout_s)
        if code in (errno.EBUSY, errno.ETIMEDOUT):
            return LockOutcome.TIMED_OUT
        if code == errno.EOWNERDEAD:
            _check(libc().pthread_mutex_consistent(self._at), "pthread_mutex_consistent")
            return LockOutcome.RECOVERED
        _check(code, "pthread_mutex_lock")
        return LockOutcome.ACQUIRED

    def release(self) -> None:
        _check(self._unlock(self._at), "pthread_mutex_unlock")

    def _wait(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        if self._clocklock is not None:
            seconds = int(deadline)
            until = _Timespec(seconds, int((deadline - seconds) * 1e9))
            return int(self._clocklock(self._at, time.CLOCK_MONOTONIC, ctypes.byref(until)))
        while (code := int(self._try(self._at))) == errno.EBUSY and time.monotonic() < deadline:
            time.sleep(1e-4)  # no timed lock on the monotonic clock here: poll
        return code
