"""Where pushed gradients are summed at their owner.

Two stores share one interface. Both make a push all-or-nothing: a push that was begun by a client that then died, or
that was interrupted, leaves no trace in the sum.

[Note: A push commits by one word] In :class:`SharedStore` the first push of a minibatch writes into the unit's
slot and commits by setting ``unit_touched``; a later push writes ``slot + gradient`` into the spare slot of its size
class and commits by changing ``slot_of``. Both are aligned 8-byte stores, so a client killed at any instruction has
either pushed or not. Nothing has to be undone: the next locker simply finds the old word. (An undo log would copy the
old sum and then add in place, two more passes over memory than an add; writing to the spare slot is one more.) An owner
that adds to its own sum (its own gradient, or as a daemon) does so in place: its death takes the sum with it, and its
failure ends the minibatch.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from odc.endpoint import Endpoint
from odc.errors import ProtocolError
from odc.kernels import add_chunked, copy_chunked, zero_chunked
from odc.transports.base import LockOutcome, Transport, aligned
from odc.units import UnitSpec, segments

_LOCK_SLICE_S = 0.05


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

        None if nobody pushed the unit. Valid until the next call or push; only after every client is done.
        """

    @abstractmethod
    def close_minibatch(self, minibatch: int) -> None:
        """From now on pushes of ``minibatch`` are late; those of the next one are welcome."""


class _StoreBase(AccumulatorStore):
    def __init__(self, end: Endpoint, units: Sequence[UnitSpec], dtype: torch.dtype) -> None:
        self._end = end
        self._units = units
        self._dtype = dtype
        self._rank = end.rank
        self._param_at = list(itertools.accumulate((len(u.params) for u in units), initial=0))

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
                    zero_chunked(out[part], after_chunk)
                elif out is not old:
                    copy_chunked(out[part], old[part], after_chunk)
                continue
            addend = grads[segment.source : segment.source + segment.numel]
            if first:
                copy_chunked(out[part], addend, after_chunk)
            else:
                add_chunked(out[part], old[part], addend, after_chunk)

    def _check_open(self, owner: int, closed: int, minibatch: int, unit: int, client: int) -> None:
        if closed != minibatch - 1:
            raise ProtocolError(
                f"push of rank {client} for minibatch {minibatch}, unit {self._units[unit].name!r}, refused by rank "
                f"{owner}: its minibatch {closed} is final and it accepts {closed + 1} now"
            )


class SharedStore(_StoreBase):
    """One slot per unit and one spare slot per distinct unit size; clients add under the size's lock."""

    def __init__(self, end: Endpoint, units: Sequence[UnitSpec], dtype: torch.dtype) -> None:
        super().__init__(end, units, dtype)
        sizes = _size_classes(units)
        self._class_of = [sizes.index(u.grad_numel) if u.grad_numel else -1 for u in units]
        first_slots = {c: [u for u, k in enumerate(self._class_of) if k == c] for c in range(len(sizes))}
        self._slots: list[tuple[int, int]] = []  # (offset, numel) in elements; slots of a class are neighbours
        self._class_slots: list[range] = []
        offset = 0
        for c, numel in enumerate(sizes):
            start = len(self._slots)
            for _ in range(len(first_slots[c]) + 1):
                self._slots.append((offset, numel))
                offset += self._aligned(numel)
            self._class_slots.append(range(start, len(self._slots)))
        self._buffer = end.transport.allocate(offset * dtype.itemsize, "accumulators")
        self._state = end.transport.allocate(8 * self._num_words(), "accumulator state")
        words = self._words(self._rank)
        for c, members in first_slots.items():
            for i, unit in enumerate(members):
                words.slot_of[unit] = self._class_slots[c][i]

    @staticmethod
    def num_locks(units: Sequence[UnitSpec]) -> int:
        return len(_size_classes(units))

    @property
    def num_bytes(self) -> int:
        return self._buffer.num_bytes + self._state.num_bytes

    def _num_words(self) -> int:
        return 1 + 2 * len(self._units) + self._param_at[-1] + len(_size_classes(self._units))

    def _words(self, owner: int) -> _Words:
        return _Words(self._state.peer(owner).view(torch.int64).numpy(), len(self._units), self._param_at[-1])

    def _slot(self, owner: int, slot: int) -> torch.Tensor:
        offset, numel = self._slots[slot]
        return self._buffer.peer(owner).view(self._dtype)[offset : offset + numel]

    def _spare(self, words: _Words, size_class: int) -> int:
        """The slot of a class that no unit refers to: all slots minus those in use."""
        members = [u for u, c in enumerate(self._class_of) if c == size_class]
        return sum(self._class_slots[size_class]) - int(sum(words.slot_of[members]))

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
        words, size_class = self._words(owner), self._class_of[unit]
        attempt = _LockAttempt(self._end.transport, owner, size_class, words.holder)
        try:
            self._end.waiter.wait(
                attempt.pending,
                lambda: f"lock of the accumulator of {self._units[unit].name!r} at rank {owner}",
                block=attempt.block,
                daemon=daemon,
            )
            words.holder[size_class] = client + 1
            self._check_open(owner, int(words.closed[0]), minibatch, unit, client)
            self._push(owner, unit, words, grads, present, minibatch)
        finally:
            if attempt.held:
                words.holder[size_class] = 0
                self._end.transport.unlock(owner, size_class)

    def _push(
        self,
        owner: int,
        unit: int,
        words: _Words,
        grads: torch.Tensor,
        present: Sequence[bool],
        minibatch: int,
    ) -> None:
        """The push itself, under the lock."""
        first = int(words.unit_touched[unit]) != minibatch
        current = int(words.slot_of[unit])
        in_place = first or owner == self._rank
        target = current if in_place else self._spare(words, self._class_of[unit])
        old = self._slot(owner, current)
        out = old if in_place else self._slot(owner, target)
        self._fill(out, old, unit, grads, present, first)
        self._end.faults.hit("scatter.before_commit")
        # See [Note: A push commits by one word].
        if first:
            words.unit_touched[unit] = minibatch
        else:
            words.slot_of[unit] = target
        at = self._param_at[unit]
        words.param_touched[at : at + len(present)][np.asarray(present, dtype=bool)] = minibatch
        self._end.faults.hit("scatter.after_commit")

    def collect(self, unit: int, minibatch: int) -> tuple[torch.Tensor, list[bool]] | None:
        words = self._words(self._rank)
        if int(words.unit_touched[unit]) != minibatch:
            return None
        touched = words.param_touched[self._param_at[unit] : self._param_at[unit + 1]] == minibatch
        return self._slot(self._rank, int(words.slot_of[unit])), [bool(flag) for flag in touched]

    def close_minibatch(self, minibatch: int) -> None:
        self._words(self._rank).closed[0] = minibatch


class PerClientStore(_StoreBase):
    """One sum per client, added in rank order at the end: bit-equal whatever the order of arrival.

    A client is the only writer of its sum, in its own program order, so there is no lock; and a sum is read only
    after its client is done, so a half push is never read. Costs ``world_size`` shards, that is one full gradient,
    of memory per rank. The sum over clients goes through one chunk at a time.
    """

    def __init__(self, end: Endpoint, units: Sequence[UnitSpec], dtype: torch.dtype) -> None:
        super().__init__(end, units, dtype)
        self._offsets = list(itertools.accumulate((self._aligned(u.grad_numel) for u in units), initial=0))
        self._buffer = end.transport.allocate(self._end.world_size * self._offsets[-1] * dtype.itemsize, "accumulators")
        self._num_words = 1 + self._end.world_size * (len(units) + self._param_at[-1])
        self._state = end.transport.allocate(8 * self._num_words, "accumulator state")
        self._sum = torch.empty(max((u.grad_numel for u in units), default=0), dtype=dtype)

    @staticmethod
    def num_locks(units: Sequence[UnitSpec]) -> int:
        return 0

    @property
    def num_bytes(self) -> int:
        return self._buffer.num_bytes + self._state.num_bytes + self._sum.nbytes

    def _closed(self, owner: int) -> npt.NDArray[np.int64]:
        return self._state.peer(owner).view(torch.int64).numpy()[:1]

    def _touched(self, owner: int, client: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(units, parameters): the last minibatch in which the client pushed each."""
        per_client = len(self._units) + self._param_at[-1]
        start = 1 + client * per_client
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
        self._check_open(owner, int(self._closed(owner)[0]), minibatch, unit, client)
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
                copy_chunked(total, region)
            else:
                add_chunked(total, total, region)
        return (total, [bool(flag) for flag in touched]) if clients else None

    def close_minibatch(self, minibatch: int) -> None:
        self._closed(self._rank)[0] = minibatch


class _Words:
    """The named int64 words of a :class:`SharedStore` at one owner."""

    def __init__(self, words: npt.NDArray[np.int64], num_units: int, num_params: int) -> None:
        self.closed = words[:1]
        self.slot_of = words[1 : 1 + num_units]
        self.unit_touched = words[1 + num_units : 1 + 2 * num_units]
        self.param_touched = words[1 + 2 * num_units : 1 + 2 * num_units + num_params]
        self.holder = words[1 + 2 * num_units + num_params :]


class _LockAttempt:
    """Taking one lock, in the form the wait function wants."""

    def __init__(self, transport: Transport, owner: int, index: int, holder: npt.NDArray[np.int64]) -> None:
        self._transport = transport
        self._owner = owner
        self._index = index
        self._holder = holder
        self.held = False

    def pending(self) -> list[int]:
        if not self.held:
            self._attempt(0.0)
        if self.held:
            return []
        # The holder (0: nobody has signed yet) is a hint for messages and liveness only: the kernel hands over the
        # lock of a dead holder before its pidfd fires.
        holder = int(self._holder[self._index])
        return [holder - 1 if holder else self._owner]

    def block(self, timeout_s: float, ranks: Sequence[int]) -> None:
        if not self.held:
            self._attempt(min(timeout_s, _LOCK_SLICE_S))

    def _attempt(self, timeout_s: float) -> None:
        outcome = self._transport.lock(self._owner, self._index, timeout_s)
        self.held = outcome is not LockOutcome.TIMED_OUT


def _size_classes(units: Sequence[UnitSpec]) -> list[int]:
    return sorted({u.grad_numel for u in units if u.grad_numel})
