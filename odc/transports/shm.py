"""The ``shm`` transport: CPU ranks of one host, in mapped shared memory.

The default for CPU tensors. Needs only Linux, so CI and laptops use it.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from odc.setup.topology import Topology
from odc.transports.base import SymmetricBuffer, Transport, not_on_this_host


class ShmTransport(Transport):
    """See :class:`~odc.transports.base.Transport`. Tensors travel in host memory too."""

    name: ClassVar[str] = "shm"

    @classmethod
    def unavailable(cls, topology: Topology, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it serves CPU tensors, the model is on {device.type}"
        return not_on_this_host(topology)

    def allocate(self, num_bytes: int, label: str) -> SymmetricBuffer:
        return self.allocate_host(num_bytes, label)
