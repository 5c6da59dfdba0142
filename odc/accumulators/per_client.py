"""One sum per client, for gradients that are equal to the bit whatever the timing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from odc.accumulators.base import StoreBase
from odc.endpoint import Endpoint
from odc.units import UnitSpec


class PerClientStore(StoreBase):
    """One sum per client, added in rank order at the end: bit-equal whatever the order of arrival.

    A client is the only writer of its sum, in its own program order, so there is no lock; and a sum is read only
    after its client is done, so a half push is never read. Costs ``world_size`` shards, that is one full gradient,
    of memory per rank. The sum over clients goes through one chunk at a time.
    """

    def __init__(self, end: Endpoint, units: Sequence[UnitSpec], dtype: torch.dtype, is_direct: bool = True) -> None:
        super().__init__(end, units, dtype, is_direct)
        self._offsets = list(itertools.accumulate((self._aligned(u.grad_numel) for u in units), initial=0))
        self._buffer = self._allocate(end.world_size * self._offsets[-1])
        self._num_words = len(units) + self._end.world_size * (len(units) + self._param_at[-1])
        self._state = self._allocate_words(self._num_words)
        largest = max((u.grad_numel for u in units), default=0)
        self._sum = torch.empty(largest, dtype=dtype, device=self._buffer.local.device)

    @staticmethod
    def num_locks(units: Sequence[UnitSpec]) -> int:
        return 0

    @property
    def num_bytes(self) -> int:
        return self._buffer.num_bytes + self._state.num_bytes + self._sum.nbytes

    @property
    def num_spare_bytes(self) -> int:
        return self.num_bytes - self._offsets[-1] * self._dtype.itemsize

    def _accepts(self, owner: int) -> npt.NDArray[np.int64]:
        return self._state.peer(owner).view(torch.int64).numpy()[: len(self._units)]

    def _touched(self, owner: int, client: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(units, parameters): the last minibatch in which the client pushed each."""
        per_client = len(self._units) + self._param_at[-1]
        start = len(self._units) + client * per_client
        words = self._state.peer(owner).view(torch.int64).numpy()[start : start + per_client]
        return words[: len(self._units)], words[len(self._units) :]

    def _region(self, owner: int, client: int, unit: int) -> torch.Tensor:
        start = client * self._offsets[-1] + self._offsets[unit]
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
        units, params = self._touched(owner, client)
        out, first = self._region(owner, client, unit), int(units[unit]) != minibatch
        self._fill(out, out, unit, grads, present, first)
        self._end.faults.hit("scatter.before_commit")
        at = self._param_at[unit]
        params[at : at + len(present)][np.asarray(present, dtype=bool)] = minibatch
        units[unit] = minibatch
        self._end.faults.hit("scatter.after_commit")

    def collect(self, unit: int, minibatch: int) -> tuple[torch.Tensor, list[bool]] | None:
        total = self._sum[: self._units[unit].grad_numel]
        touched = np.zeros(len(self._units[unit].params), dtype=bool)
        clients = [c for c in range(self._end.world_size) if int(self._touched(self._rank, c)[0][unit]) == minibatch]
        for client in clients:
            params = self._touched(self._rank, client)[1]
            touched |= params[self._param_at[unit] : self._param_at[unit + 1]] == minibatch
            region = self._region(self._rank, client, unit)
            if client == clients[0]:
                self._end.engine.copy(total, region)
            else:
                self._end.engine.add(total, total, region)
        return (total, [bool(flag) for flag in touched]) if clients else None
