"""Who is on which host."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from odc.exchange import Exchange, gather_json

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Topology:
    """The ranks of one group, their hosts and processes.

    Hosts are told apart by host name and kernel boot id (two containers of one machine share the boot id but not
    always the name; two clones of one image share the name but not the boot id), not by ``LOCAL_WORLD_SIZE``.
    """

    rank: int
    host_ids: tuple[str, ...]
    host_names: tuple[str, ...]
    pids: tuple[int, ...]

    @classmethod
    def discover(cls, exchange: Exchange, host_id: str = "") -> Topology:
        """Exchange identities over the group. Collective. ``host_id`` poses as another host (tests)."""
        name = socket.gethostname()
        rows = gather_json(exchange, [host_id or f"{name}/{_boot_id()}", host_id or name, os.getpid()])
        return cls(
            rank=exchange.rank,
            host_ids=tuple(str(row[0]) for row in rows),
            host_names=tuple(str(row[1]) for row in rows),
            pids=tuple(int(row[2]) for row in rows),
        )

    @property
    def world_size(self) -> int:
        return len(self.host_ids)

    @property
    def num_hosts(self) -> int:
        return len(set(self.host_ids))

    def describe(self, rank: int) -> str:
        return f"rank {rank} (host {self.host_names[rank]}, pid {self.pids[rank]})"

    def rotation(self) -> list[int]:
        """All ranks, starting after this one, so that clients in step do not all visit the same owner first."""
        return [(self.rank + 1 + i) % self.world_size for i in range(self.world_size)]


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "unknown-boot"
