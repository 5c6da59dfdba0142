"""One sum per unit, into which all clients add under a lock.

[Note: A push commits by one word] In :class:`SharedStore` the first push of a minibatch writes into the unit's
slot and commits by setting ``unit_touched``; a later push writes ``slot + gradient`` into the spare slot of its size
class and commits by changing ``slot_of``. Both are aligned 8-byte stores, so a client killed at any instruction has
either pushed or not. Nothing has to be undone: the next locker simply finds the old word. (An undo log would copy the
old sum and then add in place, two more passes over memory than an add; writing to the spare slot is one more.) An owner
that adds to its own sum (its own gradient, or as a daemon) does so in place: its death takes the sum with it, and its
failure ends the minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from odc.accumulators.base import StoreBase
from odc.endpoint import Endpoint
from odc.transports.base import LockOutcome, Transport
from odc.units import UnitSpec

_LOCK_SLICE_S = 0.05


class SharedStore(StoreBase):
    """One slot per unit and one spare slot per distinct unit size; clients add under the size's lock.

    Where only the owner adds (not ``is_direct``), its daemon being the hand of all clients, no slot is spare.
    """

    def __init__(self, end: Endpoint, units: Sequence[UnitSpec], dtype: torch.dtype, is_direct: bool = True) -> None:
        super().__init__(end, units, dtype, is_direct)
        self._num_spares = num_spares = 1 if is_direct else 0
        sizes = _size_classes(units)
        self._class_of = [sizes.index(u.grad_numel) if u.grad_numel else -1 for u in units]
        first_slots = {c: [u for u, k in enumerate(self._class_of) if k == c] for c in range(len(sizes))}
        self._slots: list[tuple[int, int]] = []  # (offset, numel) in elements; slots of a class are neighbours
        self._class_slots: list[range] = []
        offset = 0
        for c, numel in enumerate(sizes):
            start = len(self._slots)
            for _ in range(len(first_slots[c]) + num_spares):
                self._slots.append((offset, numel))
                offset += self._aligned(numel)
            self._class_slots.append(range(start, len(self._slots)))
        self._buffer = self._allocate(offset)
        self._state = self._allocate_words(self._num_words())
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

    @property
    def num_spare_bytes(self) -> int:
        per_class = sum(self._aligned(numel) for numel in _size_classes(self._units)) * self._dtype.itemsize
        return self._num_spares * per_class

    def _num_words(self) -> int:
        return 3 * len(self._units) + self._param_at[-1] + len(_size_classes(self._units))

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
                lambda: f"lock of the accumulator of {self._units[unit].name!r} at rank {self._end.name(owner)}",
                block=attempt.block,
                daemon=daemon,
            )
            words.holder[size_class] = client + 1
            self._check_open(owner, minibatch, unit, client)
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

    def _accepts(self, owner: int) -> npt.NDArray[np.int64]:
        return self._words(owner).accepts


class _Words:
    """The named int64 words of a :class:`SharedStore` at one owner."""

    def __init__(self, words: npt.NDArray[np.int64], num_units: int, num_params: int) -> None:
        self.accepts, self.slot_of, self.unit_touched = words[: 3 * num_units].reshape(3, num_units)
        self.param_touched = words[3 * num_units : 3 * num_units + num_params]
        self.holder = words[3 * num_units + num_params :]


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
