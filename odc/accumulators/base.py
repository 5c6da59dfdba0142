"""What every store of sums offers, and what they have in common."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from odc.endpoint import Endpoint
from odc.errors import ProtocolError
from odc.transports.base import SymmetricBuffer, aligned
from odc.units import UnitSpec, segments


class AccumulatorStore(ABC):
    """Sums of the pushes to each owner, minibatch by minibatch."""

    @staticmethod
    @abstractmethod
    def num_locks(units: Sequence[UnitSpec]) -> int:
        """How many transport locks of each rank the store uses (numbers 0 and up)."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of this rank's part."""

    @property
    def num_spare_bytes(self) -> int:
        """Of it, what is not one sum per unit."""
        return 0

    @abstractmethod
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
        """Add one push: the gradients of the ``present`` parameters of ``unit``, back to back, to ``owner``'s sum.

        Raises:
            ProtocolError: ``owner`` is not accepting pushes of ``minibatch`` (late, early or duplicate).
        """

    @abstractmethod
    def collect(self, unit: int, minibatch: int) -> tuple[torch.Tensor, list[bool]] | None:
        """This rank's final sum of ``unit`` (flat, accumulator dtype) and which parameters received a gradient.

        None if nobody pushed the unit. Only after every client is done. Valid until the next call and until the unit
        is opened again; the caller may change it.
        """

    @abstractmethod
    def open(self, unit: int, minibatch: int) -> None:
        """From now on pushes of ``minibatch`` to ``unit`` are welcome. Called before the other ranks are told so."""

    @abstractmethod
    def close(self, minibatch: int) -> None:
        """From now on pushes of ``minibatch`` are late, to any unit; those of the next one are early."""


class StoreBase(AccumulatorStore):
    def __init__(self, end: Endpoint, units: Sequence[UnitSpec], dtype: torch.dtype, is_direct: bool) -> None:
        self._end = end
        self._units = units
        self._dtype = dtype
        self._rank = end.rank
        self._is_direct = is_direct
        self._param_at = list(itertools.accumulate((len(u.params) for u in units), initial=0))

    def _allocate(self, numel: int) -> SymmetricBuffer:
        """Memory for sums; where only the owner adds, nobody else sees it."""
        transport = self._end.transport
        allocate = transport.allocate if self._is_direct else transport.allocate_private
        return allocate(numel * self._dtype.itemsize, "accumulators")

    def _allocate_words(self, count: int) -> SymmetricBuffer:
        """int64 words beside the sums, which every rank of a host can read."""
        return self._end.transport.allocate_host(8 * max(count, 1), "accumulator state")

    def _aligned(self, numel: int) -> int:
        return aligned(numel * self._dtype.itemsize) // self._dtype.itemsize

    def _fill(
        self,
        out: torch.Tensor,
        old: torch.Tensor,
        unit: int,
        grads: torch.Tensor,
        present: Sequence[bool],
        first: bool,
    ) -> None:
        """``out = old + grads``, or ``out = grads`` for the first push; ``out`` may be ``old``."""
        after_chunk = self._end.waiter.after_scatter_chunk
        for segment in segments(self._units[unit], present):
            part = slice(segment.offset, segment.offset + segment.numel)
            if segment.source is None:
                if first:
                    self._end.engine.zero(out[part], after_chunk)
                elif out is not old:
                    self._end.engine.copy(out[part], old[part], after_chunk)
                continue
            addend = grads[segment.source : segment.source + segment.numel]
            if first:
                self._end.engine.copy(out[part], addend, after_chunk)
            else:
                self._end.engine.add(out[part], old[part], addend, after_chunk)

    @abstractmethod
    def _accepts(self, owner: int) -> npt.NDArray[np.int64]:
        """The words of ``owner`` that say which minibatch each of its units accepts pushes of; that of the last one,
        negative, while its sum is final and may still be read."""

    def open(self, unit: int, minibatch: int) -> None:
        self._accepts(self._rank)[unit] = minibatch

    def close(self, minibatch: int) -> None:
        self._accepts(self._rank)[:] = -minibatch

    def _check_open(self, owner: int, minibatch: int, unit: int, client: int) -> None:
        accepted = int(self._accepts(owner)[unit])
        if accepted == minibatch and accepted > 0:
            return
        if accepted > 0:
            state = f"it accepts minibatch {accepted} now"
        elif accepted < 0:
            state = f"its sum of minibatch {-accepted} is final, and it has not published the unit for the next one yet"
        else:
            state = "it has not published the unit yet"
        raise ProtocolError(
            f"push of rank {self._end.name(client)} for minibatch {minibatch}, unit {self._units[unit].name!r}, "
            f"refused by rank {self._end.name(owner)}: {state}"
        )
