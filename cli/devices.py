"""Published figures of accelerators, to turn FLOPs into seconds and bytes into what fits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """What the data sheet says."""

    flops_per_s: float
    """Dense bfloat16 peak."""

    memory_bytes: int


DEVICES = {
    "a100": Device(312e12, 80 * 10**9),
    "h100": Device(989e12, 80 * 10**9),
    "h200": Device(989e12, 141 * 10**9),
    "b200": Device(2250e12, 180 * 10**9),
}
