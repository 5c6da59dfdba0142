"""Copies that overlap with compute on a CPU: one background thread per runtime.

FSDP asks for the next unit's parameters before it needs them (backward prefetch, explicit forward prefetch), and waits
for them when it does. In between the thread copies; whatever it has not begun by then, the waiting thread does itself,
so a gather that is awaited at once costs no hand-over.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable

from odc.threads import HelperThread


class _State(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


class PendingCopy:
    """One piece of copying that somebody will wait for."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy = copy
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._state = _State.QUEUED
        self._error: BaseException | None = None

    def run(self) -> bool:
        """Copy, unless somebody else has begun to. Returns whether this call did it."""
        with self._lock:
            if self._state is not _State.QUEUED:
                return False
            self._state = _State.RUNNING
        try:
            self._copy()
        except BaseException as error:  # raised where the copy is awaited
            self._error = error
        self._state = _State.DONE
        self._done.set()
        return True

    def wait(self, check: Callable[[], None], slice_s: float = 0.5) -> None:
        """Return when the copy is complete, doing it here if it has not begun.

        Args:
            check: called while another thread copies; raises if this rank or a peer has failed.
        """
        self.run()
        while not self._done.wait(slice_s):
            check()
        if self._error is not None:
            raise self._error

    @property
    def is_done(self) -> bool:
        return self._state is _State.DONE


class CopyThread:
    """The background thread; its owner calls :meth:`close`, which joins it."""

    def __init__(self) -> None:
        self._queue: deque[PendingCopy] = deque()
        self._wanted = threading.Condition()
        self._closing = False
        self._thread = HelperThread(self._work, "odc-copy")
        self._thread.start()

    def submit(self, copy: Callable[[], None]) -> PendingCopy:
        """Have ``copy`` done in the background, or by whoever waits for it first."""
        pending = PendingCopy(copy)
        with self._wanted:
            self._queue.append(pending)
            self._wanted.notify()
        return pending

    def _work(self) -> None:
        while True:
            with self._wanted:
                while not self._queue and not self._closing:
                    self._wanted.wait()
                if not self._queue:
                    return
                pending = self._queue.popleft()
            pending.run()

    def close(self) -> None:
        """Drop what is queued and join the thread. Idempotent. A copy from another host may be waiting for it: the
        transport's ``end_transfers`` comes before."""
        with self._wanted:
            self._closing = True
            self._queue.clear()
            self._wanted.notify()
        self._thread.end()
