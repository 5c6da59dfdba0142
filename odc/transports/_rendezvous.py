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
from typing import TYPE_CHECKING

from odc.errors import SetupError
from odc.exchange import Exchange, gather_json
from odc.topology import Topology

if TYPE_CHECKING:
    from types import TracebackType

_FRAME = struct.Struct("=8s16sIIQ")  # magic, key, rank, sequence number, value
_MAGIC = b"odc-shm1"
_PEERCRED = struct.Struct("3i")


class Mesh:
    """One connected socket per pair of ranks. Construction is collective."""

    def __init__(self, exchange: Exchange, topology: Topology, timeout_s: float) -> None:
        self._topology = topology
        self._sequence = 0
        self._timeout_s = timeout_s
        self._peers: dict[int, socket.socket] = {}
        address, self._key = secrets.token_hex(16), secrets.token_bytes(16)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"\0odc-{address}")
            listener.listen(topology.world_size)
            rows = gather_json(exchange, [address, self._key.hex()])
            # All ranks use the key of rank 0: one key per job, known to its members only.
            self._key = bytes.fromhex(rows[0][1])
            self._connect([str(row[0]) for row in rows], listener)
        except BaseException:
            self.close()
            raise
        finally:
            listener.close()

    def _connect(self, addresses: Sequence[str], listener: socket.socket) -> None:
        rank = self._topology.rank
        deadline = time.monotonic() + self._timeout_s
        for peer in range(rank):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(self._timeout_s)
            connection.connect(f"\0odc-{addresses[peer]}")
            self._peers[peer] = connection
            self._send(connection, 0, [])
        while len(self._peers) < self._topology.world_size - 1:
            listener.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = [r for r in range(rank + 1, len(addresses)) if r not in self._peers]
                raise SetupError(f"ranks {missing} did not connect within {self._timeout_s:g} s") from None
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        """Accept a connection that proves to be a rank of this job; drop any other silently."""
        connection.settimeout(2.0)
        try:
            uid = _PEERCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))[1]
            magic, key, peer, _, _ = _FRAME.unpack(_receive_exactly(connection, _FRAME.size))
        except (OSError, SetupError):
            connection.close()
            return
        wanted = self._topology.rank < peer < self._topology.world_size and peer not in self._peers
        if magic != _MAGIC or not secrets.compare_digest(key, self._key) or uid != os.getuid() or not wanted:
            connection.close()
            return
        connection.settimeout(self._timeout_s)
        self._peers[peer] = connection

    def pid_of(self, rank: int) -> int:
        """The process at the other end as the kernel sees it from this pid namespace (0: not visible)."""
        raw = self._peers[rank].getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        return int(_PEERCRED.unpack(raw)[0])

    def swap(self, value: int, fds: Sequence[int]) -> dict[int, tuple[int, list[int]]]:
        """Send ``value`` and descriptors to every peer; return what each peer sent. Collective."""
        self._sequence += 1
        for peer in self._peers.values():
            self._send(peer, value, fds)
        return {rank: self._receive(rank, len(fds)) for rank in self._peers}

    def _send(self, connection: socket.socket, value: int, fds: Sequence[int]) -> None:
        frame = _FRAME.pack(_MAGIC, self._key, self._topology.rank, self._sequence, value)
        try:
            socket.send_fds(connection, [frame], list(fds))
        except OSError as error:
            raise SetupError(f"a rank of this host went away during set-up: {error}") from None

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
        for connection in self._peers.values():
            connection.close()
        self._peers = {}

    def __enter__(self) -> Mesh:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise SetupError("connection closed in the middle of a frame")
        data += part
    return data
