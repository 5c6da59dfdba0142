"""Another rank, as one rank's transport knows it: on the same host here, on another one in :mod:`._link`."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod

from odc.transports._control import Closing, ControlBlock
from odc.transports._process import WatchedProcess
from odc.transports.base import Signs


class Neighbour(ABC):
    """News of another rank, and to it."""

    @abstractmethod
    def abort(self, text: str) -> None:
        """Leave an abort notice unless there is an earlier one, and wake it. Never raises."""

    @property
    @abstractmethod
    def signs(self) -> Signs:
        """Of its life, as far as is known here."""

    @property
    @abstractmethod
    def waiting_on(self) -> int | None:
        """Which rank of the job it waits for, as far as is known here."""

    @property
    @abstractmethod
    def closing(self) -> Closing:
        """Whether and how it has closed."""

    @property
    @abstractmethod
    def has_left(self) -> bool:
        """Whether it has closed, and all that it posted before has arrived."""

    @property
    @abstractmethod
    def is_dead(self) -> bool:
        """Whether its process has ended, or cannot be reached any more."""

    @abstractmethod
    def describe(self) -> str:
        """What is known of its process, for people."""

    @property
    def death_fd(self) -> int | None:
        """A descriptor that becomes readable when it dies; None: its death wakes who waits for it."""
        return None

    @abstractmethod
    def tell_closed(self, how: Closing) -> None:
        """Let it know that this rank has closed."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held for it."""


def ring(*bells: int) -> None:
    """Write to eventfds. A counter at its maximum means that the bell is ringing already."""
    for bell in bells:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(bell, 1)


class LocalNeighbour(Neighbour):
    """A rank of this host: its control block is mapped, its process is watched."""

    def __init__(self, process: WatchedProcess, block: ControlBlock) -> None:
        self._process = process
        self._block = block

    def abort(self, text: str) -> None:
        self._block.leave_abort(text)

    @property
    def signs(self) -> Signs:
        return self._block.signs

    @property
    def waiting_on(self) -> int | None:
        return self._block.waiting_on

    @property
    def closing(self) -> Closing:
        return self._block.closed

    @property
    def has_left(self) -> bool:
        return self.closing is not Closing.OPEN

    @property
    def is_dead(self) -> bool:
        return self._process.is_dead()

    def describe(self) -> str:
        return self._process.cause_of_death() if self.is_dead else self._process.describe_alive()

    @property
    def death_fd(self) -> int | None:
        return self._process.fileno()

    def tell_closed(self, how: Closing) -> None:
        """It reads how from this rank's control block, on which all are woken that wait for this rank."""

    def close(self) -> None:
        self._process.close()
