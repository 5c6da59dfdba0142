"""Who is on which host."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from odc.config import master_address
from odc.exchange import Exchange, gather_json

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ELSEWHERE = "192.0.2.1"  # reserved for documentation: asks for the default route, is never sent anything


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
    addresses: tuple[str, ...] = ()
    """Where ranks of other hosts reach each; empty: not known."""

    @classmethod
    def discover(cls, exchange: Exchange, host_id: str = "", address: str = "") -> Topology:
        """Exchange identities over the group. Collective.

        Args:
            host_id: poses as another host (tests).
            address: where the other hosts reach this one; default: on the way to the master, or the default route.
        """
        name = socket.gethostname()
        own = f"{name}/{_boot_id()}"
        address = address or route_address([master_address(), _ELSEWHERE])
        rows = gather_json(exchange, [host_id or own, host_id or name, os.getpid(), address, own])
        # Ranks that only pose as several hosts need no network.
        on_one_machine = len({row[4] for row in rows}) == 1
        return cls(
            rank=exchange.rank,
            host_ids=tuple(str(row[0]) for row in rows),
            host_names=tuple(str(row[1]) for row in rows),
            pids=tuple(int(row[2]) for row in rows),
            addresses=tuple("127.0.0.1" if on_one_machine else str(row[3]) for row in rows),
        )

    @property
    def world_size(self) -> int:
        return len(self.host_ids)

    @property
    def num_hosts(self) -> int:
        return len(set(self.host_ids))

    def ranks_here(self) -> list[int]:
        """The ranks on this rank's host, itself included."""
        return [rank for rank, host in enumerate(self.host_ids) if host == self.host_ids[self.rank]]

    def ranks_elsewhere(self) -> list[int]:
        """The ranks on other hosts."""
        return [rank for rank, host in enumerate(self.host_ids) if host != self.host_ids[self.rank]]

    def describe(self, rank: int) -> str:
        return f"rank {rank} (host {self.host_names[rank]}, pid {self.pids[rank]})"

    def rotation(self) -> list[int]:
        """All ranks, starting after this one, so that clients in step do not all visit the same owner first."""
        return [(self.rank + 1 + i) % self.world_size for i in range(self.world_size)]


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "unknown-boot"


def route_address(towards: Sequence[str]) -> str:
    """This host's address on the way to the first of ``towards`` that leads out of it, or ""; sends no packet."""
    for name in filter(None, towards):
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((name, 9))
                address = str(probe.getsockname()[0])
        except OSError:
            continue
        if not address.startswith("127."):
            return address
    return ""
