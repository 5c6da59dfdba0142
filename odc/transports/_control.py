"""The control block: the part of shared memory in which a rank keeps its signals, locks and status.

Layout: status words | abort text | locks | signals. Every rank has one block of equal size, mapped by all.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from odc.transports._robust_mutex import MUTEX_BYTES, RobustMutex
from odc.transports._semaphore import SEMAPHORE_BYTES, SignalCounter
from odc.transports.base import LockOutcome, Signs

_STATUS_BYTES = 64
_TEXT_BYTES = 8192
_PROGRESS, _WAITING_ON, _CLOSED, _TEXT_LENGTH, _LOOKS, _BEATS = range(6)
_ABORT_LOCK = 0  # lock 0 guards the abort text
_NOTICE_S = 1.0  # for which a rank that fails waits for another one that is writing its notice
_ABORT_SIGNAL = 0
_FIRST = 1  # the caller's own locks and signals follow

T = TypeVar("T")


def control_bytes(num_signals: int, num_locks: int) -> int:
    """Size of a block with room for the caller's signals and locks and our own one of each."""
    return _STATUS_BYTES + _TEXT_BYTES + (num_locks + 1) * MUTEX_BYTES + (num_signals + 1) * SEMAPHORE_BYTES


class Closing(enum.Enum):
    """Whether and how a rank has ended its part."""

    OPEN = 0
    COMPLETE = 1
    """Closed after all its work was done."""
    FAILED = 2
    """Closed after an error, its own or another rank's: work may be undone."""


class _Lazy(Generic[T]):
    """``length`` objects at equal distances in memory, made when first asked for."""

    def __init__(self, make: Callable[[int], T], start: int, stride: int, length: int) -> None:
        self._make, self._start, self._stride = make, start, stride
        self.length = length
        self._made: dict[int, T] = {}

    def __getitem__(self, index: int) -> T:
        found = self._made.get(index)
        if found is None:
            if not _ABORT_LOCK <= index < self.length:
                raise IndexError(f"index {index - _FIRST} of {self.length - _FIRST}")
            found = self._made[index] = self._make(self._start + index * self._stride)
        return found


class ControlBlock:
    """One rank's block, seen from any rank. ``memory`` is a uint8 tensor that must outlive this object."""

    def __init__(self, memory: torch.Tensor, num_signals: int, num_locks: int) -> None:
        self._memory = memory
        self._status = memory[:_STATUS_BYTES].view(torch.int64).numpy()
        self._text = memory[_STATUS_BYTES : _STATUS_BYTES + _TEXT_BYTES].numpy()
        locks_at = memory.data_ptr() + _STATUS_BYTES + _TEXT_BYTES
        signals_at = locks_at + (num_locks + 1) * MUTEX_BYTES
        # Made on first use: with many ranks and units most of a peer's are never touched from here.
        self._locks = _Lazy(RobustMutex, locks_at, MUTEX_BYTES, num_locks + 1)
        self._signals = _Lazy(SignalCounter, signals_at, SEMAPHORE_BYTES, num_signals + 1)

    def initialise(self) -> None:
        for index in range(self._locks.length):
            self._locks[index].initialise()
        for index in range(self._signals.length):
            self._signals[index].initialise()

    def post(self, index: int) -> None:
        self._signals[_FIRST + index].post()

    def count(self, index: int) -> int:
        return self._signals[_FIRST + index].count()

    def lock(self, index: int, timeout_s: float) -> LockOutcome:
        return self._locks[_FIRST + index].acquire(timeout_s)

    def unlock(self, index: int) -> None:
        self._locks[_FIRST + index].release()

    # Status words have one writer each and are hints: nothing is handed over through them.

    @property
    def progress(self) -> int:
        return int(self._status[_PROGRESS])

    def tick(self) -> None:
        self._status[_PROGRESS] += 1

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
    def signs(self) -> Signs:
        return Signs(self.progress, int(self._status[_LOOKS]), int(self._status[_BEATS]))

    @property
    def closed(self) -> Closing:
        return Closing(int(self._status[_CLOSED]))

    @closed.setter
    def closed(self, how: Closing) -> None:
        self._status[_CLOSED] = how.value

    def leave_abort(self, text: str) -> bool:
        """Store an abort notice unless one is there (the first cause is the one to tell)."""
        lock = self._locks[_ABORT_LOCK]
        if lock.acquire(_NOTICE_S) is LockOutcome.TIMED_OUT:
            return False
        try:
            if self._status[_TEXT_LENGTH]:
                return False
            data = text.encode(errors="replace")[:_TEXT_BYTES]
            self._text[: len(data)] = memoryview(data)
            self._status[_TEXT_LENGTH] = len(data)
            self._signals[_ABORT_SIGNAL].post()
            return True
        finally:
            lock.release()

    def abort_notice(self) -> str | None:
        if not self._signals[_ABORT_SIGNAL].count():
            return None
        length = min(int(self._status[_TEXT_LENGTH]), _TEXT_BYTES)
        return bytes(self._text[:length]).decode(errors="replace")
