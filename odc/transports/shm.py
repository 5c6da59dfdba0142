"""The ``shm`` transport: CPU ranks of one host, in mapped shared memory.

The embedded default: needs nothing but Linux, lets CI prove the protocol, and is what a laptop runs.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from odc.errors import SetupError
from odc.exchange import Exchange, raise_together
from odc.topology import Topology
from odc.transports import _memfd
from odc.transports._control import ControlBlock, control_bytes
from odc.transports._process import WatchedProcess
from odc.transports._rendezvous import Mesh
from odc.transports.base import LockOutcome, PeerState, SymmetricBuffer, Transport

_FDS_PER_PEER = 5  # pidfd, two doorbells, a socket and a passed descriptor during set-up
_FDS_SPARE = 32
_PATTERN = 0x0DC


class ShmTransport(Transport):
    """See :class:`~odc.transports.base.Transport`; memory is memfd, doorbells are eventfds, death is a pidfd."""

    name: ClassVar[str] = "shm"

    def __init__(self, exchange: Exchange, topology: Topology, timeout_s: float) -> None:
        super().__init__(exchange, topology, timeout_s)
        self._exchange = exchange
        self._rank = topology.rank
        self._peers = [rank for rank in range(topology.world_size) if rank != self._rank]
        self._buffers: list[SymmetricBuffer] = []
        self._blocks: list[ControlBlock] = []
        self._processes: dict[int, WatchedProcess] = {}
        self._bells: dict[int, tuple[int, int]] = {}
        self._closed = False
        self._owner_pid = os.getpid()
        error: Exception | None = None
        try:
            _check_descriptor_limit(topology.world_size)
        except SetupError as problem:
            error = problem
        raise_together(exchange, error)
        self._mesh = Mesh(topology)
        try:
            self._mesh.connect(exchange, timeout_s)
            self._watch_peers()
        except (SetupError, OSError) as problem:
            error = problem
        try:
            raise_together(exchange, error)
        except BaseException:
            self.close()
            raise

    @classmethod
    def unavailable(cls, topology: Topology, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it serves CPU tensors, the model is on {device.type}"
        if topology.num_hosts > 1:
            return f"it serves one host, the ranks are on {topology.num_hosts}: {sorted(set(topology.host_names))}"
        if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
            return "it needs Linux 5.3 or newer (memfd_create, pidfd_open)"
        return None

    def _watch_peers(self) -> None:
        for rank in self._peers:
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
        buffer = self.allocate(control_bytes(num_signals, num_locks), "control")
        world = range(self.topology.world_size)
        self._blocks = [ControlBlock(buffer.peer(rank), num_signals, num_locks) for rank in world]
        self._blocks[self._rank].initialise()
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        mine = (os.eventfd(0, flags), os.eventfd(0, flags))
        self._bells[self._rank] = mine
        # The swap comes after initialise(): a peer that has our doorbells may post.
        for rank, (_, fds) in self._mesh.swap(0, mine).items():
            self._bells[rank] = (fds[0], fds[1])

    def allocate(self, num_bytes: int, label: str) -> SymmetricBuffer:
        num_bytes = max(num_bytes, 1)
        self._together(lambda: _memfd.require_available(num_bytes * self.topology.world_size, label))
        fds: dict[int, int] = {}
        try:
            self._together(lambda: fds.update({self._rank: _memfd.create(num_bytes, label)}))
            for rank, (size, received) in self._mesh.swap(num_bytes, [fds[self._rank]]).items():
                fds[rank] = received[0]
                if size != num_bytes:
                    raise SetupError(
                        f"{label!r}: {self.topology.describe(rank)} has {size} bytes, rank {self._rank} {num_bytes}"
                    )
            views: dict[int, torch.Tensor] = {}
            self._together(lambda: views.update({r: self._map(fd, num_bytes) for r, fd in fds.items()}))
        finally:
            for fd in fds.values():
                os.close(fd)
        buffer = SymmetricBuffer(self._rank, [views[rank] for rank in range(self.topology.world_size)], label)
        self._buffers.append(buffer)
        return buffer

    def _together(self, action: Callable[[], object]) -> None:
        """Do it here; if it fails on any rank, fail on all."""
        error: Exception | None = None
        try:
            action()
        except (SetupError, OSError) as problem:
            error = problem
        raise_together(self._exchange, error)

    @staticmethod
    def _map(fd: int, num_bytes: int) -> torch.Tensor:
        _memfd.check(fd, num_bytes)
        return _memfd.map_bytes(fd, num_bytes)

    def seal(self) -> None:
        probe = self.allocate(8 * self.topology.world_size, "probe")
        for rank in range(self.topology.world_size):
            probe.peer(rank).view(torch.int64)[self._rank] = (_PATTERN << 32) + self._rank
        self._exchange.all_gather(b"")
        found = probe.local.view(torch.int64).tolist()
        wrong = [r for r, word in enumerate(found) if word != (_PATTERN << 32) + r]
        error = SetupError(f"the memory test failed between rank {self._rank} and ranks {wrong}") if wrong else None
        raise_together(self._exchange, error)
        self._buffers.remove(probe)
        probe.release()
        self._mesh.close()

    # Signals

    def post(self, rank: int, index: int, *, daemon: bool = False) -> None:
        self._blocks[rank].post(index)
        self._ring(self._bells[rank][1 if daemon else 0])

    def count(self, index: int) -> int:
        return self._blocks[self._rank].count(index)

    def wake_self(self) -> None:
        self._ring(*self._bells[self._rank])

    @staticmethod
    def _ring(*bells: int) -> None:
        for bell in bells:
            # A counter at its maximum means that the bell is ringing already.
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(bell, 1)

    def block(self, timeout_s: float, ranks: Sequence[int], *, daemon: bool = False) -> None:
        bell = self._bells[self._rank][1 if daemon else 0]
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        for rank in ranks:
            if rank in self._processes and not self._blocks[rank].closed:
                poll.register(self._processes[rank], select.POLLIN)
        for fd, _ in poll.poll(max(timeout_s, 0) * 1000):
            if fd == bell:
                os.eventfd_read(bell)

    # Locks

    def lock(self, rank: int, index: int, timeout_s: float) -> LockOutcome:
        return self._blocks[rank].lock(index, timeout_s)

    def unlock(self, rank: int, index: int) -> None:
        self._blocks[rank].unlock(index)

    # News of peers

    def tick(self) -> None:
        self._blocks[self._rank].tick()

    def progress(self, rank: int) -> int:
        return self._blocks[rank].progress

    def set_waiting_on(self, rank: int | None) -> None:
        self._blocks[self._rank].waiting_on = rank

    def waiting_on(self, rank: int) -> int | None:
        return self._blocks[rank].waiting_on

    def peer_state(self, rank: int) -> PeerState:
        if self._blocks[rank].closed:
            return PeerState.CLOSED
        if rank in self._processes and self._processes[rank].is_dead():
            return PeerState.DEAD
        return PeerState.ALIVE

    def describe_peer(self, rank: int) -> str:
        state = self.peer_state(rank)
        if state is PeerState.CLOSED:
            return "it closed its session"
        if rank not in self._processes:
            return "this process"
        process = self._processes[rank]
        return process.cause_of_death() if state is PeerState.DEAD else process.describe_alive()

    def abort_peers(self, text: str) -> None:
        if self._closed or not self._bells:
            return
        for rank in self._peers:
            self._blocks[rank].leave_abort(text)
            self._ring(*self._bells[rank])

    def abort_notice(self) -> str | None:
        return self._blocks[self._rank].abort_notice() if self._blocks else None

    def close(self) -> None:
        if self._closed or os.getpid() != self._owner_pid:
            return  # a forked child must not speak for its parent
        self._closed = True
        self._mesh.close()
        if self._blocks:
            self._blocks[self._rank].set_closed()
        for rank in self._peers:
            if rank in self._bells:
                self._ring(*self._bells[rank])
        for bells in self._bells.values():
            for fd in bells:
                os.close(fd)
        for process in self._processes.values():
            process.close()
        for buffer in self._buffers:
            buffer.release()
        self._blocks, self._buffers, self._bells, self._processes = [], [], {}, {}


def _check_descriptor_limit(world_size: int) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 64
    needed = _FDS_PER_PEER * world_size + _FDS_SPARE
    if limit != resource.RLIM_INFINITY and used + needed > limit:
        raise SetupError(
            f"too few file descriptors: {used} in use, {needed} needed, limit {limit}. Raise it with "
            f"`ulimit -n {max(4096, used + needed)}`."
        )
