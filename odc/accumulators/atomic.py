"""One sum per unit, into which clients' devices add element by element, without lock or daemon."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from odc.accumulators.base import StoreBase
from odc.endpoint import Endpoint
from odc.units import UnitSpec, segments


class AtomicStore(StoreBase):
    """Remote atomics of the clients' devices; for engines that have them.

    A client that dies in mid-push leaves a part of it in the sum. It also fails the minibatch for every rank, before
    any of them has a final gradient (``done`` of the dead client never comes), and a runtime that has failed is never
    used again; so that part gets into no step.
    """

    def __init__(self, end: Endpoint, units: Sequence[UnitSpec], dtype: torch.dtype, is_direct: bool = True) -> None:
        super().__init__(end, units, dtype, is_direct)
        self._offsets = list(itertools.accumulate((self._aligned(u.grad_numel) for u in units), initial=0))
        self._buffer = self._allocate(self._offsets[-1])
        self._state = self._allocate_words(2 * len(units) + self._param_at[-1])

    @staticmethod
    def num_locks(units: Sequence[UnitSpec]) -> int:
        return 0

    @property
    def num_bytes(self) -> int:
        return self._buffer.num_bytes + self._state.num_bytes

    def _words(self, owner: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(minibatch that each unit accepts, last minibatch in which anybody pushed each unit, and each parameter)."""
        words = self._state.peer(owner).view(torch.int64).numpy()
        num_units = len(self._units)
        return words[:num_units], words[num_units : 2 * num_units], words[2 * num_units :]

    def _sum(self, owner: int, unit: int) -> torch.Tensor:
        start = self._offsets[unit]
        return self._buffer.peer(owner).view(self._dtype)[start : start + self._units[unit].grad_numel]

    def add(
        self,
        owner: int,
        client: int,
        unit: int,
        grads: torch.Tensor,
        present: Sequence[bool],
        minibatch: int,
        daemon: bool = False,
    ) -> None:
        self._check_open(owner, minibatch, unit, client)
        _, units, params = self._words(owner)
        total = self._sum(owner, unit)
        for segment in segments(self._units[unit], present):
            if segment.source is not None:
                part = total[segment.offset : segment.offset + segment.numel]
                addend = grads[segment.source : segment.source + segment.numel]
                self._end.engine.add_atomically(part, addend, self._end.waiter.after_scatter_chunk)
        self._end.faults.hit("scatter.before_commit")
        # Every client writes the same number, so it does not matter who is last.
        at = self._param_at[unit]
        params[at : at + len(present)][np.asarray(present, dtype=bool)] = minibatch
        units[unit] = minibatch
        self._end.faults.hit("scatter.after_commit")

    def collect(self, unit: int, minibatch: int) -> tuple[torch.Tensor, list[bool]] | None:
        _, units, params = self._words(self._rank)
        if int(units[unit]) != minibatch:
            return None
        touched = params[self._param_at[unit] : self._param_at[unit + 1]] == minibatch
        return self._sum(self._rank, unit), [bool(flag) for flag in touched]

    def open(self, unit: int, minibatch: int) -> None:
        self._end.engine.zero(self._sum(self._rank, unit))
        super().open(unit, minibatch)

    def _accepts(self, owner: int) -> npt.NDArray[np.int64]:
        return self._words(owner)[0]
