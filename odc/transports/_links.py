"""The connections of one rank to the ranks of other hosts."""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from selectors import EVENT_READ

from odc import limits
from odc.liveness.leaving import run_all
from odc.liveness.threads import HelperThread
from odc.setup.topology import Topology
from odc.transports._control import Heartbeats
from odc.transports._link import Link
from odc.transports._peers import Peers, notify
from odc.transports._rendezvous import TcpRendezvous


class Links:
    """One :class:`Link` per rank of another host, and the thread that serves them.

    Args:
        sockets: those of :class:`~odc.transports._rendezvous.TcpRendezvous`, which are the links' from now on.
    """

    def __init__(
        self, sockets: dict[tuple[int, int], socket.socket], topology: Topology, peers: Peers, timeout_s: float
    ) -> None:
        self._peers = peers
        self._loss_fd = peers.loss_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = LinkThread()
        self.by_rank: dict[int, Link] = {}
        _close_in_children(self)
        for rank in topology.ranks_elsewhere():
            data, control, keepalive = (sockets.pop((rank, purpose)) for purpose in range(TcpRendezvous.num_purposes))
            who, ask = topology.describe(rank), self._thread.ask_for_service
            self.by_rank[rank] = Link(rank, who, data, control, keepalive, peers, timeout_s, ask)

    def start(self, status: Callable[[], tuple[Heartbeats, int | None]]) -> None:
        """Serve the others from now on, and tell them every second how this rank is doing."""
        self._thread.start(list(self.by_rank.values()), status)

    def close(self) -> None:
        """Close every link."""
        links, self.by_rank = self.by_rank, {}
        run_all([self._thread.close, *(link.close for link in links.values()), self._close_loss_fd])

    def _close_loss_fd(self) -> None:
        self._peers.loss_fd = None
        os.close(self._loss_fd)

    def close_in_child(self) -> None:
        """A forked child must not hold the connections: its parent's death would not end them."""
        run_all([self._thread.close_in_child, *(link.close_sockets for link in self.by_rank.values())])


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
