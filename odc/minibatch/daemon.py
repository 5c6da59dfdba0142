"""Pushes through slots: a client writes its gradient into a slot at every owner, and a thread of the owner (the daemon)
adds it to the sum.

[Note: Only what has arrived] Hosts run ahead of their devices, so a push is announced long before its gradient is
computed. If an owner's stream waited for it, the stream would delay the pushes of all other clients. If it shared a
hardware queue with the script's streams, it would also delay the script's kernels, for example a collective that the
awaited client has not reached yet: a deadlock. So the owner's host checks which pushes have arrived, and gives only
these to its stream.

[Note: Nobody waits for a slot forever] For the same reason the acknowledgement of an owner may be delayed: its stream
may share a queue with a kernel that waits for this client in a collective. So a client waits for a slot only briefly.
Then it keeps its pushes in its own memory until slots are free, at the latest until the end of its minibatch: by then
it has reached every collective in which others may wait. If the kept pushes are as large as all gradients together, the
client again waits briefly before each further push, so that an owner that is merely slow sets the pace.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from odc import limits
from odc.engines.base import Engine, Part
from odc.errors import OUR_FAULT, ProtocolError
from odc.liveness.threads import HelperThread
from odc.minibatch.accumulators import AccumulatorStore, Arrived
from odc.rank.waiting import GONE, Endpoint
from odc.transports.base import aligned
from odc.units import Layout, Rows, UnitSpec

logger = logging.getLogger("odc")

NUM_SLOTS = 2
"""Of each client at each owner: one is filled while the other is added."""
# Header of a slot. The number counts the client's pushes, from 1, each of which goes to all owners; "whole" says that
# all parameters are in it, else a byte for each says whether it is. The dtype is a number in _NARROW, or 0: the unit's.
_HEADER = struct.Struct("=qqqqqq")  # number, unit, minibatch, elements, dtype, whole
_NARROW = (None, torch.bfloat16, torch.float16, torch.float32)


def _dtype_of(parts: Sequence[Rows], unit: UnitSpec) -> torch.dtype:
    """What a push is sent in: the dtype that all of it was computed in, where that takes fewer bytes than the unit's.
    The owner casts, and nothing is rounded either way, so its sums have the same bits."""
    dtypes = {part.grads.dtype for part in parts}
    found = dtypes.pop()
    is_narrow = not dtypes and found in _NARROW and found.itemsize < unit.grad_dtype.itemsize
    return found if is_narrow else unit.grad_dtype


class _Push(NamedTuple):
    """One that waits for a slot."""

    unit: int
    parts: Sequence[Rows]
    layout: Layout
    minibatch: int

    @property
    def num_bytes(self) -> int:
        return sum(part.grads.nbytes for part in self.parts)

    def copied(self, engine: Engine) -> _Push:
        """The same, in memory of its own."""
        copies = [torch.empty_like(part.grads) for part in self.parts]
        engine.copy(copies, [part.grads for part in self.parts])
        parts = [part._replace(grads=copy) for part, copy in zip(self.parts, copies, strict=True)]
        return self._replace(parts=parts)


class AccumulationDaemon:
    """Both sides of it. :data:`NUM_SLOTS` slots per client, each large enough for the largest unit's slice and shared
    by all units (paper section 3.2 and appendix B): ``NUM_SLOTS * world_size * max(slice)`` elements per rank.

    A thread, not a process: it lives and dies with its rank. Torch releases the GIL while it adds.

    Args:
        signals_at: of ``1 + world_size`` signals of each rank: posted to all owners, acknowledged to each client.
        on_failure: told of what ends the thread.
    """

    def __init__(
        self,
        end: Endpoint,
        store: AccumulatorStore,
        units: Sequence[UnitSpec],
        signals_at: int,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._end = end
        self._transport = end.transport
        self._store = store
        self._units = units
        self._rank = end.rank
        self._world = range(end.world_size)
        self._on_failure = on_failure
        self._patience_s = limits.DAEMON_PATIENCE_S if end.engine.has_streams else float("inf")
        self._posted, self._acked_at = signals_at, signals_at + 1
        self._slot_bytes = self.slot_bytes(units)
        self._header_bytes = aligned(_HEADER.size + max((len(u.params) for u in units), default=0))
        num_slots = end.world_size * NUM_SLOTS
        self._slots = end.transport.allocate(self.slots_bytes(units, end.world_size), "slots")
        self._headers = end.transport.allocate_host(num_slots * self._header_bytes, "slot headers")
        is_near = all(self._slots.reaches(rank) for rank in self._world)
        self._of_all = [self._slots.peer(rank) for rank in self._world] if is_near else []
        self._elsewhere = end.transport.topology.ranks_elsewhere()
        self._header_views = [self._header_view(client) for client in self._world]
        self._sent = 0  # pushes of this rank; each goes to all owners
        self._num_emptied = 0  # owners that are known to have emptied the slot that comes next
        self._kept: deque[_Push] = deque()
        self._has_kept, self._kept_bytes = False, 0
        gradients = sum(unit.grad_numel * unit.grad_dtype.itemsize for unit in units)
        self._most_kept_bytes = end.world_size * gradients  # of all units, unsharded; more only where owners are stuck
        self._handled = [0] * end.world_size
        self._stopping = threading.Event()
        self._progress = threading.Event()  # of the thread
        self._thread = HelperThread(self._run, "odc-accumulation")

    @staticmethod
    def num_signals(world_size: int) -> int:
        """How many signals of each rank are set aside."""
        return 1 + world_size

    @classmethod
    def slots_bytes(cls, units: Sequence[UnitSpec], world_size: int) -> int:
        """Size of all slots of one rank."""
        return world_size * NUM_SLOTS * cls.slot_bytes(units)

    @staticmethod
    def slot_bytes(units: Sequence[UnitSpec]) -> int:
        """Size of one slot."""
        return aligned(max((u.grad_numel * u.grad_dtype.itemsize for u in units), default=1))

    def _header_view(self, client: int) -> memoryview:
        """The headers of a client's slots: at the client where its memory is mapped, else in the copy here."""
        headers = self._headers.peer(client) if self._headers.reaches(client) else self._headers.local
        start = client * NUM_SLOTS * self._header_bytes
        return headers[start : start + NUM_SLOTS * self._header_bytes].numpy().data

    @property
    def num_bytes(self) -> int:
        """Memory of this rank that holds slots."""
        return self._slots.num_bytes + self._headers.num_bytes

    @property
    def sent(self) -> int:
        """How many pushes this rank has sent to every owner."""
        return self._sent

    def start(self) -> None:
        """Begin to serve, once set-up is over."""
        self._thread.start()

    # The client

    def push(self, unit: int, parts: Sequence[Rows], layout: Layout, minibatch: int) -> None:
        """Send row r of ``parts`` to rank r for every r, who adds it to its sum of ``unit``. They may be reused on
        return."""
        push = _Push(unit, parts, layout, minibatch)
        while self._kept and self._has_room():
            self._send_kept()
        if not self._kept and (self._has_room() or self._await_room(self._patience_s)):
            self._send(push)
            return
        # An owner that is slow, and not stuck, must not have its clients fill their memory: they slow down to its pace.
        while self._kept_bytes > self._most_kept_bytes and self._await_room(self._patience_s):
            self._send_kept()
        self._keep(push)

    def _keep(self, push: _Push) -> None:
        if not self._has_kept:
            self._has_kept = True
            logger.warning(
                "odc: rank %d keeps pushes in memory of its own: for %g s, rank %d has not come to add earlier ones. A "
                "collective of the script may hold up its streams: CUDA_DEVICE_MAX_CONNECTIONS=32 gives them more "
                "hardware queues. (Said once.)",
                self._end.name(self._rank),
                self._patience_s,
                self._end.name(self._owner_without_room() or 0),
            )
        try:
            with self._end.engine.take("kept pushes"):
                kept = push.copied(self._end.engine)
        except torch.OutOfMemoryError:  # then it has to wait, as if there were nothing to keep it in
            self.drain()
            self._await_room(float("inf"))
            self._send(push)
        else:
            self._kept.append(kept)
            self._kept_bytes += kept.num_bytes

    def drain(self) -> None:
        """Return when this rank has sent all its pushes."""
        while self._kept:
            self._await_room(float("inf"))
            self._send_kept()

    def _send_kept(self) -> None:
        push = self._kept.popleft()
        self._kept_bytes -= push.num_bytes
        with self._end.engine.take("kept pushes"):
            self._send(push)
            for part in push.parts:
                self._end.engine.hold(part.grads)

    def _has_room(self) -> bool:
        """Whether all owners have emptied the slot that comes next."""
        return self._owner_without_room() is None

    def _owner_without_room(self) -> int | None:
        """The first that has not acknowledged the push that was in the slot before; those in front of it have."""
        needed, signal = self._sent + 1 - NUM_SLOTS, self._acked_at + self._rank
        while self._num_emptied < len(self._world):
            if not self._transport.has_arrived(self._num_emptied, signal, needed):
                return self._num_emptied
            self._num_emptied += 1
        return None

    def _await_room(self, patience_s: float) -> bool:
        """Whether there is room, within ``patience_s``."""
        deadline = time.monotonic() + patience_s

        def late() -> list[int]:
            owner = self._owner_without_room()
            return [] if owner is None or time.monotonic() > deadline else [owner]

        def what() -> str:
            before = self._sent + 1 - NUM_SLOTS
            is_there = self._transport.has_arrived(self._rank, self._posted, before)
            late = "its owner has not added" if is_there else "this rank's own device has not come to"
            return f"slot for push {self._sent + 1}: {late} push {before} yet"

        poll = self._poll(late)
        if poll is not None:
            poll(limits.DAEMON_GLANCE_S)  # mostly it takes no longer, and the care of a wait costs more than that
        self._end.waiter.wait(late, what, block=poll)
        return self._has_room()

    def _poll(self, pending: Callable[[], Sequence[int]]) -> Callable[[float], None] | None:
        """How to sleep for what a device has yet to do; None on a host, where who is awaited wakes this rank."""
        if not self._end.engine.has_streams:
            return None

        def poll(limit_s: float) -> None:
            deadline, pause_s = time.monotonic() + limit_s, limits.SLOT_PAUSE_S
            while pending() and time.monotonic() < deadline:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, limits.DEVICE_PAUSES_S[1])

        return poll

    def _send(self, push: _Push) -> None:
        # Pushes may come from several streams (FSDP has one for each root). They arrive in the order of their numbers:
        # a word that says that one is there says so of all before it. (Staging memory and the counters of a put are
        # one stream's at a time, too.)
        with self._end.engine.take("order of pushes"):
            self._send_in_order(push)

    def _send_in_order(self, push: _Push) -> None:
        number, transport, layout = self._sent + 1, self._transport, push.layout
        slot, unit = self._rank * NUM_SLOTS + number % NUM_SLOTS, self._units[push.unit]
        dtype = _dtype_of(push.parts, unit)
        narrow = 0 if dtype == unit.grad_dtype else _NARROW.index(dtype)
        is_whole = layout.present is None
        header = _HEADER.pack(number, push.unit, push.minibatch, sum(layout.numels), narrow, is_whole)
        header += bytes(layout.present or ())
        try:
            at_once = self._end.engine.has_streams and self._of_all
            send = self._send_at_once if at_once else self._send_to_each
            send(dtype, push.parts, slot * self._slot_bytes)
            start = number % NUM_SLOTS * self._header_bytes
            self._header_views[self._rank][start : start + len(header)] = header
            for owner in self._elsewhere:
                transport.write_host(self._headers, owner, slot * self._header_bytes, header)
        except GONE as error:
            raise self._end.waiter.explain(error, f"push to unit {unit.name!r}") from None
        self._end.faults.hit("scatter.before_post")
        self._sent, self._num_emptied = number, 0
        transport.post(self._posted, daemon=True)

    def _send_to_each(self, dtype: torch.dtype, parts: Sequence[Rows], at: int) -> None:
        """Put the parts of a push back to back into one slot at every owner."""
        engine, transport, after_chunk = self._end.engine, self._transport, self._end.waiter.after_scatter_chunk
        numels = [part.numel for part in parts]
        num_bytes = sum(numels) * dtype.itemsize
        rows = list(zip(*(part.unbind(len(self._world)) for part in parts), strict=True))
        for owner in transport.topology.rotation():
            if self._slots.reaches(owner) and not engine.has_streams:
                slot = self._slots.peer(owner)[at : at + num_bytes].view(dtype)
                places = list(slot.split_with_sizes(numels))
                for index, row in enumerate(rows[owner]):
                    if places[index].shape != row.shape:  # of several dimensions, or short
                        engine.zero(places[index][row.numel() :])
                        places[index] = places[index][: row.numel()].view(row.shape)
                engine.copy(places, rows[owner], after_chunk)
                continue
            sources = []
            for row, numel in zip(rows[owner], numels, strict=True):
                # Sent from where it lies; but what is not dense, or of another dtype, takes one more pass.
                sources.append(row.to(dtype).contiguous().view(-1))
                if row.numel() < numel:  # padding
                    sources.append(torch.zeros(numel - row.numel(), dtype=dtype, device=row.device))
            transport.write(self._slots, owner, at, sources, after_chunk)

    def _send_at_once(self, dtype: torch.dtype, parts: Sequence[Rows], at: int) -> None:
        """The same by one operation of the device, where all slots have an address."""
        rows = []
        for grads, numel in parts:
            flat = grads.contiguous().view(-1).to(dtype)
            rows.append(Part(flat, at, numel))
            at += numel * flat.itemsize
        self._end.engine.write_rows(self._of_all, rows, self._rank, self._end.waiter.after_scatter_chunk)

    # The owner

    def finish(self, sent: Sequence[int]) -> None:
        """Return when the pushes that each client has ``sent`` so far are in the sums, for the current stream."""
        transport, posted, handled = self._transport, self._posted, self._handled

        def late() -> list[int]:
            return [client for client in self._world if not transport.has_arrived(client, posted, sent[client])]

        self._end.waiter.wait(late, lambda: "pushes of its last microbatch", block=self._poll(late))

        def is_behind() -> list[int]:
            self._progress.clear()
            is_done = all(handled[client] >= sent[client] for client in self._world) and not transport.to_forward
            return [] if is_done else [self._rank]

        # What is left is the work of this rank's own thread.
        self._end.waiter.wait(is_behind, lambda: "pushes that have arrived", block=self._await_progress)
        self._end.waiter.check()  # words that were set free after a failure look as if all had arrived
        self._end.engine.join_background()

    def _await_progress(self, limit_s: float) -> None:
        self._progress.wait(limit_s)

    def _run(self) -> None:
        pause_s, word = limits.DEVICE_PAUSES_S[0], self._transport.peers.sleep_word(None)
        try:
            with self._end.engine.background():
                while True:
                    ticket = word.ticket  # before all that it may sleep for
                    if self._stopping.is_set():
                        break
                    announced, arrived = self._look()
                    if arrived:
                        self._serve(arrived)
                    self._transport.forward_arrivals()
                    self._progress.set()
                    if arrived:
                        pause_s = limits.DEVICE_PAUSES_S[0]
                    elif self._transport.to_forward or announced:
                        time.sleep(pause_s)
                        pause_s = min(2 * pause_s, limits.DEVICE_PAUSES_S[1])
                    else:
                        word.sleep(ticket, limits.DAEMON_IDLE_S)
        except BaseException as error:  # whatever it is must reach the training loop
            if not self._stopping.is_set():  # which has closed: an acknowledgement under way was given up
                self._on_failure(error)

    def _look(self) -> tuple[list[int], list[int]]:
        """The clients whose next push has been announced, and those of them for whom it has arrived."""
        count, posted, handled = self._transport.count, self._posted, self._handled
        announced = [client for client in self._world if count(client, posted) > handled[client]]
        has_arrived = self._transport.has_arrived
        return announced, [client for client in announced if has_arrived(client, posted, handled[client] + 1)]

    def _serve(self, clients: Sequence[int]) -> None:
        """Add the next push of each."""
        for _ in clients:
            self._end.faults.hit("daemon.before_add")
        arrived = [self._read_header(client) for client in clients]
        self._store.add_arrived(arrived, self._slots.local, self._slot_bytes)
        for _ in clients:
            self._end.faults.hit("daemon.after_add")
        for client in clients:
            self._handled[client] += 1
        self._transport.acknowledge([(self._acked_at + client, client) for client in clients])

    def _read_header(self, client: int) -> Arrived:
        who, units = self._end.name(client), self._units
        expected_number = self._handled[client] + 1
        start = expected_number % NUM_SLOTS * self._header_bytes
        header = bytes(self._header_views[client][start : start + self._header_bytes])
        number, unit_index, minibatch, numel, narrow, whole = _HEADER.unpack_from(header)
        if number != expected_number:
            raise ProtocolError(
                f"rank {who} announced its push {number} where {expected_number} comes next: twice the same, or out "
                f"of order. {OUR_FAULT}"
            )
        if not (0 <= unit_index < len(units) and 0 <= narrow < len(_NARROW)):
            raise ProtocolError(
                f"rank {who} pushed to unit {unit_index}, dtype {narrow}: there are {len(units)}, {len(_NARROW)}. "
                f"{OUR_FAULT}"
            )
        unit = units[unit_index]
        present = None if whole else [bool(flag) for flag in header[_HEADER.size : _HEADER.size + len(unit.params)]]
        expected = unit.pushed_numel(present)
        if numel != expected:
            raise ProtocolError(
                f"rank {who} pushed {numel} elements to unit {unit.name!r}: expected {expected}. {OUR_FAULT}"
            )
        slot = client * NUM_SLOTS + number % NUM_SLOTS
        return Arrived(client, slot, unit_index, present, minibatch, _NARROW[narrow] or unit.grad_dtype)

    def close(self) -> None:
        """Let the thread finish its current round and join it. Local and idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._transport.peers.wake_self()
            self._thread.end()
