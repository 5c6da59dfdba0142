"""The interface of transports: symmetric memory, signals that all ranks of a group see, and the order of streams after
them. The status of the other ranks (alive, closed, dead, silent) is in :mod:`odc.transports._peers`.

The two primitives and the minibatch protocol use only this interface.
``tests/transports/test_transport_conformance.py`` is the contract in executable form; every transport must pass it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from odc.engines.base import AfterChunk, Engine, no_op
from odc.errors import OUR_FAULT, SetupError
from odc.liveness.leaving import Closable, release_when, run_all
from odc.liveness.process import WatchedProcess
from odc.setup.agreement import Exchange, gather_together, raise_together, together
from odc.setup.topology import Topology
from odc.transports import _control, _memfd
from odc.transports._control import Closing, ControlBlock, control_bytes
from odc.transports._link import Link
from odc.transports._links import Links
from odc.transports._peers import LocalPeer, Peer, Peers, Readers, WatchedExchange
from odc.transports._rendezvous import TcpRendezvous, UnixRendezvous, require_descriptors

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
            raise ValueError(
                f"buffer {self.label!r} of rank {rank} is not addressable from rank {self._rank}. {OUR_FAULT}"
            )
        return view

    def reaches(self, rank: int) -> bool:
        """Whether ``rank``'s copy is addressable from here."""
        return bool(self._views) and self._views[rank] is not None

    def release(self) -> None:
        """Forget the views. The memory goes when the last tensor that uses it does."""
        self._views = []


_PATTERN = 0x0DC

T = TypeVar("T")


def not_on_this_host(topology: Topology) -> str | None:
    """Why not all ranks can share host memory and watch each other, or None."""
    if topology.num_hosts > 1:
        return f"it serves one host, the ranks are on {topology.num_hosts}: {sorted(set(topology.host_names))}"
    return not_on_this_kernel()


def not_on_this_kernel() -> str | None:
    """Why the ranks of a host cannot share its memory, or None."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "it needs Linux 5.3 or newer (memfd_create, pidfd_open)"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as problem:
        return f"processes cannot be watched here (pidfd_open: {problem.strerror}): a sandbox forbids it"
    return _control.problem()


def places(
    tensors: Iterable[torch.Tensor], memory: torch.Tensor, offset_bytes: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each, and where it lies in ``memory``: one behind the other, from there on."""
    for tensor in tensors:
        yield tensor, memory[offset_bytes : offset_bytes + tensor.nbytes].view(tensor.dtype)
        offset_bytes += tensor.nbytes


def no_way_out(topology: Topology) -> str | None:
    """Why other hosts cannot reach this one, or None."""
    if topology.num_hosts > 1 and not (topology.addresses and topology.addresses[topology.rank]):
        return "no network leads out of this host: set ODC_ADDRESS to the address at which the others reach it"
    return None


class Transport(ABC):
    """One-sided memory, signals, locks and liveness between the ranks of one group.

    Life cycle: construct (collective), :meth:`open` once (collective), :meth:`allocate` any number of times
    (collective), :meth:`seal` (collective, ends set-up), use, :meth:`close` (local, idempotent, waits for a moment at
    most).

    Between ranks of one host memory is memfd, signals are words in it, who waits sleeps on a futex, and death is a
    pidfd. With ranks of other hosts there are links (:mod:`._links`), which keep a copy of their signals here.

    Left to subclasses: for whom it is, the memory in which tensors travel (:meth:`allocate`), what is done with that of
    other hosts, and on devices the order of streams behind the signals.
    """

    name: ClassVar[str]

    def __init__(self, exchange: Exchange, topology: Topology, timeout_s: float, device: torch.device = HOST) -> None:
        self.topology = topology
        self.device = device
        """Where tensors travel."""
        self.engine: Engine = Engine()
        """What moves and adds bytes in the memory of :meth:`allocate`."""
        self.peers = Peers(topology)
        """The other ranks, and what this one shows them."""
        self.exchange: Exchange = WatchedExchange(exchange, self._gone, self.peers.abort_notice)
        """For the rest of set-up."""
        self.extra_bytes = 0
        """Memory where the model computes that this rank spends beyond what was asked of :meth:`allocate`."""
        self.serves_readers = False
        """The group is complete: others may read this rank's memory until they close, too."""
        self.to_forward: deque[tuple[int, int, Sequence[int], bool]] = deque()
        """Posts of which other hosts have yet to be told: (signal, count, to, daemon); see :meth:`forward_arrivals`."""
        self._timeout_s = timeout_s
        self._rank = topology.rank
        self._world = range(topology.world_size)
        self._here, self._elsewhere = topology.ranks_here(), topology.ranks_elsewhere()
        self._blocks = self.peers.blocks
        self._buffers: list[SymmetricBuffer] = []
        self._processes: dict[int, WatchedProcess] = {}
        self._links: Links | None = None
        self._is_sealed = self._closed = self._has_announced_close = False
        self._owner_pid = os.getpid()
        self._near = UnixRendezvous(topology)
        self._far = TcpRendezvous(topology) if self._elsewhere else None
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    @classmethod
    @abstractmethod
    def unavailable(cls, topology: Topology, device: torch.device) -> str | None:
        """Why this transport cannot serve this rank in this group, or None. Allocates nothing."""

    # Set-up

    def _connect(self) -> None:
        """Collective; between the exchanges each step is this rank's own, and fails on all ranks if it does on one."""

        def listen() -> list[Any]:
            require_descriptors(len(self._here), len(self._elsewhere))  # before any is opened
            return [self._near.listen(), None if self._far is None else self._far.listen()]

        rows = gather_together(self.exchange, listen)
        self._together(lambda: self._near.connect([row[0] for row in rows], self._timeout_s))
        self._together(self._watch_peers)
        far = self._far
        if far is not None:
            self._together(lambda: far.connect([row[1] for row in rows], self._timeout_s))
            self._together(lambda: self._make_links(far))

    def _make_links(self, far: TcpRendezvous) -> None:
        far.complete()
        self._links = Links(far.sockets, self.topology, self.peers, self._timeout_s)

    def _meet(self) -> None:
        """The ranks of this host, once more: to pass descriptors."""
        self._near = UnixRendezvous(self.topology)
        rows = gather_together(self.exchange, self._near.listen)
        self._together(lambda: self._near.connect(rows, self._timeout_s))
        self._together(self._near.complete)

    def _gone(self) -> list[str]:
        """The ranks that have ended, and how."""
        watched = {rank: (process.is_dead(), process.cause_of_death) for rank, process in self._processes.items()}
        watched |= {rank: (peer.is_dead, peer.describe_process) for rank, peer in self.peers.others.items()}
        return [f"{self.topology.describe(rank)}: {how()}" for rank, (is_dead, how) in watched.items() if is_dead]

    def _watch_peers(self) -> None:
        self._near.complete()
        for rank in self._here:
            if rank == self._rank:
                continue
            pid = self._near.pid_of(rank)
            if not pid:
                raise SetupError(
                    f"{self.topology.describe(rank)} is in another pid namespace: its death could not be noticed. "
                    "Run the ranks of one host in one container, or share the pid namespace."
                )
            try:
                self._processes[rank] = WatchedProcess(pid)
            except ProcessLookupError:
                raise SetupError(f"{self.topology.describe(rank)} died during set-up") from None

    def open(self, *, num_signals: int, num_locks: int, num_bytes: int = 0) -> None:
        """Create ``num_signals`` signals (all 0) and ``num_locks`` locks for every rank.

        Args:
            num_bytes: so much will be asked of :meth:`allocate` in all.

        Raises:
            SetupError: on all ranks, if that is known to be too much.
        """
        size = control_bytes(num_signals, num_locks)
        # Nobody uses a block before its owner has made it.
        buffer = self._share(size, "control", lambda own: ControlBlock(own, num_signals, num_locks).initialise())
        blocks = {}
        for rank in self._world:
            memory = buffer.peer(rank) if buffer.reaches(rank) else torch.zeros(size, dtype=torch.uint8, device="cpu")
            blocks[rank] = ControlBlock(memory, num_signals, num_locks)
        here = {r: LocalPeer(self.topology.describe(r), process, blocks[r]) for r, process in self._processes.items()}
        self._processes = {}
        self.peers.start(blocks, {**here, **(self._links.by_rank if self._links is not None else {})})
        if self._links is not None:
            links, own = self._links, self.peers.own
            # Together: nobody posts before everybody can be posted to.
            self._together(lambda: links.start(lambda: (own.heartbeats, own.waiting_on)))

    @abstractmethod
    def allocate(self, num_bytes: int, label: str) -> SymmetricBuffer:
        """``num_bytes`` of zeroed memory on every rank, where the model computes.

        Behind :meth:`seal` too: to be called when all ranks have come to it, each of which is known to be about to call
        it, too.

        Raises:
            SetupError: on all ranks, if one of them cannot provide the memory.
        """

    def allocate_private(self, num_bytes: int, label: str) -> SymmetricBuffer:
        """As :meth:`allocate`, for this rank's eyes only."""

        def make() -> SymmetricBuffer:
            own = torch.zeros(max(num_bytes, 1), dtype=torch.uint8, device=self.device)
            return SymmetricBuffer(self._rank, [own if rank == self._rank else None for rank in self._world], label)

        return self._together(make)

    def allocate_host(self, num_bytes: int, label: str) -> SymmetricBuffer:
        """As :meth:`allocate`, in memory that the processors of all ranks of a host can read and write."""
        return self._share(num_bytes, label)

    def _share(
        self, num_bytes: int, label: str, prepare: Callable[[torch.Tensor], None] = lambda own: None
    ) -> SymmetricBuffer:
        """See :meth:`allocate_host`; ``prepare`` is done to this rank's copy before others see it."""
        num_bytes = max(num_bytes, 1)
        self._require_one_size(num_bytes, label, lambda: _memfd.require_available(num_bytes * len(self._here), label))
        fds: dict[int, int] = {}
        views: dict[int, torch.Tensor] = {}
        problem: SetupError | None = None

        def map_all() -> None:
            if problem is not None:
                raise problem
            for rank, fd in fds.items():
                _memfd.check(fd, num_bytes)
                views[rank] = _memfd.map_bytes(fd, num_bytes)
            prepare(views[self._rank])
            self.peers.memory.append(views[self._rank].numpy().data)  # before any rank has heard that all have it

        try:
            if self._is_sealed:
                self._meet()
            try:
                fds[self._rank] = _memfd.create(num_bytes, label)
            except SetupError as error:  # the others wait for what this rank passes them; then they are told
                problem = error
            fds.update(self._swap(fds.get(self._rank)))
            self._together(map_all)
        finally:
            for fd in fds.values():
                os.close(fd)
            if self._is_sealed:
                self._near.close()
        return self._keep([views.get(rank) for rank in self._world], label)

    def _keep(self, views: Sequence[torch.Tensor | None], label: str) -> SymmetricBuffer:
        """The buffer to which the last of ``Peers.memory`` belongs. All ranks allocate in the same order, so it has one
        number on all."""
        buffer = SymmetricBuffer(self._rank, views, label, len(self.peers.memory) - 1)
        self._buffers.append(buffer)
        return buffer

    def _swap(self, fd: int | None) -> dict[int, int]:
        """See :meth:`~odc.transports._rendezvous.UnixRendezvous.swap`."""
        try:
            return self._near.swap(fd)
        except SetupError:
            if (notice := self.peers.abort_notice()) is not None:  # a better account of what happened
                raise SetupError(f"set-up failed on {notice}") from None
            raise

    def _require_one_size(self, num_bytes: int, label: str, check: Callable[[], None] = no_op) -> None:
        """All ranks ask for the same, and pass ``check``."""

        def own_size() -> int:
            check()
            return num_bytes

        for rank, size in enumerate(gather_together(self.exchange, own_size)):
            if size != num_bytes:
                raise SetupError(
                    f"{label!r}: {self.topology.describe(rank)} has {size} bytes, rank {self.topology.me} {num_bytes}. "
                    f"{OUR_FAULT}"
                )

    def _together(self, action: Callable[[], T]) -> T:
        """See :func:`odc.setup.agreement.together`."""
        return together(self.exchange, action)

    def seal(self) -> None:
        """End of set-up: prove every pair with a pattern, release what only set-up needs."""
        probes = [self._prove(self.allocate_host, "host memory")]
        if self.engine.has_streams:
            probes.append(self._prove(self.allocate, "device memory"))
        if self._elsewhere:
            self._together(lambda: self._prove_far(probes[-1]))
        for probe in probes:
            self.release(probe)
        self._near.close()
        self._is_sealed = True

    def _prove(self, allocate: Callable[[int, str], SymmetricBuffer], what: str) -> SymmetricBuffer:
        """Write a pattern to every rank and look for everybody's here."""
        probe = allocate(8 * len(self._world), f"probe of {what}")
        near = [rank for rank in self._world if probe.reaches(rank)]
        for rank in near:
            probe.peer(rank).view(torch.int64)[self._rank] = (_PATTERN << 32) + self._rank
        self._together(lambda: self._require_idle(what))
        found = probe.local.view(torch.int64).tolist()
        wrong = [self.topology.global_rank(r) for r in near if found[r] != (_PATTERN << 32) + r]
        problem = SetupError(f"the test of {what} failed between rank {self.topology.me} and ranks {wrong}")
        raise_together(self.exchange, problem if wrong else None)
        return probe

    def _prove_far(self, probe: SymmetricBuffer) -> None:
        """Write a pattern to every rank of another host, and read it back."""
        pattern = torch.full((1,), (_PATTERN << 32) + self._rank, dtype=torch.int64, device=self.device)
        for rank in self._elsewhere:
            found = torch.zeros_like(pattern)
            self.write(probe, rank, 8 * self._rank, [pattern])
            self.read([([found], rank)], probe, 8 * self._rank)
            self._require_idle("memory of other hosts")
            if not torch.equal(found, pattern):
                raise SetupError(f"what was written to {self.topology.describe(rank)} was not read back")

    def _require_idle(self, what: str) -> None:
        if not self.engine.synchronize(self._timeout_s):
            raise SetupError(f"writes to the {what} of the other ranks did not end within {self._timeout_s:g} s")

    def release(self, buffer: SymmetricBuffer) -> None:
        """Nobody reads or writes this rank's copy of ``buffer`` any more, nor this rank another one's: give it back.
        Local. Host memory goes when all ranks have done so, device memory at :meth:`close`, since no rank knows when
        the devices of the others have let go of it."""
        if buffer in self._buffers:
            self._buffers.remove(buffer)
            self.peers.memory[buffer.number] = None
            buffer.release()

    def no_atomics(self) -> str | None:
        """Why :meth:`odc.engines.base.Engine.add_rows` would lose additions in the memory of all ranks, or None."""
        return "processors add under locks"

    # Memory of ranks that may be on other hosts. Offsets are in bytes, tensors are flat, bytes travel as they are,
    # and as with the engine's work it happens in the order of the current stream.

    def read(
        self,
        parts: Sequence[tuple[Sequence[torch.Tensor], int]],
        buffer: SymmetricBuffer,
        offset_bytes: int,
        after_chunk: AfterChunk = no_op,
    ) -> None:
        """Fill the tensors of each (tensors, rank), one behind the other, from that rank's copy of a buffer of
        :meth:`allocate`; rank by rank, or all at once. Those of each rank are equally long together."""
        far = []
        for part in parts:
            outs, rank = part
            if buffer.reaches(rank):
                for out, place in places(outs, buffer.peer(rank), offset_bytes):
                    self.engine.copy([out], [place], after_chunk)
            else:
                far.append(part)
        if far:
            self._read_far(far, buffer, offset_bytes, after_chunk)

    def write(
        self,
        buffer: SymmetricBuffer,
        rank: int,
        offset_bytes: int,
        sources: Sequence[torch.Tensor],
        after_chunk: AfterChunk = no_op,
    ) -> None:
        """Put ``sources``, one behind the other, into ``rank``'s copy of a buffer of :meth:`allocate`, before this
        thread's next post to it."""
        if not buffer.reaches(rank):
            self._write_far(buffer, rank, offset_bytes, sources, after_chunk)
            return
        for source, place in places(sources, buffer.peer(rank), offset_bytes):
            self.engine.copy([place], [source], after_chunk)

    def _read_far(
        self,
        parts: Sequence[tuple[Sequence[torch.Tensor], int]],
        buffer: SymmetricBuffer,
        offset_bytes: int,
        after_chunk: AfterChunk,
    ) -> None:
        """:meth:`read` from ranks whose memory has no address here."""
        buffer.peer(parts[0][1])  # raises: this transport has no other way

    def _write_far(
        self,
        buffer: SymmetricBuffer,
        rank: int,
        offset_bytes: int,
        sources: Sequence[torch.Tensor],
        after_chunk: AfterChunk,
    ) -> None:
        """:meth:`write` to a rank whose memory has no address here."""
        buffer.peer(rank)  # raises: this transport has no other way

    def write_host(self, buffer: SymmetricBuffer, rank: int, offset_bytes: int, data: bytes) -> None:
        """Put ``data`` into ``rank``'s copy of a buffer of :meth:`allocate_host`, before this thread's next post to
        it."""
        if buffer.reaches(rank):
            buffer.peer(rank)[offset_bytes : offset_bytes + len(data)].numpy()[:] = memoryview(data)
        else:
            self._link(rank).write(buffer.number, offset_bytes, [memoryview(data)])

    def _link(self, rank: int) -> Link:
        assert self._links is not None
        return self._links.by_rank[rank]

    # Signals. Each rank has counters of its own, which it alone advances and all others see: on one host where they
    # lie, across hosts in a copy at each. post() is a release, count() an acquire: whatever the poster wrote before its
    # n-th post is visible to the reader that counts n. What the poster's *stream* writes has only been asked for by
    # then: order_after() carries the order on to the reader's stream.

    def post(self, index: int, *, to: int | None = None, daemon: bool = False) -> None:
        """Add one to signal ``index`` of this rank, and wake who waits for this rank.

        Never by two threads at a time.

        Args:
            to: the only rank that counts it; None: all do.
            daemon: for all daemons, which are woken instead; they look for its arrival (:meth:`has_arrived`).
        """
        if to is not None and to not in self._here:
            self._link(to).post(index, daemon)
            return
        own = self.peers.own
        own.post_to(index, self.peers.sleep_word(None) if daemon else own.events)
        if to is None and self._links is not None:
            for link in self._links.by_rank.values():
                link.post(index, daemon)

    def acknowledge(self, posts: Sequence[tuple[int, int]]) -> None:
        """Post each (signal, to), for :meth:`has_arrived` alone: where streams are, :meth:`count` may not tell."""
        for index, to in posts:
            self.post(index, to=to)

    def count(self, rank: int, index: int) -> int:
        """How often ``rank`` has posted its signal ``index``."""
        return self._blocks[rank].count(index)

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

    def forward_arrivals(self) -> None:
        """Tell other hosts of those in :attr:`to_forward` that have arrived. For the daemon's thread."""
        return

    def release_streams(self) -> None:
        """Let streams of this rank go on that wait for a dead rank. What they compute then is not valid."""
        return

    # The end

    def close(self) -> None:
        """Tell the peers that this rank has closed, and release everything; what they may still read
        (:attr:`serves_readers`) in the background, once they have closed, too. Local and idempotent."""
        if self._closed or os.getpid() != self._owner_pid:
            return  # a forked child must not speak for its parent
        self._closed = True
        far = [] if self._far is None else [self._far.close]
        run_all([self._near.close, *far, self.announce_close, self._leave])

    def announce_close(self) -> None:
        """Tell the peers that this rank has closed: it takes part in nothing any more. Idempotent, never waits."""
        if self._has_announced_close or os.getpid() != self._owner_pid:
            return
        self._has_announced_close = True
        how = Closing.FAILED
        try:
            how = Closing.COMPLETE if self._let_go() else Closing.FAILED
        finally:
            self.peers.say_closed(how)

    # [Note: Others still read] Ranks close when their scripts come to it. One that evaluates longer still gathers the
    # parameters that were published last, from ranks that have closed and even ended. Where memory of this rank ends
    # with its process, or is read through it, closing goes on behind close() until the others have closed, too.

    def _leave(self) -> None:
        readers = Readers(self.topology, self._readers())

        def is_unused(is_script_over: bool) -> bool:
            return self.peers.abort_notice() is not None or not readers.left(is_script_over)

        release_when(is_unused, lambda: run_all([self._take_back, self._release_all]))

    def _readers(self) -> dict[int, Peer]:
        """Ranks that may still read memory of this rank which ends with its process, or is read through it."""
        is_read = self.serves_readers and not self.peers.failing
        return dict(self._links.by_rank) if is_read and self._links is not None else {}

    def _release_all(self) -> None:
        # Links first: their thread uses the rest. Processes: those that set-up has not got round to.
        links = [] if self._links is None else [self._links]
        here = [peer for rank, peer in self.peers.others.items() if rank in self._here]
        closables: list[Closable] = [*links, *here, *self._processes.values()]
        steps = [part.close for part in closables] + [buffer.release for buffer in self._buffers]
        run_all([*steps, self._forget])

    def _forget(self) -> None:
        self.peers.forget()
        self._buffers, self._processes, self._links = [], {}, None

    def _let_go(self) -> bool:
        """Before the peers are told of the end: stop using their memory. Whether all work of this rank is done."""
        return not self.peers.failing

    def _take_back(self) -> None:
        """After the peers were told: free what they no longer use."""
        return
