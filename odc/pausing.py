"""For waits that no signal ends, or that end long after they should: pauses between looks, and reminders."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_REMINDER_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 2e-3


class Reminder:
    """Says when to warn of a wait: after ten seconds, and each time it has doubled since."""

    def __init__(self) -> None:
        self.due_s = FIRST_REMINDER_S

    def is_due(self, waited_s: float) -> bool:
        """Whether to warn now, ``waited_s`` seconds into the wait; if so, the next time is twice as far."""
        if waited_s <= self.due_s:
            return False
        self.due_s *= 2
        return True


def look_until(is_completed: Callable[[], bool], look: Callable[[float], None]) -> None:
    """Return when ``is_completed()``, looked at often at first and then every 2 ms.

    Args:
        is_completed: cheap; it may raise.
        look: called with the seconds waited so far after each look in vain; ends the wait by raising.
    """
    started, pause_s = time.monotonic(), _FIRST_PAUSE_S
    while not is_completed():
        look(time.monotonic() - started)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
