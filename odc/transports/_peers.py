"""The ranks of a group as one rank sees them: their status and errors (of ranks on other hosts by :mod:`._link`), the
status that this rank publishes, the ranks that still read from it after it has closed, and the rank whose end broke an
exchange.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from odc import limits
from odc.errors import AbortedError, OdcError, SetupError
from odc.liveness.leaving import run_all
from odc.liveness.process import WatchedProcess
from odc.liveness.threads import Reminder, in_helper
from odc.setup.agreement import BrokenExchangeError, Exchange, no_op
from odc.setup.topology import Topology
from odc.transports._control import Closing, ControlBlock, Heartbeats, SleepWord
from odc.transports._frames import MAX_RANKS

logger = logging.getLogger("odc")

IN_COLLECTIVE = MAX_RANKS // 2
"""In place of the rank that a rank waits for: nobody knows, it is in a collective of its script. Added to it is how
many collectives of all ranks of the job it has entered, see :func:`in_collective`."""
_NO_NOTICE = (0,)


def in_collective(num_entered: int) -> int:
    """What a rank shows that is in a collective of its script, and has entered so many of all ranks."""
    return IN_COLLECTIVE + num_entered % IN_COLLECTIVE


class PeerState(enum.Enum):
    """What is known of a peer's process."""

    ALIVE = "alive"
    CLOSED = "closed"
    DEAD = "dead"


class Peer(ABC):
    """A rank, as far as another one knows it."""

    who: str
    """For people: its number in the job, host and process."""

    @abstractmethod
    def abort(self, text: str) -> None:
        """Leave an abort notice with it unless there is an earlier one, and wake it. Never raises."""

    @property
    @abstractmethod
    def heartbeats(self) -> Heartbeats:
        """Of its life, as far as is known here."""

    @property
    @abstractmethod
    def waiting_on(self) -> int | None:
        """Which rank of the job, by its number there, it waits for, if it waits, as far as is known here."""

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
        """Whether its process has ended or cannot be reached any more, whether it had closed before or not."""

    @property
    def state(self) -> PeerState:
        """Cheap."""
        return PeerState.CLOSED if self.has_left else PeerState.DEAD if self.is_dead else PeerState.ALIVE

    @property
    def has_left_work_undone(self) -> bool:
        return self.closing is Closing.FAILED or (self.is_dead and self.closing is Closing.OPEN)

    @abstractmethod
    def describe_process(self) -> str:
        """What is known of its process, for people: "killed by signal 9", "stopped by a signal"."""

    def describe(self) -> str:
        """As :meth:`describe_process`, of one that may have closed."""
        return "it closed its session" if self.has_left else self.describe_process()

    @property
    @abstractmethod
    def refusal(self) -> str:
        """What it has refused of its own script, as far as is known here; see :meth:`Peers.set_refusal`."""

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


def notify(eventfd: int) -> None:
    """Wake who polls it. A counter at its maximum means that it is readable already."""
    with contextlib.suppress(BlockingIOError):
        os.eventfd_write(eventfd, 1)


class LocalPeer(Peer):
    """A rank of this host: its control block is mapped, its process is watched (None: it is this one)."""

    def __init__(self, who: str, process: WatchedProcess | None, block: ControlBlock) -> None:
        self.who = who
        self._process = process
        self._block = block

    def abort(self, text: str) -> None:
        self._block.leave_abort(text)

    @property
    def heartbeats(self) -> Heartbeats:
        return self._block.heartbeats

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
        return self._process is not None and self._process.is_dead()

    def describe_process(self) -> str:
        if self._process is None:
            return "this process"
        return self._process.cause_of_death() if self.is_dead else self._process.describe_alive()

    @property
    def refusal(self) -> str:
        return self._block.refusal

    @property
    def death_fd(self) -> int | None:
        return None if self._process is None else self._process.fileno()

    def tell_refusal(self, text: str) -> None:
        """It reads the text where it reads the next."""

    def tell_closed(self, how: Closing) -> None:
        """It reads how from this rank's control block, on which all are woken that wait for this rank."""

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


class Peers:
    """All ranks of a group, by rank, this one included; and what this one shows the others.

    Until :meth:`start` nobody is known, and nobody can be told anything.
    """

    own: ControlBlock
    """This rank's."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.here = topology.ranks_here()
        self.by_rank: dict[int, Peer] = {}
        self.others: dict[int, Peer] = {}
        self.blocks: dict[int, ControlBlock] = {}
        """Of the ranks of this host: their signals, locks and status. Of others: this rank's copies."""
        self.memory: list[memoryview | None] = []
        """This rank's copy of each buffer, by its number; None: other hosts may not use it."""
        self.failing = False
        """This rank or another one has reported an error."""
        self.is_leaving = False
        """This rank is about to close: threads of its own that wait for another rank in a transfer give that up."""
        self.check_context: Callable[[], None] = no_op
        """Raises what has failed at this rank beyond this group."""
        self.loss_fd: int | None = None
        """Readable once a link has ended; None: there are no links."""
        self._shown: list[ControlBlock] = []  # where this rank shows its progress and its waits
        self._progress: list[memoryview] = []  # there; and the word that tells of a notice: each operation uses both
        self._notice: Sequence[int] = _NO_NOTICE

    def start(self, blocks: Mapping[int, ControlBlock], others: Mapping[int, Peer]) -> None:
        """From now on they are known."""
        rank = self.topology.rank
        self.blocks.update(blocks)
        self.own = blocks[rank]
        self.others.update(others)
        self.by_rank.update({rank: LocalPeer(self.topology.describe(rank), None, self.own), **others})
        self._shown, self._progress, self._notice = [self.own], [self.own.progress], self.own.notice

    def forget(self) -> None:
        """Behind the end of whoever uses them."""
        for known in (self.by_rank, self.others, self.blocks, self.memory):
            known.clear()
        self._shown, self._progress, self._notice = [], [], _NO_NOTICE

    # Sleeping: take the ticket of a word, look whether what is awaited has come, sleep with that ticket.

    def sleep_word(self, rank: int | None) -> SleepWord:
        """For who waits for ``rank``: advanced when that has posted a signal, or anything has failed. None: for all
        daemons of this host, since a push is for all of them. That a rank dies is not noticed."""
        if rank is None:
            return self.blocks[self.here[0]].calls
        # Links wake this rank on its own word, as do those of its host when anything has failed.
        return (self.blocks[rank] if rank in self.here else self.own).events

    def wake_self(self) -> None:
        """Wake this rank's daemon, and all who wait for this rank."""
        self.own.wake()
        self.sleep_word(None).advance()

    # What this rank shows of itself

    def tick(self) -> None:
        """Count one step of progress of this rank."""
        for word in self._progress:
            word[0] += 1

    def beat(self) -> None:
        """Count one look of this rank's watchdog."""
        for block in self._shown:
            block.beat()

    def set_waiting_on(self, rank: int | None) -> None:
        """Show which rank of the job, by its number there, this one waits for (None: it is working; or
        :func:`in_collective`).

        To be repeated at each look: a rank that says for whom it waits, and does not look, is stopped itself.
        """
        for block in self._shown:
            block.waiting_on = rank

    def waits_for(self, rank: int | None) -> None:
        """This rank waits for ``rank`` in a transfer, or no more."""
        if in_helper():  # what that waits for, the training loop does not
            return
        if rank is None:
            self.tick()  # before the next line: nobody may see "not waiting, long silent"
        self.set_waiting_on(None if rank is None else self.topology.global_rank(rank))

    def show_to(self, other: Peers) -> None:
        """Show the ranks of another group, too, what this rank shows of its progress and its waits."""
        self._shown.append(other.own)
        self._progress.append(other.own.progress)

    def set_refusal(self, text: str) -> None:
        """Show all others what this rank has refused, without harm to them; empty: it has gone on. For messages of
        ranks that wait for it. Never raises, never waits."""
        if self.blocks:
            self.own.refusal = text
            for peer in self.others.values():
                peer.tell_refusal(text)

    def say_closed(self, how: Closing) -> None:
        """Tell all others that this rank takes part in nothing any more. Never waits."""
        if self.blocks:
            self.own.closed = how
            self.own.wake()
        run_all(partial(peer.tell_closed, how) for peer in self.others.values())

    # Failures

    def abort(self, text: str) -> None:
        """Leave ``text`` with every other rank that has no earlier notice, and wake it. Never raises, never waits
        longer than a moment for one."""
        if not self.blocks:
            return
        self.failing = True
        for peer in self.others.values():
            peer.abort(text)
        self.own.wake()

    def abort_notice(self) -> str | None:
        """The first notice that another rank has left here."""
        if not self._notice[0]:
            return None
        self.failing = True
        return self.own.abort_notice()

    def check(self) -> None:
        """Raise if this rank or another one has failed; in a transfer, or this rank is about to close."""
        if self.is_leaving:
            raise OdcError("given up, because this rank has closed its session")
        self.check_context()
        if (notice := self.abort_notice()) is not None:
            raise AbortedError(f"rank {self.topology.me} aborted because {notice}")

    def wait_for_loss(self, stop_fd: int, timeout_s: float) -> int | None:
        """Sleep until a rank has died that may have left work undone which a stream here waits for; that rank.

        Returns None when ``stop_fd`` becomes readable or the time is over.
        """
        poll = select.poll()
        poll.register(stop_fd, select.POLLIN)
        watched = {rank: peer for rank, peer in self.others.items() if peer.closing is not Closing.COMPLETE}
        for fd in (self.loss_fd, *(peer.death_fd for peer in watched.values())):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        poll.poll(timeout_s * 1000)
        if self.loss_fd is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.loss_fd)
        # A rank may close, all its work done, and end while this sleeps.
        return next((rank for rank, peer in watched.items() if peer.has_left_work_undone), None)

    # What links do here, in the thread that serves them

    def deliver(self, rank: int, index: int, daemon: bool) -> None:
        """``rank`` of another host has posted its signal ``index``: wake who waits for it, or the daemons."""
        self.blocks[rank].post_to(index, self.sleep_word(None) if daemon else self.own.events)

    def notice(self, text: str) -> None:
        """A rank of another host has failed."""
        if self.blocks:
            self.own.leave_abort(text)

    def lost(self) -> None:
        """A link has ended, or said that it will."""
        if self.blocks:
            self.own.wake()
        if self.loss_fd is not None:
            notify(self.loss_fd)


class Readers:
    """Ranks that may still read from this one, which has closed: those that have not, and are there."""

    def __init__(self, topology: Topology, peers: Mapping[int, Peer]) -> None:
        self._topology = topology
        self._peers = dict(peers)
        self._started = self._last_look = time.monotonic()
        self._over_since: float | None = None
        self._reminder = Reminder()
        self._progress = {rank: (peer.heartbeats.progress, self._started) for rank, peer in self._peers.items()}

    def left(self, is_script_over: bool) -> list[int]:
        """Those that are left now; if the process stays only for them, those that make progress."""
        now = time.monotonic()
        absence_s, self._last_look = now - self._last_look, now
        if is_script_over and self._over_since is None:
            self._over_since = now
        for rank, peer in list(self._peers.items()):
            progress, since = self._progress[rank]
            if peer.heartbeats.progress != progress:
                since = now
            elif absence_s > limits.ABSENCE_S:
                since += absence_s
            self._progress[rank] = (peer.heartbeats.progress, since)
            is_idle = self._over_since is not None and now - max(since, self._over_since) > limits.STAY_S
            if peer.closing is not Closing.OPEN or peer.is_dead or is_idle:
                del self._peers[rank]
        waited_s = now - self._started
        if is_script_over and self._peers and self._reminder.is_due(waited_s):
            who = ", ".join(self._topology.describe(rank) for rank in self._peers)
            logger.warning(
                "rank %d has closed its session %.0f s ago, and its process stays for those that still read parameters "
                "from it: %s",
                self._topology.me,
                waited_s,
                who,
            )
        return list(self._peers)


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
