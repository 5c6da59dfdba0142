"""Sums that serve as ``.grad``: lent to the script until it clears them, taken back before they are overwritten."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from odc.fsdp_patch.unit import Unit, lies_in


class Loan:
    """The sum of one unit, in which its ``.grad`` lies.

    A script may keep a gradient that it has cleared (``kept = [p.grad for p in params]``), so the loan watches the
    tensors themselves and not only ``.grad``. A view that the script makes of one is not seen: clone it.
    """

    def __init__(self, unit: Unit, sums: torch.Tensor) -> None:
        self._unit = unit
        self.sums = sums
        self._lent = [weakref.ref(tensor) for tensor in unit.gradients()]

    @property
    def is_over(self) -> bool:
        """Whether nobody holds a gradient that lies in the sum."""
        return not self._unit.borrows(self.sums) and not self._held()

    def take_back(self) -> None:
        """Give every gradient that is still held memory of its own."""
        self._unit.keep_gradients(self.sums)
        for tensor in self._held():
            if isinstance(tensor, DTensor):
                tensor._local_tensor = tensor._local_tensor.clone()
            else:
                tensor.data = tensor.data.clone()

    def _held(self) -> list[torch.Tensor]:
        alive = [tensor for tensor in (ref() for ref in self._lent) if tensor is not None]
        return [tensor for tensor in alive if lies_in(local_part(tensor), self.sums)]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; anything else is that already."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def sums_of(loans: Sequence[Loan]) -> list[torch.Tensor]:
    """The memory that is lent."""
    return [loan.sums for loan in loans]
