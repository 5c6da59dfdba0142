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
from odc.endpoint import Endpoint
from odc.errors import ProtocolError
from odc.kernels import copy_chunked
from odc.pushers import Pusher
from odc.timeline import Timeline
from odc.transports.base import SymmetricBuffer
from odc.units import UnitSpec


class State(enum.Enum):
    """Where this rank stands in minibatch ``k`` (``MinibatchProtocol.minibatch``)."""

    PUBLISHED = "published"  # shards of k are out, no push of k yet
    OPEN = "open"  # in minibatch k
    FINISHED = "finished"  # gradients of k are final, shards of k + 1 not (all) published yet


class MinibatchProtocol:
    """State machine over one transport; the signals of all units and ranks.

    Signals of a rank, in its own memory: ``published[unit][owner]``, then ``done[client]``. Both are counters: the
    n-th post of ``published`` means "my shard of this unit for minibatch n is ready", of ``done`` "all my pushes of
    minibatch n are accumulated at you, and I have made all my gathers of it".
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
        self._pushes = [0] * len(units)  # of this minibatch
        self.minibatch = 0
        self.state = State.FINISHED
        self.timeline: Timeline | None = None

    @staticmethod
    def num_signals(num_units: int, world_size: int) -> int:
        return num_units * world_size + world_size

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
        fill(self.shard(unit, self._rank))
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
        self._end.waiter.check()
        if self.state is State.FINISHED:
            raise ProtocolError(
                f"gather of unit {self._units[unit].name!r} after minibatch {self.minibatch} was finished and before "
                "this rank published its next parameters: the other ranks may have replaced theirs already. "
                "Evaluate inside the minibatch, or after optimizer.step()."
            )
        started_ns = time.monotonic_ns()
        self._end.faults.hit("gather.before")
        numel = self._units[unit].shard_numel
        for owner in self._rotation:
            if owner == self._rank and own_in_place:
                continue
            self._await_published(unit, owner, "gather of")
            self._copy_shard(unit, owner, out[owner * numel : (owner + 1) * numel])
        self._ready[unit] = self.minibatch
        self._end.transport.tick()
        self._end.stats.gathers += 1
        self._end.stats.gather_bytes += out.nbytes
        self._end.stats.gather_s += self._record("gather", unit, started_ns)

    def _copy_shard(self, unit: int, owner: int, out: torch.Tensor) -> None:
        copy_chunked(out, self.shard(unit, owner), self._end.waiter.after_gather_chunk)

    def _await_published(self, unit: int, owner: int, operation: str) -> None:
        if self._ready[unit] == self.minibatch:
            return
        signal = unit * self._world_size + owner
        self._end.waiter.wait(
            lambda: [owner] if self._end.transport.count(signal) < self.minibatch else [],
            lambda: f"{operation} unit {self._units[unit].name!r} ({self._units[unit].shard_bytes} bytes)",
        )

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
            # An owner publishes only after it has consumed its sum of the minibatch before, so this keeps a push out
            # of the wrong minibatch. After a gather of the unit it is known already and costs nothing.
            self._await_published(unit, owner, "push to")
            self._pusher.push(owner, unit, rows[owner], flags, self.minibatch)
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
        self._pusher.drain()
        self._end.faults.hit("finish.before_done")
        done_at = len(self._units) * self._world_size
        for rank in self._rotation:
            self._end.transport.post(rank, done_at + self._rank)
        self._await_done(done_at)
        self._end.faults.hit("finish.after_done")
        self._store.close_minibatch(self.minibatch)
        self.state = State.FINISHED
        self._set_context()
        self._end.transport.tick()
        self._end.stats.minibatches += 1
        self._end.stats.finish_s += self._record("finish", None, started_ns)

    def _await_done(self, done_at: int) -> None:
        self._end.waiter.wait(
            lambda: [r for r in range(self._world_size) if self._end.transport.count(done_at + r) < self.minibatch],
            lambda: "end of the minibatch",
        )

    def gradient(self, unit: int) -> tuple[torch.Tensor, list[bool]] | None:
        """The final sum over all clients for this rank's shard of ``unit`` and which parameters received one.

        None if no rank pushed the unit. The tensor belongs to the runtime: it is valid until the next call of this
        method or until this rank publishes, whichever comes first.
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
