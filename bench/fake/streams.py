"""Streams without a GPU: threads that do the work that they are given in order, later, and after random delays."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable

WAIT_LIMIT_S = 60.0
"""How long a stream waits for another one: far longer than on a loaded machine, and less than a check gives its
ranks."""
_LOOK_S = 0.05


class FakeDeviceError(RuntimeError):
    """A stream of the fake has failed."""


class FakeDevice:
    """What the streams of one rank share: the first error of any of them. After an error no stream does anything.

    As after an error of CUDA's, each later call says so. A stream that went on would compute from what is not there,
    and whoever checks that would take it for a mistake of what is checked.
    """

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def check(self) -> None:
        """Raise if a stream has failed."""
        if self.errors:
            raise FakeDeviceError(f"a stream of the fake has failed: {self.errors[0]}") from self.errors[0]

    def await_condition(self, is_met: Callable[[], bool], what: str) -> None:
        """Called in a stream: return when ``is_met``, or when a stream has failed. ``is_met`` may itself wait for a
        moment.

        Args:
            what: the stream, and what it waits for.

        Raises:
            TimeoutError: it never is.
        """
        deadline = time.monotonic() + WAIT_LIMIT_S
        while not (is_met() or self.errors):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the fake's {what}: not within {WAIT_LIMIT_S:g} s")


class FakeEvent:
    """An event that is set when its stream has come to it."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._event = threading.Event()
        self.set = self._event.set
        self.is_set = self._event.is_set

    def has_come(self) -> bool:
        """A condition for :meth:`FakeDevice.await_condition`."""
        return self._event.wait(_LOOK_S)

    def wait(self, timeout_s: float) -> bool:
        """Called on the host: whether the event has been set within ``timeout_s``.

        Raises:
            FakeDeviceError: it will not be, since a stream has failed.
        """
        deadline = time.monotonic() + timeout_s
        while not self._event.wait(min(_LOOK_S, max(deadline - time.monotonic(), 0.0))):
            self._device.check()
            if time.monotonic() >= deadline:
                return False
        return True


class FakeStream:
    """A thread that does the work that it is given, in order."""

    def __init__(self, delay_s: float, seed: int, device: FakeDevice) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._delay_s = delay_s
        self._random = random.Random(seed)
        self._device = device
        self._thread = threading.Thread(target=self._run, name="fake-stream", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> None:
        self._queue.put(work)

    def event(self) -> FakeEvent:
        """An event that is set when the stream has done all that it was given so far."""
        done = FakeEvent(self._device)
        self.submit(done.set)
        return done

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if self._device.errors:
                continue
            if self._delay_s:
                time.sleep(self._random.random() * self._delay_s)
            try:
                work()
            except BaseException as error:  # told to whoever calls next
                self._device.errors.append(error)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
