"""Device addresses of every owner's buffer, for use by kernels."""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

VECTOR_BYTES = 16
"""The widest access of one thread on every supported GPU; only addresses that are multiples of it allow it."""


@dataclass(frozen=True, eq=False)
class PeerTable:
    """The addresses of one buffer per rank, for the host (``addresses``) and for kernels (``tensor``).

    Build it once per buffer with `build` or `of`: a launch must know on the host how all addresses are aligned, and
    reading ``tensor`` back would wait for the GPU. The table does not keep the buffers alive; whoever mapped them does.
    """

    addresses: tuple[int, ...]
    """Byte address of rank r's buffer at position r, valid on the device of ``tensor``."""
    tensor: torch.Tensor
    """The same numbers, int64 [world_size]."""

    @classmethod
    def build(cls, addresses: Sequence[int], device: torch.device | str) -> PeerTable:
        """Copy ``addresses`` to ``device``; the copy has been made when this returns.

        >>> PeerTable.build([4096, 8192], "cpu").tensor
        tensor([4096, 8192])
        """
        if not addresses:
            raise ValueError("addresses is empty, expected the address of one buffer per rank")
        for rank, address in enumerate(addresses):
            if not 0 < address < 2**63:
                raise ValueError(f"address of rank {rank} is {address}, expected a non-null address below 2**63")
        return cls(tuple(addresses), torch.tensor(list(addresses), dtype=torch.int64, device=device))

    @classmethod
    def of(cls, buffers: Sequence[torch.Tensor]) -> PeerTable:
        """The table of these tensors, one per rank, of which each must be contiguous; on the device of the first.

        >>> PeerTable.of([torch.zeros(2), torch.zeros(2)]).world_size
        2
        """
        for rank, buffer in enumerate(buffers):
            if not buffer.is_contiguous():
                raise ValueError(f"buffer of rank {rank} has strides {buffer.stride()}, expected a contiguous tensor")
        return cls.build([b.data_ptr() for b in buffers], buffers[0].device if buffers else "cpu")

    @property
    def world_size(self) -> int:
        return len(self.addresses)

    @functools.cached_property
    def address_bits(self) -> int:
        """The bits that are set in any address: all addresses are multiples of what divides it.

        >>> PeerTable.build([4096, 8200], "cpu").address_bits % 8
        0
        """
        return functools.reduce(operator.or_, self.addresses)

    def host_view(self, owner: int, byte_offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """``numel`` elements of ``owner``'s buffer as a tensor on the memory itself: host addresses only.

        >>> buffer = torch.arange(4.0)
        >>> PeerTable.of([buffer]).host_view(0, 8, 2, torch.float32)
        tensor([2., 3.])
        """
        if self.tensor.device.type != "cpu":
            raise ValueError(
                f"the table is on {self.tensor.device}: only host memory can be viewed, build it on the CPU"
            )
        raw = (ctypes.c_char * (numel * dtype.itemsize)).from_address(self.addresses[owner] + byte_offset)
        return torch.frombuffer(raw, dtype=dtype)


def rotated(rank: int, world_size: int) -> list[int]:
    """The order in which ``rank`` visits owners: its successor first, itself last.

    Ranks in step then never visit the same owner at the same time.

    >>> rotated(1, 4)
    [2, 3, 0, 1]
    """
    return [(rank + 1 + step) % world_size for step in range(world_size)]
