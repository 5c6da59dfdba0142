"""The control block: the part of shared memory in which a rank keeps its signals, locks and status.

Layout: status words | abort text | locks | signals. Every rank has one block of equal size, mapped by all.
"""

from __future__ import annotations

import torch

from odc.transports._robust_mutex import MUTEX_BYTES, RobustMutex
from odc.transports._semaphore import SEMAPHORE_BYTES, SignalCounter
from odc.transports.base import LockOutcome

_STATUS_BYTES = 64
_TEXT_BYTES = 8192
_PROGRESS, _WAITING_ON, _CLOSED, _TEXT_LENGTH = range(4)
_ABORT_LOCK = 0  # lock 0 guards the abort text; the caller's locks follow
_ABORT_SIGNAL = 0


def control_bytes(num_signals: int, num_locks: int) -> int:
    """Size of a block with room for the caller's signals and locks and our own one of each."""
    return _STATUS_BYTES + _TEXT_BYTES + (num_locks + 1) * MUTEX_BYTES + (num_signals + 1) * SEMAPHORE_BYTES


class ControlBlock:
    """One rank's block, seen from any rank. ``memory`` is a uint8 tensor that must outlive this object."""

    def __init__(self, memory: torch.Tensor, num_signals: int, num_locks: int) -> None:
        self._memory = memory
        self._status = memory[:_STATUS_BYTES].view(torch.int64).numpy()
        self._text = memory[_STATUS_BYTES : _STATUS_BYTES + _TEXT_BYTES].numpy()
        locks_at = memory.data_ptr() + _STATUS_BYTES + _TEXT_BYTES
        signals_at = locks_at + (num_locks + 1) * MUTEX_BYTES
        self._locks = [RobustMutex(locks_at + i * MUTEX_BYTES) for i in range(num_locks + 1)]
        self._signals = [SignalCounter(signals_at + i * SEMAPHORE_BYTES) for i in range(num_signals + 1)]

    def initialise(self) -> None:
        for lock in self._locks:
            lock.initialise()
        for signal in self._signals:
            signal.initialise()

    def post(self, index: int) -> None:
        self._signals[index + 1].post()

    def count(self, index: int) -> int:
        return self._signals[index + 1].count()

    def lock(self, index: int, timeout_s: float) -> LockOutcome:
        return self._locks[index + 1].acquire(timeout_s)

    def unlock(self, index: int) -> None:
        self._locks[index + 1].release()

    # Status words have one writer each and are hints: nothing is handed over through them.

    @property
    def progress(self) -> int:
        return int(self._status[_PROGRESS])

    def tick(self) -> None:
        self._status[_PROGRESS] += 1

    @property
    def waiting_on(self) -> int | None:
        value = int(self._status[_WAITING_ON])
        return value - 1 if value else None

    @waiting_on.setter
    def waiting_on(self, rank: int | None) -> None:
        self._status[_WAITING_ON] = 0 if rank is None else rank + 1

    @property
    def closed(self) -> bool:
        return bool(self._status[_CLOSED])

    def set_closed(self) -> None:
        self._status[_CLOSED] = 1

    def leave_abort(self, text: str) -> bool:
        """Store an abort notice unless one is there (the first cause is the one to tell)."""
        lock = self._locks[_ABORT_LOCK]
        if lock.acquire(0.1) is LockOutcome.TIMED_OUT:
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
