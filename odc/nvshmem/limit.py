"""A time limit for calls of NVSHMEM that have none: they wait for all ranks, and nothing can interrupt them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from odc.pausing import Reminder
from odc.threads import HelperThread

logger = logging.getLogger("odc")

_ADVICE = (
    "A rank has not come so far, or hosts do not reach each other: NVSHMEM_DEBUG=INFO tells more, "
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME chooses the network"
)


@contextmanager
def time_limit(what: str, limit_s: float) -> Iterator[None]:
    """Warn of a call inside that takes long, and end this process if it has not returned after ``limit_s``.

    No exception could end it: the call is inside NVSHMEM, which never looks. The other ranks hang in the same call, or
    notice that this one is gone. The call must release the interpreter's lock.
    """
    returned = threading.Event()
    watch = HelperThread(_watch, "odc-nvshmem-limit", (returned, what, limit_s))
    watch.start()
    try:
        yield
    finally:
        returned.set()
        watch.join()


def _watch(returned: threading.Event, what: str, limit_s: float) -> None:
    started, reminder = time.monotonic(), Reminder()
    while not returned.wait(min(reminder.due_s, limit_s) - (time.monotonic() - started)):
        waited_s = time.monotonic() - started
        if waited_s >= limit_s and not returned.is_set():
            logger.critical("odc: %s has not returned for %.0f s; ending this process. %s", what, waited_s, _ADVICE)
            os._exit(1)
        if reminder.is_due(waited_s):
            logger.warning("odc: %s has not returned for %.0f s. %s", what, waited_s, _ADVICE)
