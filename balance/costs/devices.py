"""Published figures of accelerators and of what connects them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """What the data sheet says."""

    flops_per_s: float
    """Dense bfloat16 peak."""

    memory_bytes: int
    links: Mapping[str, float]
    """Bytes per second that one device receives over a link, while it sends as many."""


def _links(nvlink: float, pcie: float, infiniband: float) -> dict[str, float]:
    return {"nvlink": nvlink, "pcie": pcie, "infiniband": infiniband}


# PCIe: 16 lanes, of the fourth or fifth generation. InfiniBand: one port for each device, HDR or NDR.
DEVICES = {
    "a100": Device(312e12, 80 * 10**9, _links(300e9, 32e9, 25e9)),
    "h100": Device(989e12, 80 * 10**9, _links(450e9, 64e9, 50e9)),
    "h200": Device(989e12, 141 * 10**9, _links(450e9, 64e9, 50e9)),
    "b200": Device(2250e12, 180 * 10**9, _links(900e9, 64e9, 50e9)),
}
LINKS = tuple(DEVICES["h100"].links)
