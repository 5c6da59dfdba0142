"""How the ranks of one host meet in set-up: file descriptors are passed on a mesh of Unix sockets.

Abstract addresses: no file, no port. Every connection must come from the same user (SO_PEERCRED) and show the key of
this job, which travelled over the process group; a frame has a fixed size, so there is nothing to parse and no length
to lie about. The mesh is closed when set-up ends.

An :class:`Acceptor`, of this mesh or of the links to other hosts, is open while set-up lasts: ranks come in side by
side, and no stranger holds anybody up. Anybody can connect: a port scanner, a rank of another job, somebody who says
nothing or one byte a second. Whoever does not prove within the first bytes that it belongs here costs one descriptor,
for as long as there is room.

[Note: Not by /proc] A rank could open another one's memory as /proc/PID/fd/N, and no socket would be needed. But the
kernel allows that as it does reading a process for debugging (PTRACE_MODE_READ): not where each rank is in a user
namespace of its own, as in a rootless container per rank (`srun apptainer exec ...`), nor if one is not dumpable.
Sockets work there, and tell the process at the other end.
"""

from __future__ import annotations

import errno
import os
import resource
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial

from odc.errors import SetupError
from odc.liveness.leaving import run_all
from odc.liveness.threads import HelperThread
from odc.setup.agreement import OutOfReachError
from odc.setup.topology import Topology
from odc.transports._peers import notify

PER_PEER = 3  # pidfd, and during set-up a socket and a passed descriptor
PER_LINK = 3
SPARE = 32  # more than strangers who wait to be let in can hold
_FOLDER = "/proc/self/fd"
_GUESS = 64  # where there is no such folder


def require_descriptors(num_here: int, num_elsewhere: int = 0, *, now: int | None = None) -> None:
    """For a group with so many ranks on this host, and on others.

    Args:
        now: how many have to be free at present; default: all that will be needed.

    Raises:
        SetupError: the process may not have so many beside those in use.
    """
    needed = PER_PEER * num_here + PER_LINK * num_elsewhere + SPARE
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return
    used = _num_used(limit)
    if used + (needed if now is None else now) > limit:
        raise SetupError(
            f"too few file descriptors: {used} in use, {needed} needed, limit {limit}. Raise it with "
            f"`ulimit -n {max(4096, used + needed)}`."
        )


def _num_used(limit: int) -> int:
    if not os.path.isdir(_FOLDER):
        return _GUESS
    try:
        return len(os.listdir(_FOLDER))
    except OSError:
        return limit  # none is left to look with


MOST_WAITING = 16  # connections that have not proved anything yet; the oldest goes when another one comes
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """A thread that accepts connections from :meth:`open` to :meth:`close`."""

    def __init__(self, listener: socket.socket, num_bytes: int, admit: Callable[[socket.socket, bytes], bool]) -> None:
        """
        Args:
            listener: bound and listening; the acceptor's from now on.
            num_bytes: of the greeting with which every rank begins.
            admit: given a connection, which does not block, and its greeting: answers it, and keeps it or not. Called
                by the thread.
        """
        self._listener = listener
        self._num_bytes = num_bytes
        self._admit = admit
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._waiting: dict[int, tuple[socket.socket, bytearray]] = {}  # by descriptor, the oldest first
        self._thread = HelperThread(self._serve, "odc-acceptor")
        self._closed = False
        self.problem: OSError | None = None
        """Why nobody is accepted any more."""

    def open(self) -> None:
        """
        Raises:
            SetupError: no thread can be started.
        """
        self._listener.setblocking(False)
        try:
            self._thread.start()
        except BaseException:
            self.close()  # who calls is refused, instead of waiting for an answer
            raise

    def _serve(self) -> None:
        listening_fd = self._listener.fileno()
        for fd in (self._stop_fd, listening_fd):
            self._poll.register(fd, select.POLLIN)
        try:
            while True:
                ready = [fd for fd, _ in self._poll.poll()]
                if self._stop_fd in ready:
                    return
                for fd in ready:
                    if fd in self._waiting:
                        self._listen_to(fd)
                if listening_fd in ready:
                    self._accept_some()
        except OSError as problem:
            self.problem = problem
        finally:  # what nobody looks after must not seem open
            self._listener.close()
            while self._waiting:
                self._send_oldest_away()

    def _accept_some(self) -> None:
        """Those who knock; not so many that those who are in have to wait."""
        for _ in range(MOST_WAITING):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as problem:
                if problem.errno in _EXHAUSTED:
                    if not self._waiting:
                        raise
                    self._send_oldest_away()
                continue  # any other error is that of a connection that has ended already
            connection.setblocking(False)
            fd = connection.fileno()
            self._waiting[fd] = connection, bytearray()
            self._poll.register(fd, select.POLLIN)
            self._listen_to(fd)
            if len(self._waiting) > MOST_WAITING:
                self._send_oldest_away()

    def _listen_to(self, fd: int) -> None:
        connection, greeting = self._waiting[fd]
        try:
            part = connection.recv(self._num_bytes - len(greeting))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        greeting += part
        if part and len(greeting) < self._num_bytes:
            return
        del self._waiting[fd]
        self._poll.unregister(fd)
        if len(greeting) < self._num_bytes or not self._admit(connection, bytes(greeting)):
            connection.close()

    def _send_oldest_away(self) -> None:
        fd = next(iter(self._waiting))
        connection, _ = self._waiting.pop(fd)
        self._poll.unregister(fd)
        connection.close()

    def close(self) -> None:
        """Local, idempotent. Connections that were kept are not touched."""
        if self._closed:
            return
        self._closed = True
        notify(self._stop_fd)
        run_all([self._thread.end, self._listener.close, partial(os.close, self._stop_fd)])


_FRAME = struct.Struct("=8s16sII")  # magic, key, rank, sequence number
_MAGIC = b"odc-shm1"
_PEERCRED = struct.Struct("3i")
_MIN_BACKLOG = 128
_ATTEMPTS = 100


class SocketMesh:
    """One connected socket per pair of ranks of a host. In turn: :meth:`listen`, swap what it returns, :meth:`connect`,
    wait for all, :meth:`complete`."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._ranks = topology.ranks_here()
        self._sequence = 0
        self._timeout_s = 0.0
        self._key = secrets.token_bytes(16)
        self._peers: dict[int, socket.socket] = {}
        self._listener: socket.socket | None = None
        self._acceptor: Acceptor | None = None

    def listen(self) -> list[str]:
        """Listen; what the others need to find it."""
        address = secrets.token_hex(16)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0odc-{address}")
        self._listener.listen(max(_MIN_BACKLOG, self._topology.world_size))
        return [address, self._key.hex()]

    def connect(self, rows: Sequence[Sequence[str]], timeout_s: float) -> None:
        """Connect to the ranks of this host with a lower number, and let in those with a higher one from now on.

        Args:
            rows: what :meth:`listen` returned, of all ranks.

        Raises:
            SetupError: a rank cannot be reached, or does not answer within ``timeout_s``.
        """
        assert self._listener is not None
        self._timeout_s = timeout_s
        # All use the key of the host's first rank: one key per job and host, known to its members only.
        self._key = bytes.fromhex(rows[self._ranks[0]][1])
        if self._ranks[-1] > self._topology.rank:
            self._acceptor, self._listener = Acceptor(self._listener, _FRAME.size, self._admit), None
            self._acceptor.open()
        deadline = time.monotonic() + timeout_s
        for peer in self._ranks:
            if peer < self._topology.rank:
                self._call(peer, str(rows[peer][0]), deadline)

    def complete(self) -> None:
        """Everybody has connected everywhere.

        Raises:
            SetupError: somebody is missing all the same.
        """
        if self._acceptor is not None:
            self._acceptor.close()
        missing = [rank for rank in self._ranks if rank != self._topology.rank and rank not in self._peers]
        if missing:
            raise SetupError(f"ranks {missing} say that they are connected to rank {self._topology.rank}, and are not")

    def _call(self, peer: int, address: str, deadline: float) -> None:
        """Connect, and wait for the answer; again where strangers have pushed this rank out of the queue."""
        for _ in range(_ATTEMPTS):
            connection = self._peers[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._connect(peer, connection, address, deadline)
            try:
                self._send(peer)
                self._receive(peer)
            except SetupError:
                connection.close()
                if time.monotonic() > deadline:
                    raise
                continue
            connection.settimeout(self._timeout_s)
            return
        raise OutOfReachError(f"{self._topology.describe(peer)} has ended {_ATTEMPTS} connections without an answer")

    def _connect(self, peer: int, connection: socket.socket, address: str, deadline: float) -> None:
        who = self._topology.describe(peer)
        while True:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                connection.connect(f"\0odc-{address}")
                return
            except BlockingIOError:  # its queue is full: somebody knocks at it in vain
                if time.monotonic() > deadline:
                    raise SetupError(f"{who} did not answer during set-up") from None
                time.sleep(0.01)
            except OSError as problem:
                raise OutOfReachError(f"cannot reach {who} during set-up: {problem}") from None

    def _admit(self, connection: socket.socket, greeting: bytes) -> bool:
        """Keep and answer a connection that proves to be a rank of this job. See :class:`Acceptor`."""
        if _credentials(connection)[1] != os.getuid():
            return False
        magic, key, peer, _ = _FRAME.unpack(greeting)
        wanted = peer in self._ranks and peer > self._topology.rank and peer not in self._peers
        if magic != _MAGIC or not secrets.compare_digest(key, self._key) or not wanted:
            return False
        connection.settimeout(self._timeout_s)
        self._peers[peer] = connection
        try:
            self._send(peer)
        except SetupError:  # it has ended, and may come again
            del self._peers[peer]
            return False
        return True

    def pid_of(self, rank: int) -> int:
        """The process at the other end as the kernel sees it from this pid namespace (0: not visible)."""
        return _credentials(self._peers[rank])[0]

    def swap(self, fd: int | None) -> dict[int, int]:
        """Send a descriptor to every peer of this host (None: this rank has none); return what each sent. Collective.

        In rounds, sending to one rank and receiving from another: Linux limits the descriptors of a user that are
        under way, and all-to-all at once exceeds a limit of 1024 with 24 ranks.
        """
        self._sequence += 1
        number, own = len(self._ranks), self._ranks.index(self._topology.rank)
        received: dict[int, int] = {}
        try:
            for step in range(1, number):
                self._send(self._ranks[(own + step) % number], fd)
                source = self._ranks[(own - step) % number]
                if (passed := self._receive(source)) is not None:
                    received[source] = passed
        except BaseException:
            for passed in received.values():
                os.close(passed)
            raise
        return received

    def _send(self, rank: int, fd: int | None = None) -> None:
        frame = _FRAME.pack(_MAGIC, self._key, self._topology.rank, self._sequence)
        try:
            socket.send_fds(self._peers[rank], [frame], [] if fd is None else [fd])
        except OSError as error:
            raise SetupError(f"cannot pass memory to {self._topology.describe(rank)}: {error}") from None

    def _receive(self, rank: int) -> int | None:
        connection = self._peers[rank]
        who = self._topology.describe(rank)
        try:
            data, fds, _, _ = socket.recv_fds(connection, _FRAME.size, 1, socket.MSG_CMSG_CLOEXEC)
            if data and len(data) < _FRAME.size:
                data += _receive_exactly(connection, _FRAME.size - len(data))
        except TimeoutError:
            raise SetupError(f"{who} sent nothing within {self._timeout_s:g} s of set-up") from None
        except OSError as error:
            raise SetupError(f"lost {who} during set-up: {error}") from None
        if not data:
            raise SetupError(f"{who} went away during set-up")
        if _FRAME.unpack(data) != (_MAGIC, self._key, rank, self._sequence):
            for fd in fds:
                os.close(fd)
            raise SetupError(f"{who} sent a set-up frame that does not belong here")
        return next(iter(fds), None)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._acceptor is not None:
            self._acceptor.close()
        for connection in self._peers.values():
            connection.close()
        self._peers = {}


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the other end, from the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    pid, uid, gid = _PEERCRED.unpack(raw)
    return pid, uid, gid


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise SetupError("connection closed in the middle of a frame")
        data += part
    return data
