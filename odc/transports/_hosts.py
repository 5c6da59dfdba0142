"""What ranks share whatever they compute on: mapped host memory, signals, locks, liveness, within and across hosts."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from odc.errors import AbortedError, SetupError, UnsupportedError
from odc.liveness.leaving import Closable, release_when, run_all
from odc.liveness.process import WatchedProcess
from odc.liveness.threads import in_helper
from odc.setup.agreement import Exchange, gather_json, raise_together, together
from odc.setup.topology import Topology
from odc.transports import _control, _memfd
from odc.transports._control import Closing, ControlBlock, SleepWord, control_bytes
from odc.transports._link import Link
from odc.transports._links import Links
from odc.transports._peers import LocalNeighbour, Neighbour, Readers, WatchedExchange
from odc.transports._rendezvous import Mesh, require_descriptors
from odc.transports.base import HOST, PeerState, Signs, SymmetricBuffer, Transport

_PATTERN = 0x0DC
_NO_NOTICE = (0,)


T = TypeVar("T")


class HostsTransport(Transport):
    """See :class:`~odc.transports.base.Transport`.

    Between ranks of one host memory is memfd, signals are words in it, who waits sleeps on a futex, and death is a
    pidfd. With ranks of other hosts there are links (:mod:`._links`), which keep a copy of their signals here.

    Left to subclasses: for whom it is, and the memory in which tensors travel (:meth:`allocate`).
    """

    def __init__(self, exchange: Exchange, topology: Topology, timeout_s: float, device: torch.device = HOST) -> None:
        super().__init__(exchange, topology, timeout_s, device)
        self.exchange = WatchedExchange(exchange, self._gone, self.abort_notice)
        self._timeout_s = timeout_s
        self._rank = topology.rank
        self._world = range(topology.world_size)
        self._here, self._elsewhere = topology.ranks_here(), topology.ranks_elsewhere()
        self._peers = [rank for rank in self._world if rank != self._rank]
        self._buffers: list[SymmetricBuffer] = []
        self._blocks: dict[int, ControlBlock] = {}  # of the ranks of this host; of others, this rank's copies
        self._neighbours: dict[int, Neighbour] = {}
        self._processes: dict[int, WatchedProcess] = {}
        self._shown: list[ControlBlock] = []  # where this rank shows its progress and its waits
        self._progress: list[memoryview] = []  # there; and the word that tells of a notice: each operation uses both
        self._notice: Sequence[int] = _NO_NOTICE
        self._own_check: Callable[[], None] | None = None  # raises what else has failed at this rank
        self._far_memory: list[memoryview | None] = []  # by number of the buffer: for other hosts
        self._links: Links | None = None
        self._closed = self._has_said_farewell = False
        self._failing = False  # this rank or another one has reported an error
        self._lends = False  # others read its memory as they like
        self._owner_pid = os.getpid()
        self._mesh = Mesh(topology)
        try:
            self._together(lambda: require_descriptors(len(self._here), topology.world_size - len(self._here)))
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        """Collective; between the swaps each step is this rank's own, and fails on all ranks if it does on one."""
        self._meet()
        self._together(self._watch_peers)
        if self.topology.num_hosts > 1:
            links = self._links = Links(self.topology, self, self._timeout_s)
            doors = gather_json(self.exchange, self._together(links.listen))
            self._together(lambda: links.connect(doors))
            self._together(links.complete)

    def _meet(self) -> None:
        """The ranks of this host: to pass descriptors, from now on."""
        rows = gather_json(self.exchange, self._together(self._mesh.listen))
        self._together(lambda: self._mesh.connect(rows, self._timeout_s))
        self._together(self._mesh.complete)

    def _link(self, rank: int) -> Link:
        assert self._links is not None
        return self._links.by_rank[rank]

    @staticmethod
    def not_on_this_host(topology: Topology) -> str | None:
        """Why not all ranks can share host memory and watch each other, or None."""
        if topology.num_hosts > 1:
            return f"it serves one host, the ranks are on {topology.num_hosts}: {sorted(set(topology.host_names))}"
        return HostsTransport.not_on_this_kernel()

    @staticmethod
    def not_on_this_kernel() -> str | None:
        """Why the ranks of a host cannot share its memory, or None."""
        if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
            return "it needs Linux 5.3 or newer (memfd_create, pidfd_open)"
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError as problem:
            return f"processes cannot be watched here (pidfd_open: {problem.strerror}): a sandbox forbids it"
        return _control.problem()

    @staticmethod
    def no_way_out(topology: Topology) -> str | None:
        """Why other hosts cannot reach this one, or None."""
        if topology.num_hosts > 1 and not (topology.addresses and topology.addresses[topology.rank]):
            return "no network leads out of this host: set ODC_ADDRESS to the address at which the others reach it"
        return None

    def _gone(self) -> list[str]:
        """The ranks that have ended, and how."""
        watched = {rank: (process.is_dead(), process.cause_of_death) for rank, process in self._processes.items()}
        watched |= {rank: (n.is_dead, n.describe) for rank, n in self._neighbours.items()}
        return [f"{self.topology.describe(rank)}: {how()}" for rank, (is_dead, how) in watched.items() if is_dead]

    def _watch_peers(self) -> None:
        for rank in self._here:
            if rank == self._rank:
                continue
            pid = self._mesh.pid_of(rank)
            if not pid:
                raise SetupError(
                    f"{self.topology.describe(rank)} is in another pid namespace: its death could not be noticed. "
                    "Run the ranks of one host in one container, or share the pid namespace."
                )
            try:
                self._processes[rank] = WatchedProcess(pid)
            except ProcessLookupError:
                raise SetupError(f"{self.topology.describe(rank)} died during set-up") from None

    # Set-up

    def open(self, *, num_signals: int, num_locks: int) -> None:
        num_bytes = control_bytes(num_signals, num_locks)
        buffer = self.allocate_host(num_bytes, "control")
        for rank in self._world:
            memory = buffer.peer(rank) if buffer.reaches(rank) else torch.zeros(num_bytes, dtype=torch.uint8)
            self._blocks[rank] = ControlBlock(memory, num_signals, num_locks)
        self._own.initialise()
        self._shown, self._progress, self._notice = [self._own], [self._own.progress], self._own.notice
        self.exchange.all_gather(b"")  # nobody uses a block before its owner has made it
        for rank, process in self._processes.items():
            self._neighbours[rank] = LocalNeighbour(process, self._blocks[rank])
        self._processes = {}
        if self._links is not None:
            self._neighbours.update(self._links.by_rank)
            links, own = self._links, self._own
            # Together: nobody posts before everybody can be posted to.
            self._together(lambda: links.start(lambda: (own.signs, own.waiting_on)))

    @property
    def _own(self) -> ControlBlock:
        return self._blocks[self._rank]

    def allocate_host(self, num_bytes: int, label: str) -> SymmetricBuffer:
        num_bytes = max(num_bytes, 1)
        self._together(lambda: _memfd.require_available(num_bytes * len(self._here), label))
        fds: dict[int, int] = {}
        try:
            self._together(lambda: fds.update({self._rank: _memfd.create(num_bytes, label)}))
            self._require_one_size(num_bytes, label)
            for rank, (_, received) in self._swap(num_bytes, [fds[self._rank]]).items():
                fds[rank] = received[0]
            views: dict[int, torch.Tensor] = {}
            self._together(lambda: self._map_all(fds, num_bytes, views))
        finally:
            for fd in fds.values():
                os.close(fd)
        return self._keep([views.get(rank) for rank in self._world], label)

    def _keep(self, views: Sequence[torch.Tensor | None], label: str) -> SymmetricBuffer:
        """The buffer to which the last of ``_far_memory`` belongs. All ranks allocate in the same order, so it has one
        number on all."""
        buffer = SymmetricBuffer(self._rank, views, label, len(self._far_memory) - 1)
        self._buffers.append(buffer)
        return buffer

    def _swap(self, value: int, fds: Sequence[int]) -> dict[int, tuple[int, list[int]]]:
        """See :meth:`~odc.transports._rendezvous.Mesh.swap`."""
        try:
            return self._mesh.swap(value, fds)
        except SetupError:
            if (notice := self.abort_notice()) is not None:  # a better account of what happened
                raise SetupError(f"set-up failed on {notice}") from None
            raise

    def _map_all(self, fds: Mapping[int, int], num_bytes: int, views: dict[int, torch.Tensor]) -> None:
        views.update({rank: self._map(fd, num_bytes) for rank, fd in fds.items()})
        self._far_memory.append(views[self._rank].numpy().data)  # before any rank has heard that all have mapped it

    def _require_one_size(self, num_bytes: int, label: str) -> None:
        for rank, size in enumerate(gather_json(self.exchange, num_bytes)):
            if size != num_bytes:
                raise SetupError(
                    f"{label!r}: {self.topology.describe(rank)} has {size} bytes, rank {self.topology.me} {num_bytes}"
                )

    def _together(self, action: Callable[[], T]) -> T:
        """See :func:`odc.setup.agreement.together`."""
        return together(self.exchange, action)

    @staticmethod
    def _map(fd: int, num_bytes: int) -> torch.Tensor:
        _memfd.check(fd, num_bytes)
        return _memfd.map_bytes(fd, num_bytes)

    def seal(self) -> None:
        self._prove(self.allocate_host, "host memory")
        if self.engine.has_streams:
            self._prove(self.allocate, "device memory")
        if self._links is not None:
            far_probe = self.allocate(8 * len(self._world), "probe of other hosts")
            self._together(lambda: self._prove_far(far_probe))
        self._mesh.close()

    def _prove(self, allocate: Callable[[int, str], SymmetricBuffer], what: str) -> None:
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
        self.release(probe)

    def _prove_far(self, probe: SymmetricBuffer) -> None:
        """Write a pattern to every rank of another host, and read it back."""
        pattern = torch.full((1,), (_PATTERN << 32) + self._rank, dtype=torch.int64, device=self.device)
        for rank in self.topology.ranks_elsewhere():
            found = torch.zeros_like(pattern)
            self.write(probe, rank, 8 * self._rank, pattern)
            self.read(found, probe, rank, 8 * self._rank)
            self._require_idle("memory of other hosts")
            if not torch.equal(found, pattern):
                raise SetupError(f"what was written to {self.topology.describe(rank)} was not read back")

    def _require_idle(self, what: str) -> None:
        if not self.engine.synchronize(self._timeout_s):
            raise SetupError(f"writes to the {what} of the other ranks did not end within {self._timeout_s:g} s")

    def extend(self, num_bytes: int, label: str) -> SymmetricBuffer:
        self._mesh = Mesh(self.topology)
        try:
            self._meet()
            return self.allocate(num_bytes, label)
        finally:
            self._mesh.close()

    def release(self, buffer: SymmetricBuffer) -> None:
        if buffer in self._buffers:
            self._buffers.remove(buffer)
            self._far_memory[buffer.number] = None
            buffer.release()

    def use_check(self, check: Callable[[], None]) -> None:
        self._own_check = check

    def allocate_private(self, num_bytes: int, label: str) -> SymmetricBuffer:
        return self._together(lambda: super(HostsTransport, self).allocate_private(num_bytes, label))

    def write_host(self, buffer: SymmetricBuffer, rank: int, offset_bytes: int, data: bytes) -> None:
        if buffer.reaches(rank):
            super().write_host(buffer, rank, offset_bytes, data)
        else:
            self._link(rank).write(buffer.number, offset_bytes, memoryview(data))

    # Signals

    def post(self, index: int, *, to: int | None = None, daemon: bool = False) -> None:
        if to is not None and to not in self._here:
            self._link(to).post(index, daemon)
            return
        if daemon:
            self._own.post_to(index, self._bell)
        else:
            self._own.post(index)
        if to is None and self._links is not None:
            for link in self._links.by_rank.values():
                link.post(index, daemon)

    @property
    def _bell(self) -> SleepWord:
        """On which all daemons of this host sleep: a push is for all of them, and one call wakes them."""
        return self._blocks[self._here[0]].calls

    def count(self, rank: int, index: int) -> int:
        return self._blocks[rank].count(index)

    def _sleep_word(self, rank: int | None) -> SleepWord:
        """Links wake this rank on its own word, as do those of its host when anything has failed."""
        if rank is None:
            return self._bell
        return (self._blocks[rank] if rank in self._here else self._own).events

    def ticket(self, rank: int | None) -> int:
        return self._sleep_word(rank).ticket

    def sleep(self, rank: int | None, ticket: int, timeout_s: float) -> None:
        self._sleep_word(rank).sleep(ticket, timeout_s)

    def wake_self(self) -> None:
        self._own.wake()
        self._bell.advance()

    # Locks

    def lock(self, rank: int, index: int, timeout_s: float = 0.0) -> bool:
        if rank not in self._here:
            raise UnsupportedError(f"{self.topology.describe(rank)} is on another host: no lock reaches so far")
        if timeout_s > 0:
            return self._blocks[rank].lock(index, self._rank, timeout_s)
        return self._blocks[rank].try_lock(index, self._rank)

    def lock_holder(self, rank: int, index: int) -> int | None:
        return self._blocks[rank].holder(index)

    def unlock(self, rank: int, index: int) -> None:
        self._blocks[rank].unlock(index)

    # News of peers

    def tick(self) -> None:
        for word in self._progress:
            word[0] += 1

    def beat(self) -> None:
        for block in self._shown:
            block.beat()

    def signs(self, rank: int) -> Signs:
        return self._own.signs if rank == self._rank else self._neighbours[rank].signs

    def set_waiting_on(self, rank: int | None) -> None:
        for block in self._shown:
            block.waiting_on = rank

    def mirror(self, other: Transport) -> None:
        if not isinstance(other, HostsTransport):
            raise UnsupportedError(f"{other.name} keeps what ranks show elsewhere")
        self._shown.append(other._own)
        self._progress.append(other._own.progress)

    def waiting_on(self, rank: int) -> int | None:
        return self._own.waiting_on if rank == self._rank else self._neighbours[rank].waiting_on

    def peer_state(self, rank: int) -> PeerState:
        neighbour = self._neighbours.get(rank)
        if neighbour is None:
            return PeerState.ALIVE if self._own.closed is Closing.OPEN else PeerState.CLOSED
        if neighbour.has_left:
            return PeerState.CLOSED
        return PeerState.DEAD if neighbour.is_dead else PeerState.ALIVE

    def has_ended(self, rank: int) -> bool:
        neighbour = self._neighbours.get(rank)
        return neighbour is not None and neighbour.is_dead

    def wait_for_loss(self, stop_fd: int, timeout_s: float) -> int | None:
        poll = select.poll()
        poll.register(stop_fd, select.POLLIN)
        watched = {rank: n for rank, n in self._neighbours.items() if n.closing is not Closing.COMPLETE}
        for neighbour in watched.values():
            if neighbour.death_fd is not None:
                poll.register(neighbour.death_fd, select.POLLIN)
        if self._links is not None:
            poll.register(self._links.loss_fd, select.POLLIN)
        poll.poll(timeout_s * 1000)
        if self._links is not None:
            self._links.forget_loss()
        # A rank may close, all its work done, and end while this sleeps.
        return next((r for r, n in watched.items() if self._left_work_undone(n)), None)

    @staticmethod
    def _left_work_undone(neighbour: Neighbour) -> bool:
        return neighbour.closing is Closing.FAILED or (neighbour.is_dead and neighbour.closing is Closing.OPEN)

    def describe_peer(self, rank: int) -> str:
        if self.peer_state(rank) is PeerState.CLOSED:
            return "it closed its session"
        return self._neighbours[rank].describe() if rank in self._neighbours else "this process"

    def set_refusal(self, text: str) -> None:
        if self._blocks:
            self._own.refusal = text
            for neighbour in self._neighbours.values():
                neighbour.tell_refusal(text)

    def refusal(self, rank: int) -> str:
        return self._neighbours[rank].refusal if rank in self._neighbours else ""

    def abort_peers(self, text: str) -> None:
        if not self._blocks:
            return
        self._failing = True
        for neighbour in self._neighbours.values():
            neighbour.abort(text)
        self._own.wake()

    def abort_notice(self) -> str | None:
        if not self._notice[0]:
            return None
        self._failing = True
        return self._own.abort_notice()

    # What links do here: see odc.transports._link.LinkOwner

    def deliver(self, rank: int, index: int, daemon: bool) -> None:
        """``rank`` of another host has posted its signal ``index``."""
        self._blocks[rank].post_to(index, self._bell if daemon else self._own.events)

    def memory(self, buffer: int) -> memoryview | None:
        """This rank's copy of a buffer, if other hosts may use it."""
        return self._far_memory[buffer] if buffer < len(self._far_memory) else None

    def notice(self, text: str) -> None:
        """A rank of another host has failed."""
        if self._blocks:
            self._own.leave_abort(text)

    def lost(self) -> None:
        """A link has ended, or said that it will."""
        if self._blocks:
            self._own.wake()
        if self._links is not None:
            self._links.lost()

    def check(self) -> None:
        """Raise if this rank or another one has failed."""
        if self._own_check is not None:
            self._own_check()
        if (notice := self.abort_notice()) is not None:
            raise AbortedError(f"rank {self.topology.me} aborted because {notice}")

    def waits_for(self, rank: int | None) -> None:
        """This rank waits for ``rank`` in a transfer, or no more."""
        if in_helper():  # what that waits for, the training loop does not
            return
        if rank is None:
            self.tick()  # before the next lines: nobody may see "not waiting, long silent"
        for block in self._shown:
            block.waiting_on = None if rank is None else self.topology.global_rank(rank)

    def lend(self) -> None:
        self._lends = True

    def end_transfers(self) -> None:
        if self._links is not None:
            self._links.end_transfers()

    def close(self) -> None:
        if self._closed or os.getpid() != self._owner_pid:
            return  # a forked child must not speak for its parent
        self._closed = True
        run_all([self._mesh.close, self.say_farewell, self._leave])

    def say_farewell(self) -> None:
        if self._has_said_farewell or os.getpid() != self._owner_pid:
            return
        self._has_said_farewell = True
        how = Closing.FAILED
        try:
            how = Closing.COMPLETE if self._let_go() else Closing.FAILED
        finally:
            if self._blocks:
                self._own.closed = how
                self._own.wake()
            run_all(partial(neighbour.tell_closed, how) for neighbour in self._neighbours.values())

    # [Note: Others still read] Ranks close when their scripts come to it. One that evaluates longer still gathers the
    # parameters that were published last, from ranks that have closed and even ended. Where memory of this rank ends
    # with its process, or is read through it, closing goes on behind close() until the others have closed, too.

    def _leave(self) -> None:
        readers = Readers(self.topology, self._borrowers())

        def is_unused(is_script_over: bool) -> bool:
            return self.abort_notice() is not None or not readers.left(is_script_over)

        release_when(is_unused, lambda: run_all([self._take_back, self._release_all]))

    def _borrowers(self) -> dict[int, Neighbour]:
        """Ranks that may still read memory of this rank which ends with its process, or is read through it."""
        return dict(self._links.by_rank) if self._lends and not self._failing and self._links is not None else {}

    def _release_all(self) -> None:
        # Links first: their thread uses the rest. Processes: those that set-up has not got round to.
        here = [neighbour for neighbour in self._neighbours.values() if not isinstance(neighbour, Link)]
        links = [] if self._links is None else [self._links]
        closables: list[Closable] = [*links, *here, *self._processes.values()]
        steps = [part.close for part in closables] + [buffer.release for buffer in self._buffers]
        run_all([*steps, self._forget])

    def _forget(self) -> None:
        self._blocks, self._buffers, self._neighbours, self._processes = {}, [], {}, {}
        self._links, self._shown, self._progress, self._notice, self._far_memory = None, [], [], _NO_NOTICE, []

    def _let_go(self) -> bool:
        """Before the peers are told of the end: stop using their memory. Whether all work of this rank is done."""
        return not self._failing

    def _take_back(self) -> None:
        """After the peers were told: free what they no longer use."""
