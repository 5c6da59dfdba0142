"""Sums of pushed gradients in the owner's memory.

Two stores have the same interface: :class:`SharedStore` has one sum per unit, into which all clients add.
:class:`PerClientStore` has one sum per client, for gradients that do not depend on timing, bit for bit.
:class:`StorePlan` chooses the store.

[Note: Sums in place] A client adds directly to the sum. If the client dies or is interrupted, a part of its push is in
the sum. No step uses this sum: final gradients need the client's ``done`` of this minibatch, which never comes; all
ranks learn of the failure or the death; and a failed runtime refuses every further operation. (A separate copy that is
committed by one word would need a third pass over the memory.)
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from odc import limits
from odc.config import RuntimeConfig
from odc.engines.base import Addition, Engine, Part
from odc.errors import ConfigError, ProtocolError
from odc.rank.waiting import Endpoint
from odc.transports.base import SymmetricBuffer, Transport, aligned
from odc.units import Layout, Rows, UnitSpec, segments

logger = logging.getLogger("odc")

_WORD_BYTES = 8


@dataclass(frozen=True)
class StorePlan:
    """Which store, and whether clients add to it themselves."""

    kind: type[SharedStore] | type[PerClientStore]
    is_direct: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, config: RuntimeConfig, transport: Transport, prefers_daemon: bool = False) -> StorePlan:
        """Between hosts the owner's daemon adds, since nobody else can. On one host "auto" is direct: one pass less
        over the gradient, and a client depends on nobody else. On devices that takes atomic additions over every link.

        Collective.

        Args:
            prefers_daemon: what "auto" does on devices that could do either, by measurements of this machine or by
                the dtype of gradients.

        Raises:
            ConfigError: "direct" was asked for where it cannot be: between hosts, on a device in float64, or where
                additions to another device's memory could be lost.
        """
        num_hosts, engine = transport.topology.num_hosts, transport.engine
        obstacle = None
        if num_hosts > 1:
            obstacle = f"adds in the owner's memory, which the ranks of {num_hosts} hosts do not share"
        elif engine.has_streams and config.accumulate_dtype != torch.float32:
            obstacle = f"on a device adds float32 atomically, not {config.accumulate_dtype}"
        elif engine.has_streams and (reason := transport.no_atomics()) is not None:
            obstacle = f"would lose additions: {reason}"
        if config.accumulate == "direct" and obstacle is not None:
            raise ConfigError(f"accumulate='direct' {obstacle}: use 'daemon' or 'auto'")
        is_auto = config.accumulate == "auto" and engine.has_streams
        if is_auto and num_hosts == 1 and obstacle is not None and transport.topology.me == 0:
            logger.warning("odc: gradients take slots and one more pass: accumulate='direct' %s", obstacle)
        chooses_daemon = is_auto and prefers_daemon
        is_direct = config.accumulate != "daemon" and obstacle is None and not chooses_daemon
        return cls(PerClientStore if config.deterministic else SharedStore, is_direct, config.accumulate_dtype)

    def num_locks(self, units: Sequence[UnitSpec], engine: Engine) -> int:
        """How many transport locks of each rank the store uses: one per unit, where several processors add."""
        return len(units) if self.kind is SharedStore and self.is_direct and not engine.has_streams else 0

    def make(self, end: Endpoint, units: Sequence[UnitSpec]) -> AccumulatorStore:
        return self.kind(end, units, self.dtype, self.is_direct)

    def shared_bytes(self, units: Sequence[UnitSpec], world_size: int) -> int:
        """What :meth:`make` will ask of ``Transport.allocate``, at most."""
        if not self.is_direct:
            return 0
        copies = world_size if self.kind is PerClientStore else 1
        return copies * sum(aligned(unit.grad_numel * self.dtype.itemsize) for unit in units)


class Arrived(NamedTuple):
    """A push that lies in a slot here."""

    client: int
    slot: int
    unit: int
    present: Sequence[bool] | None
    minibatch: int
    dtype: torch.dtype


class AccumulatorStore(ABC):
    """Sums of the pushes to each owner, minibatch by minibatch.

    Beside the sums of an owner lie 64-bit words: which minibatch each unit accepts pushes of (that of the last one,
    negative, while its sum is final and may still be read; 0 before the first), and in which minibatch each unit, as a
    whole, and each parameter was pushed last, for each sum that there is of it.

    Who adds, and how: on one host the clients do (``is_direct``). Processors call :meth:`add` for each owner. Devices,
    which work later than a lock of the host could keep them apart, call :meth:`add_to_all`: element by element with
    atomic additions, to sums that their owner has zeroed when it opened them. Else the owner's daemon does, with
    :meth:`add_arrived`, and nobody else sees the sums.
    """

    is_per_client: ClassVar[bool]
    """Whether each client has a sum of its own; else it is the writer of none alone, and processors take turns."""

    def __init__(self, end: Endpoint, units: Sequence[UnitSpec], dtype: torch.dtype, is_direct: bool) -> None:
        self._end, self._blocks, self._faults = end, end.transport.peers.blocks, end.faults
        self._units = units
        self._dtype = dtype
        self._rank = end.rank
        self._engine = end.engine
        self._by_atomics = is_direct and end.engine.has_streams
        self._num_sums = end.world_size if self.is_per_client else 1
        self._own = self._sum_of(end.rank)  # where this rank's pushes go, at every owner
        self._after_chunk = end.waiter.after_scatter_chunk
        sizes = [unit.grad_numel for unit in units]
        self._offsets = list(itertools.accumulate((self._aligned(numel) for numel in sizes), initial=0))
        allocate = end.transport.allocate if is_direct else end.transport.allocate_private
        self._buffer: SymmetricBuffer = allocate(self._num_sums * self._offsets[-1] * dtype.itemsize, "accumulators")
        self._params_at = list(itertools.accumulate((len(unit.params) for unit in units), initial=0))
        self._words_per_client = 2 * len(units) + self._params_at[-1]
        num_words = len(units) + self._num_sums * self._words_per_client
        self._state = end.transport.allocate_host(_WORD_BYTES * max(num_words, 1), "accumulator state")
        self._owners = [
            _OwnerSums(self._sums_of(rank), self._state.peer(rank), len(units), self._num_sums, self._params_at[-1])
            if self._state.reaches(rank) and (is_direct or rank == self._rank)
            else None
            for rank in range(end.world_size)
        ]
        self._of_all = [self._buffer.peer(rank) for rank in range(end.world_size)] if self._by_atomics else []

    def _sum_of(self, client: int) -> int:
        """To which of the sums of a unit this client's pushes are added."""
        return client % self._num_sums

    def _aligned(self, numel: int) -> int:
        return aligned(numel * self._dtype.itemsize) // self._dtype.itemsize

    def _sums_of(self, owner: int) -> list[list[torch.Tensor]]:
        """By client and unit, flat."""
        if not self._buffer.reaches(owner):
            return []
        size = self._offsets[-1]
        flat = self._buffer.peer(owner)[: self._num_sums * size * self._dtype.itemsize].view(self._dtype)
        starts = [(client * size + at, unit) for client in range(self._num_sums) for at, unit in self._places()]
        views = [flat[start : start + unit.grad_numel] for start, unit in starts]
        return [views[client * len(self._units) : (client + 1) * len(self._units)] for client in range(self._num_sums)]

    def _own_sums(self, unit: int) -> torch.Tensor:
        """This rank's sums of a unit, a row for each."""
        size, start = self._offsets[-1], self._offsets[unit]
        flat = self._buffer.local[: self._num_sums * size * self._dtype.itemsize].view(self._dtype)
        return flat.view(self._num_sums, size)[:, start : start + self._units[unit].grad_numel]

    def _places(self) -> list[tuple[int, UnitSpec]]:
        return list(zip(self._offsets, self._units, strict=False))

    @property
    def num_bytes(self) -> int:
        """Memory of this rank's part."""
        return self._buffer.num_bytes + self._state.num_bytes

    def add(self, owner: int, unit: int, rows: tuple[torch.Tensor, ...], layout: Layout, minibatch: int) -> None:
        """Add a push of this rank to ``owner``'s sum of ``unit``, on host memory; or write it there, and zeros where it
        has nothing, if it is the first one. Padding is not written: it stays zero.

        Args:
            rows: the owner's row of each part of the push.

        Raises:
            ProtocolError: ``owner`` is not accepting pushes of ``minibatch`` (late, early or duplicate).
        """
        # In one piece: a push takes this way for each owner.
        sums, block, number = self._owners[owner], self._blocks[owner], self._own
        assert sums is not None, "on one host every rank reaches every sum"
        present, numels, offsets, gaps = layout
        if not self.is_per_client and not block.try_lock(unit, self._rank):
            self._await_lock(owner, unit)
        try:
            if sums.accepts[unit] != minibatch or minibatch <= 0:
                self._check_open(owner, minibatch, unit, self._rank)
            pushed, total = sums.pushed[number], sums.sums[number][unit]
            targets = sums.targets.get((number, unit, numels)) if present is None else None
            if targets is None:
                targets = [total[start : start + numel] for start, numel in zip(offsets, numels, strict=True)]
                if present is None:  # not all the choices that there can be
                    sums.targets[number, unit, numels] = targets
            for index, row in enumerate(rows):
                if targets[index].shape != row.shape:  # of several dimensions, or short
                    start = offsets[index]
                    targets[index] = total[start : start + row.numel()].view(row.shape)
            first = pushed.units[unit] != minibatch
            for offset, numel in gaps if first else ():
                self._engine.zero(total[offset : offset + numel], self._after_chunk)
            (self._engine.copy if first else self._engine.add)(targets, rows, self._after_chunk)
            self._note(pushed, unit, present, minibatch)
        finally:
            if not self.is_per_client:
                block.unlock(unit)

    def _await_lock(self, owner: int, unit: int) -> None:
        block, is_held = self._blocks[owner], False

        def try_it(timeout_s: float = 0.0) -> None:
            nonlocal is_held
            is_held = is_held or block.lock(unit, self._rank, timeout_s)

        def pending() -> list[int]:
            try_it()
            if is_held:
                return []
            holder = block.holder(unit)
            return [owner if holder is None else holder]

        try:
            self._end.waiter.wait(
                pending,
                lambda: f"lock of the accumulator of {self._units[unit].name!r} at rank {self._end.name(owner)}",
                block=lambda timeout_s: try_it(min(timeout_s, limits.LOCK_SLICE_S)),
            )
        except BaseException:
            if is_held:  # Ctrl-C, say, between the lock and here
                block.unlock(unit)
            raise

    def add_to_all(self, unit: int, parts: Sequence[Rows], layout: Layout, minibatch: int) -> None:
        """Add row r of ``parts`` to rank r's sum of ``unit``, for every r, by atomic additions.

        Raises:
            ProtocolError: an owner is not accepting pushes of ``minibatch``.
        """
        owners = [self._of(owner) for owner in range(self._end.world_size)]
        if minibatch <= 0 or any(sums.accepts[unit] != minibatch for sums in owners):
            for owner in range(len(owners)):
                self._check_open(owner, minibatch, unit, self._rank)
        start = self._own * self._offsets[-1] + self._offsets[unit]
        rows = [
            Part(grads.contiguous().view(-1), (start + offset) * self._dtype.itemsize, numel)
            for (grads, numel), offset in zip(parts, layout.offsets, strict=True)
        ]
        self._engine.add_rows(self._of_all, rows, self._rank, self._after_chunk)
        for sums in owners:  # each sum has several writers, who all write the same number
            self._note(sums.pushed[self._own], unit, layout.present, minibatch)

    def add_arrived(self, pushes: Sequence[Arrived], slots: torch.Tensor, slot_bytes: int) -> None:
        """Add pushes, at most one of each client, that lie in slots of this rank, to its sums.

        Raises:
            ProtocolError: this rank is not accepting one of them (late, early or duplicate).
        """
        own = self._of(self._rank)
        whole: dict[torch.dtype, dict[tuple[int, int], list[Arrived]]] = {}
        for push in pushes:
            self._check_open(self._rank, push.minibatch, push.unit, push.client)
            if push.present is None:
                groups = whole.setdefault(push.dtype, {})
                groups.setdefault((self._sum_of(push.client), push.unit), []).append(push)
        for dtype, groups in whole.items():
            additions = []
            for (number, unit), group in groups.items():
                is_first = own.pushed[number].units[unit] != group[0].minibatch
                additions.append(Addition(own.sums[number][unit], [push.slot for push in group], 0, is_first))
            self._engine.add_slots(slots, slot_bytes, dtype, additions, self._after_chunk)
            for (number, unit), group in groups.items():
                self._note(own.pushed[number], unit, None, group[0].minibatch)
        for push in pushes:
            if push.present is not None:
                self._add_parts(push, push.present, slots, slot_bytes)

    def _add_parts(self, push: Arrived, present: Sequence[bool], slots: torch.Tensor, slot_bytes: int) -> None:
        """A push that holds the gradients of some parameters."""
        number, own = self._sum_of(push.client), self._of(self._rank)
        total, pushed = own.sums[number][push.unit], own.pushed[number]
        is_first = pushed.units[push.unit] != push.minibatch
        rows = []
        for offset, numel, source in segments(self._units[push.unit], present):
            part = total[offset : offset + numel]
            if source is not None:
                rows.append(Addition(part, [push.slot], source * push.dtype.itemsize, is_first))
            elif is_first:
                rows.append(Addition(part, [], 0, True))
        self._engine.add_slots(slots, slot_bytes, push.dtype, rows, self._after_chunk)
        self._note(pushed, push.unit, present, push.minibatch)

    @abstractmethod
    def collect(self, unit: int, minibatch: int) -> tuple[torch.Tensor, list[bool]] | None:
        """This rank's final sum of ``unit`` (flat, accumulator dtype) and which parameters received a gradient.

        None if nobody pushed the unit. Only after every client is done. Valid until the next call and until the unit
        is opened again; the caller may change it.
        """

    def open(self, unit: int, minibatch: int) -> None:
        """From now on pushes of ``minibatch`` to ``unit`` are welcome. Called before the other ranks are told so."""
        if self._by_atomics:
            self._engine.run(self._own_sums(unit).zero_)
        self._of(self._rank).accepts[unit] = minibatch

    def close(self, minibatch: int) -> None:
        """From now on pushes of ``minibatch`` are late, to any unit; those of the next one are early."""
        accepts = self._of(self._rank).accepts
        for unit in range(len(self._units)):
            accepts[unit] = -minibatch

    def release(self) -> None:
        """Let go of all memory of the transport."""
        self._owners = []

    def _of(self, owner: int) -> _OwnerSums:
        sums = self._owners[owner]
        assert sums is not None, "only the owner adds, or those of its host"
        return sums

    def _note(self, words: _Pushed, unit: int, present: Sequence[bool] | None, minibatch: int) -> None:
        """A push is in the sum."""
        self._faults.hit("scatter.added")
        if present is None:
            words.whole[unit] = minibatch
        else:
            start = self._params_at[unit]
            for index, here in enumerate(present):
                if here:
                    words.params[start + index] = minibatch
        words.units[unit] = minibatch

    def _touched(self, words: _Pushed, unit: int, minibatch: int) -> list[bool]:
        params = words.params[self._params_at[unit] : self._params_at[unit + 1]].tolist()
        return [words.whole[unit] == minibatch or pushed == minibatch for pushed in params]

    def _check_open(self, owner: int, minibatch: int, unit: int, client: int) -> None:
        accepted = self._of(owner).accepts[unit]
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


class _Pushed:
    """In which minibatch each unit was pushed last, in part or as a whole, and each parameter by itself."""

    def __init__(self, words: memoryview, num_units: int) -> None:
        self.units, self.whole, self.params = (
            words[:num_units],
            words[num_units : 2 * num_units],
            words[2 * num_units :],
        )


class _OwnerSums:
    """What one owner has, as this rank sees it."""

    def __init__(
        self, sums: list[list[torch.Tensor]], state: torch.Tensor, num_units: int, num_clients: int, num_params: int
    ) -> None:
        self.sums = sums
        words = state.numpy().data.cast("B").cast("q")
        self.accepts = words[:num_units]
        size = 2 * num_units + num_params
        self.targets: dict[tuple[int, int, tuple[int, ...]], list[torch.Tensor]] = {}
        """By sum and unit, where the parts of whole pushes go, shaped as what came last."""
        starts = [num_units + client * size for client in range(num_clients)]
        self.pushed = [_Pushed(words[start : start + size], num_units) for start in starts]


class SharedStore(AccumulatorStore):
    """One sum per unit: the first push of a minibatch is written there, each later one is added. Processors add under
    the lock of that owner and unit."""

    is_per_client = False

    def collect(self, unit: int, minibatch: int) -> tuple[torch.Tensor, list[bool]] | None:
        sums = self._of(self._rank)
        pushed = sums.pushed[0]
        if pushed.units[unit] != minibatch:
            return None
        return sums.sums[0][unit], self._touched(pushed, unit, minibatch)


class PerClientStore(AccumulatorStore):
    """One sum per client, added in rank order at the end: bit-equal whatever the order of arrival.

    A client is the only writer of its sum, in its own program order, so there is no lock; and a sum is read only
    after its client is done. Costs ``world_size`` shards, that is one full gradient, of memory per rank.
    """

    is_per_client = True

    def __init__(self, end: Endpoint, units: Sequence[UnitSpec], dtype: torch.dtype, is_direct: bool = True) -> None:
        super().__init__(end, units, dtype, is_direct)
        largest = max((unit.grad_numel for unit in units), default=0)
        self._sum = torch.empty(largest, dtype=dtype, device=self._buffer.local.device)

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self._sum.nbytes

    def collect(self, unit: int, minibatch: int) -> tuple[torch.Tensor, list[bool]] | None:
        sums, total = self._of(self._rank), self._sum[: self._units[unit].grad_numel]
        clients = [client for client, pushed in enumerate(sums.pushed) if pushed.units[unit] == minibatch]
        for client in clients:
            (self._engine.copy if client == clients[0] else self._engine.add)([total], [sums.sums[client][unit]])
        if not clients:
            return None
        touched = [self._touched(sums.pushed[client], unit, minibatch) for client in clients]
        return total, [any(flags) for flags in zip(*touched, strict=True)]
