"""The ``tcp`` transport: CPU ranks of several hosts.

Within a host it is ``shm``. Between hosts the owner's receiving thread serves reads and takes in pushes, over framed
sockets with a key of the job; its daemon adds what was pushed.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from odc.engine import AfterChunk
from odc.topology import Topology
from odc.transports._hosts import HostsTransport
from odc.transports.base import SymmetricBuffer


class TcpTransport(HostsTransport):
    """See :class:`~odc.transports.base.Transport`."""

    name: ClassVar[str] = "tcp"

    @classmethod
    def unavailable(cls, topology: Topology, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it serves CPU tensors, the model is on {device.type}"
        return cls.not_on_this_kernel() or cls.no_way_out(topology)

    def allocate(self, num_bytes: int, label: str) -> SymmetricBuffer:
        return self.allocate_host(num_bytes, label)

    def _read_far(
        self, out: torch.Tensor, buffer: SymmetricBuffer, rank: int, offset_bytes: int, after_chunk: AfterChunk
    ) -> None:
        self._link(rank).read(buffer.number, offset_bytes, _bytes_of(out), after_chunk)

    def _write_far(
        self, buffer: SymmetricBuffer, rank: int, offset_bytes: int, source: torch.Tensor, after_chunk: AfterChunk
    ) -> None:
        self._link(rank).write(buffer.number, offset_bytes, _bytes_of(source), after_chunk)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().view(torch.uint8).numpy().data
