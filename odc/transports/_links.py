"""The connections of one rank to the ranks of other hosts."""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from selectors import EVENT_READ
from typing import Any

from odc import limits
from odc.errors import SetupError
from odc.liveness.leaving import Closable, run_all
from odc.liveness.threads import HelperThread
from odc.setup.agreement import OutOfReachError
from odc.setup.topology import Topology
from odc.transports._control import Heartbeats
from odc.transports._frames import HEADER, KEY_BYTES, Frame, Kind, receive_until
from odc.transports._link import Link
from odc.transports._peers import Peers, notify
from odc.transports._rendezvous import Acceptor

WIRE_VERSION = 3  # of what travels between hosts, these greetings included
_ATTEMPTS = 100
_MIN_BACKLOG = 128
_MAX_REFUSAL_BYTES = 500
_DATA, _CONTROL, _KEEPALIVE = _PURPOSES = 0, 1, 2
_ADVICE = (
    "If the hosts have several networks, set ODC_ADDRESS on each host to its own address in the one they share; open "
    "TCP between them"
)


class Links:
    """One :class:`Link` per rank of another host. In turn: :meth:`listen`, swap what it returns, :meth:`connect`,
    wait for all, :meth:`complete`, :meth:`start`."""

    def __init__(self, topology: Topology, peers: Peers, timeout_s: float) -> None:
        self._topology = topology
        self._peers = peers
        self._timeout_s = timeout_s
        self._remote = topology.ranks_elsewhere()
        self._listener: socket.socket | None = None
        self._acceptor: Acceptor | None = None
        self._key = secrets.token_bytes(KEY_BYTES)
        self._sockets: dict[tuple[int, int], socket.socket] = {}  # (rank, purpose)
        self.by_rank: dict[int, Link] = {}
        self._loss_fd = peers.loss_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = LinkThread()
        _close_in_children(self)

    # Set-up: each step is this rank's own

    def listen(self) -> list[Any]:
        """Listen; what the others need to find it.

        Raises:
            SetupError: the address is not this host's.
        """
        address = self._topology.addresses[self._topology.rank]
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            backlog = max(_MIN_BACKLOG, 2 * self._topology.world_size)
            self._listener = socket.create_server((address, 0), family=family, backlog=backlog)
        except OSError as problem:
            raise SetupError(
                f"{self._topology.describe(self._topology.rank)} cannot listen at its address {address}: {problem}. "
                "Set ODC_ADDRESS on that host to an address of its own that the other hosts can reach."
            ) from None
        return [*self._listener.getsockname()[:2], self._key.hex()]

    def connect(self, rows: Sequence[Sequence[Any]]) -> None:
        """Connect to every rank of another host with a lower number; from now on let in those with a higher one.

        Args:
            rows: what :meth:`listen` returned, of all ranks.

        Raises:
            SetupError: a rank cannot be reached, refuses this one, or does not answer within the time limit.
        """
        assert self._listener is not None
        self._key = bytes.fromhex(rows[0][2])  # rank 0's: one key per job, known to its members only
        if self._remote[-1] > self._topology.rank:
            self._acceptor, self._listener = Acceptor(self._listener, HEADER.size + KEY_BYTES, self._admit), None
            self._acceptor.open()
        deadline = time.monotonic() + self._timeout_s
        for rank in self._remote:
            if rank < self._topology.rank:
                for purpose in _PURPOSES:
                    self._call(rank, (str(rows[rank][0]), int(rows[rank][1])), purpose, deadline)
        if self._acceptor is not None and self._acceptor.problem is not None:
            raise SetupError(f"{self._whoami} cannot let in the other ranks: {self._acceptor.problem}")

    # [Note: Nobody waits for a rank to come in] Each rank calls those below it, waits for their answers, and then for
    # all others to have had theirs, in the exchange between connect() and this. So whoever is refused says why on all
    # ranks at once, and a rank that comes late costs nobody a limit of its own.

    def complete(self) -> None:
        """Everybody has connected everywhere: make the links.

        Raises:
            SetupError: somebody is missing all the same.
        """
        self._close_acceptor()
        for rank in self._remote:
            sockets = [self._sockets.get((rank, purpose)) for purpose in _PURPOSES]
            who = self._topology.describe(rank)
            if None in sockets:
                raise SetupError(f"{who} says that it is connected to {self._whoami}, which knows nothing of it")
        for rank in self._remote:
            data, control, keepalive = (self._sockets.pop((rank, purpose)) for purpose in _PURPOSES)
            who, ask = self._topology.describe(rank), self._thread.ask_for_service
            self.by_rank[rank] = Link(rank, who, data, control, keepalive, self._peers, self._timeout_s, ask)

    @property
    def _whoami(self) -> str:
        return self._topology.describe(self._topology.rank)

    def _call(self, rank: int, address: tuple[str, int], purpose: int, deadline: float) -> None:
        where = f"{self._topology.describe(rank)} at {address[0]} port {address[1]}"
        hello = Frame(Kind.HELLO, self._topology.rank, purpose, rank, WIRE_VERSION)
        for _ in range(_ATTEMPTS):
            connection = self._connect(where, address, deadline)
            self._keep(rank, purpose, connection)
            try:
                connection.sendall(hello.pack() + self._proof(hello))
                refusal = self._answer_to(hello, connection, deadline)
            except TimeoutError:
                raise SetupError(f"{where} did not answer within {self._timeout_s:g} s. {_ADVICE}") from None
            except ValueError as problem:
                raise SetupError(f"what listens where {where} should be is no rank of this job: {problem}") from None
            except OSError:  # strangers have pushed this rank out of the queue
                connection.close()
                continue
            if refusal is not None:
                raise SetupError(f"{where} has refused {self._whoami}: {refusal}. {_ADVICE}")
            connection.settimeout(None)
            return
        raise OutOfReachError(f"{where} has ended {_ATTEMPTS} connections without an answer. {_ADVICE}")

    def _connect(self, where: str, address: tuple[str, int], deadline: float) -> socket.socket:
        limit_s = min(max(deadline - time.monotonic(), 1e-3), limits.CALL_S)
        try:
            return socket.create_connection(address, timeout=limit_s)
        except OSError as problem:
            raise OutOfReachError(f"cannot reach {where}: {problem}. {_ADVICE}") from None

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

    def _keep(self, rank: int, purpose: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets[rank, purpose] = connection

    def _admit(self, connection: socket.socket, greeting: bytes) -> bool:
        """Let in a rank that is expected; tell any other why it is not let in. See :class:`Acceptor`."""
        try:
            hello = Frame.unpack(greeting[: HEADER.size])
        except ValueError:
            return False
        if hello.kind is not Kind.HELLO:
            return False
        refusal = self._refusal(hello, greeting[HEADER.size :])
        answer = Frame(Kind.WELCOME)
        behind = self._proof(answer, hello)
        if refusal is not None:
            behind = refusal.encode()
            answer = Frame(Kind.REFUSED, b=len(behind))
        try:
            connection.send(answer.pack() + behind)  # the first that is sent on it: there is room
        except OSError:
            return False
        if refusal is not None:
            return False
        connection.settimeout(None)
        self._keep(hello.number, hello.a, connection)
        return True

    def _refusal(self, hello: Frame, proof: bytes) -> str | None:
        if hello.c != WIRE_VERSION:
            return f"it speaks version {hello.c} between hosts, this one {WIRE_VERSION}: run one version of odc on all"
        if not hmac.compare_digest(proof, self._proof(hello)):
            return "it does not hold this job's key, so it belongs to another job"
        if hello.b != self._topology.rank:
            return f"it calls rank {hello.b}, but this is rank {self._topology.rank}"
        if hello.number not in self._remote or hello.number < self._topology.rank or hello.a not in _PURPOSES:
            return f"rank {hello.number} is not expected here (purpose {hello.a})"
        if (hello.number, hello.a) in self._sockets:
            return f"rank {hello.number} is connected already (purpose {hello.a})"
        return None

    def _close_acceptor(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._acceptor is not None:
            self._acceptor.close()
        self._listener = self._acceptor = None

    # Service

    def start(self, status: Callable[[], tuple[Heartbeats, int | None]]) -> None:
        """Serve the others from now on, and tell them every second how this rank is doing."""
        self._thread.start(list(self.by_rank.values()), status)

    def close(self) -> None:
        """Close every link, and what set-up left unfinished."""
        closables: list[Closable] = [*self.by_rank.values(), *self._sockets.values()]
        steps = [self._thread.close, self._close_acceptor, *(part.close for part in closables)]
        self.by_rank, self._sockets = {}, {}
        run_all([*steps, self._close_loss_fd])

    def _close_loss_fd(self) -> None:
        self._peers.loss_fd = None
        os.close(self._loss_fd)

    def close_in_child(self) -> None:
        """A forked child must not hold the connections: its parent's death would not end them."""
        links, sockets = self.by_rank.values(), self._sockets.values()
        closes = [*(link.close_sockets for link in links), *(connection.close for connection in sockets)]
        run_all([self._thread.close_in_child, *closes])


class LinkThread:
    """The one thread that serves all links of a rank: it takes in what comes, answers, and tells the others every
    second how this rank is doing. It waits for no connection in particular."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, EVENT_READ)
        self._waking = threading.Lock()  # for the descriptor, which is another one's when it has been closed
        self._asking: deque[Link] = deque()
        self._unsettled: list[Link] = []
        self._is_over = False
        self._thread: HelperThread | None = None

    def start(self, links: Sequence[Link], status: Callable[[], tuple[Heartbeats, int | None]]) -> None:
        """
        Raises:
            SetupError: no thread can be started.
        """
        for link in links:
            self._selector.register(link.data, EVENT_READ, (link, link.serve_data))
            self._selector.register(link.control, EVENT_READ, (link, link.serve_control))
            self._selector.register(link.keepalive, EVENT_READ, (link, link.serve_keepalive))
        self._thread = HelperThread(self._serve, "odc-links", (links, status))
        self._thread.start()

    def ask_for_service(self, link: Link) -> None:
        """By any thread: what the data of ``link`` wait for has changed."""
        self._asking.append(link)
        with self._waking:
            if not self._is_over:
                notify(self._wake_fd)

    def _serve(self, links: Sequence[Link], status: Callable[[], tuple[Heartbeats, int | None]]) -> None:
        next_status = 0.0
        while not self._is_over:
            now = time.monotonic()
            if now >= next_status:
                next_status = now + limits.STATUS_S
                for link in links:
                    link.send_status(*status())
            pause_s = next_status - now
            for key, events in self._selector.select(min(pause_s, limits.LINK_SLICE_S) if self._unsettled else pause_s):
                self._handle(key, events)
            if self._unsettled:
                self._unsettled = [link for link in self._unsettled if not link.settle()]

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fd == self._wake_fd:
            os.eventfd_read(self._wake_fd)
            while self._asking:
                link = self._asking.popleft()
                if link.data in self._selector.get_map():  # not yet at its end
                    self._selector.modify(link.data, link.data_events, (link, link.serve_data))
            return
        link, serve = key.data
        wanted = serve(events)
        if not wanted:
            self._selector.unregister(key.fileobj)
            self._unsettled.append(link)
        elif wanted != self._selector.get_key(key.fileobj).events:  # the key itself may be older than a change of it
            self._selector.modify(key.fileobj, wanted, key.data)

    def close(self) -> None:
        """Join it. Links are closed behind it."""
        with self._waking:
            self._is_over = True
            notify(self._wake_fd)
        join = [] if self._thread is None else [self._thread.end]
        run_all([*join, self._selector.close, partial(os.close, self._wake_fd)])

    def close_in_child(self) -> None:
        """A forked child has the selector, and no such thread."""
        self._is_over = True
        self._selector.close()


# Python knows no way to take a fork handler back, so there is one for all.
_inherited: weakref.WeakSet[Links] = weakref.WeakSet()
_has_handler = threading.Event()


def _close_in_children(links: Links) -> None:
    """Have ``links`` closed in every child that this process forks (DataLoader workers)."""
    if not _has_handler.is_set():
        _has_handler.set()
        os.register_at_fork(after_in_child=_close_inherited)
    _inherited.add(links)


def _close_inherited() -> None:
    for links in list(_inherited):
        links.close_in_child()
