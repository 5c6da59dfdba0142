"""Ranks that compute together: they run the same microbatches, each on its part of every layer (tensor parallelism) or
of every sample (context parallelism).

They meet in collectives inside forward and backward, so if one of them has fewer microbatches, the other waits there
for a rank that has gone on; or what one computes with is another collective's result. So before a minibatch ends
partners tell each other how many microbatches they had, and who computes meanwhile looks for partners that have ended.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

from odc.errors import OUR_FAULT, ProtocolError
from odc.liveness.waiting import Waiter
from odc.minibatch.state import JointState, MinibatchState
from odc.transports.base import Transport

_ENDED = 0  # signal
_WORDS = 3  # number of the end, microbatches, collectives in the group


class Partners:
    """One rank and its partners along one dimension of the mesh.

    Args:
        transport: between them, with one signal. Not sealed yet.
        num_collectives: that this rank has entered in their group. Where nobody enters any, as in a second model that
            has no use for the dimension, they do not compute together.

    [Note: Who waits for good] A partner has ended the minibatch before a microbatch that this rank is in, and before a
    collective that this rank has entered: so that will not complete. One of these alone says less. A forward without a
    backward looks like a further microbatch, and a group may count sends and receives, too, of which ranks have
    different numbers.
    """

    def __init__(self, transport: Transport, num_collectives: Callable[[], int]) -> None:
        self._num_collectives, self._num_before = num_collectives, num_collectives()
        self._transport, topology = transport, transport.topology
        self._rank, self._size = topology.rank, topology.world_size
        self._others = [rank for rank in topology.rotation() if rank != self._rank]
        self._num_ended = 0
        # For two ends in turn: who comes to the next one has been seen at this one by all. They lie at each rank, and
        # in copies on other hosts.
        self._words = transport.allocate_host(8 * 2 * self._size * _WORDS, "ends of partners")

    def end(self, num_microbatches: int, waiter: Waiter, minibatch: int) -> None:
        """This rank has run so many microbatches. Wait until every partner says the same.

        Raises:
            ProtocolError: one has run another number.
        """
        self._num_ended = number = self._num_ended + 1
        at = self._at(self._rank, number)
        row = struct.pack(f"={_WORDS}q", number, num_microbatches, self._collectives_here)
        for rank in (self._rank, *self._transport.topology.ranks_elsewhere()):
            self._transport.write_host(self._words, rank, 8 * at, row)
        self._transport.post(_ENDED)
        count = self._transport.count
        waiter.wait(
            lambda: [rank for rank in self._others if count(rank, _ENDED) < number],
            lambda: f"end of minibatch {minibatch}, with ranks that compute together",
            among=self._transport,
        )
        for rank in self._others:
            theirs, collectives = self._said(rank, number)
            if theirs != num_microbatches and (collectives or self._collectives_here):
                raise ProtocolError(self._describe(rank, minibatch, theirs, f"after {num_microbatches}"))
        self._num_before = self._num_collectives()

    @property
    def _collectives_here(self) -> int:
        """Entered by this rank since the last end."""
        return self._num_collectives() - self._num_before

    def gone_on(self, microbatch: int, minibatch: int) -> str | None:
        """Why a collective of a microbatch will not complete, see [Note: Who waits for good].

        Args:
            microbatch: which one it is, from 1.
        """
        number = self._num_ended + 1
        for rank in self._others:
            if self._transport.count(rank, _ENDED) >= number:
                theirs, collectives = self._said(rank, number)
                if theirs < microbatch and collectives < self._collectives_here:
                    return self._describe(rank, minibatch, theirs, f"not before its microbatch number {microbatch}")
        return None

    def _at(self, rank: int, number: int) -> int:
        return (number % 2 * self._size + rank) * _WORDS

    def _said(self, rank: int, number: int) -> tuple[int, int]:
        """How many microbatches it had, and how many collectives it has entered since the end before."""
        words = self._words.peer(rank) if self._words.reaches(rank) else self._words.local
        at = self._at(rank, number)
        row = words.numpy().data.cast("B").cast("q")[at : at + _WORDS]
        if row[0] != number:
            raise ProtocolError(f"a partner has ended {row[0]} minibatches, not {number}. {OUR_FAULT}")
        return row[1], row[2]

    def _describe(self, rank: int, minibatch: int, theirs: int, ours: str) -> str:
        topology = self._transport.topology
        return (
            f"ranks that compute together have different numbers of microbatches: rank {topology.global_rank(rank)} "
            f"has ended minibatch {minibatch} after {theirs}, rank {topology.me} {ours}. Give both the same ones: to a "
            "loader the rank and the number of ranks of the data parallel dimension"
        )


def why_stuck(partners: Iterable[Partners], state: MinibatchState | JointState) -> str | None:
    """See :meth:`Partners.gone_on`, along every dimension of the mesh. For another thread than the training loop's."""
    microbatch = state.microbatch
    found = (group.gone_on(microbatch, state.minibatch) for group in partners if microbatch)
    return next((why for why in found if why is not None), None)
