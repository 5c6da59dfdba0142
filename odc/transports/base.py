"""What a transport has to provide, and nothing more.

A transport gives the ranks of one group: symmetric memory, signals that all of them see, locks, and news of the peers
(alive, closed, dead, silent). The two primitives and the minibatch protocol are built on these and know nothing of the
wire. ``tests/transports/test_transport_conformance.py`` is the
contract in executable form: every transport must pass it.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch

from odc.engines.base import AfterChunk, CpuEngine, Engine, no_op
from odc.errors import UnsupportedError
from odc.setup.agreement import Exchange
from odc.setup.topology import Topology
from odc.transports._frames import MAX_RANKS

HOST = torch.device("cpu")
_ALIGN_BYTES = 64


def aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up to whole cache lines: where the next part of a buffer may begin."""
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


class SymmetricBuffer:
    """One allocation of equal size on every rank of the group.

    ``local`` is this rank's copy; ``peer(rank)`` the copy of another rank where that memory is addressable. Both are
    one-dimensional uint8 tensors of ``num_bytes`` elements.
    """

    def __init__(self, rank: int, views: Sequence[torch.Tensor | None], label: str, number: int = 0) -> None:
        self.number = number
        """The same on all ranks, and no other buffer's."""
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

    def reaches(self, rank: int) -> bool:
        """Whether ``rank``'s copy is addressable from here."""
        return bool(self._views) and self._views[rank] is not None

    def release(self) -> None:
        """Forget the views. The memory goes when the last tensor that uses it does."""
        self._views = []


class PeerState(enum.Enum):
    """What is known of a peer's process."""

    ALIVE = "alive"
    CLOSED = "closed"
    DEAD = "dead"


IN_COLLECTIVE = MAX_RANKS - 1
"""In place of the rank that a rank waits for: nobody knows, it is in a collective of its script."""


class Signs(NamedTuple):
    """Of a rank's life: counters, each of which grows while the rank is well."""

    progress: int
    """Steps of work."""
    looks: int
    """While it waits for another rank: looks at whether that has come."""
    beats: int
    """Of a thread that does nothing else: they end where the process is stopped."""


class Transport(ABC):
    """One-sided memory, signals, locks and liveness between the ranks of one group.

    Life cycle: construct (collective), :meth:`open` once (collective), :meth:`allocate` any number of times
    (collective), :meth:`seal` (collective, ends set-up), use, :meth:`close` (local, idempotent, waits for a moment at
    most).
    """

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, exchange: Exchange, topology: Topology, timeout_s: float, device: torch.device = HOST) -> None:
        self.exchange: Exchange = exchange
        """For the rest of set-up."""
        self.topology = topology
        self.device = device
        """Where tensors travel."""
        self._engine: Engine = CpuEngine()

    @classmethod
    @abstractmethod
    def unavailable(cls, topology: Topology, device: torch.device) -> str | None:
        """Why this transport cannot serve this rank in this group, or None. Allocates nothing."""

    @abstractmethod
    def open(self, *, num_signals: int, num_locks: int) -> None:
        """Create ``num_signals`` signals (all 0) and ``num_locks`` locks for every rank."""

    @property
    def engine(self) -> Engine:
        """What moves and adds bytes in the memory of :meth:`allocate`."""
        return self._engine

    def no_atomics(self) -> str | None:
        """Why :meth:`odc.engines.base.Engine.add_to_peers` would lose additions in the memory of all ranks, or None."""
        return "processors add under locks"

    @property
    def extra_bytes(self) -> int:
        """Memory where the model computes that this rank spends beyond what was asked of :meth:`allocate`."""
        return 0

    @abstractmethod
    def allocate(self, num_bytes: int, label: str) -> SymmetricBuffer:
        """``num_bytes`` of zeroed memory on every rank, where the model computes.

        Raises:
            SetupError: on all ranks, if one of them cannot provide the memory.
        """

    def allocate_private(self, num_bytes: int, label: str) -> SymmetricBuffer:
        """As :meth:`allocate`, for this rank's eyes only."""
        views: list[torch.Tensor | None] = [None] * self.topology.world_size
        views[self.topology.rank] = torch.zeros(max(num_bytes, 1), dtype=torch.uint8, device=self.device)
        return SymmetricBuffer(self.topology.rank, views, label)

    def use_check(self, check: Callable[[], None]) -> None:
        """Have transfers that take long call ``check``, which raises if this rank or another one has failed."""
        return

    def reserve(self, num_bytes: int) -> None:
        """So much will be asked of :meth:`allocate` in all. Collective; before :meth:`open`.

        Raises:
            SetupError: on all ranks, if that is known to be too much.
        """
        return

    @abstractmethod
    def allocate_host(self, num_bytes: int, label: str) -> SymmetricBuffer:
        """As :meth:`allocate`, in memory that the processors of all ranks of a host can read and write."""

    @abstractmethod
    def seal(self) -> None:
        """End of set-up: prove every pair with a pattern, release what only set-up needs."""

    @abstractmethod
    def extend(self, num_bytes: int, label: str) -> SymmetricBuffer:
        """As :meth:`allocate`, behind :meth:`seal`. Collective: to be called when all ranks have come to it, each of
        which is known to be about to call it, too."""

    @abstractmethod
    def release(self, buffer: SymmetricBuffer) -> None:
        """Nobody reads or writes this rank's copy of ``buffer`` any more, nor this rank another one's: give it back.
        Local. Host memory goes when all ranks have done so, device memory at :meth:`close`, since no rank knows when
        the devices of the others have let go of it."""

    # Memory of ranks that may be on other hosts. Offsets are in bytes, tensors are flat, bytes travel as they are,
    # and as with the engine's work it happens in the order of the current stream.

    def read(
        self,
        out: torch.Tensor,
        buffer: SymmetricBuffer,
        rank: int,
        offset_bytes: int,
        after_chunk: AfterChunk = no_op,
    ) -> None:
        """Fill ``out`` from ``rank``'s copy of a buffer of :meth:`allocate`."""
        if not buffer.reaches(rank):
            self._read_far(out, buffer, rank, offset_bytes, after_chunk)
            return
        source = buffer.peer(rank)[offset_bytes : offset_bytes + out.nbytes].view(out.dtype)
        self.engine.copy(out, source, after_chunk)

    def read_all(
        self,
        parts: Sequence[tuple[torch.Tensor, int]],
        buffer: SymmetricBuffer,
        offset_bytes: int,
        after_chunk: AfterChunk = no_op,
    ) -> None:
        """:meth:`read` each (out, rank), in this order or all at once; the tensors are equally long."""
        for out, rank in parts:
            self.read(out, buffer, rank, offset_bytes, after_chunk)

    def write(
        self,
        buffer: SymmetricBuffer,
        rank: int,
        offset_bytes: int,
        source: torch.Tensor,
        after_chunk: AfterChunk = no_op,
    ) -> None:
        """Put ``source`` into ``rank``'s copy of a buffer of :meth:`allocate`, before this thread's next post to it."""
        if not buffer.reaches(rank):
            self._write_far(buffer, rank, offset_bytes, source, after_chunk)
            return
        out = buffer.peer(rank)[offset_bytes : offset_bytes + source.nbytes].view(source.dtype)
        self.engine.copy(out, source, after_chunk)

    def _read_far(
        self, out: torch.Tensor, buffer: SymmetricBuffer, rank: int, offset_bytes: int, after_chunk: AfterChunk
    ) -> None:
        """:meth:`read` from a rank whose memory has no address here."""
        buffer.peer(rank)  # raises: this transport has no other way

    def _write_far(
        self, buffer: SymmetricBuffer, rank: int, offset_bytes: int, source: torch.Tensor, after_chunk: AfterChunk
    ) -> None:
        """:meth:`write` to a rank whose memory has no address here."""
        buffer.peer(rank)  # raises: this transport has no other way

    def write_host(self, buffer: SymmetricBuffer, rank: int, offset_bytes: int, data: bytes) -> None:
        """Put ``data`` into ``rank``'s copy of a buffer of :meth:`allocate_host`, before this thread's next post to
        it."""
        target = buffer.peer(rank)[offset_bytes : offset_bytes + len(data)]
        target.numpy()[:] = memoryview(data)

    # Signals. Each rank has counters of its own, which it alone advances and all others see: on one host where they
    # lie, across hosts in a copy at each. post() is a release, count() an acquire: whatever the poster wrote before its
    # n-th post is visible to the reader that counts n. What the poster's *stream* writes has only been asked for by
    # then: order_after() carries the order on to the reader's stream.

    @abstractmethod
    def post(self, index: int, *, to: int | None = None, daemon: bool = False) -> None:
        """Add one to signal ``index`` of this rank, and wake who waits for this rank.

        Never by two threads at a time.

        Args:
            to: the only rank that counts it; None: all do.
            daemon: for all daemons, which are woken instead; they look for its arrival (:meth:`has_arrived`).
        """

    def acknowledge(self, posts: Sequence[tuple[int, int]]) -> None:
        """Post each (signal, to), for :meth:`has_arrived` alone: where streams are, :meth:`count` may not tell."""
        for index, to in posts:
            self.post(index, to=to)

    @abstractmethod
    def count(self, rank: int, index: int) -> int:
        """How often ``rank`` has posted its signal ``index``."""

    def order_after(self, ranks: Sequence[int], index: int, count: int) -> None:
        """What this thread's current stream is given from now on runs after all that the streams of the posters had
        been given before the ``count``-th post of signal ``index`` of each of ``ranks``.

        Only after :meth:`count` has returned at least ``count`` for each. A stream thus waits only for work that has
        been submitted already, so streams cannot wait for each other in a circle, and a host that waits for its device
        (``torch.cuda.synchronize()``) waits for no other host. Host memory needs nothing: :meth:`count` orders it.
        """
        return

    # A host runs ahead of its device, so a signal has been posted long before it arrives: before the poster's stream
    # has done what it had been given. Who must not let a stream wait for another rank's work looks at arrivals.

    def has_arrived(self, rank: int, index: int, count: int) -> bool:
        """Whether the poster's stream has done all that it had been given before the ``count``-th post of signal
        ``index`` of ``rank``; then it is done for the streams of this rank, too."""
        return self.count(rank, index) >= count

    def forward_arrivals(self) -> bool:
        """Tell other hosts which posts to their daemons, and which acknowledgements, have arrived. For the daemon's
        thread.

        Returns:
            :attr:`is_forwarding`.
        """
        return self.is_forwarding

    @property
    def is_forwarding(self) -> bool:
        """Whether other hosts have yet to be told of some."""
        return False

    # Sleeping: take a ticket, look whether what is awaited has come, sleep with that ticket.

    @abstractmethod
    def ticket(self, rank: int | None) -> int:
        """For a wait for ``rank``; None: of this rank's daemon, for anybody."""

    @abstractmethod
    def sleep(self, rank: int | None, ticket: int, timeout_s: float) -> None:
        """Until ``rank`` (None: anybody, for the daemon) has posted a signal since the ticket was taken, or anything
        has failed; may return early. That ``rank`` dies is not noticed here."""

    @abstractmethod
    def wake_self(self) -> None:
        """End :meth:`sleep` of this rank's daemon, and of all who wait for this rank."""

    # Locks: number ``index`` of ``rank``, which has to be on this host. A holder that dies keeps its lock, and ends the
    # job.

    @abstractmethod
    def lock(self, rank: int, index: int, timeout_s: float = 0.0) -> bool:
        """Take a lock, trying for up to ``timeout_s``; whether it has been taken."""

    @abstractmethod
    def lock_holder(self, rank: int, index: int) -> int | None:
        """Which rank has the lock, for messages; None: nobody, or one that has not signed yet."""

    @abstractmethod
    def unlock(self, rank: int, index: int) -> None:
        """Give back a lock that this thread holds."""

    # News of peers.

    @abstractmethod
    def tick(self) -> None:
        """Count one step of progress of this rank, visible to the others."""

    @abstractmethod
    def signs(self, rank: int) -> Signs:
        """The signs of life that ``rank`` has given."""

    @abstractmethod
    def beat(self) -> None:
        """Count one look of this rank's watchdog, visible to the others."""

    @abstractmethod
    def set_waiting_on(self, rank: int | None) -> None:
        """Tell the others which rank of the job, by its number there, this one waits for (None: it is working;
        :data:`IN_COLLECTIVE`).

        To be repeated at each look: a rank that says for whom it waits, and does not look, is stopped itself.
        """

    @abstractmethod
    def waiting_on(self, rank: int) -> int | None:
        """Which rank of the job, by its number there, ``rank`` is waiting for, if it is waiting."""

    def mirror(self, other: Transport) -> None:
        """Show the ranks of ``other``, too, what this rank shows of its progress and its waits."""
        raise UnsupportedError(f"{self.name} shows its own ranks only")

    @abstractmethod
    def peer_state(self, rank: int) -> PeerState:
        """Whether ``rank`` is alive, has closed its session, or is dead. Cheap."""

    @abstractmethod
    def has_ended(self, rank: int) -> bool:
        """Whether the process of ``rank`` has ended or cannot be reached, whether it had closed before or not."""

    def wait_for_loss(self, stop_fd: int, timeout_s: float) -> int | None:
        """Sleep until a rank has died that may have left work undone which a stream here waits for; that rank.

        Returns None when ``stop_fd`` becomes readable or the time is over. Transports with streams only.
        """
        raise UnsupportedError(f"{self.name} has no streams to watch")

    def release_streams(self) -> None:
        """Let streams of this rank go on that wait for a dead rank. What they compute then is not valid."""
        return

    @abstractmethod
    def describe_peer(self, rank: int) -> str:
        """What is known of ``rank``'s process, for people: "killed by signal 9", "stopped by a signal"."""

    @abstractmethod
    def set_refusal(self, text: str) -> None:
        """Show all other ranks what this one has refused, without harm to them; empty: it has gone on. For messages of
        ranks that wait for it. Never raises, never waits."""

    @abstractmethod
    def refusal(self, rank: int) -> str:
        """What ``rank`` shows by :meth:`set_refusal`."""

    @abstractmethod
    def abort_peers(self, text: str) -> None:
        """Leave ``text`` with every peer that has no earlier abort notice, and wake it. Never raises, never waits
        longer than a moment for one peer."""

    @abstractmethod
    def abort_notice(self) -> str | None:
        """The first abort notice that a peer left here."""

    def lend(self) -> None:
        """The group is complete: from now on others may read this rank's memory until they close, too."""
        return

    def end_transfers(self) -> None:
        """This rank is about to close: whatever thread of its own waits for another rank in a transfer gives it up, and
        raises. Local."""
        return

    @abstractmethod
    def say_farewell(self) -> None:
        """Tell the peers that this rank has closed: it takes part in nothing any more. Idempotent, never waits."""

    @abstractmethod
    def close(self) -> None:
        """Tell the peers that this rank has closed, and release everything; what they may still read (:meth:`lend`) in
        the background, once they have closed, too. Local and idempotent."""
