"""Ranks that compute together: they run the same microbatches, each on its part of every layer (tensor parallelism) or
of every sample (context parallelism).

They have collectives inside forward and backward. If one of them has fewer microbatches, another waits there for a rank
that has gone on, or gets the result of a different collective. So partners exchange their numbers of microbatches
before a minibatch ends, and a rank that still computes checks whether a partner has ended.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from odc.errors import OUR_FAULT, ProtocolError
from odc.minibatch.state import JointState, MinibatchState
from odc.rank.waiting import GONE, Waiter
from odc.transports.base import Transport

Counts = Callable[[], Sequence[int]]
"""See :class:`Partners`."""

_ENDED = 0  # signal
_MEANWHILE = 2  # the row behind those of two ends


class Look(NamedTuple):
    """How many collectives this rank has entered since the end before."""

    before: int
    """Its last forward or backward, in the first group;"""
    behind: int
    """behind the last one that it has left."""
    entered: list[int]
    """By now, in all groups."""


class Partners:
    """One rank and its partners along one dimension of the mesh.

    Args:
        transport: between them, with one signal. Not sealed yet.
        counts: how many collectives this rank has entered in their group, and in each other one of which all of them
            are members. Where nobody enters any of the first, as in a second model that has no use for the dimension,
            they do not compute together.

    [Note: Who waits for good] This rank is in a microbatch, and has entered a collective there; a partner has ended the
    minibatch before both: so that collective will not complete. One of these alone says less. A forward without a
    backward looks like a further microbatch, and a group may count sends and receives, too, of which ranks have
    different numbers. A partner that has not ended yet may be in another collective, before both and outside of its
    microbatches, which this rank has not entered: so neither will complete. It says so by and by, in a row of its own.
    Where all ranks are partners, that collective may be of the same group, and then takes itself for the one in which
    this rank is: as many were entered there, the last one inside of a microbatch here and outside of any there.
    """

    def __init__(self, transport: Transport, counts: Counts) -> None:
        self._counts, self._before = counts, counts()
        self._transport, topology = transport, transport.topology
        self._rank, self._size = topology.rank, topology.world_size
        self._others = [rank for rank in topology.rotation() if rank != self._rank]
        self._num_ended = 0
        # Number of the end, microbatches, whether the last collective is outside of them, and how many there were since
        # the end before. For two ends in turn: who comes to the next one has been seen at this one by all; and for what
        # is between. They lie at each rank, and in copies on other hosts.
        self._row = struct.Struct(f"={3 + len(self._before)}q")
        self._words = transport.allocate_host(3 * self._size * self._row.size, "ends of partners")
        self._shown, self._seen = b"", dict[int, Sequence[int]]()
        self._before_microbatch = self._behind_microbatch = 0

    def end(self, num_microbatches: int, waiter: Waiter, minibatch: int) -> None:
        """This rank has run so many microbatches. Wait until every partner says the same.

        Raises:
            ProtocolError: one has run another number.
        """
        self._num_ended = number = self._num_ended + 1
        self._say(number % 2, self._row.pack(number, num_microbatches, False, *self._entered))
        self._transport.post(_ENDED)
        count = self._transport.count
        waiter.wait(
            lambda: [rank for rank in self._others if count(rank, _ENDED) < number],
            lambda: f"end of minibatch {minibatch}, with ranks that compute together",
            among=self._transport,
        )
        for rank in self._others:
            theirs, _, collectives, *_ = self._said(rank, number)
            if theirs != num_microbatches and (collectives or self._entered[0]):
                ended = f"has ended minibatch {minibatch} after {theirs}"
                raise ProtocolError(self._describe(rank, ended, f"after {num_microbatches}"))
        self._before = self._counts()
        self._before_microbatch = self._behind_microbatch = 0

    def count_at_border(self, is_entered: bool) -> None:
        """The training loop enters a forward or backward, or has left it."""
        if is_entered:
            self._before_microbatch = self._entered[0]
        else:
            self._behind_microbatch = self._entered[0]

    def look(self) -> Look:
        """From beside the training loop, which goes on meanwhile."""
        return Look(self._before_microbatch, self._behind_microbatch, self._entered)

    @property
    def _entered(self) -> list[int]:
        """Collectives since the last end."""
        return [count - before for count, before in zip(self._counts(), self._before, strict=True)]

    def show(self, num_microbatches: int, look: Look) -> None:
        """This rank, which has had so many microbatches, is in a collective outside of them."""
        is_last = look.entered[0] > look.behind == self._behind_microbatch
        row = self._row.pack(self._num_ended + 1, num_microbatches, is_last, *look.entered)
        if row != self._shown:
            self._shown = row
            with contextlib.suppress(*GONE):  # whoever waits for it reports it
                self._say(_MEANWHILE, row)

    def gone_on(self, microbatch: int, minibatch: int, look: Look) -> str | None:
        """Why a collective of a microbatch will not complete, see [Note: Who waits for good].

        Args:
            microbatch: which one it is, from 1.
        """
        number, entered = self._num_ended + 1, look.entered
        for rank in self._others:
            has_ended = self._transport.count(rank, _ENDED) >= number
            found, theirs, is_last, *counts = self._read(rank, number % 2 if has_ended else _MEANWHILE)
            if found != number or theirs >= microbatch:
                continue
            did = f"has ended minibatch {minibatch} after {theirs}"
            if has_ended and counts[0] >= entered[0]:
                continue
            if not has_ended:
                did = f"is in another collective in minibatch {minibatch} after {theirs}"
                last, self._seen[rank] = self._seen.get(rank), [theirs, *counts, *entered]
                if not self._is_elsewhere(counts, look) and not (is_last and self._has_taken(counts, look)):
                    continue
                if last != self._seen[rank]:
                    continue
            return self._describe(rank, did, f"not before its microbatch number {microbatch}")
        return None

    @staticmethod
    def _is_elsewhere(counts: Sequence[int], look: Look) -> bool:
        """Whether a partner has not come to what this rank is in, and is in a collective to which this has not."""
        first, *others = zip(counts, look.entered, strict=True)
        return first[0] < first[1] and any(there > here for there, here in others)

    def _has_taken(self, counts: Sequence[int], look: Look) -> bool:
        """Whether the last collective that a partner has entered is the number of one in this rank's microbatch."""
        return look.before == self._before_microbatch and look.before < counts[0] <= look.entered[0]

    def _say(self, row: int, data: bytes) -> None:
        for rank in (self._rank, *self._transport.topology.ranks_elsewhere()):
            self._transport.write_host(self._words, rank, (row * self._size + self._rank) * self._row.size, data)

    def _read(self, rank: int, row: int) -> tuple[int, ...]:
        words = self._words.peer(rank) if self._words.reaches(rank) else self._words.local
        return self._row.unpack_from(words.numpy().data, (row * self._size + rank) * self._row.size)

    def _said(self, rank: int, number: int) -> Sequence[int]:
        """How many microbatches it had, and how many collectives it has entered since the end before."""
        found, *said = self._read(rank, number % 2)
        if found != number:
            raise ProtocolError(f"a partner has ended {found} minibatches, not {number}. {OUR_FAULT}")
        return said

    def _describe(self, rank: int, theirs: str, ours: str) -> str:
        topology = self._transport.topology
        return (
            f"ranks that compute together have different numbers of microbatches: rank {topology.global_rank(rank)} "
            f"{theirs}, rank {topology.me} {ours}. Give both the same ones: to a loader the data-parallel dimension "
            "alone, mesh=mesh['dp']"
        )


def why_stuck(partners: Iterable[Partners], state: MinibatchState | JointState, is_in_collective: bool) -> str | None:
    """See :meth:`Partners.gone_on` and :meth:`Partners.show`, along every dimension of the mesh. Not for the training
    loop itself."""
    why = None
    for group in partners:
        look = group.look()  # first: what it has entered by now, it has entered before it was where it is seen next
        if microbatch := state.microbatch:
            why = why or group.gone_on(microbatch, state.minibatch, look)
        elif is_in_collective:
            group.show(state.num_pushed, look)
    return why
