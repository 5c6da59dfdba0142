"""The end of a runtime, also of one that nobody has closed."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from odc import limits
from odc.liveness.threads import in_helper
from odc.setup.agreement import is_known_everywhere

if TYPE_CHECKING:
    from odc.transports.base import Transport

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


def shut_down(parts: Sequence[Closable], *transports: Transport) -> None:
    """Close the parts, in this order, and then what they work on. Waits for no other rank longer than a moment.

    Raises:
        as :func:`run_all`.
    """
    ends = [transport.end_transfers for transport in transports]
    farewells = [transport.say_farewell for transport in transports]  # none waits for what another one has to wait for
    closes = [transport.close for transport in transports]
    run_all([*ends, *(part.close for part in parts), *farewells, *closes])


def give_up(error: BaseException, parts: Sequence[Closable], *transports: Transport) -> None:
    """The end of a set-up that has failed here: unless all ranks know, they are told, and wait for this one no more."""
    for transport in transports if not is_known_everywhere(error) else ():
        transport.abort_peers(f"{transport.topology.whoami}: {type(error).__name__}: {error}")
    try:
        shut_down(parts, *transports)
    except Exception as another:  # the first cause is the one to raise
        logger.error("odc: while giving up: %s: %s", type(another).__name__, another)


_CLOSING = "odc-close"


def release_when(is_unused: Callable[[bool], bool], release: Callable[[], object]) -> None:
    """Release what others may still be using as soon as they do not.

    Beyond a moment that happens behind this call, in a thread for which the interpreter waits at its end; but not if
    that end is an error's.

    Args:
        is_unused: given whether the script is over, so that this process stays for nothing else.
    """
    earlier_error = id(_last_error())

    def wait(limit_s: float) -> bool:
        deadline, pause_s = time.monotonic() + limit_s, limits.CLOSE_PAUSE_S
        while not is_unused(not threading.main_thread().is_alive()) and not _has_failed_at_exit(earlier_error):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)
        release()
        return True

    def wait_behind() -> None:
        if threading.main_thread().is_alive():
            with contextlib.suppress(RuntimeError):  # no thread can be started any more
                threading.Thread(target=wait, args=(math.inf,), name=_CLOSING, daemon=False).start()
                return
        wait(math.inf)

    try:
        is_released = wait(limits.CLOSE_GRACE_S)
    except BaseException:  # Ctrl-C
        wait_behind()
        raise
    if not is_released:
        wait_behind()


class Told(Protocol):
    """Who hears of a failure."""

    def abort_peers(self, text: str) -> None: ...


class Leaving:
    """What happens to a runtime that nobody has closed: its user has dropped it, or the interpreter ends."""

    def __init__(self, parts: Sequence[Closable], transports: Sequence[Transport], peers: Told, whoami: str) -> None:
        self._parts = parts
        self._transports = transports
        self._peers = peers
        self._whoami = whoami
        self._pid = os.getpid()
        self._earlier_error = id(_last_error())  # in a notebook, say, where it ended nothing

    def without_close(self) -> None:
        if os.getpid() != self._pid:
            return
        # [Note: Garbage is collected anywhere] Also in a helper thread of this very runtime, which can neither join
        # itself nor wait for a lock that it holds. It has to go on, see that it is to end, and be joined by another.
        if in_helper():
            with contextlib.suppress(RuntimeError):  # no thread can be started any more
                threading.Thread(target=self._end, name=_CLOSING, daemon=False).start()
                return
        self._end()

    def _end(self) -> None:
        run_all([self._tell_why, lambda: shut_down(self._parts, *self._transports)])

    def _tell_why(self) -> None:
        error = _last_error()
        if _has_failed_at_exit(self._earlier_error):
            self._peers.abort_peers(f"{self._whoami}: {type(error).__name__}: {error}")


def _has_failed_at_exit(earlier_error: int) -> bool:
    """Whether the script has ended with an error, other than the one of this ``id``."""
    error = _last_error()
    return not threading.main_thread().is_alive() and error is not None and id(error) != earlier_error


def _last_error() -> BaseException | None:
    """The exception that was printed last because nobody had caught it: it has ended the script, if it has ended."""
    error: BaseException | None = getattr(sys, "last_value", None)
    return error
