"""The control block: the part of shared memory in which a rank keeps its signals, locks and status.

Every rank has one block of equal size, mapped by all ranks of its host. Layout: status words | words to sleep on |
abort text | refusal | locks | their holders | signals.

[Note: Order between processes] A signal is a 64-bit word with one writer, read in place. A reader of the n-th value
must also see all earlier writes. x86 keeps this order. On other processors both sides call two functions of a private
semaphore between data and word (:func:`order_memory`): POSIX lists ``sem_post`` and ``sem_trywait`` among the functions
that synchronize memory.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import platform
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from odc import limits
from odc.transports._memfd import libc

_STATUS_BYTES = 64
_SLEEP_BYTES = 64
_TEXT_BYTES = 8192
_REFUSAL_BYTES = 2048
_SEMAPHORE_BYTES = 32  # sizeof(sem_t) on 64-bit Linux, glibc and musl
_PROGRESS, _WAITING_ON, _CLOSED, _TEXT_LENGTH, _LOOKS, _BEATS, _REFUSAL_LENGTH = range(7)
_NOTICE_LOCK = 0  # taken once, by who leaves the abort text; the caller's own locks follow
_FIRST_LOCK = 1

# From linux/futex.h, and the number of the call on each architecture.
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98, "ppc64le": 221, "s390x": 238}
_FUTEX_WAIT, _FUTEX_WAKE_OP = 0, 5
_ADD_ONE = (1 << 28) | (1 << 12)  # add 1 to the word
_ALL = 2**31 - 1


def problem() -> str | None:
    """Why processes cannot wake each other here, or None."""
    machine = platform.machine()
    return None if machine in _FUTEX_CALL else f"the number of its futex call is not known for {machine}"


@functools.cache
def _at_once() -> ctypes.PyDLL:
    """libc, for calls that never sleep: these are not worth giving up the interpreter's lock."""
    library = ctypes.PyDLL(None)
    for call in (library.sem_post, library.sem_trywait):
        call.argtypes = [ctypes.c_void_p]
    library.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    return library


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))

    @classmethod
    def of(cls, seconds: float) -> _Timespec:
        whole = int(seconds)
        return cls(whole, int((seconds - whole) * 1e9))


@functools.cache
def _futex(sleeps: bool) -> tuple[Callable[..., int], int]:
    """The system call, and its number. To sleep it releases the interpreter's lock; to wake others is too short for
    that, and whoever gave it up would have to compete for it with those who were woken."""
    call = (ctypes.CDLL if sleeps else ctypes.PyDLL)(None).syscall
    call.restype = ctypes.c_long
    word, number = ctypes.c_void_p, ctypes.c_int
    call.argtypes = [ctypes.c_long, word, number, number, ctypes.POINTER(_Timespec), word, number]
    return call, _FUTEX_CALL[platform.machine()]


@functools.cache
def _own_semaphore() -> ctypes.Array[ctypes.c_char]:
    semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
    _initialise(ctypes.addressof(semaphore), 0)
    return semaphore


def _order_by_semaphore() -> None:
    at = ctypes.addressof(_own_semaphore())
    _at_once().sem_post(at)
    _at_once().sem_trywait(at)


def _keep_order() -> None:
    """x86 does not reorder stores with stores, nor loads with loads."""


order_memory = _keep_order if platform.machine() == "x86_64" else _order_by_semaphore
"""See [Note: Order between processes]."""


def _initialise(semaphore_at: int, value: int) -> None:
    if _at_once().sem_init(semaphore_at, 1, value):
        raise OSError("sem_init failed")


class SleepWord:
    """A word of shared memory on which threads of any process sleep until it is advanced: a futex."""

    __slots__ = ("_address", "_word")

    def __init__(self, memory: torch.Tensor) -> None:
        self._address = memory.data_ptr()
        self._word = memory.numpy().data.cast("B")[:4].cast("I")

    @property
    def ticket(self) -> int:
        """To be taken before looking at what one may then sleep for."""
        value: int = self._word[0]
        order_memory()
        return value

    def advance(self) -> None:
        """Change it, and wake all who sleep on it: one call, in which the kernel adds as one whole."""
        call, number = _futex(sleeps=False)
        call(number, self._address, _FUTEX_WAKE_OP, _ALL, None, self._address, _ADD_ONE)

    def sleep(self, ticket: int, timeout_s: float) -> None:
        """Until it is advanced, if it has not been since ``ticket``, or a signal handler runs; may return early."""
        call, number = _futex(sleeps=True)
        signed = ticket - (1 << 32) if ticket >= 1 << 31 else ticket
        call(number, self._address, _FUTEX_WAIT, signed, _Timespec.of(max(timeout_s, 0.0)), None, 0)


def control_bytes(num_signals: int, num_locks: int) -> int:
    """Size of a block with room for the caller's signals and locks and our own lock."""
    locks = num_locks + _FIRST_LOCK
    texts = _TEXT_BYTES + _REFUSAL_BYTES
    return _STATUS_BYTES + 2 * _SLEEP_BYTES + texts + locks * (_SEMAPHORE_BYTES + 8) + 8 * num_signals


class Heartbeats(NamedTuple):
    """Of a rank's life: counters, each of which grows while the rank is well."""

    progress: int
    """Steps of work."""
    looks: int
    """While it waits for another rank: looks at whether that has come."""
    beats: int
    """Of a thread that does nothing else: they end where the process is stopped."""


class Closing(enum.Enum):
    """Whether and how a rank has ended its part."""

    OPEN = 0
    COMPLETE = 1
    """Closed after all its work was done."""
    FAILED = 2
    """Closed after an error, its own or another rank's: work may be undone."""


class ControlBlock:
    """One rank's block, seen from any rank. ``memory`` is a uint8 tensor that must outlive this object."""

    def __init__(self, memory: torch.Tensor, num_signals: int, num_locks: int) -> None:
        self._memory = memory
        raw = memory.numpy().data.cast("B")
        self._num_locks = num_locks + _FIRST_LOCK
        sleep_at = _STATUS_BYTES
        text_at = sleep_at + 2 * _SLEEP_BYTES
        refusal_at = text_at + _TEXT_BYTES
        locks_at = refusal_at + _REFUSAL_BYTES
        holders_at = locks_at + self._num_locks * _SEMAPHORE_BYTES
        signals_at = holders_at + 8 * self._num_locks
        self._status = raw[:_STATUS_BYTES].cast("q")
        self.progress = self._status[_PROGRESS : _PROGRESS + 1]
        """A word that its rank alone adds to, with each step of progress."""
        self.notice = self._status[_TEXT_LENGTH : _TEXT_LENGTH + 1]
        """A word that is not zero once there is an abort notice."""
        self.events = SleepWord(memory[sleep_at:])
        """For who waits for this rank: advanced with each of its signals, and when anything has failed."""
        self.calls = SleepWord(memory[sleep_at + _SLEEP_BYTES :])
        """For daemons: advanced by their clients. (All of a host sleep on that of its first rank.)"""
        self._text = raw[text_at:refusal_at]
        self._refusal = raw[refusal_at:locks_at]
        self._locks_at = memory.data_ptr() + locks_at
        self._holders = raw[holders_at:signals_at].cast("q")
        self._signals = raw[signals_at : signals_at + 8 * num_signals].cast("q")

    def initialise(self) -> None:
        """Called once, by the owner of the memory, before anybody else can see it."""
        for index in range(self._num_locks):
            _initialise(self._locks_at + index * _SEMAPHORE_BYTES, 1)

    # Signals: one writer each

    def post(self, index: int) -> None:
        """Add one to a signal and wake who sleeps for this rank."""
        order_memory()
        self._signals[index] += 1
        self.events.advance()

    def post_to(self, index: int, sleeper: SleepWord) -> None:
        """As :meth:`post`, for one who sleeps elsewhere."""
        order_memory()
        self._signals[index] += 1
        sleeper.advance()

    def count(self, index: int) -> int:
        """How often a signal has been posted; what its poster wrote before is visible."""
        value: int = self._signals[index]
        order_memory()
        return value

    # Locks: semaphores that begin with one. Not handed on when their holder dies: that ends the job.

    def try_lock(self, index: int, holder: int) -> bool:
        """Take a lock if it is free, as rank ``holder`` (a hint for messages)."""
        if _at_once().sem_trywait(self._locks_at + (_FIRST_LOCK + index) * _SEMAPHORE_BYTES):
            return False
        self._holders[_FIRST_LOCK + index] = holder + 1
        return True

    def lock(self, index: int, holder: int, timeout_s: float) -> bool:
        """As :meth:`try_lock`, waiting for up to ``timeout_s`` seconds."""
        if not _wait_for_semaphore(self._locks_at + (_FIRST_LOCK + index) * _SEMAPHORE_BYTES, timeout_s):
            return False
        self._holders[_FIRST_LOCK + index] = holder + 1
        return True

    def holder(self, index: int) -> int | None:
        """Who has the lock, as far as he has signed."""
        value = int(self._holders[_FIRST_LOCK + index])
        return value - 1 if value else None

    def unlock(self, index: int) -> None:
        self._holders[_FIRST_LOCK + index] = 0
        _at_once().sem_post(self._locks_at + (_FIRST_LOCK + index) * _SEMAPHORE_BYTES)

    # Status words have one writer each and are hints: nothing is handed over through them.

    @property
    def waiting_on(self) -> int | None:
        """The number in the job of the rank that this one waits for."""
        value = int(self._status[_WAITING_ON])
        return value - 1 if value else None

    @waiting_on.setter
    def waiting_on(self, rank: int | None) -> None:
        if rank is not None:
            self._status[_LOOKS] += 1
        self._status[_WAITING_ON] = 0 if rank is None else rank + 1

    def beat(self) -> None:
        """The watchdog runs, whatever the training loop does."""
        self._status[_BEATS] += 1

    @property
    def heartbeats(self) -> Heartbeats:
        return Heartbeats(self._status[_PROGRESS], self._status[_LOOKS], self._status[_BEATS])

    @property
    def closed(self) -> Closing:
        how = Closing(self._status[_CLOSED])
        order_memory()  # signals that are looked at next are all that it has posted before
        return how

    @closed.setter
    def closed(self, how: Closing) -> None:
        self._status[_CLOSED] = how.value

    @property
    def refusal(self) -> str:
        """What this rank has refused, without any harm to the others, if it has not gone on since."""
        return bytes(self._refusal[: self._status[_REFUSAL_LENGTH]]).decode(errors="replace")

    @refusal.setter
    def refusal(self, text: str) -> None:
        data = text.encode(errors="replace")[:_REFUSAL_BYTES]
        self._refusal[: len(data)] = data
        self._status[_REFUSAL_LENGTH] = len(data)

    # The abort notice: the first cause is the one to tell, so there is one in a block's life.

    def leave_abort(self, text: str) -> None:
        """Store an abort notice unless somebody has, and wake this rank. Never waits."""
        if not _at_once().sem_trywait(self._locks_at + _NOTICE_LOCK * _SEMAPHORE_BYTES):
            data = text.encode(errors="replace")[:_TEXT_BYTES]
            self._text[: len(data)] = data
            order_memory()
            self._status[_TEXT_LENGTH] = len(data)
        self.wake()

    def abort_notice(self) -> str | None:
        length = self._status[_TEXT_LENGTH]
        if not length:
            return None
        order_memory()
        return bytes(self._text[:length]).decode(errors="replace")

    def wake(self) -> None:
        """Whoever sleeps for this rank."""
        self.events.advance()


def _wait_for_semaphore(address: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    until_clock = getattr(libc(), "sem_clockwait", None)  # glibc 2.30
    if until_clock is not None:
        until = _Timespec.of(deadline)
        return not until_clock(ctypes.c_void_p(address), time.CLOCK_MONOTONIC, ctypes.byref(until))
    while _at_once().sem_trywait(address):  # no wait on the monotonic clock here
        if time.monotonic() > deadline:
            return False
        time.sleep(limits.SEMAPHORE_PAUSE_S)
    return True
