"""The ``tcp`` transport: CPU ranks of several hosts.

Within a host it works like ``shm``. Between hosts one thread of the owner serves all reads and receives all pushes,
over sockets that are authenticated by the job's key. The owner's daemon adds the pushes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from odc.engines.base import AfterChunk
from odc.setup.topology import Topology
from odc.transports.base import SymmetricBuffer, Transport, no_way_out, not_on_this_kernel


class TcpTransport(Transport):
    """See :class:`~odc.transports.base.Transport`."""

    name: ClassVar[str] = "tcp"

    @classmethod
    def unavailable(cls, topology: Topology, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it serves CPU tensors, the model is on {device.type}"
        return not_on_this_kernel() or no_way_out(topology)

    def allocate(self, num_bytes: int, label: str) -> SymmetricBuffer:
        return self.allocate_host(num_bytes, label)

    def _read_far(
        self,
        parts: Sequence[tuple[Sequence[torch.Tensor], int]],
        buffer: SymmetricBuffer,
        offset_bytes: int,
        after_chunk: AfterChunk,
    ) -> None:
        for outs, rank in parts:
            self._link(rank).read(buffer.number, offset_bytes, [_bytes_of(out) for out in outs], after_chunk)

    def _write_far(
        self,
        buffer: SymmetricBuffer,
        rank: int,
        offset_bytes: int,
        sources: Sequence[torch.Tensor],
        after_chunk: AfterChunk,
    ) -> None:
        self._link(rank).write(buffer.number, offset_bytes, [_bytes_of(one) for one in sources], after_chunk)


class _Memory:
    """The bytes of a tensor, as numpy takes them over from a stranger.

    [Note: Storage of others] ``tensor.numpy()`` pins the tensor's storage: it can never be resized again, also when
    nobody holds the array any more. FSDP1 frees and allocates the storage that it gathers into (``storage.resize_``) at
    every use. So what belongs to others is only addressed here, for the time of a call.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # alive as long as the array that is made of this
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (tensor.nbytes,),
            "data": (tensor.data_ptr(), False),
        }


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous tensor in host memory. See [Note: Storage of others]."""
    return np.asarray(_Memory(tensor)).data
