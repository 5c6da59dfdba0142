"""Connections of ranks in set-up: each rank connects to all lower ranks and accepts all higher ones, with one
connection per purpose. Within a host these are Unix sockets, over which file descriptors are passed; between hosts TCP,
for the links.

The connecting rank sends its own rank and the rank it wants, and proves that it has the job's key, which was exchanged
over the process group. The answer does the same. Frames have a fixed size, so there is no length to parse. Unix sockets
have abstract addresses (no file) and accept only processes of the same user (SO_PEERCRED).

An :class:`Acceptor` is open during set-up and handles connections in parallel, so that strangers do not delay ranks. A
stranger may be a port scanner, a rank of another job, or a client that sends nothing or one byte per second. A
connection whose first bytes do not prove the key only occupies one descriptor, as long as there is room.

[Note: Not by /proc] A rank could open another rank's memory as /proc/PID/fd/N, without a socket. But the kernel applies
the rules of debugging (PTRACE_MODE_READ): this fails if each rank has its own user namespace, as in a rootless
container per rank (`srun apptainer exec ...`), or if a process is not dumpable. Sockets work there, and identify the
process at the other end.
"""

from __future__ import annotations

import errno
import hmac
import os
import resource
import secrets
import select
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from odc import limits
from odc.errors import SetupError
from odc.liveness.leaving import run_all
from odc.liveness.threads import HelperThread
from odc.setup.agreement import OutOfReachError
from odc.setup.topology import Topology
from odc.transports._frames import HEADER, KEY_BYTES, WIRE_VERSION, Frame, Kind, receive_until
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


_ATTEMPTS = 100
_MIN_BACKLOG = 128
_MAX_REFUSAL_BYTES = 500


class Rendezvous(ABC):
    """Connections of this rank to some others. In turn: :meth:`listen`, swap what it returns, :meth:`connect`, wait for
    all, :meth:`complete`.

    Args:
        ranks: who meets, in order; this rank may be one of them.
        first: whose key all of them use.
    """

    num_purposes = 1
    advice = ""
    """What to do where ranks cannot reach each other."""

    def __init__(self, topology: Topology, ranks: Sequence[int], first: int) -> None:
        self._topology = topology
        self._others = [rank for rank in ranks if rank != topology.rank]
        self._first = first
        self._timeout_s = 0.0
        self._key = secrets.token_bytes(KEY_BYTES)
        self._listener: socket.socket | None = None
        self._acceptor: Acceptor | None = None
        self.sockets: dict[tuple[int, int], socket.socket] = {}
        """By rank and purpose; they have a time limit."""

    @abstractmethod
    def _open(self) -> tuple[socket.socket, Sequence[Any]]:
        """What listens, and where."""

    @abstractmethod
    def _dial(self, address: Sequence[Any], deadline: float) -> socket.socket:
        """A connection to what listens there.

        Raises:
            OSError: nobody does, or not in time.
        """

    @abstractmethod
    def _may_enter(self, connection: socket.socket) -> bool:
        """Whether who has connected is answered at all."""

    def _where(self, rank: int, address: Sequence[Any]) -> str:
        return self._topology.describe(rank)

    @property
    def _whoami(self) -> str:
        return self._topology.describe(self._topology.rank)

    def listen(self) -> list[Any]:
        """Listen; what the others need to find it.

        Raises:
            SetupError: the address is not this host's.
        """
        self._listener, address = self._open()
        return [*address, self._key.hex()]

    def connect(self, rows: Sequence[Sequence[Any]], timeout_s: float) -> None:
        """Connect to the ranks with a lower number; from now on let in those with a higher one.

        Args:
            rows: what :meth:`listen` returned, of all ranks.

        Raises:
            SetupError: a rank cannot be reached, refuses this one, or does not answer within ``timeout_s``.
        """
        assert self._listener is not None
        self._timeout_s = timeout_s
        self._key = bytes.fromhex(rows[self._first][-1])  # one of all, known to them only
        if any(rank > self._topology.rank for rank in self._others):
            self._acceptor, self._listener = Acceptor(self._listener, HEADER.size + KEY_BYTES, self._admit), None
            self._acceptor.open()
        deadline = time.monotonic() + timeout_s
        for rank in self._others:
            if rank < self._topology.rank:
                for purpose in range(self.num_purposes):
                    self._call(rank, rows[rank][:-1], purpose, deadline)
        if self._acceptor is not None and self._acceptor.problem is not None:
            raise SetupError(f"{self._whoami} cannot let in the other ranks: {self._acceptor.problem}")

    # [Note: Nobody waits for a rank to come in] Each rank calls those below it, waits for their answers, and then for
    # all others to have had theirs, in the exchange between connect() and complete(). So whoever is refused says why on
    # all ranks at once, and a rank that comes late costs nobody a limit of its own.

    def complete(self) -> None:
        """Everybody has connected everywhere.

        Raises:
            SetupError: somebody is missing all the same.
        """
        self._close_door()
        for rank in self._others:
            if any((rank, purpose) not in self.sockets for purpose in range(self.num_purposes)):
                raise SetupError(
                    f"{self._topology.describe(rank)} says that it is connected to {self._whoami}, which knows nothing "
                    "of it"
                )

    def _call(self, rank: int, address: Sequence[Any], purpose: int, deadline: float) -> None:
        """Connect, and wait for the answer; again where strangers have pushed this rank out of the queue."""
        where, whom = self._where(rank, address), (rank, purpose)
        hello = Frame(Kind.HELLO, self._topology.rank, purpose, rank, WIRE_VERSION)
        for _ in range(_ATTEMPTS):
            try:
                connection = self.sockets[whom] = self._dial(address, deadline)
            except OSError as problem:
                raise OutOfReachError(f"cannot reach {where}: {problem}{self.advice}") from None
            try:
                connection.sendall(hello.pack() + self._proof(hello))
                refusal = self._answer_to(hello, connection, deadline)
            except TimeoutError:
                raise SetupError(f"{where} did not answer within {self._timeout_s:g} s{self.advice}") from None
            except ValueError as problem:
                raise SetupError(f"what listens where {where} should be is no rank of this job: {problem}") from None
            except OSError:
                connection.close()
                continue
            if refusal is not None:
                raise SetupError(f"{where} has refused {self._whoami}: {refusal}{self.advice}")
            connection.settimeout(self._timeout_s)
            return
        raise OutOfReachError(f"{where} has ended {_ATTEMPTS} connections without an answer{self.advice}")

    def _answer_to(self, hello: Frame, connection: socket.socket, deadline: float) -> str | None:
        """None: welcome. Otherwise why this rank was refused.

        Raises:
            ValueError: it is not the answer of a rank of this job.
            OSError: there was none, or, if it is a TimeoutError, not in time.
        """
        answer = Frame.unpack(receive_until(connection, HEADER.size, deadline))
        if answer.kind is Kind.REFUSED and answer.b <= _MAX_REFUSAL_BYTES:
            return receive_until(connection, answer.b, deadline).decode(errors="replace")
        if answer.kind is not Kind.WELCOME:
            raise ValueError(f"it has answered with a frame of kind {answer.kind.name}")
        if not hmac.compare_digest(receive_until(connection, KEY_BYTES, deadline), self._proof(answer, hello)):
            raise ValueError("it does not hold this job's key")
        return None

    def _proof(self, *frames: Frame) -> bytes:
        """Whoever sends it with these frames holds this job's key."""
        return hmac.digest(self._key, b"".join(frame.pack() for frame in frames), "sha256")[:KEY_BYTES]

    def _admit(self, connection: socket.socket, greeting: bytes) -> bool:
        """Let in a rank that is expected; tell any other why it is not let in. See :class:`Acceptor`."""
        try:
            hello = Frame.unpack(greeting[: HEADER.size])
        except ValueError:
            return False
        if hello.kind is not Kind.HELLO or not self._may_enter(connection):
            return False
        refusal = self._refusal(hello, greeting[HEADER.size :])
        answer = Frame(Kind.WELCOME)
        behind = self._proof(answer, hello)
        if refusal is not None:
            behind = refusal.encode()
            answer = Frame(Kind.REFUSED, b=len(behind))
        try:
            connection.send(answer.pack() + behind)  # the first that is sent on it: there is room
        except OSError:  # it has ended, and may come again
            return False
        if refusal is not None:
            return False
        connection.settimeout(self._timeout_s)
        self.sockets[hello.number, hello.a] = connection
        return True

    def _refusal(self, hello: Frame, proof: bytes) -> str | None:
        if hello.c != WIRE_VERSION:
            return f"it speaks version {hello.c} between hosts, this one {WIRE_VERSION}: run one version of odc on all"
        if not hmac.compare_digest(proof, self._proof(hello)):
            return "it does not hold this job's key, so it belongs to another job"
        if hello.b != self._topology.rank:
            return f"it calls rank {hello.b}, but this is rank {self._topology.rank}"
        is_above = hello.number in self._others and hello.number > self._topology.rank
        if not is_above or hello.a >= self.num_purposes:
            return f"rank {hello.number} is not expected here (purpose {hello.a})"
        if (hello.number, hello.a) in self.sockets:
            return f"rank {hello.number} is connected already (purpose {hello.a})"
        return None

    def _close_door(self) -> None:
        door = self._acceptor or self._listener
        if door is not None:
            door.close()
        self._listener = self._acceptor = None

    def close(self) -> None:
        """What set-up has left. Local, idempotent."""
        try:
            self._close_door()
        finally:  # until then somebody may be let in
            run_all([connection.close for connection in self.sockets.values()])


class TcpRendezvous(Rendezvous):
    """The ranks of other hosts, for the links (:mod:`odc.transports._links`)."""

    num_purposes = 3
    """Data, control, keep-alive."""
    advice = (
        ". If the hosts have several networks, set ODC_ADDRESS on each host to its own address in the one they share; "
        "open TCP between them"
    )

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology, topology.ranks_elsewhere(), 0)

    def _where(self, rank: int, address: Sequence[Any]) -> str:
        return f"{super()._where(rank, address)} at {address[0]} port {address[1]}"

    def _open(self) -> tuple[socket.socket, Sequence[Any]]:
        address = self._topology.addresses[self._topology.rank]
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            backlog = max(_MIN_BACKLOG, 2 * self._topology.world_size)
            listener = socket.create_server((address, 0), family=family, backlog=backlog)
        except OSError as problem:
            raise SetupError(
                f"{self._whoami} cannot listen at its address {address}: {problem}. Set ODC_ADDRESS on that host to an "
                "address of its own that the other hosts can reach."
            ) from None
        return listener, listener.getsockname()[:2]

    def _dial(self, address: Sequence[Any], deadline: float) -> socket.socket:
        limit_s = min(max(deadline - time.monotonic(), 1e-3), limits.CALL_S)
        return socket.create_connection((str(address[0]), int(address[1])), timeout=limit_s)

    def _may_enter(self, connection: socket.socket) -> bool:
        return True


_TURN = struct.Struct("=Q")
_PEERCRED = struct.Struct("3i")


class UnixRendezvous(Rendezvous):
    """The ranks of this host, which pass descriptors to one another."""

    def __init__(self, topology: Topology) -> None:
        ranks = topology.ranks_here()
        super().__init__(topology, ranks, ranks[0])
        self._num_swaps = 0

    def _open(self) -> tuple[socket.socket, Sequence[Any]]:
        address = secrets.token_hex(16)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0odc-{address}")
        listener.listen(max(_MIN_BACKLOG, self._topology.world_size))
        return listener, [address]

    def _dial(self, address: Sequence[Any], deadline: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            while True:
                connection.settimeout(max(deadline - time.monotonic(), 1e-3))
                try:
                    connection.connect(f"\0odc-{address[0]}")
                    return connection
                except BlockingIOError:  # its queue is full: somebody knocks at it in vain
                    if time.monotonic() > deadline:
                        raise TimeoutError("its queue is full") from None
                    time.sleep(0.01)
        except BaseException:
            connection.close()
            raise

    def _may_enter(self, connection: socket.socket) -> bool:
        return _credentials(connection)[1] == os.getuid()

    def pid_of(self, rank: int) -> int:
        """The process at the other end as the kernel sees it from this pid namespace (0: not visible)."""
        return _credentials(self.sockets[rank, 0])[0]

    def swap(self, fd: int | None) -> dict[int, int]:
        """Send a descriptor to every peer of this host (None: this rank has none); return what each sent. Collective.

        In rounds, sending to one rank and receiving from another: Linux limits the descriptors of a user that are
        under way, and all-to-all at once exceeds a limit of 1024 with 24 ranks.
        """
        self._num_swaps += 1
        ranks = sorted([self._topology.rank, *self._others])
        own = ranks.index(self._topology.rank)
        received: dict[int, int] = {}
        try:
            for step in range(1, len(ranks)):
                self._send(ranks[(own + step) % len(ranks)], fd)
                source = ranks[(own - step) % len(ranks)]
                if (passed := self._receive(source)) is not None:
                    received[source] = passed
        except BaseException:
            for passed in received.values():
                os.close(passed)
            raise
        return received

    def _send(self, rank: int, fd: int | None) -> None:
        try:
            socket.send_fds(self.sockets[rank, 0], [_TURN.pack(self._num_swaps)], [] if fd is None else [fd])
        except OSError as error:
            raise SetupError(f"cannot pass memory to {self._topology.describe(rank)}: {error}") from None

    def _receive(self, rank: int) -> int | None:
        who = self._topology.describe(rank)
        try:
            data, fds, _, _ = socket.recv_fds(self.sockets[rank, 0], _TURN.size, 1, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise SetupError(f"{who} sent nothing within {self._timeout_s:g} s of set-up") from None
        except OSError as error:
            raise SetupError(f"lost {who} during set-up: {error}") from None
        if not data:
            raise SetupError(f"{who} went away during set-up")
        if data != _TURN.pack(self._num_swaps):
            for fd in fds:
                os.close(fd)
            raise SetupError(f"{who} sent a set-up frame that does not belong here")
        return next(iter(fds), None)


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the other end, from the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    pid, uid, gid = _PEERCRED.unpack(raw)
    return pid, uid, gid
