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

_STOPPED_S = 10.0  # of a process whose heart has been seen to beat


class Readers:
    """Ranks that may still read from this one, which has closed: those that are neither closed nor gone.

    One that makes no progress for the whole time limit is not waited for, nor one whose process does not run.
    """

    def __init__(self, topology: Topology, neighbours: Mapping[int, Neighbour], timeout_s: float) -> None:
        self._topology = topology
        self._neighbours = dict(neighbours)
        self._timeout_s = timeout_s
        self._started = time.monotonic()
        self._reminder = Reminder()
        self._progress = {rank: (n.signs.progress, self._started) for rank, n in self._neighbours.items()}
        self._beats = {rank: (n.signs.beats, self._started) for rank, n in self._neighbours.items()}

    def left(self) -> list[int]:
        """Those that are left now. Once nobody is, nobody ever is again."""
        for rank, neighbour in list(self._neighbours.items()):
            if neighbour.closing is Closing.COMPLETE or neighbour.is_dead or self._is_silent(rank, neighbour):
                del self._neighbours[rank]
        waited_s = time.monotonic() - self._started
        if self._neighbours and self._reminder.is_due(waited_s):
            who = ", ".join(self._topology.describe(rank) for rank in self._neighbours)
            logger.warning(
                "rank %d has closed its session %.0f s ago and stays for those that have not and may still read "
                "parameters from it: %s",
                self._topology.me,
                waited_s,
                who,
            )
        return list(self._neighbours)

    def _is_silent(self, rank: int, neighbour: Neighbour) -> bool:
        now, signs = time.monotonic(), neighbour.signs
        if signs.progress != self._progress[rank][0]:
            self._progress[rank] = (signs.progress, now)
        if signs.beats != self._beats[rank][0]:
            self._beats[rank] = (signs.beats, now)
        stopped = signs.beats > 0 and now - self._beats[rank][1] > _STOPPED_S
        return stopped or now - self._progress[rank][1] > self._timeout_s
