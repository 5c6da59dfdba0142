"""The minibatch protocol of one rank: when a gather may read, a push may land, a gradient is final.

PROTOCOL.md in this folder states the rules and why they suffice. tests/minibatch/test_protocol.py runs this class alone
under random delays, and checks that it fails if any signal is removed.
"""

from __future__ import annotations

import contextlib
import enum
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from odc.errors import OUR_FAULT, MisuseError, PeerClosedError, PeerDiedError, ProtocolError
from odc.minibatch.accumulators import AccumulatorStore
from odc.minibatch.daemon import AccumulationDaemon
from odc.minibatch.state import MinibatchState, Phase
from odc.rank.waiting import GONE, Endpoint
from odc.timeline import Timeline
from odc.transports.base import SymmetricBuffer
from odc.units import Destination, Layout, Rows, UnitSpec


class EndKind(enum.IntEnum):
    """What becomes of the sums of a minibatch. All ranks must end it in the same way."""

    USE = 1  # they are the gradients of a step
    DISCARD = 2  # they are thrown away
    FENCE = 3  # there are none: shards are replaced (Session.publish)


_KIND_TEXTS = {
    EndKind.USE: "for a step",
    EndKind.DISCARD: "to throw it away (discard)",
    EndKind.FENCE: "to publish changed parameters",
}


NUM_NOTES = 5
"""Numbers that the caller sends along with the end of a minibatch."""


@dataclass(frozen=True)
class End:
    """How one rank has ended a minibatch; every rank learns it of every other one, together with ``done``."""

    kind: EndKind = EndKind.USE
    notes: tuple[int, ...] = (0,) * NUM_NOTES
    """Numbers of the caller, which the protocol only carries."""
    has_pushed: bool = False
    """Filled in by the protocol: this rank has pushed gradients in this minibatch."""
    num_collectives: int = 0
    """Filled in by the protocol: :attr:`MinibatchProtocol.num_collectives` before it."""


CHANGE_EVERYWHERE = (
    "Change parameters on every rank at the same place of the loop; where that changes nothing on some (through .data, "
    "of a parameter that lies on another rank), call odc.session_of(model).publish() behind it, on every rank"
)


def require_same_end(minibatch: int, ends: Mapping[int, End]) -> None:
    """Refuse a minibatch that ranks have ended in different ways; ``ends``: by global rank.

    Raises:
        ProtocolError: naming two of them.
    """
    (first, how), *others = ends.items()
    for rank, other in others:
        if other.kind is not how.kind:
            is_of_changes = EndKind.FENCE in (how.kind, other.kind)
            must = "Every rank must step, discard() or publish() at the same place of the loop"
            raise ProtocolError(
                f"the ranks have ended minibatch {minibatch} in different ways: rank {first} {_KIND_TEXTS[how.kind]}, "
                f"rank {rank} {_KIND_TEXTS[other.kind]}. {CHANGE_EVERYWHERE if is_of_changes else must}"
            )


_PushToAll = Callable[[int, Sequence[Rows], Layout, int], None]

_END_WORDS = 5 + NUM_NOTES  # minibatch, kind, num_collectives, has_pushed, notes, pushes sent to a daemon so far
_SENT = _END_WORDS - 1
_END_FORMAT = f"={_END_WORDS}q"


class MinibatchProtocol:
    """The steps of :class:`MinibatchState` over one transport; the signals of all units and ranks.

    Signals that each rank posts, and all others see: ``published[unit]``, ``open`` and ``done``. They are counters: the
    n-th post of ``published`` means "my shard of this unit for minibatch n is ready to be read", of ``open`` "my sums
    are ready to be added to in minibatch n", of ``done`` "all my pushes of minibatch n are accumulated, and I have made
    all my gathers of it".

    Args:
        daemon: adds the pushes of other ranks to this rank's sums; None: each client does so itself.
    """

    def __init__(
        self,
        end: Endpoint,
        units: Sequence[UnitSpec],
        published: SymmetricBuffer,
        offsets: Sequence[int],
        store: AccumulatorStore,
        daemon: AccumulationDaemon | None,
    ) -> None:
        self._end, self._engine, self._waiter = end, end.engine, end.waiter
        self._faults, self._stats = end.faults, end.stats
        self._units = units
        self._buffer = published
        self._offsets = offsets
        self._store = store
        self._daemon = daemon
        self._has_streams = end.engine.has_streams
        # Beside it, who sends a push to all owners at once; None: it is added owner by owner, on host memory.
        self._push_to_all: _PushToAll | None = daemon.push if daemon is not None else None
        if daemon is None and self._has_streams:
            self._push_to_all = store.add_to_all
        self._rank = end.rank
        self.world_size = end.world_size
        self._rotation = end.transport.topology.rotation()
        self._others = [rank for rank in self._rotation if rank != self._rank]
        self._shards = [[self._view(unit, owner) for owner in range(self.world_size)] for unit in range(len(units))]
        self.state = MinibatchState([unit.name for unit in units])
        self._parts: dict[int, tuple[list[torch.Size], list[list[torch.Tensor] | None]]] = {}  # of shards, by unit
        self._layouts: dict[tuple[int, ...], Layout] = {}  # of whole pushes
        self._ready = [0] * len(units)  # version up to which all owners are known to have published
        self._done, self._open = len(units), len(units) + 1  # signals
        # What each client says of its end, for two minibatches in turn: it may be done with k + 1 before this rank has
        # looked at its words of k, and is never further ahead. They lie at the client, and in copies on other hosts.
        num_bytes = 8 * 2 * self.world_size * _END_WORDS
        self._end_words = end.transport.allocate_host(num_bytes, "ends of minibatches")
        self._ends_of = [self._words_of(rank) for rank in range(self.world_size)]
        self.timeline: Timeline | None = None
        self.num_collectives = 0
        """How many that every rank comes to, outside of minibatches, this rank has entered since the last end."""
        self.others: Sequence[MinibatchProtocol] = ()
        """Of this rank on other meshes, where this one leads: they end with it."""
        end.waiter.where = self._where

    @property
    def meshes(self) -> Sequence[MinibatchProtocol]:
        """This one, and those that end with it."""
        return (self, *self.others)

    @staticmethod
    def num_signals(num_units: int) -> int:
        """How many signals of each rank are set aside."""
        return num_units + 2

    def _view(self, unit: int, owner: int) -> torch.Tensor | None:
        if not self._buffer.reaches(owner):
            return None
        spec, start = self._units[unit], self._offsets[unit]
        return self._buffer.peer(owner)[start : start + spec.shard_bytes].view(spec.dtype)

    def _words_of(self, rank: int) -> memoryview:
        words = self._end_words.peer(rank) if self._end_words.reaches(rank) else self._end_words.local
        return words.numpy().data.cast("B").cast("q")

    # Publishing

    def shard(self, unit: int) -> torch.Tensor:
        """This rank's published shard, as a flat tensor of the unit's dtype in symmetric memory."""
        own = self._shards[unit][self._rank]
        assert own is not None
        return own

    def open_sums(self) -> None:
        """This rank has taken its sums: pushes of the next minibatch may come. What :meth:`gradient` has returned is no
        longer valid. Without this call the sum of each unit is opened when that is published.

        Raises:
            MisuseError: not after finish.
        """
        if self.state.phase is not Phase.FINISHED:
            raise MisuseError(f"open_sums() before minibatch {self.state.minibatch} was finished. {OUR_FAULT}")
        for unit in range(len(self._units)):
            self._open_sum(unit)

    def _open_sum(self, unit: int) -> None:
        if self.state.is_open(unit):
            return
        self._store.open(unit, self.state.coming)  # before anybody is told: see PROTOCOL.md
        if self.state.open(unit):
            self._end.transport.post(self._open)

    def publish(self, unit: int, fill: Callable[[torch.Tensor], object] | None) -> None:
        """Let ``fill`` write this rank's shard of ``unit`` for the next minibatch, then tell every rank.

        They may read it from then on, and add to this rank's sums once all are open (:meth:`open_sums`).

        Args:
            fill: None: the unit is what it was, on every rank. Then this rank's gathers wait for nobody who has yet to
                say so.

        Raises:
            MisuseError: not between finish and the next minibatch, or already published for it.
        """
        self._waiter.check()
        self.state.check_publish(unit)
        started_ns = time.monotonic_ns()
        self._faults.hit("publish.before")
        # Every client is done with the old version: finish() has seen all their done signals.
        if self._has_streams:
            self._order_after_done()
        if fill is not None:
            shard, write = self.shard(unit), fill
            self._engine.run(lambda: write(shard))
            self._stats.publish_bytes += self._units[unit].shard_bytes
        self._open_sum(unit)
        self.state.publish(unit, is_changed=fill is not None)
        self._end.transport.post(unit)
        self._end.transport.peers.tick()
        self._faults.hit("publish.after")
        self._stats.publish_s += self._record("publish", unit, started_ns, is_changed=fill is not None)

    # Inside a minibatch

    def begin(self) -> None:
        """Enter the minibatch whose shards were published.

        Raises:
            MisuseError: a minibatch is open, or shards are unpublished, or are about to be replaced (:meth:`fence`).
        """
        self._waiter.check()
        self.state.begin()

    def gather(self, unit: int, out: Destination, own_in_place: bool = False) -> None:
        """Read the unit's shards of all owners into ``out``, owner by owner, as each becomes ready.

        Args:
            own_in_place: this rank's rows of ``out``, which is dense, are filled already.

        Raises:
            MisuseError: between finish and publish, when other owners may already hold the next version.
        """
        self._waiter.check()
        self.state.check_gather(unit)
        started_ns = time.monotonic_ns()
        self._faults.hit("gather.before")
        owners = self._others if own_in_place else self._rotation
        is_ready = self._ready[unit] == self.state.changed[unit]
        if self._has_streams:
            if not is_ready:
                self._await_published(unit, self._rotation)
            self._end.transport.order_after(self._rotation, unit, self.state.changed[unit])
            self._gather_at_once(unit, out, owners, own_in_place)
            self._engine.note_use()
        else:
            rows, after_chunk = out.rows, self._waiter.after_gather_chunk
            known = self._parts.get(unit)
            if known is None or known[0] != out.shapes:
                parts = [None if shard is None else out.parts_of(shard) for shard in self._shards[unit]]
                known = self._parts[unit] = out.shapes, parts
            for owner in owners:
                if not is_ready:
                    self._await_published(unit, [owner])
                source = known[1][owner]
                if source is None:
                    self._read_row(unit, owner, rows[owner])
                else:
                    self._engine.copy(rows[owner], source, after_chunk)
        self._ready[unit] = self.state.changed[unit]
        stats, ended_ns = self._stats, time.monotonic_ns()
        stats.gathers += 1
        stats.gather_bytes += out.nbytes
        stats.gather_s += (ended_ns - started_ns) * 1e-9
        if self.timeline is not None:
            self.timeline.record("gather", self._units[unit].name, started_ns, ended_ns, bytes=out.nbytes)

    def _read_row(self, unit: int, owner: int, row: Sequence[torch.Tensor]) -> None:
        """The shard of an owner on another host. What arrives goes into its place; but for what is not dense, which
        takes one more pass."""
        dense = [there if there.is_contiguous() else there.new_empty(there.shape) for there in row]
        self._read_far(unit, [([there.view(-1) for there in dense], owner)])
        apart = [(there, tmp) for there, tmp in zip(row, dense, strict=True) if tmp is not there]
        if apart:
            self._engine.copy([one for one, _ in apart], [tmp for _, tmp in apart], self._waiter.after_gather_chunk)

    def _read_far(self, unit: int, parts: Sequence[tuple[Sequence[torch.Tensor], int]]) -> None:
        """Shards of owners on other hosts, each into its places."""
        after_chunk = self._waiter.after_gather_chunk
        try:
            self._end.transport.read(parts, self._buffer, self._offsets[unit], after_chunk)
        except GONE as error:
            raise self._waiter.explain(error, self._gather_of(unit)) from None

    def _gather_at_once(self, unit: int, out: Destination, owners: Sequence[int], own_in_place: bool) -> None:
        """All owners have published: one operation of the device may read many of them, each part into its place."""
        engine, device = self._engine, out.outs[0].device
        dense = [
            torch.empty(there.numel(), dtype=out.dtype, device=device) if flat is None else flat
            for there, flat in zip(out.outs, out.flat, strict=True)
        ]
        shards = [shard for shard in self._shards[unit] if shard is not None]
        if len(shards) == self.world_size:
            engine.read_rows(dense, shards, self._rank, own_in_place, self._waiter.after_gather_chunk)
        else:
            # A copy for each part of each row. Whether to read whole rows, and have one launch hand them out, would be
            # faster for many parts, only GPUs of several hosts can show.
            rows = list(zip(*(flat.view(self.world_size, -1).unbind() for flat in dense), strict=True))
            self._read_far(unit, [(rows[owner], owner) for owner in owners])
        apart = [(there, tmp) for there, tmp, flat in zip(out.outs, dense, out.flat, strict=True) if flat is None]
        if apart:
            engine.run(lambda: [there.copy_(tmp.view(there.shape)) for there, tmp in apart])

    def _gather_of(self, unit: int) -> str:
        return f"gather of unit {self._units[unit].name!r} ({self._units[unit].shard_bytes} bytes)"

    def _await_published(self, unit: int, owners: Sequence[int]) -> None:
        """Wait until ``owners`` have published the unit as it is since this rank has changed its own part last."""
        self._await_posts(unit, self.state.changed[unit], owners, lambda: self._gather_of(unit))

    def _await_open(self, unit: int, owners: Sequence[int]) -> None:
        """Wait until ``owners`` have opened their sums for this minibatch, to push to ``unit``."""
        self._await_posts(self._open, self.state.minibatch, owners, lambda: f"push to unit {self._units[unit].name!r}")

    def _await_posts(self, signal: int, number: int, owners: Sequence[int], what: Callable[[], str]) -> None:
        count = self._end.transport.count
        late = [owner for owner in owners if count(owner, signal) < number]
        if late:
            self._waiter.wait(lambda: [owner for owner in late if count(owner, signal) < number], what)

    def scatter_accumulate(self, unit: int, parts: Sequence[Rows], present: Sequence[bool] | None = None) -> None:
        """Push each owner its slice of the unit's gradient, to be added to the owner's sum of this minibatch.

        Args:
            parts: together the gradients of the present parameters; none spans one that is not. Row r goes to rank r.
                May be reused on return.
            present: which trainable parameters the push holds, if not all.

        Raises:
            MisuseError: outside a minibatch.
        """
        self._waiter.check()
        # An owner opens its sums only after it has taken those of the minibatch before, so to wait for that keeps a
        # push out of the wrong minibatch. The first one has waited for all of them.
        is_welcome = not self.state.push(unit)
        started_ns = time.monotonic_ns()
        self._faults.hit("scatter.before")
        minibatch, numels = self.state.minibatch, [part.numel for part in parts]
        layout = self._layouts.get((unit, *numels)) if present is None else None
        if layout is None:
            layout = Layout.of(self._units[unit], numels, present)
            if present is None:
                self._layouts[(unit, *numels)] = layout
        if self._push_to_all is not None:
            if not is_welcome:
                self._await_open(unit, self._rotation)
            self._end.transport.order_after(self._rotation, self._open, minibatch)
            self._push_to_all(unit, parts, layout, minibatch)
            self._engine.note_use()
        else:
            rows = list(zip(*[part.unbind(self.world_size) for part in parts], strict=True))
            for owner in self._rotation:
                if not is_welcome:
                    self._await_open(unit, [owner])
                self._store.add(owner, unit, rows[owner], layout, minibatch)
        num_bytes = sum([part.grads.nbytes for part in parts])
        stats, ended_ns = self._stats, time.monotonic_ns()
        stats.pushes += 1
        stats.push_bytes += num_bytes
        stats.push_s += (ended_ns - started_ns) * 1e-9
        if self.timeline is not None:
            self.timeline.record("scatter", self._units[unit].name, started_ns, ended_ns, bytes=num_bytes)

    # The end of a minibatch

    def finish(self, how: End | None = None) -> None:
        """The one synchronization: my pushes are in everywhere, everyone's pushes to me are in.

        Args:
            how: what this rank does with the sums; default: use them for a step.

        Raises:
            MisuseError: no minibatch is open.
            ProtocolError: the ranks have ended this minibatch in different ways.
        """
        self._waiter.check()
        self.state.check_finish()
        started_ns = time.monotonic_ns()
        self._say_done(how or End())
        for one in self.meshes:
            one._await_done()
        self._complete(started_ns)

    def begin_fence(self, how: End) -> None:
        """Begin an empty minibatch: behind it nobody reads the published shards any more, and they may be replaced.
        Nothing if it has begun.

        Raises:
            MisuseError: a minibatch is open, or shards are unpublished.
        """
        if self.state.phase is not Phase.FENCED:
            self._waiter.check()
            for one in self.meshes:
                one.state.fence()
            self._say_done(how)

    def late(self) -> list[int]:
        """The ranks of this mesh, by their numbers here, that are not done with this minibatch."""
        count, done, minibatch = self._end.transport.count, self._done, self.state.minibatch
        return [rank for rank in self._rotation if count(rank, done) < minibatch]

    def end_fence(self) -> None:
        """Nobody is late, on any mesh.

        Raises:
            ProtocolError: the ranks have ended this minibatch in different ways.
        """
        started_ns = time.monotonic_ns()
        for one in self.meshes:
            if one._has_streams:
                one._order_after_done()
        self._complete(started_ns)

    def _say_done(self, how: End) -> None:
        """On all meshes, before any of their ends is waited for."""
        for one in self.meshes:
            one._send_all()
        has_pushed = any(any(one.state.pushes) for one in self.meshes)
        said = replace(how, has_pushed=has_pushed, num_collectives=self.num_collectives)
        self.num_collectives = 0
        for one in self.meshes:
            one._post_done(said)

    def _send_all(self) -> None:
        self._faults.hit("finish.before")
        if self._daemon is not None:
            self._daemon.drain()
        self._faults.hit("finish.before_done")
        self._engine.join()  # "done" says of every stream here that its gathers have been made

    def _complete(self, started_ns: int) -> None:
        for one in self.meshes:
            one._close_sums()
        self._stats.minibatches += 1
        self._stats.finish_s += self._record("finish", None, started_ns)

    def _close_sums(self) -> None:
        """All ranks are done."""
        if self._daemon is not None:
            self._daemon.finish([words[self._end_at(rank) + _SENT] for rank, words in enumerate(self._ends_of)])
        self._faults.hit("finish.after_done")
        self._store.close(self.state.minibatch)
        self.state.finish()
        self._check_ends()
        self._end.transport.peers.tick()

    def left_behind(self) -> int | None:
        """A rank, by its number in the job, that will not come to the collective in which this rank is: it has ended
        the coming minibatch, and entered fewer before. Asked beside the training loop, which goes on meanwhile."""
        before = number, coming = self.num_collectives, self.state.coming
        found = None
        for rank in self._others:
            words, at = self._ends_of[rank], self._end_at(rank, coming)
            if self._end.transport.count(rank, self._done) < coming or words[at + 1] == EndKind.FENCE:
                continue
            if words[at] == coming and words[at + 2] < number:
                found = self._end.name(rank)
        return found if (self.num_collectives, self.state.coming) == before else None

    def _post_done(self, how: End) -> None:
        sent = 0 if self._daemon is None else self._daemon.sent
        row = [self.state.minibatch, how.kind, how.num_collectives, how.has_pushed, *how.notes, sent]
        at = self._end_at(self._rank)
        self._ends_of[self._rank][at : at + _END_WORDS] = words = memoryview(struct.pack(_END_FORMAT, *row)).cast("q")
        for rank in self._end.transport.topology.ranks_elsewhere():
            with contextlib.suppress(PeerClosedError, PeerDiedError):  # whoever waits for its answer reports it
                self._end.transport.write_host(self._end_words, rank, 8 * at, words.tobytes())
        self._end.transport.post(self._done)

    def _end_at(self, rank: int, minibatch: int | None = None) -> int:
        """Where the words of ``rank``'s end of a minibatch begin; default: of this one."""
        number = self.state.minibatch if minibatch is None else minibatch
        return (number % 2 * self.world_size + rank) * _END_WORDS

    def _check_ends(self) -> None:
        """What the others have said with ``done``. Ranks that end a minibatch in different ways are not at the same
        place of their script: no step must use its sums."""
        kinds = set()
        for rank, words in enumerate(self._ends_of):
            at = self._end_at(rank)
            if words[at] != self.state.minibatch:
                raise ProtocolError(
                    f"rank {rank} is done with minibatch {self.state.minibatch} and speaks of {words[at]}. {OUR_FAULT}"
                )
            kinds.add(words[at + 1])
        if len(kinds) > 1:
            topology = self._end.transport.topology
            require_same_end(
                self.state.minibatch, {topology.global_rank(rank): end for rank, end in enumerate(self.ends)}
            )

    @property
    def ends(self) -> list[End]:
        """How each rank has ended the minibatch that is final. Until this rank has published the next one."""
        places = map(self._end_at, range(self.world_size))
        rows = [words[at : at + _END_WORDS].tolist() for at, words in zip(places, self._ends_of, strict=True)]
        return [
            End(EndKind(kind), tuple(notes), bool(pushed), collectives)
            for _, kind, collectives, pushed, *notes, _ in rows
        ]

    def _await_done(self) -> None:
        self._waiter.wait(self.late, lambda: "end of the minibatch")
        if self._has_streams:
            self._order_after_done()

    def _order_after_done(self) -> None:
        """The current stream goes on when all streams of all ranks are done with this minibatch."""
        self._end.transport.order_after(self._rotation, self._done, self.state.minibatch)

    def gradient(self, unit: int) -> tuple[torch.Tensor, list[bool]] | None:
        """The final sum over all clients for this rank's shard of ``unit`` and which parameters received one.

        None if no rank pushed the unit. The tensor belongs to the runtime: it is valid until the next call of this
        method, until :meth:`open_sums`, and until the unit is published. The caller may change it.

        Raises:
            MisuseError: before finish, or after the sum was opened anew.
        """
        self.state.check_gradient(unit)
        return self._store.collect(unit, self.state.minibatch)

    def release(self) -> None:
        """Let go of all memory of the transport; the runtime has closed."""
        self._shards, self._ends_of, self._parts = [], [], {}
        self._store.release()

    def _where(self) -> str:
        microbatch = self.state.num_pushed
        return f"minibatch {self.state.minibatch}" + (f", microbatch {microbatch}" if microbatch else "")

    def _record(self, kind: str, unit: int | None, started_ns: int, is_changed: bool = False) -> float:
        ended_ns = time.monotonic_ns()
        if self.timeline is not None:
            if unit is None:
                self.timeline.record(kind, "minibatch", started_ns, ended_ns)
            else:
                spec = self._units[unit]
                written = spec.shard_bytes if is_changed else 0
                self.timeline.record(kind, spec.name, started_ns, ended_ns, bytes=written)
        return (ended_ns - started_ns) * 1e-9
