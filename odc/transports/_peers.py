"""Other ranks, as one rank's transport knows them: what it hears of each (of those on other hosts in :mod:`._link`),
who still reads from it when it has closed, and whose end it was that broke an exchange.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from odc import limits
from odc.errors import SetupError
from odc.liveness.process import WatchedProcess
from odc.liveness.threads import Reminder
from odc.setup.agreement import BrokenExchangeError, Exchange, no_op
from odc.setup.topology import Topology
from odc.transports._control import Closing, ControlBlock
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
    @abstractmethod
    def refusal(self) -> str:
        """What it has refused, as far as is known here; see :meth:`odc.transports.base.Transport.refusal`."""

    @property
    def death_fd(self) -> int | None:
        """A descriptor that becomes readable when it dies; None: its death wakes who waits for it."""
        return None

    @abstractmethod
    def tell_refusal(self, text: str) -> None:
        """Let it know what this rank has refused. Never raises."""

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
    def refusal(self) -> str:
        return self._block.refusal

    @property
    def death_fd(self) -> int | None:
        return self._process.fileno()

    def tell_refusal(self, text: str) -> None:
        """It reads the text where it reads the next."""

    def tell_closed(self, how: Closing) -> None:
        """It reads how from this rank's control block, on which all are woken that wait for this rank."""

    def close(self) -> None:
        self._process.close()


logger = logging.getLogger("odc")


class Readers:
    """Ranks that may still read from this one, which has closed: those that have not, and are there."""

    def __init__(self, topology: Topology, neighbours: Mapping[int, Neighbour]) -> None:
        self._topology = topology
        self._neighbours = dict(neighbours)
        self._started = self._last_look = time.monotonic()
        self._over_since: float | None = None
        self._reminder = Reminder()
        self._progress = {rank: (n.signs.progress, self._started) for rank, n in self._neighbours.items()}

    def left(self, is_script_over: bool) -> list[int]:
        """Those that are left now; if the process stays only for them, those that make progress."""
        now = time.monotonic()
        absence_s, self._last_look = now - self._last_look, now
        if is_script_over and self._over_since is None:
            self._over_since = now
        for rank, neighbour in list(self._neighbours.items()):
            progress, since = self._progress[rank]
            if neighbour.signs.progress != progress:
                since = now
            elif absence_s > limits.ABSENCE_S:
                since += absence_s
            self._progress[rank] = (neighbour.signs.progress, since)
            is_idle = self._over_since is not None and now - max(since, self._over_since) > limits.STAY_S
            if neighbour.closing is not Closing.OPEN or neighbour.is_dead or is_idle:
                del self._neighbours[rank]
        waited_s = now - self._started
        if is_script_over and self._neighbours and self._reminder.is_due(waited_s):
            who = ", ".join(self._topology.describe(rank) for rank in self._neighbours)
            logger.warning(
                "rank %d has closed its session %.0f s ago, and its process stays for those that still read parameters "
                "from it: %s",
                self._topology.me,
                waited_s,
                who,
            )
        return list(self._neighbours)


class WatchedExchange:
    """See :class:`~odc.setup.agreement.Exchange`.

    Args:
        gone: describes the ranks that have ended.
        notice: what a rank has told of its failure, which ends every wait for it.
    """

    def __init__(self, exchange: Exchange, gone: Callable[[], Sequence[str]], notice: Callable[[], str | None]) -> None:
        self.rank = exchange.rank
        self.world_size = exchange.world_size
        self.global_ranks = exchange.global_ranks
        self._exchange = exchange
        self._gone = gone
        self._notice = notice

    def all_gather(self, payload: bytes, check: Callable[[], None] = no_op) -> list[bytes]:
        gone_since: float | None = None

        def check_all() -> None:
            nonlocal gone_since
            check()
            if (notice := self._notice()) is not None:
                raise SetupError(f"set-up failed on {notice}")
            gone = self._gone()
            if not gone:
                gone_since = None
                return
            gone_since = time.monotonic() if gone_since is None else gone_since
            if time.monotonic() - gone_since > limits.PART_MOMENT_S:
                raise SetupError(f"set-up cannot go on: {'; '.join(gone)}")

        try:
            return self._exchange.all_gather(payload, check_all)
        except BrokenExchangeError as problem:
            check_all()  # its own account of what happened is better than ours
            raise SetupError(str(problem)) from None
