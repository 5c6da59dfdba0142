"""The connections of one rank to the ranks of other hosts."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from odc.errors import SetupError
from odc.threads import HelperThread
from odc.topology import Topology
from odc.transports._frames import HEADER, KEY_BYTES, Frame, Kind, receive_until
from odc.transports._link import Link, LinkOwner
from odc.transports._neighbours import ring

_STATUS_S = 1.0
_HELLO_S = 2.0
_CALL_S = 30.0  # for a connection to come about: beyond that something swallows the packets
_MIN_BACKLOG = 128
_DATA, _NEWS = 0, 1


class Links:
    """One :class:`Link` per rank of another host. In turn: :meth:`listen`, swap what it returns, :meth:`connect`,
    :meth:`start`."""

    def __init__(self, topology: Topology, owner: LinkOwner, timeout_s: float) -> None:
        self._topology = topology
        self._owner = owner
        self._timeout_s = timeout_s
        self._remote = topology.ranks_elsewhere()
        self._listener: socket.socket | None = None
        self._key = secrets.token_bytes(KEY_BYTES)
        self._sockets: dict[tuple[int, int], socket.socket] = {}  # (rank, data or news)
        self.by_rank: dict[int, Link] = {}
        self.loss_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable once a link has ended."""
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None

    # Set-up: each step is this rank's own

    def listen(self) -> list[Any]:
        """Open this rank's door; what the others need to find it.

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
        """Connect to every rank of another host. ``rows``: what :meth:`listen` returned, of all ranks.

        Raises:
            SetupError: a rank cannot be reached within the time limit.
        """
        self._key = bytes.fromhex(rows[0][2])  # rank 0's: one key per job, known to its members only
        deadline = time.monotonic() + self._timeout_s
        for rank in self._remote:
            if rank < self._topology.rank:
                for purpose in (_DATA, _NEWS):
                    self._call(rank, (str(rows[rank][0]), int(rows[rank][1])), purpose)
        while len(self._sockets) < 2 * len(self._remote):
            self._answer(deadline)
        self._close_listener()
        for rank in self._remote:
            data, news = self._sockets.pop((rank, _DATA)), self._sockets.pop((rank, _NEWS))
            who = self._topology.describe(rank)
            self.by_rank[rank] = Link(rank, who, data, news, self._owner, self._timeout_s)

    def _call(self, rank: int, address: tuple[str, int], purpose: int) -> None:
        try:
            connection = socket.create_connection(address, timeout=min(self._timeout_s, _CALL_S))
            self._keep(rank, purpose, connection)
            connection.sendall(Frame(Kind.HELLO, self._topology.rank, purpose).pack() + self._key)
        except OSError as problem:
            raise SetupError(
                f"cannot reach {self._topology.describe(rank)} at {address[0]} port {address[1]}: {problem}. If the "
                "hosts have several networks, set ODC_ADDRESS on each host to its address in the one they share; open "
                "TCP between them."
            ) from None

    def _keep(self, rank: int, purpose: int, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets[rank, purpose] = connection

    def _answer(self, deadline: float) -> None:
        """Let in the next rank that knocks; send others away."""
        assert self._listener is not None
        self._listener.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            missing = sorted({rank for rank in self._remote if (rank, _NEWS) not in self._sockets})
            raise SetupError(f"ranks {missing} did not connect within {self._timeout_s:g} s") from None
        try:
            hello_ends = min(time.monotonic() + _HELLO_S, deadline)
            hello = Frame.unpack(receive_until(connection, HEADER.size, hello_ends))
            shown = receive_until(connection, KEY_BYTES, hello_ends)
        except (OSError, ValueError):
            connection.close()  # not one of us
            return
        rank, purpose = hello.number, hello.a
        wanted = rank in self._remote and rank > self._topology.rank and purpose in (_DATA, _NEWS)
        is_known = hello.kind is Kind.HELLO and secrets.compare_digest(shown, self._key)
        if is_known and wanted and (rank, purpose) not in self._sockets:
            self._keep(rank, purpose, connection)
        else:
            connection.close()

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # Service

    def start(self, status: Callable[[], tuple[int, int | None]]) -> None:
        """Serve the others from now on, and tell them every second how this rank is doing."""
        for link in self.by_rank.values():
            link.start()
        self._thread = HelperThread(self._swap_news, "odc-news", (status,))
        self._thread.start()

    def _swap_news(self, status: Callable[[], tuple[int, int | None]]) -> None:
        """Read what the others tell, as it comes, and tell them of this rank once a second."""
        poll, links = select.poll(), {link.news.fileno(): link for link in self.by_rank.values()}
        for fd in (self._stop_fd, *links):
            poll.register(fd, select.POLLIN)
        next_status = time.monotonic()
        while True:
            for fd, _ in poll.poll(max(next_status - time.monotonic(), 0) * 1000):
                if fd == self._stop_fd:
                    return
                if not links[fd].news.read():
                    poll.unregister(fd)
            if time.monotonic() >= next_status:
                next_status = time.monotonic() + _STATUS_S
                for link in links.values():
                    link.send_status(*status())

    def lost(self) -> None:
        """Make :attr:`loss_fd` readable."""
        ring(self.loss_fd)

    def forget_loss(self) -> None:
        """Make :attr:`loss_fd` wait for the next loss."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.loss_fd)

    def close(self) -> None:
        """Close every link, and what set-up left unfinished."""
        ring(self._stop_fd)
        if self._thread is not None:
            self._thread.join()
        self._close_listener()
        for link in self.by_rank.values():
            link.close()
        for connection in self._sockets.values():
            connection.close()
        self.by_rank, self._sockets = {}, {}
        os.close(self.loss_fd)
        os.close(self._stop_fd)
