"""The only function in which ODC waits for another rank, and the conditions that it checks meanwhile.

It checks the awaited condition, death and progress of the awaited ranks, abort notices, this rank's own failure, and
the time. A slow rank is not an error: progress of the awaited rank, or of the rank for which *that* one waits, restarts
the limit. Death, or no progress for the whole limit, is an error with the rank, the purpose, the time and the cause.

On-demand communication runs inside a shard group. With replicas (hybrid sharding) a rank belongs to two groups: its
shard group, and the ranks with the same place in the other shard groups. Each group has a transport. News in one group
is passed on to the other (:mod:`odc.rank.watchdog`), so it reaches every rank of the mesh in two steps. Units on other
meshes add further groups. :class:`Job` holds what one rank knows of all ranks, by their numbers in the job.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch.distributed as dist

from odc import limits
from odc.engines.base import Engine
from odc.errors import AbortedError, OdcError, PeerClosedError, PeerDiedError, PeerSilentError
from odc.liveness.faults import FaultInjector
from odc.liveness.gloo import num_entered
from odc.liveness.threads import Reminder, look_until
from odc.timeline import Stats, Timeline
from odc.transports._control import Heartbeats
from odc.transports._peers import IN_COLLECTIVE, Peer, Peers, PeerState, in_collective
from odc.transports.base import Transport

logger = logging.getLogger("odc")


GONE = (PeerClosedError, PeerDiedError, PeerSilentError)
"""What a transfer raises when its rank is not there any more."""


@dataclass(frozen=True)
class Endpoint:
    """What the parts of one rank's runtime share: its transport, with the waiting, fault points and counters that go
    with it."""

    transport: Transport
    waiter: Waiter
    faults: FaultInjector
    stats: Stats

    @property
    def engine(self) -> Engine:
        return self.transport.engine

    @property
    def rank(self) -> int:
        return self.transport.topology.rank

    @property
    def world_size(self) -> int:
        return self.transport.topology.world_size

    def name(self, rank: int) -> int:
        """The number in the job of ``rank`` of this group, for messages."""
        return self.transport.topology.global_rank(rank)


@dataclass
class Failure:
    """The first failure of this rank, shared by its training loop and its daemon thread."""

    error: BaseException | None = None
    is_raised: bool = False
    """The training loop has been told: it waits for nobody any more, and may catch that and go on."""


class WaitStats(Protocol):
    """What a wait is added to."""

    def add_wait(self, seconds: float, whom: int | None) -> None: ...


class Waiter:
    """Waits on behalf of one rank."""

    def __init__(
        self,
        transport: Transport,
        timeout_s: float,
        faults: FaultInjector,
        stats: WaitStats,
        failure: Failure,
        job: Job | None = None,
    ) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._faults = faults
        self._stats = stats
        self._failure = failure
        self.job = job or Job(transport.peers)
        """Whom this rank hears of; with replicas, partners or several meshes, these as well."""
        self.timeline: Timeline | None = None
        self.where: Callable[[], str] = str
        """Says where this rank is, for example "minibatch 7, microbatch 2": ends every error text."""
        self.after_scatter_chunk = self._after_chunk("scatter.after_chunk")
        """Called after each chunk of a push: progress that others can see, and a fault point."""
        self.after_gather_chunk = self._after_chunk("gather.after_chunk")
        """Called after each chunk of a gather."""

    def wait(
        self,
        pending: Callable[[], Sequence[int]],
        what: Callable[[], str],
        *,
        block: Callable[[float], None] | None = None,
        among: Transport | None = None,
    ) -> None:
        """Return as soon as ``pending()`` is empty.

        Args:
            pending: the ranks still awaited. Called again after every wake-up.
            what: what is awaited, for messages.
            block: sleeps for up to the given seconds; default: until the first pending rank posts a signal.
            among: whose numbers these are; default: those of the shard group.

        Raises:
            PeerDiedError, PeerClosedError, PeerSilentError: a pending rank will not do it any more.
            AbortedError: another rank reported a failure.
            OdcError: this rank's daemon failed.
        """
        ranks = pending()
        if not ranks:
            return
        transport = among or self._transport
        started_ns = time.monotonic_ns()
        patience, reminder = Patience(self.job, self._timeout_s), Reminder()
        pause = min(limits.WAIT_SLEEP_S, self._timeout_s / 4)
        whom: int | None = None
        try:
            while ranks:
                self._faults.hit("wait")
                self.check()
                self._check_peers(transport, pending, ranks, what, patience)
                first = ranks[0]
                whom = transport.topology.global_rank(first)
                if reminder.is_due(patience.waited_s):
                    text, after = self._describe(whom, what, patience.waited_s), self.job.after_refusal(whom)
                    logger.warning("%s%s", text, after)
                self.job.own.set_waiting_on(whom)
                if block is not None:
                    block(pause)
                    ranks = pending()
                    continue
                word = transport.peers.sleep_word(first)
                ticket = word.ticket
                ranks = pending()  # again: what came before the ticket wakes nobody
                if ranks and ranks[0] == first:
                    word.sleep(ticket, pause)
                    ranks = pending()
        finally:
            self.waits_no_more()
            self._account(what, started_ns, whom)

    def waits_no_more(self) -> None:
        """The end of a wait."""
        self.job.own.tick()  # before the next line: nobody may see "not waiting, long silent"
        self.job.own.set_waiting_on(None)

    def wait_for_work(
        self, is_completed: Callable[[], bool], what: str, ranks: Sequence[int], is_outside: bool = False
    ) -> None:
        """Return when a collective on a process group is complete.

        Args:
            ranks: the ranks of that group, by their numbers in the job.
            is_outside: none of them completes it, but a process outside of the job: their progress does not make the
                limit longer, and who has closed is not missed.

        Raises:
            PeerDiedError, PeerClosedError, PeerSilentError: one of them will not take part any more.
            AbortedError, OdcError: a rank of the job, or this rank, has failed meanwhile.
        """
        started_ns = time.monotonic_ns()
        patience, reminder = Patience(self.job, self._timeout_s), Reminder()
        others = [rank for rank in ranks if rank != self.job.rank and self.job.sees(rank)]
        closed_s = dict[int, float]()  # since when, on the clock of this wait

        def look(waited_s: float) -> None:
            self._faults.hit("wait")
            self.check()
            if waited_s < limits.COLLECTIVE_FIRST_LOOK_S:
                return
            if is_outside:
                others[:] = [rank for rank in others if self.job.peer(rank).state is not PeerState.CLOSED]
            for rank in others:
                state = self.job.peer(rank).state
                if state is PeerState.CLOSED:  # behind its part of this collective, which may still be on its way here
                    is_missed = waited_s - closed_s.setdefault(rank, waited_s) > limits.CLOSED_S
                else:
                    is_missed = state is PeerState.DEAD
                if is_missed and not is_completed():
                    self._fail_gone(rank, lambda: what, waited_s)
            self._fail_silent(patience, others, lambda: what)
            if is_outside and waited_s > self._timeout_s + 1.5 * limits.STATUS_LAG_S:  # a silent rank is found before
                raise PeerSilentError(
                    f"{self._whoami()} waited {waited_s:.1f} s for {what}{self._where()}. If that is only slow, raise "
                    f"timeout_s or ODC_TIMEOUT (now {self._timeout_s:g} s)."
                )
            if others:
                self.job.own.set_waiting_on(others[0])
            if reminder.is_due(waited_s):
                logger.warning("%s waited %.1f s for %s%s", self._whoami(), waited_s, what, self._where())

        try:
            look_until(is_completed, look)
        finally:
            self.waits_no_more()
            self._account(lambda: what, started_ns)

    def explain_collective(self, what: str, waited_s: float) -> OdcError | None:
        """Why a collective of torch has failed here; None if nothing is heard of it within a moment."""
        looks, left = 0, list[int]()  # who has closed and ended, in this order
        while True:
            looked_s = looks * limits.EXPLANATION_PAUSE_S
            try:
                self.check()
                for rank in self.job.others:
                    state = self.job.peer(rank).state
                    if state is PeerState.DEAD:
                        self._fail_gone(rank, lambda: what, waited_s)
                    if state is PeerState.CLOSED and rank not in left and self.job.peer(rank).is_dead:
                        left.append(rank)
                # They may have come to all that they had to, so others come first.
                if left and looked_s > limits.CLOSED_S:
                    self._fail_gone(left[0], lambda: what, waited_s)
            except PeerClosedError as cause:  # which of them it was, nobody can tell
                others = f"; so are ranks {left[1:]}" if len(left) > 1 else ""
                return PeerClosedError(f"{cause}{others}")
            except OdcError as cause:
                return cause
            if looked_s >= limits.EXPLANATION_S:
                return None
            looks += 1
            time.sleep(limits.EXPLANATION_PAUSE_S)

    def explain(self, error: OdcError, what: str) -> OdcError:
        """The error of a transfer that found its rank gone (one of :data:`GONE`), with what was being done, and when.

        Raises:
            AbortedError, OdcError: this rank or another one has failed; that is the better account.
        """
        self.check()
        return type(error)(f"{self._whoami()}: {what}{self._where()}: {error}")

    def _after_chunk(self, point: str) -> Callable[[], None]:
        # Decided once: where no fault is set, whoever replaces FaultInjector.hit later does not hear of these points.
        if not self._faults.is_set:
            return self._transport.peers.tick

        def tick_and_hit() -> None:
            self._transport.peers.tick()
            self._faults.hit(point)

        return tick_and_hit

    def check(self) -> None:
        """Raise if this rank or a peer has failed already. Cheap; called at every operation."""
        failure, notice = self._failure.error, self.job.abort_notice()
        if failure is None and notice is None:
            return
        if isinstance(failure, AbortedError):  # whichever thread has heard of it, it is another rank's failure
            raise AbortedError(str(failure)) from failure
        if isinstance(failure, GONE):  # found by another thread, on behalf of whichever wait this is
            raise type(failure)(str(failure)) from failure
        if failure is not None:
            raise OdcError(f"{self._whoami()} failed earlier: {_one_line(failure)}") from failure
        raise AbortedError(f"{self._whoami()} aborted because {notice}")

    def _account(self, what: Callable[[], str], started_ns: int, whom: int | None = None) -> None:
        ended_ns = time.monotonic_ns()
        self._stats.add_wait((ended_ns - started_ns) * 1e-9, whom)
        if self.timeline is not None:
            peer = {} if whom is None else {"peer": whom}
            self.timeline.record("wait", what(), started_ns, ended_ns, **peer)

    def _check_peers(
        self,
        transport: Transport,
        pending: Callable[[], Sequence[int]],
        ranks: Sequence[int],
        what: Callable[[], str],
        patience: Patience,
    ) -> None:
        for rank in ranks:
            if transport.peers.by_rank[rank].state is PeerState.ALIVE:
                continue
            if rank not in pending():  # it delivered, and ended afterwards
                continue
            self._fail_gone(transport.topology.global_rank(rank), what, patience.waited_s)
        self._fail_silent(patience, [transport.topology.global_rank(rank) for rank in ranks], what)

    def _fail_gone(self, rank: int, what: Callable[[], str], waited_s: float) -> NoReturn:
        self.check()  # its own account of what happened is better than ours
        text, after = self._describe(rank, what, waited_s), self.job.after_refusal(rank)
        detail = self.job.peer(rank).describe()
        if self.job.peer(rank).state is PeerState.DEAD:
            raise PeerDiedError(f"{text}. Cause: rank {rank} is dead: {detail}{after}")
        if after and not self.job.peer(rank).is_dead:
            raise PeerClosedError(f"{text}. Cause: rank {rank} is still running, but {detail}{after}")
        raise PeerClosedError(f"{text}. Cause: rank {rank} is gone: {detail}{after}")

    def _fail_silent(self, patience: Patience, ranks: Sequence[int], what: Callable[[], str]) -> None:
        """Raise if one of ``ranks``, by their numbers in the job, has been silent for too long."""
        found = patience.blame(ranks)
        if found is None:
            return
        rank, blamed, fault, may_be_slow = found
        after = self.job.after_refusal(blamed)
        slow = f". If it is only slow, raise timeout_s or ODC_TIMEOUT (now {self._timeout_s:g} s)."
        advice = slow if may_be_slow and not after else ""
        via = "" if blamed == rank else f" (rank {rank} itself waits for {self.job.peer(blamed).who})"
        raise PeerSilentError(
            f"{self._describe(rank, what, patience.waited_s)}{via}. Cause: rank {blamed} {fault} "
            f"({self.job.peer(blamed).describe()}){after}{advice}"
        )

    def _describe(self, rank: int, what: Callable[[], str], waited_s: float) -> str:
        return f"{self._whoami()} waited {waited_s:.1f} s for {self.job.peer(rank).who}: {what()}{self._where()}"

    def _where(self) -> str:
        where = self.where()
        return f", {where}" if where else ""

    def _whoami(self) -> str:
        return f"rank {self.job.rank}"


class Patience:
    """How long ranks have given no sign of life, as far as one wait has seen, and who is to blame for that wait.

    A rank that waits itself is not to blame as long as it looks: whom it waits for is found by following the waits, or
    judged by that rank itself where he is not seen from here. One that waits and does not look is stopped: what it
    says of its wait is of the past, so a circle of waits that one seems to see has such a rank in it.
    """

    def __init__(self, job: Job, timeout_s: float) -> None:
        self._job = job
        self._timeout_s = timeout_s
        self._started = self._last_look = time.monotonic()
        self._seen: dict[int, tuple[Heartbeats, float, float]] = {}  # since when it is silent, and has had no beat
        self._circles: dict[int, tuple[list[int], float, int]] = {}
        self._runs = False
        """Whether the process of the last rank looked at beats: it is not stopped, but waits."""

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._started

    def blame(self, ranks: Sequence[int]) -> tuple[int, int, str, bool] | None:
        """(awaited rank, rank to blame, its fault, whether it may only be slow) of the first awaited rank for which the
        time is over."""
        self.forgive_own_absence()
        for rank in ranks:
            chain, is_circle = self._follow(rank)
            silences = {one: self.silence_s(one) for one in chain}
            blamed = max(chain, key=lambda one: silences[one] - self.limit_s(one))
            silence_s = silences[blamed]
            if silence_s > self.limit_s(blamed):
                return rank, blamed, self.describe_silence(blamed, silence_s), True
            waits_for_this = self._waits_for_this(chain[-1])
            stuck_s = self._stuck_s(rank, chain) if is_circle or waits_for_this else self._not_stuck(rank)
            if waits_for_this and self._runs and stuck_s > limits.COLLECTIVE_STUCK_S and self._nobody_works():
                return rank, chain[-1], self.describe_collective(stuck_s), False
            if stuck_s > self._timeout_s + 2 * limits.STATUS_LAG_S:  # one that is stopped is found before
                fault = f"is alive but in a circle of ranks that wait for each other for {stuck_s:.1f} s"
                return rank, blamed, fault, False
        return None

    def describe_collective(self, stuck_s: float) -> str:
        """What to say of a rank that waits for this one in a collective, while this one waits for it."""
        return (
            f"has waited for {stuck_s:.1f} s in a collective of the script, to which all ranks have to come, and rank "
            f"{self._job.rank} waits here instead: neither goes on. Give each rank as many minibatches as the others "
            "(of loaders of different lengths, up to the end of the shortest), and let all come to such a collective "
            "between the same ones"
        )

    def _waits_for_this(self, rank: int) -> bool:
        """Whether ``rank`` is in a collective of all ranks, and the training loop of this one waits elsewhere."""
        whom = self._job.peer(rank).waiting_on
        if whom is None or whom < IN_COLLECTIVE or threading.current_thread() is not threading.main_thread():
            return False
        ahead = (whom - in_collective(num_entered(dist.group.WORLD))) % IN_COLLECTIVE
        return 0 < ahead < IN_COLLECTIVE // 2

    def _nobody_works(self) -> bool:
        """A rank that works may come to what others wait for, if that is another collective."""
        peers = [self._job.peer(rank) for rank in self._job.others]
        return all(peer.waiting_on is not None for peer in peers if peer.state is PeerState.ALIVE)

    def describe_silence(self, rank: int, silence_s: float) -> str:
        """What to say of a rank that is alive and gives no sign of life. One that has stopped in a collective waits for
        nobody."""
        has_beaten = self.silence_s(rank, heartbeat=True) < limits.STATUS_LAG_S
        if has_beaten and (self._job.peer(rank).waiting_on or 0) >= IN_COLLECTIVE:
            return f"has waited for {silence_s:.1f} s in a collective of the script, to which another rank has to come"
        return f"is alive but silent for {silence_s:.1f} s"

    def limit_s(self, rank: int) -> float:
        """Silence of ``rank`` beyond which it is to blame. That a rank still looks is heard with some delay."""
        return self._timeout_s + (limits.STATUS_LAG_S if self._job.peer(rank).waiting_on is not None else 0.0)

    def forgive_own_absence(self) -> None:
        """If this process itself was suspended (Ctrl-Z, a paused container), the others may have been too."""
        now = time.monotonic()
        absence_s = now - self._last_look
        self._last_look = now
        if absence_s > limits.ABSENCE_S:
            self._seen = {
                rank: (signs, since + absence_s, beaten + absence_s)
                for rank, (signs, since, beaten) in self._seen.items()
            }
            self._circles.clear()

    def silence_s(self, rank: int, heartbeat: bool = False) -> float:
        """Since when ``rank`` has made no progress, nor looked if it waits; or has not even had a ``heartbeat``."""
        now, signs = time.monotonic(), self._job.peer(rank).heartbeats
        before, since, beaten = self._seen.get(rank, (signs, now, now))
        since, beaten = now if before[:2] != signs[:2] else since, now if before != signs else beaten
        self._seen[rank] = (signs, since, beaten)
        return now - (beaten if heartbeat else since)

    def _follow(self, rank: int) -> tuple[list[int], bool]:
        """``rank``, whom it waits for, and so on, as far as they are seen from here; and whether that is a circle."""
        chain = [rank]
        while (target := self._job.peer(chain[-1]).waiting_on) is not None and self._job.sees(target):
            if target == self._job.rank or target in chain:
                return chain, True
            chain.append(target)
        return chain, False

    def _stuck_s(self, rank: int, chain: Sequence[int]) -> float:
        """For how long ranks that all wait have made no progress: somebody waits outside the protocol."""
        now, progress = time.monotonic(), [self._job.peer(one).heartbeats.progress for one in chain]
        beats = self._job.peer(chain[-1]).heartbeats.beats
        before, since, beats_then = self._circles.get(rank, (progress, now, beats))
        if before != progress:
            since, beats_then = now, beats
        self._circles[rank] = (progress, since, beats_then)
        self._runs = beats - beats_then >= limits.STUCK_BEATS
        return now - since

    def _not_stuck(self, rank: int) -> float:
        self._circles.pop(rank, None)
        return 0.0


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


class Job:
    """Ranks by their numbers in the job, as this one hears of them at first hand: those of all groups that it belongs
    to. ``peers``: of the first group, which shows what this rank does."""

    def __init__(self, peers: Peers) -> None:
        self.rank = peers.topology.me
        self.own = peers
        self._groups: list[Peers] = []
        self._found: dict[int, tuple[Peers, int]] = {}
        self.add(peers)

    def add(self, peers: Peers) -> None:
        """Another group that this rank belongs to; what it shows in the first group, it shows in this one too."""
        if self._groups:
            self.own.show_to(peers)
        self._groups.append(peers)
        for rank in range(peers.topology.world_size):
            self._found.setdefault(peers.topology.global_rank(rank), (peers, rank))

    @property
    def others(self) -> list[int]:
        """Every rank that this one hears of at first hand."""
        return [rank for rank in self._found if rank != self.rank]

    def sees(self, rank: int) -> bool:
        """Whether this rank hears of ``rank`` at first hand."""
        return rank in self._found

    def peer(self, rank: int) -> Peer:
        """What is known of ``rank``."""
        peers, number = self._found[rank]
        return peers.by_rank[number]

    def after_refusal(self, rank: int) -> str:
        """To be put behind what is said of ``rank``, whose script may have caught a refusal."""
        refusal = self.peer(rank).refusal
        return f", after rank {rank} had refused what its script did ({refusal})" if refusal else ""

    def set_refusal(self, text: str) -> None:
        """See :meth:`odc.transports._peers.Peers.set_refusal`."""
        for peers in self._groups:
            peers.set_refusal(text)

    def abort_notice(self) -> str | None:
        """The first abort notice that was left here, in any group."""
        for peers in self._groups:  # a plain loop: each operation asks
            notice = peers.abort_notice()
            if notice is not None:
                return notice
        return None

    def abort(self, text: str) -> None:
        """Leave ``text`` with every rank that has no earlier notice. Never raises."""
        for peers in self._groups:
            peers.abort(text)
