"""Run all steps of a shutdown, also if some fail. Resources that others may still use are released at the end."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from odc import limits

logger = logging.getLogger("odc")


class Closable(Protocol):
    """A part that ends when the runtime does."""

    def close(self) -> None: ...


def run_all(steps: Iterable[Callable[[], object]]) -> None:
    """Take each step, in this order, also behind one that fails: what is left open makes peers wait.

    Raises:
        the first error, when all steps have been taken. Later ones are logged.
    """
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:  # Ctrl-C too must not keep the rest open
            if first is None:
                first = error
            else:
                logger.error("odc: while closing, after another error: %s: %s", type(error).__name__, error)
    if first is not None:
        raise first


CLOSING = "odc-close"


def release_when(is_unused: Callable[[bool], bool], release: Callable[[], object]) -> None:
    """Release what others may still be using as soon as they do not.

    Beyond a moment that happens behind this call, in a thread for which the interpreter waits at its end; but not if
    that end is an error's.

    Args:
        is_unused: given whether the script is over, so that this process stays for nothing else.
    """
    earlier_error = id(last_error())

    def wait(limit_s: float) -> bool:
        deadline, pause_s = time.monotonic() + limit_s, limits.CLOSE_PAUSE_S
        while not is_unused(not threading.main_thread().is_alive()) and not has_failed_at_exit(earlier_error):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)
        release()
        return True

    def wait_behind() -> None:
        if threading.main_thread().is_alive():
            with contextlib.suppress(RuntimeError):  # no thread can be started any more
                threading.Thread(target=wait, args=(math.inf,), name=CLOSING, daemon=False).start()
                return
        wait(math.inf)

    try:
        is_released = wait(limits.CLOSE_GRACE_S)
    except BaseException:  # Ctrl-C
        wait_behind()
        raise
    if not is_released:
        wait_behind()


def has_failed_at_exit(earlier_error: int) -> bool:
    """Whether the script has ended with an error, other than the one of this ``id``."""
    error = last_error()
    return not threading.main_thread().is_alive() and error is not None and id(error) != earlier_error


def last_error() -> BaseException | None:
    """The exception that was printed last because nobody had caught it: it has ended the script, if it has ended."""
    error: BaseException | None = getattr(sys, "last_value", None)
    return error
