"""The end of a runtime, also of one that nobody has closed."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from typing import Protocol

from odc.transports.base import Transport


class Closable(Protocol):
    """A part that ends when the runtime does."""

    def close(self) -> None: ...


def shut_down(parts: Sequence[Closable]) -> None:
    """Close them, in this order."""
    for part in parts:
        part.close()


class Leaving:
    """What happens to a runtime that nobody has closed: its user has dropped it, or the interpreter ends."""

    def __init__(self, parts: Sequence[Closable], transport: Transport, whoami: str) -> None:
        self._parts = parts
        self._transport = transport
        self._whoami = whoami
        self._pid = os.getpid()
        self._earlier_error = id(_last_error())  # in a notebook, say, where it ended nothing

    def without_close(self) -> None:
        if os.getpid() != self._pid:
            return
        try:
            error = _last_error()
            is_at_exit = not threading.main_thread().is_alive()
            if is_at_exit and error is not None and id(error) != self._earlier_error:
                self._transport.abort_peers(f"{self._whoami}: {type(error).__name__}: {error}")
        finally:
            shut_down(self._parts)


def _last_error() -> BaseException | None:
    """The exception that was printed last because nobody had caught it: it has ended the script, if it has ended."""
    error: BaseException | None = getattr(sys, "last_value", None)
    return error
