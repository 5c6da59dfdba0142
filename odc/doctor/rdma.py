"""InfiniBand and RoCE devices, as the kernel lists them under /sys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from odc.doctor.finding import Finding, not_needed, ok, warning

_CLASS = Path("/sys/class/infiniband")
_DEVICES = Path("/dev/infiniband")
DOCKER = "docker run --device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1"


@dataclass(frozen=True)
class RdmaPort:
    """One port of an RDMA device."""

    device: str
    port: str
    link: str
    """"InfiniBand" or "Ethernet" (RoCE)."""

    rate: str
    active: bool


def read_ports(folder: Path = _CLASS) -> tuple[RdmaPort, ...]:
    """All ports; none where there is no such hardware."""
    return tuple(_read_port(path) for path in sorted(folder.glob("*/ports/*")))


def _read_port(path: Path) -> RdmaPort:
    return RdmaPort(
        device=path.parents[1].name,
        port=path.name,
        link=_text(path / "link_layer"),
        rate=_text(path / "rate"),
        active="ACTIVE" in _text(path / "state"),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"


def ports(ports: Iterable[RdmaPort], accessible: bool | None = None) -> Finding:
    """The ports, and whether this process may open them (``accessible``; default: /dev/infiniband exists)."""
    listed = list(ports)
    if not listed:
        return not_needed("no InfiniBand or RoCE device: ranks of one host need none")
    found = "\n".join(
        f"{p.device} port {p.port}: {p.link}, {p.rate}, {'active' if p.active else 'down'}" for p in listed
    )
    if not any(port.active for port in listed):
        return warning(found, "No port is active: check cables and the subnet manager (`ibstat`).")
    if not (_DEVICES.exists() if accessible is None else accessible):
        return warning(f"{found}\nbut no {_DEVICES}", f"In a container: {DOCKER}")
    return ok(found)
