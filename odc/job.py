"""The ranks of the job that one rank hears of, by their numbers in the job.

On-demand communication runs inside a shard group. With replicas (hybrid sharding) a rank belongs to two groups: its
shard group, and the ranks with the same place in the other shard groups. Each group has a transport; what is told in
one group is passed on to the other (:mod:`odc.watchdog`), and so reaches every rank of the mesh in two steps.
"""

from __future__ import annotations

from odc.transports.base import PeerState, Signs, Transport


class Job:
    """Status of ranks by number in the job. ``transports``: of the groups that this rank belongs to."""

    def __init__(self, *transports: Transport) -> None:
        self.rank = transports[0].topology.me
        self._transports: list[Transport] = []
        self._found: dict[int, tuple[Transport, int]] = {}
        for transport in transports:
            self.add(transport)

    def add(self, transport: Transport) -> None:
        """Another group that this rank belongs to; what it shows in the first group, it shows in this one too."""
        if self._transports:
            self._transports[0].mirror(transport)
        self._transports.append(transport)
        for rank in range(transport.topology.world_size):
            self._found.setdefault(transport.topology.global_rank(rank), (transport, rank))

    @property
    def others(self) -> list[int]:
        """Every rank that this one hears of at first hand."""
        return [rank for rank in self._found if rank != self.rank]

    def sees(self, rank: int) -> bool:
        """Whether this rank hears of ``rank`` at first hand."""
        return rank in self._found

    def describe(self, rank: int) -> str:
        """``rank`` with its host and process."""
        transport, number = self._found[rank]
        return transport.topology.describe(number)

    def state(self, rank: int) -> PeerState:
        transport, number = self._found[rank]
        return transport.peer_state(number)

    def has_ended(self, rank: int) -> bool:
        """See :meth:`odc.transports.base.Transport.has_ended`."""
        transport, number = self._found[rank]
        return transport.has_ended(number)

    def describe_process(self, rank: int) -> str:
        """What is known of its process: "killed by signal 9", "stopped by a signal"."""
        transport, number = self._found[rank]
        return transport.describe_peer(number)

    def signs(self, rank: int) -> Signs:
        transport, number = self._found[rank]
        return transport.signs(number)

    def waiting_on(self, rank: int) -> int | None:
        transport, number = self._found[rank]
        return transport.waiting_on(number)

    def set_waiting_on(self, rank: int | None) -> None:
        """See :meth:`odc.transports.base.Transport.set_waiting_on`."""
        self._transports[0].set_waiting_on(rank)

    def tick(self) -> None:
        """Count one step of progress of this rank."""
        self._transports[0].tick()

    def beat(self) -> None:
        """See :meth:`odc.transports.base.Transport.beat`."""
        self._transports[0].beat()

    def has_notice(self) -> bool:
        """Whether an abort notice was left here. Cheap."""
        return any(transport.abort_notice() is not None for transport in self._transports)

    def abort_notice(self) -> str | None:
        """The first abort notice that was left here, in any group."""
        notices = (transport.abort_notice() for transport in self._transports)
        return next((notice for notice in notices if notice is not None), None)

    def abort_peers(self, text: str) -> None:
        """Leave ``text`` with every rank that has no earlier notice. Never raises."""
        for transport in self._transports:
            transport.abort_peers(text)
