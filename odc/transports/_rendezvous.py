"""A mesh of Unix sockets on which the ranks of one host pass file descriptors during set-up.

Abstract addresses: no file, no port. Every connection must come from the same user (SO_PEERCRED) and show the key of
this job, which travelled over the process group; a frame has a fixed size, so there is nothing to parse and no length
to lie about. The mesh is closed when set-up ends.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence

from odc.errors import SetupError
from odc.topology import Topology

_FRAME = struct.Struct("=8s16sIIQ")  # magic, key, rank, sequence number, value
_MAGIC = b"odc-shm1"
_PEERCRED = struct.Struct("3i")
_MIN_BACKLOG = 128


class Mesh:
    """One connected socket per pair of ranks of a host, once :meth:`connect` has returned."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._ranks = topology.ranks_here()
        self._sequence = 0
        self._timeout_s = 0.0
        self._key = secrets.token_bytes(16)
        self._peers: dict[int, socket.socket] = {}
        self._listener: socket.socket | None = None

    def listen(self) -> list[str]:
        """Open this rank's door; what the others need to find it."""
        address = secrets.token_hex(16)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0odc-{address}")
        self._listener.listen(max(_MIN_BACKLOG, self._topology.world_size))
        return [address, self._key.hex()]

    def connect(self, rows: Sequence[Sequence[str]], timeout_s: float) -> None:
        """Connect to every rank of this host. ``rows``: what :meth:`listen` returned, of all ranks.

        Raises:
            SetupError, OSError: a rank did not come within ``timeout_s``.
        """
        assert self._listener is not None
        self._timeout_s = timeout_s
        # All use the key of the host's first rank: one key per job and host, known to its members only.
        self._key = bytes.fromhex(rows[self._ranks[0]][1])
        deadline = time.monotonic() + timeout_s
        for peer in self._ranks:
            if peer < self._topology.rank:
                self._call(peer, str(rows[peer][0]), deadline)
        while len(self._peers) < len(self._ranks) - 1:
            self._answer(self._listener, deadline)
        self._listener.close()

    def _call(self, peer: int, address: str, deadline: float) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self._timeout_s)
        self._peers[peer] = connection
        while True:
            try:
                connection.connect(f"\0odc-{address}")
                break
            except BlockingIOError:  # its queue is full: somebody knocks at it in vain
                if time.monotonic() > deadline:
                    raise SetupError(f"{self._topology.describe(peer)} did not answer during set-up") from None
                time.sleep(0.01)
        self._send(peer, 0, [])

    def _answer(self, listener: socket.socket, deadline: float) -> None:
        listener.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            missing = [r for r in self._ranks if r > self._topology.rank and r not in self._peers]
            raise SetupError(f"ranks {missing} did not connect within {self._timeout_s:g} s") from None
        if _credentials(connection)[1] != os.getuid():
            connection.close()  # another user: not even listened to
            return
        self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        """Keep a connection that proves to be a rank of this job; drop any other silently."""
        connection.settimeout(2.0)
        try:
            magic, key, peer, _, _ = _FRAME.unpack(_receive_exactly(connection, _FRAME.size))
        except (OSError, SetupError):
            connection.close()
            return
        wanted = peer in self._ranks and peer > self._topology.rank and peer not in self._peers
        if magic != _MAGIC or not secrets.compare_digest(key, self._key) or not wanted:
            connection.close()
            return
        connection.settimeout(self._timeout_s)
        self._peers[peer] = connection

    def pid_of(self, rank: int) -> int:
        """The process at the other end as the kernel sees it from this pid namespace (0: not visible)."""
        return _credentials(self._peers[rank])[0]

    def swap(self, value: int, fds: Sequence[int]) -> dict[int, tuple[int, list[int]]]:
        """Send ``value`` and descriptors to every peer of this host; return what each sent. Collective.

        In rounds, sending to one rank and receiving from another: Linux limits the descriptors of a user that are
        under way, and all-to-all at once exceeds a limit of 1024 with 24 ranks.
        """
        self._sequence += 1
        number, own = len(self._ranks), self._ranks.index(self._topology.rank)
        received: dict[int, tuple[int, list[int]]] = {}
        try:
            for step in range(1, number):
                self._send(self._ranks[(own + step) % number], value, fds)
                source = self._ranks[(own - step) % number]
                received[source] = self._receive(source, len(fds))
        except BaseException:
            for _, passed in received.values():
                for fd in passed:
                    os.close(fd)
            raise
        return received

    def _send(self, rank: int, value: int, fds: Sequence[int]) -> None:
        frame = _FRAME.pack(_MAGIC, self._key, self._topology.rank, self._sequence, value)
        try:
            socket.send_fds(self._peers[rank], [frame], list(fds))
        except OSError as error:
            raise SetupError(f"cannot pass memory to {self._topology.describe(rank)}: {error}") from None

    def _receive(self, rank: int, num_fds: int) -> tuple[int, list[int]]:
        connection = self._peers[rank]
        who = self._topology.describe(rank)
        try:
            data, fds, _, _ = socket.recv_fds(connection, _FRAME.size, num_fds, socket.MSG_CMSG_CLOEXEC)
            if data and len(data) < _FRAME.size:
                data += _receive_exactly(connection, _FRAME.size - len(data))
        except TimeoutError:
            raise SetupError(f"{who} sent nothing within {self._timeout_s:g} s of set-up") from None
        except OSError as error:
            raise SetupError(f"lost {who} during set-up: {error}") from None
        if not data:
            raise SetupError(f"{who} went away during set-up")
        magic, key, sender, sequence, value = _FRAME.unpack(data)
        if (magic, key, sender, sequence) != (_MAGIC, self._key, rank, self._sequence) or len(fds) != num_fds:
            for fd in fds:
                os.close(fd)
            raise SetupError(f"{who} sent a set-up frame that does not belong here")
        return int(value), list(fds)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
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
