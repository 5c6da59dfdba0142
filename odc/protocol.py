"""The minibatch protocol of one rank: when a gather may read, a push may land, a gradient is final.

PROTOCOL.md beside this file states the rules and why they suffice; tests/test_protocol.py runs this class alone under
random delays and checks that it fails when either signal is removed.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence

import torch

from odc.accumulators import AccumulatorStore
from odc.copier import CopyThread, PendingCopy
from odc.endpoint import Endpoint
from odc.engine import AfterChunk, no_op
from odc.errors import ProtocolError
from odc.pushers import Pusher
from odc.timeline import Timeline
from odc.transports.base import SymmetricBuffer
from odc.units import UnitSpec
from odc.waiting import GONE


class State(enum.Enum):
    """Where this rank stands in minibatch ``k`` (``MinibatchProtocol.minibatch``)."""

    PUBLISHED = "published"  # shards of k are out, no push of k yet
    OPEN = "open"  # in minibatch k
    FINISHED = "finished"  # gradients of k are final, shards of k + 1 not (all) published yet


class MinibatchProtocol:
    """State machine over one transport; the signals of all units and ranks.

    Signals of a rank, in its own memory: ``published[unit][owner]``, ``done[client]``, ``opened[owner]``. All are
    counters: the n-th post of ``published`` means "my shard of this unit for minibatch n is ready", of ``done`` "all my
    pushes of minibatch n are accumulated at you, and I have made all my gathers of it", of ``opened`` "my sums are
    yours to write for minibatch n: nobody here needs those of n - 1".
    """

    def __init__(
        self,
        end: Endpoint,
        units: Sequence[UnitSpec],
        published: SymmetricBuffer,
        offsets: Sequence[int],
        store: AccumulatorStore,
        pusher: Pusher,
    ) -> None:
        self._end = end
        self._units = units
        self._buffer = published
        self._offsets = offsets
        self._store = store
        self._pusher = pusher
        self._rank = end.rank
        self._world_size = end.world_size
        self._rotation = end.transport.topology.rotation()
        self._versions = [0] * len(units)  # of this rank's own published shards
        self._ready = [0] * len(units)  # version up to which all owners are known to have published
        self._done_at = len(units) * self._world_size
        self._opened = 0  # minibatch for which this rank's own sums are open
        self._open_at = [0] * self._world_size  # minibatch for which each owner's sums are known to be open
        self.hold_gradients = False
        """Whether sums stay this rank's own until :meth:`open_sums`, instead of until all units are published."""
        self._pushes = [0] * len(units)  # of this minibatch
        self._ahead: list[PendingCopy] = []
        self.minibatch = 0
        self.state = State.FINISHED
        self.timeline: Timeline | None = None

    @staticmethod
    def num_signals(num_units: int, world_size: int) -> int:
        return num_units * world_size + 2 * world_size

    # Publishing

    def shard(self, unit: int, owner: int) -> torch.Tensor:
        """``owner``'s published shard, as a flat tensor of the unit's dtype in symmetric memory."""
        spec = self._units[unit]
        start = self._offsets[unit]
        return self._buffer.peer(owner)[start : start + spec.shard_bytes].view(spec.dtype)

    def is_published(self, unit: int) -> bool:
        """Whether this rank's shard for the coming (or running) minibatch is out."""
        return self._versions[unit] == self._coming

    @property
    def _coming(self) -> int:
        return self.minibatch + 1 if self.state is State.FINISHED else self.minibatch

    def publish(self, unit: int, fill: Callable[[torch.Tensor], object]) -> None:
        """Let ``fill`` write this rank's shard of ``unit`` for the next minibatch, then tell every rank.

        Raises:
            ProtocolError: not between finish and the next minibatch, or already published for it.
        """
        self._end.waiter.check()
        if self.state is not State.FINISHED or self.is_published(unit):
            raise ProtocolError(
                f"unit {self._units[unit].name!r} cannot be published now (minibatch {self.minibatch} is "
                f"{self.state.value}): a shard is published once, after finish() and before the next minibatch"
            )
        started_ns = time.monotonic_ns()
        self._end.faults.hit("publish.before")
        # Every client is done with the old version: finish() has seen all their done signals.
        self._order_after_done()
        self._end.engine.run(lambda: fill(self.shard(unit, self._rank)))
        self._versions[unit] = self._coming
        for rank in self._rotation:
            self._end.transport.post(rank, unit * self._world_size + self._rank)
        self._end.transport.tick()
        self._end.faults.hit("publish.after")
        self._advance_if_published()
        self._end.stats.publish_bytes += self._units[unit].shard_bytes
        self._end.stats.publish_s += self._record("publish", unit, started_ns)

    def _advance_if_published(self) -> None:
        if self.state is State.FINISHED and all(version == self._coming for version in self._versions):
            self.minibatch, self.state = self._coming, State.PUBLISHED
            self._set_context()
            if not self.hold_gradients:
                self.open_sums()

    @property
    def holds_sums(self) -> bool:
        """Whether all units are published, but this rank's sums are not open for the minibatch yet."""
        return self.state is not State.FINISHED and self._opened < self.minibatch

    def open_sums(self) -> None:
        """Let the other ranks push: what :meth:`gradient` returned is no longer needed. Once per minibatch.

        Raises:
            ProtocolError: units are unpublished, so an optimizer may still read the sums.
        """
        if not self.holds_sums:
            raise ProtocolError(f"sums cannot be opened now: minibatch {self.minibatch} is {self.state.value}")
        self._end.faults.hit("open.before")
        self._opened = self.minibatch
        self._store.open_minibatch(self.minibatch)
        opened_at = (len(self._units) + 1) * self._world_size
        for rank in self._rotation:
            self._end.transport.post(rank, opened_at + self._rank)

    # Inside a minibatch

    def begin(self) -> None:
        """Enter the minibatch whose shards were published.

        Raises:
            ProtocolError: a minibatch is open, or shards are unpublished.
        """
        self._end.waiter.check()
        self._advance_if_published()  # a runtime without units has nothing to publish
        if self.state is not State.PUBLISHED:
            raise ProtocolError(
                f"a minibatch cannot begin now: minibatch {self.minibatch} is {self.state.value}"
                + (" (publish every unit first)" if self.state is State.FINISHED else "")
            )
        if self.holds_sums:
            self.open_sums()
        self.state = State.OPEN
        self._pushes = [0] * len(self._units)
        self._set_context()

    def gather(self, unit: int, out: torch.Tensor, own_in_place: bool = False) -> None:
        """Read the unit's shards of all owners into ``out``, owner by owner, as each becomes ready.

        Args:
            out: flat, ``world_size * shard_numel`` elements of the unit's dtype; rank r's shard comes r-th.
            own_in_place: this rank's part of ``out`` is filled already.

        Raises:
            ProtocolError: between finish and publish, when other owners may already hold the next version.
        """
        self._check_gather(unit)
        started_ns = time.monotonic_ns()
        self._end.faults.hit("gather.before")
        owners = [owner for owner in self._rotation if not (owner == self._rank and own_in_place)]
        if self._end.engine.has_streams and self._ready[unit] == self.minibatch:
            self._gather_at_once(unit, out, owners, own_in_place)
        else:
            self._gather_in_turn(unit, out, owners)
        self._ready[unit] = self.minibatch
        self._after_gather(unit, out, started_ns)

    def _gather_in_turn(self, unit: int, out: torch.Tensor, owners: Sequence[int]) -> None:
        transport, offset, after_chunk = self._end.transport, self._offsets[unit], self._end.waiter.after_gather_chunk
        for part, owner in self._parts(unit, out, owners):
            self._await_published(unit, owner)
            try:
                transport.read(part, self._buffer, owner, offset, after_chunk)
            except GONE as error:
                raise self._end.waiter.explain(error, self._gather_of(unit)) from None

    def _parts(self, unit: int, out: torch.Tensor, owners: Sequence[int]) -> list[tuple[torch.Tensor, int]]:
        """Where each owner's shard goes."""
        numel = self._units[unit].shard_numel
        return [(out[owner * numel : (owner + 1) * numel], owner) for owner in owners]

    def _read_all(self, unit: int, parts: Sequence[tuple[torch.Tensor, int]], after_chunk: AfterChunk) -> None:
        try:
            self._end.transport.read_all(parts, self._buffer, self._offsets[unit], after_chunk)
        except GONE as error:
            raise self._end.waiter.explain(error, self._gather_of(unit)) from None

    def _gather_at_once(self, unit: int, out: torch.Tensor, owners: Sequence[int], own_in_place: bool) -> None:
        """All owners have published: one operation of the device may read many of them."""
        for owner in owners:
            self._end.transport.order_after(unit * self._world_size + owner, self.minibatch)
        after_chunk = self._end.waiter.after_gather_chunk
        if all(self._buffer.reaches(owner) for owner in owners):
            shards = [self.shard(unit, owner) for owner in range(self._world_size)]
            self._end.engine.copy_rows(out, shards, self._rank, own_in_place, after_chunk)
        else:
            self._read_all(unit, self._parts(unit, out, owners), after_chunk)

    def gather_ahead(
        self, copier: CopyThread, unit: int, out: torch.Tensor, own_in_place: bool
    ) -> Callable[[], None] | None:
        """As :meth:`gather`, but copying in the background; call what is returned before using ``out``.

        None if owners have to be waited for: the first gather of a unit in a minibatch stays with :meth:`gather`.
        """
        self._check_gather(unit)
        if self._ready[unit] != self.minibatch:
            return None
        self._end.faults.hit("gather.before")
        owners = [owner for owner in self._rotation if not (owner == self._rank and own_in_place)]
        parts = self._parts(unit, out, owners)

        def copy() -> None:
            self._read_all(unit, parts, no_op)

        self._ahead = [pending for pending in self._ahead if not pending.is_done]
        pending = copier.submit(copy)
        self._ahead.append(pending)

        def wait() -> None:
            started_ns = time.monotonic_ns()
            pending.wait(self._end.waiter.check)
            self._after_gather(unit, out, started_ns)

        return wait

    def _check_gather(self, unit: int) -> None:
        self._end.waiter.check()
        if self.state is State.FINISHED:
            raise ProtocolError(
                f"gather of unit {self._units[unit].name!r} after minibatch {self.minibatch} was finished and before "
                "this rank published its next parameters: the other ranks may have replaced theirs already. "
                "Evaluate inside the minibatch, or after optimizer.step()."
            )

    def _after_gather(self, unit: int, out: torch.Tensor, started_ns: int) -> None:
        self._end.engine.note_use()
        self._end.transport.tick()
        self._end.stats.gathers += 1
        self._end.stats.gather_bytes += out.nbytes
        self._end.stats.gather_s += self._record("gather", unit, started_ns)

    def _gather_of(self, unit: int) -> str:
        return f"gather of unit {self._units[unit].name!r} ({self._units[unit].shard_bytes} bytes)"

    def _await_published(self, unit: int, owner: int) -> None:
        signal = unit * self._world_size + owner
        if self._ready[unit] != self.minibatch:
            self._end.waiter.wait(
                lambda: [owner] if self._end.transport.count(signal) < self.minibatch else [],
                lambda: self._gather_of(unit),
            )
        self._end.transport.order_after(signal, self.minibatch)

    def _await_opened(self, unit: int, owner: int) -> None:
        signal = (len(self._units) + 1) * self._world_size + owner
        if self._open_at[owner] != self.minibatch:
            self._end.waiter.wait(
                lambda: [owner] if self._end.transport.count(signal) < self.minibatch else [],
                lambda: (
                    f"push to unit {self._units[unit].name!r} (that rank still needs its gradients of minibatch "
                    f"{self.minibatch - 1})"
                ),
            )
            self._open_at[owner] = self.minibatch
        self._end.transport.order_after(signal, self.minibatch)

    def scatter_accumulate(self, unit: int, grads: torch.Tensor, present: Sequence[bool] | None = None) -> None:
        """Push each owner its slice of the unit's gradient, to be added to the owner's sum of this minibatch.

        Args:
            grads: flat, ``world_size`` rows of the present parameters' slices back to back; row r goes to rank r.
                May be reused on return.
            present: which trainable parameters the push holds; default all.

        Raises:
            ProtocolError: outside a minibatch.
        """
        self._end.waiter.check()
        if self.state is not State.OPEN:
            raise ProtocolError(
                f"push of unit {self._units[unit].name!r} outside a minibatch (minibatch {self.minibatch} is "
                f"{self.state.value}): run backward inside session.minibatch()"
            )
        started_ns = time.monotonic_ns()
        self._end.faults.hit("scatter.before")
        flags = [True] * len(self._units[unit].params) if present is None else list(present)
        self._pushes[unit] += 1
        self._set_context()
        rows = grads.view(self._world_size, -1)
        for owner in self._rotation:
            # An owner opens its sums only after it has consumed those of the minibatch before, so this keeps a push
            # out of the wrong minibatch. Once known it costs nothing.
            self._await_opened(unit, owner)
            self._pusher.push(owner, unit, rows[owner], flags, self.minibatch)
        self._end.engine.note_use()
        self._end.stats.pushes += 1
        self._end.stats.push_bytes += grads.nbytes
        self._end.stats.push_s += self._record("scatter", unit, started_ns)

    # The end of a minibatch

    def finish(self) -> None:
        """The one synchronization: my pushes are in everywhere, everyone's pushes to me are in.

        Raises:
            ProtocolError: no minibatch is open.
        """
        self._end.waiter.check()
        if self.state is not State.OPEN:
            raise ProtocolError(
                f"finish() without an open minibatch (minibatch {self.minibatch} is {self.state.value})"
            )
        started_ns = time.monotonic_ns()
        self._end.faults.hit("finish.before")
        for pending in self._ahead:  # a prefetch that nobody waited for: it must not read the next shards
            pending.wait(self._end.waiter.check)
        self._ahead.clear()
        self._pusher.drain()
        self._end.faults.hit("finish.before_done")
        self._end.engine.join()  # "done" says of every stream here that its gathers have been made
        for rank in self._rotation:
            self._end.transport.post(rank, self._done_at + self._rank)
        self._await_done()
        self._end.faults.hit("finish.after_done")
        self._store.close_minibatch(self.minibatch)
        self.state = State.FINISHED
        self._set_context()
        self._end.transport.tick()
        self._end.stats.minibatches += 1
        self._end.stats.finish_s += self._record("finish", None, started_ns)

    def _await_done(self) -> None:
        self._end.waiter.wait(
            lambda: [
                r for r in range(self._world_size) if self._end.transport.count(self._done_at + r) < self.minibatch
            ],
            lambda: "end of the minibatch",
        )
        self._order_after_done()

    def _order_after_done(self) -> None:
        """The current stream goes on when all streams of all ranks are done with this minibatch."""
        for rank in range(self._world_size):
            self._end.transport.order_after(self._done_at + rank, self.minibatch)

    def gradient(self, unit: int) -> tuple[torch.Tensor, list[bool]] | None:
        """The final sum over all clients for this rank's shard of ``unit`` and which parameters received one.

        None if no rank pushed the unit. The tensor belongs to the runtime: it is valid until this rank's sums are
        opened (:meth:`open_sums`) and, unless :attr:`AccumulatorStore.sums_stay`, until the next call of this method.
        The caller may change it.
        """
        if self.state is not State.FINISHED:
            raise ProtocolError(f"gradients of minibatch {self.minibatch} are not final: call finish() first")
        return self._store.collect(unit, self.minibatch)

    def _set_context(self) -> None:
        microbatch = max(self._pushes, default=0)
        inner = f", microbatch {microbatch}" if self.state is State.OPEN and microbatch else ""
        self._end.waiter.context = f"minibatch {self.minibatch}{inner}"

    def _record(self, kind: str, unit: int | None, started_ns: int) -> float:
        ended_ns = time.monotonic_ns()
        if self.timeline is not None:
            label = "minibatch" if unit is None else self._units[unit].name
            self.timeline.record(kind, label, started_ns, ended_ns)
        return (ended_ns - started_ns) * 1e-9
