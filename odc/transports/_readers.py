"""Who still reads from a rank that has closed."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from odc.pausing import Reminder
from odc.topology import Topology
from odc.transports._control import Closing
from odc.transports._neighbours import Neighbour

logger = logging.getLogger("odc")

STAY_S = 5.0  # for which a process whose script is over stays behind the last sign of progress of a reader
_ABSENCE_S = 2.0  # between two looks: this process was not running, and the others may not have been either


class Readers:
    """Ranks that may still read from this one, which has closed: those that have not, and are there."""

    def __init__(self, topology: Topology, neighbours: Mapping[int, Neighbour]) -> None:
        self._topology = topology
        self._neighbours = dict(neighbours)
        self._started = self._last_look = time.monotonic()
        self._over_since: float | None = None
        self._reminder = Reminder()
        self._progress = {rank: (n.signs.progress, self._started) for rank, n in self._neighbours.items()}

    def left(self, is_script_over: bool) -> list[int]:
        """Those that are left now; if the process stays only for them, those that make progress."""
        now = time.monotonic()
        absence_s, self._last_look = now - self._last_look, now
        if is_script_over and self._over_since is None:
            self._over_since = now
        for rank, neighbour in list(self._neighbours.items()):
            progress, since = self._progress[rank]
            if neighbour.signs.progress != progress:
                since = now
            elif absence_s > _ABSENCE_S:
                since += absence_s
            self._progress[rank] = (neighbour.signs.progress, since)
            is_idle = self._over_since is not None and now - max(since, self._over_since) > STAY_S
            if neighbour.closing is not Closing.OPEN or neighbour.is_dead or is_idle:
                del self._neighbours[rank]
        waited_s = now - self._started
        if is_script_over and self._neighbours and self._reminder.is_due(waited_s):
            who = ", ".join(self._topology.describe(rank) for rank in self._neighbours)
            logger.warning(
                "rank %d has closed its session %.0f s ago, and its process stays for those that still read parameters "
                "from it: %s",
                self._topology.me,
                waited_s,
                who,
            )
        return list(self._neighbours)
