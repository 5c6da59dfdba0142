"""What a transport has to provide, and nothing more.

A transport gives the ranks of one group: symmetric memory, signals that are pushed into the waiter's own memory, locks
that survive their holder's death, and news of the peers (alive, closed, dead, silent). The two primitives and the
minibatch protocol are built on these and know nothing of the wire. ``tests/test_transport_conformance.py`` is the
contract in executable form: every transport must pass it.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from odc.exchange import Exchange
from odc.topology import Topology

_ALIGN_BYTES = 64


def aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up to whole cache lines: where the next part of a buffer may begin."""
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


class SymmetricBuffer:
    """One allocation of equal size on every rank of the group.

    ``local`` is this rank's copy; ``peer(rank)`` the copy of another rank where that memory is addressable. Both are
    one-dimensional uint8 tensors of ``num_bytes`` elements.
    """

    def __init__(self, rank: int, views: Sequence[torch.Tensor | None], label: str) -> None:
        self._rank = rank
        self._views = list(views)
        self.label = label

    @property
    def local(self) -> torch.Tensor:
        return self.peer(self._rank)

    @property
    def num_bytes(self) -> int:
        return self.local.numel()

    def peer(self, rank: int) -> torch.Tensor:
        """``rank``'s copy.

        Raises:
            ValueError: this memory is not addressable from here (another host), or the buffer was released.
        """
        view = self._views[rank] if self._views else None
        if view is None:
            raise ValueError(f"buffer {self.label!r} of rank {rank} is not addressable from rank {self._rank}")
        return view

    def release(self) -> None:
        """Forget the views. The memory goes when the last tensor that uses it does."""
        self._views = []


class PeerState(enum.Enum):
    """What is known of a peer's process."""

    ALIVE = "alive"
    CLOSED = "closed"
    DEAD = "dead"


class LockOutcome(enum.Enum):
    """Result of trying to take a lock for a while."""

    ACQUIRED = "acquired"
    RECOVERED = "acquired after its holder died"
    TIMED_OUT = "timed out"


class Transport(ABC):
    """One-sided memory, signals, locks and liveness between the ranks of one group.

    Life cycle: construct (collective), :meth:`open` once (collective), :meth:`allocate` any number of times
    (collective), :meth:`seal` (collective, ends set-up), use, :meth:`close` (local, idempotent, never waits).
    """

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, exchange: Exchange, topology: Topology, timeout_s: float) -> None:
        self.topology = topology

    @classmethod
    @abstractmethod
    def unavailable(cls, topology: Topology, device: torch.device) -> str | None:
        """Why this transport cannot serve this group, or None. Must give the same answer on every rank."""

    @abstractmethod
    def open(self, *, num_signals: int, num_locks: int) -> None:
        """Create ``num_signals`` signals (all 0) and ``num_locks`` locks on every rank."""

    @abstractmethod
    def allocate(self, num_bytes: int, label: str) -> SymmetricBuffer:
        """``num_bytes`` of zeroed memory on every rank.

        Raises:
            SetupError: on all ranks, if one of them cannot provide the memory.
        """

    @abstractmethod
    def seal(self) -> None:
        """End of set-up: prove every pair with a pattern, release what only set-up needs."""

    # Signals are counters in the waiter's own memory. post() is a release, count() an acquire: whatever the poster
    # wrote before its n-th post is visible to the reader that counts n.

    @abstractmethod
    def post(self, rank: int, index: int, *, daemon: bool = False) -> None:
        """Add one to signal ``index`` of ``rank`` and wake its training loop, or its daemon thread."""

    @abstractmethod
    def count(self, index: int) -> int:
        """How often signal ``index`` of this rank has been posted. One thread per signal may count it."""

    @abstractmethod
    def block(self, timeout_s: float, ranks: Sequence[int], *, daemon: bool = False) -> None:
        """Sleep until a signal arrives, one of ``ranks`` dies, or the time is over; may return early.

        ``daemon`` selects the doorbell of the daemon thread, so that it and the training loop do not steal each
        other's wake-ups.
        """

    @abstractmethod
    def wake_self(self) -> None:
        """Ring both doorbells of this rank."""

    # Locks: number ``index`` of ``rank``.

    @abstractmethod
    def lock(self, rank: int, index: int, timeout_s: float) -> LockOutcome:
        """Try for up to ``timeout_s`` to take a lock."""

    @abstractmethod
    def unlock(self, rank: int, index: int) -> None:
        """Give back a lock that this thread holds."""

    # News of peers.

    @abstractmethod
    def tick(self) -> None:
        """Count one step of progress of this rank, visible to the others."""

    @abstractmethod
    def progress(self, rank: int) -> int:
        """How often ``rank`` has ticked."""

    @abstractmethod
    def set_waiting_on(self, rank: int | None) -> None:
        """Tell the others which rank this one waits for (None: it is working)."""

    @abstractmethod
    def waiting_on(self, rank: int) -> int | None:
        """Which rank ``rank`` is waiting for, if it is waiting."""

    @abstractmethod
    def peer_state(self, rank: int) -> PeerState:
        """Whether ``rank`` is alive, has closed its session, or is dead. Cheap."""

    @abstractmethod
    def describe_peer(self, rank: int) -> str:
        """What is known of ``rank``'s process, for people: "killed by signal 9", "stopped by a signal"."""

    @abstractmethod
    def abort_peers(self, text: str) -> None:
        """Leave ``text`` with every peer that has no earlier abort notice, and wake it. Never raises, never waits
        longer than a moment for one peer."""

    @abstractmethod
    def abort_notice(self) -> str | None:
        """The first abort notice that a peer left here."""

    @abstractmethod
    def close(self) -> None:
        """Tell the peers that this rank has closed, and release everything. Local and idempotent."""
