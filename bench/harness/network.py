"""Two hosts and a switch on one machine: network namespaces, whose network can be slow or cut.

A rank that enters a host has this host's addresses, routes and name. ODC tells these hosts apart and finds their
addresses as it does between real machines. Needs root and iproute2.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000
_INTERFACE = "odc0"  # the same name on both hosts
_LEAST_BURST, _BURST_S = 128 << 10, 0.002  # what goes at once: a packet of the interface has up to 64 KiB


@dataclass(frozen=True)
class TwoHosts:
    """Two hosts. Ranks of the lower half are on the first one."""

    hosts: tuple[str, str]
    switch: str

    def enter(self, rank: int, world_size: int) -> None:
        """Move this process to its rank's host, before it makes threads or sockets."""
        host = self.hosts[rank * 2 // world_size]
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", host).open() as namespace:
            _require(libc.setns(namespace.fileno(), _CLONE_NEWNET))
        _require(libc.unshare(_CLONE_NEWUTS))
        socket.sethostname(host)
        os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE

    def cut(self) -> None:
        """Switch the switch off. No host is told; packets only get no answer any more."""
        _ip("-n", self.switch, "link", "set", "switch", "down")

    def unplug(self, host: int) -> None:
        """Take the interface of a host down. Its kernel then knows of no way to the other host."""
        _ip("-n", self.hosts[host], "link", "set", _INTERFACE, "down")

    def mend(self) -> None:
        _ip("-n", self.switch, "link", "set", "switch", "up")


def received_bytes() -> int:
    """Bytes that the host of this process has received from the other host since it was set up."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith(f"{_INTERFACE}:"))


@contextmanager
def two_hosts(bits_per_s: float = 0.0) -> Iterator[TwoHosts]:
    """Set up two hosts, and take them down afterwards. Each sends at most ``bits_per_s``; 0 is no limit."""
    names = [f"odc-{os.getpid()}-{name}" for name in ("a", "b", "switch")]
    made: list[str] = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        *hosts, switch = names
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for number, host in enumerate(hosts, start=1):
            _plug_in(host, switch, number)
            if bits_per_s:
                burst = max(_LEAST_BURST, bits_per_s / 8 * _BURST_S)
                shape = ("rate", f"{bits_per_s:.0f}bit", "burst", f"{burst:.0f}", "latency", "50ms")
                _run("tc", "-n", host, "qdisc", "add", "dev", _INTERFACE, "root", "tbf", *shape)
        yield TwoHosts((hosts[0], hosts[1]), switch)
    finally:
        for name in made:
            _ip("netns", "del", name)


def _plug_in(host: str, switch: str, number: int) -> None:
    port = f"port{number}"
    _ip("link", "add", _INTERFACE, "netns", host, "type", "veth", "peer", "name", port, "netns", switch)
    _ip("-n", switch, "link", "set", port, "master", "switch", "up")
    _ip("-n", host, "addr", "add", f"10.77.0.{number}/24", "dev", _INTERFACE)
    for interface in ("lo", _INTERFACE):
        _ip("-n", host, "link", "set", interface, "up")
    _ip("-n", host, "route", "add", "default", "dev", _INTERFACE)


def why_not() -> str | None:
    """Why this machine cannot have two hosts, or None."""
    if shutil.which("ip") is None:
        return "needs iproute2 for network namespaces"
    try:
        with two_hosts(1e9):
            return None
    except (OSError, subprocess.SubprocessError) as problem:
        return f"needs permission to make network namespaces (root): {problem}"


def _require(status: int) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)
