"""What the parts of one rank's runtime share."""

from __future__ import annotations

from dataclasses import dataclass

from odc.engine import Engine
from odc.faults import FaultInjector
from odc.stats import Stats
from odc.transports.base import Transport
from odc.waiting import Waiter


@dataclass(frozen=True)
class Endpoint:
    """One rank's transport, with the waiting, fault points and counters that go with it."""

    transport: Transport
    waiter: Waiter
    faults: FaultInjector
    stats: Stats

    @property
    def engine(self) -> Engine:
        return self.transport.engine

    @property
    def rank(self) -> int:
        return self.transport.topology.rank

    def name(self, rank: int) -> int:
        """The number in the job of ``rank`` of this group, for messages."""
        return self.transport.topology.global_rank(rank)

    @property
    def world_size(self) -> int:
        return self.transport.topology.world_size
