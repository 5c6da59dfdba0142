"""The one function in which this package waits for another rank.

It watches the thing awaited, the awaited ranks' deaths, their progress, abort notices, this rank's own failure, and
the monotonic clock. Slow is not dead: progress of the awaited rank (or of the rank *it* waits for) starts the limit
anew; silence for the whole limit, or death, is an error that says who, what for, how long, and why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from odc.errors import AbortedError, OdcError, PeerClosedError, PeerDiedError, PeerSilentError
from odc.faults import FaultInjector
from odc.pausing import Reminder, look_until
from odc.stats import Stats
from odc.timeline import Timeline
from odc.transports.base import PeerState, Transport

logger = logging.getLogger("odc")

_SLICE_S = 0.5  # longest sleep between two looks at the clock and at progress
_ABSENCE_S = 4 * _SLICE_S  # between two looks: this process was not running


GONE = (PeerClosedError, PeerDiedError, PeerSilentError)
"""What a transfer raises when its rank is not there any more."""


@dataclass
class Failure:
    """The first failure of this rank, shared by its training loop and its daemon thread."""

    error: BaseException | None = None


class Waiter:
    """Waits on behalf of one rank."""

    def __init__(
        self, transport: Transport, timeout_s: float, faults: FaultInjector, stats: Stats, failure: Failure
    ) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._faults = faults
        self._stats = stats
        self._failure = failure
        self.timeline: Timeline | None = None
        self.context = ""  # for example "minibatch 7, microbatch 2"; ends every error text

    def wait(
        self,
        pending: Callable[[], Sequence[int]],
        what: Callable[[], str],
        *,
        block: Callable[[float, Sequence[int]], None] | None = None,
        daemon: bool = False,
    ) -> None:
        """Return as soon as ``pending()`` is empty.

        Args:
            pending: the ranks still awaited. Called again after every wake-up.
            what: what is awaited, for messages.
            block: sleeps for up to the given seconds; default: until a signal arrives or a pending rank dies.
            daemon: this is the daemon thread, which must not be seen as the rank's own waiting.

        Raises:
            PeerDiedError, PeerClosedError, PeerSilentError: a pending rank will not do it any more.
            AbortedError: another rank reported a failure.
            OdcError: this rank's daemon failed.
        """
        ranks = pending()
        if not ranks:
            return
        started_ns = time.monotonic_ns()
        patience, reminder = _Patience(self._transport, self._timeout_s), Reminder()
        try:
            while ranks:
                self._faults.hit("wait")
                self.check()
                self._check_peers(pending, ranks, what, patience)
                if reminder.is_due(patience.waited_s):
                    logger.warning("%s", self._describe(ranks[0], what, patience.waited_s))
                if not daemon:
                    self._transport.set_waiting_on(ranks[0])
                pause = min(_SLICE_S, self._timeout_s / 4)
                if block is not None:
                    block(pause, ranks)
                else:
                    self._transport.block(pause, ranks, daemon=daemon)
                ranks = pending()
        finally:
            if not daemon:
                self._transport.tick()  # before the next line: nobody may see "not waiting, long silent"
                self._transport.set_waiting_on(None)
                self._account(what, started_ns)

    def wait_for_work(self, is_completed: Callable[[], bool], what: str) -> None:
        """Return when a collective on a process group is complete; that group sees the deaths of its own ranks.

        Raises:
            PeerSilentError: it was not for the whole limit.
            AbortedError, OdcError: a rank of this transport, or this rank, has failed meanwhile.
        """
        started_ns = time.monotonic_ns()
        reminder = Reminder()

        def look(waited_s: float) -> None:
            self._faults.hit("wait")
            self.check()
            text = f"{self._whoami()} waited {waited_s:.1f} s for {what}" + self._where()
            if waited_s > self._timeout_s:
                raise PeerSilentError(
                    f"{text}. If they are only slow, raise timeout_s or ODC_TIMEOUT (now {self._timeout_s:g} s)."
                )
            if reminder.is_due(waited_s):
                logger.warning("%s", text)

        try:
            look_until(is_completed, look)
        finally:
            self._transport.tick()
            self._account(lambda: what, started_ns)

    def explain(self, error: OdcError, what: str) -> OdcError:
        """The error of a transfer that found its rank gone (one of :data:`GONE`), with what was being done, and when.

        Raises:
            AbortedError, OdcError: this rank or another one has failed; that is the better account.
        """
        self.check()
        return type(error)(f"{self._whoami()}: {what}{self._where()}: {error}")

    def after_scatter_chunk(self) -> None:
        """Called after each chunk of a push: progress that others can see, and a fault point."""
        self._transport.tick()
        self._faults.hit("scatter.after_chunk")

    def after_gather_chunk(self) -> None:
        """Called after each chunk of a gather."""
        self._transport.tick()
        self._faults.hit("gather.after_chunk")

    def check(self) -> None:
        """Raise if this rank or a peer has failed already. Cheap; called at every operation."""
        failure = self._failure.error
        if isinstance(failure, AbortedError):  # whichever thread has heard of it, it is another rank's failure
            raise AbortedError(str(failure)) from failure
        if failure is not None:
            raise OdcError(f"{self._whoami()} failed earlier: {_one_line(failure)}") from failure
        notice = self._transport.abort_notice()
        if notice is not None:
            raise AbortedError(f"{self._whoami()} aborted because {notice}")

    def _account(self, what: Callable[[], str], started_ns: int) -> None:
        ended_ns = time.monotonic_ns()
        self._stats.waits += 1
        self._stats.wait_s += (ended_ns - started_ns) * 1e-9
        if self.timeline is not None:
            self.timeline.record("wait", what(), started_ns, ended_ns)

    def _check_peers(
        self,
        pending: Callable[[], Sequence[int]],
        ranks: Sequence[int],
        what: Callable[[], str],
        patience: _Patience,
    ) -> None:
        for rank in ranks:
            state = self._transport.peer_state(rank)
            if state is PeerState.ALIVE:
                continue
            if rank not in pending():  # it delivered, and ended afterwards
                continue
            self.check()  # its own account of what happened is better than ours
            text, detail = self._describe(rank, what, patience.waited_s), self._transport.describe_peer(rank)
            if state is PeerState.DEAD:
                raise PeerDiedError(f"{text}. Cause: rank {rank} is dead: {detail}")
            raise PeerClosedError(f"{text}. Cause: rank {rank} is gone: {detail}")
        silent = patience.silent_rank(ranks)
        if silent is not None:
            rank, blamed, silence_s = silent
            via = "" if blamed == rank else f" (rank {rank} itself waits for rank {blamed})"
            raise PeerSilentError(
                f"{self._describe(rank, what, patience.waited_s)}{via}. Cause: rank {blamed} is alive but silent for "
                f"{silence_s:.1f} s ({self._transport.describe_peer(blamed)}). If it is only slow, raise timeout_s "
                f"or ODC_TIMEOUT (now {self._timeout_s:g} s)."
            )

    def _describe(self, rank: int, what: Callable[[], str], waited_s: float) -> str:
        peer = self._transport.topology.describe(rank)
        return f"{self._whoami()} waited {waited_s:.1f} s for {peer}: {what()}{self._where()}"

    def _where(self) -> str:
        return f", {self.context}" if self.context else ""

    def _whoami(self) -> str:
        return f"rank {self._transport.topology.rank}"


class _Patience:
    """Since when each rank has been silent, as far as one wait has seen."""

    def __init__(self, transport: Transport, timeout_s: float) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._started = self._last_look = time.monotonic()
        self._seen: dict[int, tuple[int, float]] = {}

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._started

    def silent_rank(self, ranks: Sequence[int]) -> tuple[int, int, float] | None:
        """(awaited rank, rank to blame, seconds) of the first awaited rank that has been silent for too long."""
        self._forgive_own_absence()
        for rank in ranks:
            blamed = self._follow(rank)
            silence_s = self._silence_s(blamed)
            if silence_s > self._timeout_s:
                return rank, blamed, silence_s
        return None

    def _forgive_own_absence(self) -> None:
        """If this process itself was suspended (Ctrl-Z, a paused container), the others may have been too."""
        now = time.monotonic()
        absence_s = now - self._last_look
        self._last_look = now
        if absence_s > _ABSENCE_S:
            self._seen = {rank: (progress, since + absence_s) for rank, (progress, since) in self._seen.items()}

    def _follow(self, rank: int) -> int:
        """Who ``rank`` is really held up by: follow waits to a rank that is not waiting (or to a cycle)."""
        visited = {rank}
        while (target := self._transport.waiting_on(rank)) is not None and target not in visited:
            visited.add(target)
            rank = target
        return rank

    def _silence_s(self, rank: int) -> float:
        now, progress = time.monotonic(), self._transport.progress(rank)
        before, since = self._seen.get(rank, (progress, now))
        if before != progress:
            since = now
        self._seen[rank] = (progress, since)
        return now - since


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
