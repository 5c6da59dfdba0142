"""Freeing streams that wait for work of a process that has died.

A stream waits only for work that another rank has submitted. If that rank dies, or its device fails, the work is
dropped, and the word that the stream waits for is never written: ``torch.cuda.synchronize()`` or ``loss.item()`` in the
script would hang, where no wait of ours can notice anything. This thread sleeps on the peers' process descriptors; when
one has left work undone, or has told of an error, it records the failure, so that the next operation raises, and lets
the streams go on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

from odc.errors import PeerDiedError
from odc.threads import HelperThread
from odc.transports.base import Transport

logger = logging.getLogger("odc")

_LOOK_S = 1.0  # a death wakes at once, an error that a living rank has told of is found by looking


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
            lost = None if released else self._transport.wait_for_loss(self._stop_fd, _LOOK_S)
            if lost is not None:
                self._report(lost)
            # After a reported error every operation raises, so nothing valid can come of what still waits. Again and
            # again: a write that was under way may have put the old word back.
            released = released or lost is not None or self._transport.abort_notice() is not None
            if released:
                self._transport.release_streams()
                self._stopping.wait(_LOOK_S)

    def _report(self, rank: int) -> None:
        if self._transport.abort_notice() is not None:
            return  # that is the cause, and whoever operates next is told of it
        who, how = self._transport.topology.describe(rank), self._transport.describe_peer(rank)
        error = PeerDiedError(
            f"rank {self._transport.topology.rank}: {who} is gone ({how}) with work under way that streams of this "
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
        if self._thread is not threading.current_thread():
            self._thread.join()
        os.close(self._stop_fd)
