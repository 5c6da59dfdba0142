"""Which ranks are on which host."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odc.config import ADDRESS, master_address
from odc.errors import SetupError
from odc.setup.agreement import Exchange, gather_json

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_EXPECTED = (
    f"Set {ADDRESS} on each host to its own IP address in the network that all share, or leave it out where the way to "
    "MASTER_ADDR is the right one."
)
_ELSEWHERE = "192.0.2.1"  # reserved for documentation: asks for the default route, is never sent anything


@dataclass(frozen=True)
class Topology:
    """The ranks of one group, their hosts and processes. Ranks are numbered within the group.

    Hosts are told apart by host name and kernel boot id (two containers of one machine share the boot id but not
    always the name; two clones of one image share the name but not the boot id), not by ``LOCAL_WORLD_SIZE``.
    """

    rank: int
    host_ids: tuple[str, ...]
    host_names: tuple[str, ...]
    pids: tuple[int, ...]
    addresses: tuple[str, ...] = ()
    """Where ranks of other hosts reach each; empty: not known."""
    global_ranks: tuple[int, ...] = ()
    """The number of each in the job, which messages use; empty: the group is the job."""

    @classmethod
    def discover(cls, exchange: Exchange, host_id: str = "", address: str = "") -> Topology:
        """Exchange identities over the group. Collective.

        Args:
            host_id: poses as another host (tests).
            address: where the other hosts reach this one; default: on the way to the master, or the default route.

        Raises:
            SetupError: on all ranks, if several machines have given addresses that cannot be right.
        """
        name = socket.gethostname()
        own = f"{name}/{_boot_id()}"
        address = address or route_address([master_address(), _ELSEWHERE])
        rows = gather_json(exchange, [host_id or own, host_id or name, os.getpid(), address, own])
        _check_addresses(rows)
        # Ranks that only pose as several hosts need no network.
        on_one_machine = len({row[4] for row in rows}) == 1
        return cls(
            rank=exchange.rank,
            host_ids=tuple(str(row[0]) for row in rows),
            host_names=tuple(str(row[1]) for row in rows),
            pids=tuple(int(row[2]) for row in rows),
            addresses=tuple("127.0.0.1" if on_one_machine else str(row[3]) for row in rows),
            global_ranks=tuple(exchange.global_ranks),
        )

    @property
    def world_size(self) -> int:
        return len(self.host_ids)

    @property
    def num_hosts(self) -> int:
        return len(set(self.host_ids))

    def ranks_per_host(self) -> int | None:
        """How many ranks each host has, if they are as many, and one host's follow those of another; else None."""
        size = self.world_size // self.num_hosts
        each = [self.host_ids[rank - rank % size] for rank in range(self.world_size)]  # the first of so many
        return size if tuple(each) == self.host_ids and size * self.num_hosts == self.world_size else None

    def ranks_here(self) -> list[int]:
        """The ranks on this rank's host, itself included."""
        return [rank for rank, host in enumerate(self.host_ids) if host == self.host_ids[self.rank]]

    def ranks_elsewhere(self) -> list[int]:
        """The ranks on other hosts."""
        return [rank for rank, host in enumerate(self.host_ids) if host != self.host_ids[self.rank]]

    def global_rank(self, rank: int) -> int:
        """The number in the job of ``rank`` of this group."""
        return self.global_ranks[rank] if self.global_ranks else rank

    @property
    def me(self) -> int:
        """This rank's number in the job."""
        return self.global_rank(self.rank)

    def describe(self, rank: int) -> str:
        """``rank`` of this group for people, by its number in the job."""
        return f"rank {self.global_rank(rank)} (host {self.host_names[rank]}, pid {self.pids[rank]})"

    @property
    def whoami(self) -> str:
        """This rank, as the others are told who has failed."""
        return f"rank {self.me} (pid {self.pids[self.rank]})"

    def rotation(self) -> list[int]:
        """All ranks, starting after this one, so that clients in step do not all visit the same owner first."""
        return [(self.rank + 1 + i) % self.world_size for i in range(self.world_size)]


def _check_addresses(rows: Sequence[Sequence[Any]]) -> None:
    """On all ranks the same: what each has said of itself.

    Raises:
        SetupError: hosts have given addresses at which others cannot reach them.
    """
    machine_of: dict[str, tuple[int, str]] = {}
    machines = [str(row[4]).rpartition("/")[2] for row in rows]  # containers may share their machine's network
    if len(set(machines)) == 1:
        return
    for rank, (row, machine) in enumerate(zip(rows, machines, strict=True)):
        address, who = str(row[3]), f"rank {rank} (host {row[1]}, pid {row[2]})"
        if not address:
            continue  # the transports that need one say so
        if ipaddress.ip_address(address).is_loopback:
            raise SetupError(
                f"{ADDRESS}={address!r} of {who} leads back to whoever uses it, and the ranks are on several machines. "
                f"{_EXPECTED}"
            )
        other_rank, other_machine = machine_of.setdefault(address, (rank, machine))
        if other_machine != machine:
            raise SetupError(
                f"rank {other_rank} (host {rows[other_rank][1]}) and {who} are on different machines and have given "
                f"the same address, {address}. {_EXPECTED}"
            )


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
