"""How long the other end of a link may let this rank wait, and who is told of it."""

from __future__ import annotations

import logging
import math
import time
from typing import Protocol

from odc.errors import PeerSilentError
from odc.pausing import Reminder

logger = logging.getLogger("odc")

SLICE_S = 0.5  # between two looks at aborts, deaths and the clock


class Waiting(Protocol):
    """The rank that waits."""

    def check(self) -> None:
        """Raise if this rank or another one has failed."""
        ...

    def waits_for(self, rank: int | None) -> None:
        """Tell the others for which rank this one waits, so that they do not blame this one."""
        ...


class Silence:
    """Of one rank during one transfer: progress ends it, the limit makes it an error.

    A transfer that takes less than a slice tells nobody anything.
    """

    def __init__(self, owner: Waiting, rank: int, who: str, limit_s: float) -> None:
        self._owner = owner
        self._rank = rank
        self._who = who
        self._limit_s = limit_s
        self._is_known = False
        self.end()

    @property
    def is_watched(self) -> bool:
        """Whether this rank waits for the transfer: what it only answers may take as long as the other one likes."""
        return self._limit_s < math.inf

    def end(self) -> None:
        """The other rank has given a sign of progress."""
        self._since = time.monotonic()
        self._reminder = Reminder()

    def look(self, what: str) -> None:
        """It still has, for example, "received nothing".

        Raises:
            PeerSilentError: for longer than the limit.
            AbortedError, OdcError: this rank or another one has failed meanwhile.
        """
        self._owner.check()
        if not self.is_watched:
            return
        self._owner.waits_for(self._rank)
        self._is_known = True
        silent_s = time.monotonic() - self._since
        if silent_s > self._limit_s:
            raise PeerSilentError(f"{self._who} has {what} for {self._limit_s:g} s")
        if self._reminder.is_due(silent_s):
            logger.warning("%s has %s for %.0f s", self._who, what, silent_s)

    def __enter__(self) -> Silence:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_known:
            self._owner.waits_for(None)
