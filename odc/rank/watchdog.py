"""Threads that detect failures while the training loop runs code in which ODC cannot check for them.

A stream waits only for work that another rank has submitted. If that rank dies or its device fails, the work is
dropped, and the word that the stream waits for is never written: ``torch.cuda.synchronize()`` or ``loss.item()`` in the
script would hang. :class:`StreamWatchdog` sleeps on the peers' process descriptors. If a peer left work unfinished or
reported an error, the watchdog records the failure, so that the next operation raises, and releases the streams.

:class:`JobWatchdog` passes news of a failure on to this rank's other group. It also ends torch's collectives in which
the training loop may wait for a rank that will not come: those of gradient clipping, of replicas, and of the script.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from odc import limits
from odc.errors import PeerDiedError, PeerSilentError, ProtocolError
from odc.liveness.threads import HelperThread
from odc.rank.waiting import Failure, Job, Patience
from odc.transports._peers import PeerState
from odc.transports.base import Transport

logger = logging.getLogger("odc")


class StreamWatchdog:
    """The thread. Its owner calls :meth:`close`, which joins it."""

    def __init__(self, transport: Transport, on_failure: Callable[[BaseException], None]) -> None:
        self._transport = transport
        self._on_failure = on_failure
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self._thread = HelperThread(self._run, "odc-watchdog")
        self._thread.start()

    def _run(self) -> None:
        released = False
        while not self._stopping.is_set():
            lost = None if released else self._transport.peers.wait_for_loss(self._stop_fd, limits.DEATH_LOOK_S)
            if lost is not None:
                self._report(lost)
            # After a reported error every operation raises, so nothing valid can come of what still waits. Again and
            # again: a write that was under way may have put the old word back.
            released = released or lost is not None or self._transport.peers.abort_notice() is not None
            if released:
                self._transport.release_streams()
                self._stopping.wait(limits.DEATH_LOOK_S)

    def _report(self, rank: int) -> None:
        if self._transport.peers.abort_notice() is not None:
            return  # that is the cause, and whoever operates next is told of it
        who, how = self._transport.peers.by_rank[rank].who, self._transport.peers.by_rank[rank].describe()
        error = PeerDiedError(
            f"rank {self._transport.topology.me}: {who} is gone ({how}) with work under way that streams of this "
            "rank may wait for. They go on, and what they compute now is not valid: do not save it"
        )
        logger.error("%s", error)
        self._on_failure(error)  # before they are: whoever is set free must find the failure recorded

    def close(self) -> None:
        """Stop and join. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._stop_fd, 1)
        self._thread.end()
        os.close(self._stop_fd)


@dataclass
class InCollective:
    """Where the training loop is while it may be waiting in a collective of torch. One writer, the loop."""

    what: str = ""
    """Empty: elsewhere."""
    is_due: bool = False
    """Every rank comes to it at the end of its minibatch: whoever makes no progress meanwhile is late. Else only a
    process that does not run at all is: what it does in between is the script's own affair."""


class JobWatchdog:
    """The thread. Its owner calls :meth:`close`, which joins it.

    Args:
        end_collectives: makes collectives of torch in this process fail, those under way and those to come.
        why_stuck: why the collective that the training loop is in will not complete, if that is so.
    """

    def __init__(
        self,
        job: Job,
        failure: Failure,
        in_collective: InCollective,
        timeout_s: float,
        on_failure: Callable[[BaseException], None],
        end_collectives: Callable[[], object],
        why_stuck: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._job = job
        self._failure = failure
        self._in_collective = in_collective
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._end_collectives = end_collectives
        self._why_stuck = why_stuck
        self._failed_since: float | None = None
        self._lost_since: float | None = None
        self._passed_on: str | None = None
        self._has_said_so = False
        self._stopping = threading.Event()
        self._thread = HelperThread(self._run, "odc-job-watchdog")
        self._thread.start()

    def _run(self) -> None:
        patience: Patience | None = None
        while not self._stopping.wait(limits.BEAT_S):
            self._job.own.beat()
            self._look_for_losses()
            if self._look_for_failures():
                continue
            if (why := self._why_stuck()) is not None:
                self._on_failure(ProtocolError(why))
            patience = (patience or Patience(self._job, self._timeout_s)) if self._in_collective.what else None
            if patience is not None:
                self._look_for_silence(patience)

    def _look_for_failures(self) -> bool:
        """Pass on what others have told, and once the training loop has had its time, end what it waits in."""
        notice = self._job.abort_notice()
        if notice is not None and notice != self._passed_on:
            self._passed_on = notice
            self._job.abort(notice)  # of the other group; who has one keeps the first
        if notice is None and self._failure.error is None:
            return False
        now = time.monotonic()
        if self._failed_since is None:
            self._failed_since = now
        elif self._failure.is_raised:
            return True
        elif now - self._failed_since > limits.FAILURE_GRACE_S and self._end_collectives() and not self._has_said_so:
            self._has_said_so = True
            logger.error(
                "rank %d ends its collectives because %s",
                self._job.rank,
                notice or f"it has failed: {self._failure.error}",
            )
        return True

    def _look_for_losses(self) -> None:
        lost = [rank for rank in self._job.others if self._job.peer(rank).state is PeerState.DEAD]
        now = time.monotonic()
        if not lost:
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = now
        elif (
            now - self._lost_since > limits.FAILURE_GRACE_S
            and self._failure.error is None
            and self._job.abort_notice() is None
        ):
            self._on_failure(PeerDiedError(self._describe(lost[0], "is dead")))

    def _look_for_silence(self, patience: Patience) -> None:
        """The training loop waits in a collective: for whom, nobody knows, so for all."""
        patience.forgive_own_absence()
        is_due = self._in_collective.is_due
        # Who has closed may be through with everything; or has left without coming to this one.
        expected = (PeerState.ALIVE, PeerState.CLOSED) if is_due else (PeerState.ALIVE,)
        alive = [rank for rank in self._job.others if self._job.peer(rank).state in expected]
        silences = [(patience.silence_s(rank, heartbeat=not is_due), rank) for rank in alive]
        if is_due and silences:
            # A look at this wait, for those who wait for this rank in turn; rather for one that works than for one
            # that waits, and for one that waits for this rank only if there is no other.
            waits = {rank: self._job.peer(rank).waiting_on for rank in alive}
            self._job.own.set_waiting_on(
                max(silences, key=lambda one: (waits[one[1]] is None, waits[one[1]] != self._job.rank, one))[1]
            )
            if not self._in_collective.what:  # the training loop has come out of it just now
                self._job.own.set_waiting_on(None)
        late = [(silence_s, rank) for silence_s, rank in silences if silence_s > patience.limit_s(rank)]
        if late:
            silence_s, rank = max(late)
            fault = patience.describe_silence(rank, silence_s)
            advice = f". If it is only slow, raise timeout_s or ODC_TIMEOUT (now {self._timeout_s:g} s)."
            after = self._job.after_refusal(rank)
            self._on_failure(PeerSilentError(f"{self._describe(rank, fault)}{after or advice}"))

    def _describe(self, rank: int, fault: str) -> str:
        """What happened to ``rank``, and where this one is meanwhile."""
        where = f" in {self._in_collective.what}" if self._in_collective.what else ""
        return (
            f"rank {self._job.rank} waits{where}. Cause: {self._job.peer(rank).who} {fault}: "
            f"{self._job.peer(rank).describe()}"
        )

    def close(self) -> None:
        """Stop and join. Idempotent."""
        self._stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
