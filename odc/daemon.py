"""Pushes through a slot: the client fills its slot at the owner, and a thread of the owner adds it to the sum."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence

import torch

from odc.accumulators import AccumulatorStore
from odc.errors import ProtocolError
from odc.threads import HelperThread
from odc.transports.base import aligned
from odc.units import UnitSpec
from odc.waiting import GONE, Endpoint

# Header of a slot. The number counts the client's pushes to this owner, from 1; "whole" says that all parameters are in
# it, else a byte for each says whether it is.
_HEADER = struct.Struct("=qqqqq")  # number, unit, minibatch, elements, whole
_IDLE_S = 1.0


class AccumulationDaemon:
    """Both sides of it. One slot per client, large enough for the largest unit's slice and shared by all units (paper
    section 3.2 and appendix B): ``world_size * max(slice)`` elements per rank.

    A thread, not a process: it lives and dies with its rank. Torch releases the GIL while it adds.

    Args:
        signals_at: of ``2 * world_size`` signals of each rank: posted to each owner, acknowledged to each client.
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
        self._on_failure = on_failure
        self._posted_at, self._acked_at = signals_at, signals_at + end.world_size
        self._slot_bytes = self.slot_bytes(units)
        self._header_bytes = aligned(_HEADER.size + max((len(u.params) for u in units), default=0))
        self._slots = end.transport.allocate(end.world_size * self._slot_bytes, "slots")
        self._headers = end.transport.allocate_host(end.world_size * self._header_bytes, "slot headers")
        self._sent = [0] * end.world_size
        self._handled = [0] * end.world_size
        self._stopping = threading.Event()
        self._thread = HelperThread(self._run, "odc-accumulation")

    @staticmethod
    def num_signals(world_size: int) -> int:
        """How many signals of each rank are set aside."""
        return 2 * world_size

    @staticmethod
    def slot_bytes(units: Sequence[UnitSpec]) -> int:
        """Size of one client's slot."""
        return aligned(max((u.grad_numel * u.grad_dtype.itemsize for u in units), default=1))

    @property
    def num_bytes(self) -> int:
        """Memory of this rank that holds slots."""
        return self._slots.num_bytes + self._headers.num_bytes

    def start(self) -> None:
        """Begin to serve, once set-up is over."""
        self._thread.start()

    # The client

    def push(self, owner: int, unit: int, grads: torch.Tensor, present: Sequence[bool] | None, minibatch: int) -> None:
        """Send ``grads`` to ``owner``, who adds them as :meth:`~odc.accumulators.AccumulatorStore.add` does. They may
        be reused on return."""
        sent = self._sent[owner]
        if self._transport.count(owner, self._acked_at + self._rank) < sent:
            self._await_ack(owner, lambda: f"slot at rank {self._end.name(owner)} for {self._units[unit].name!r}")
        self._transport.order_after(owner, self._acked_at + self._rank, sent)
        header = _HEADER.pack(sent + 1, unit, minibatch, grads.numel(), present is None) + bytes(present or ())
        try:
            self._transport.write(
                self._slots, owner, self._rank * self._slot_bytes, grads, self._end.waiter.after_scatter_chunk
            )
            self._transport.write_host(self._headers, owner, self._rank * self._header_bytes, header)
        except GONE as error:
            raise self._end.waiter.explain(error, f"push to unit {self._units[unit].name!r}") from None
        self._end.faults.hit("scatter.before_post")
        self._sent[owner] = sent + 1
        self._transport.post(self._posted_at + owner, to=owner, daemon=True)

    def drain(self) -> None:
        """Return when every push of this rank has been accumulated."""
        for owner, sent in enumerate(self._sent):
            if self._transport.count(owner, self._acked_at + self._rank) < sent:
                self._await_ack(owner, lambda: "acknowledgement of this rank's pushes")
            self._transport.order_after(owner, self._acked_at + self._rank, sent)

    def _await_ack(self, owner: int, what: Callable[[], str]) -> None:
        signal, sent = self._acked_at + self._rank, self._sent[owner]
        self._end.waiter.wait(lambda: [owner] if self._transport.count(owner, signal) < sent else [], what)

    # The owner

    def _run(self) -> None:
        try:
            with self._end.engine.background():
                while True:
                    ticket = self._transport.ticket(None)  # before all that it may sleep for
                    if self._stopping.is_set():
                        break
                    if not self._serve_round():
                        self._transport.sleep(None, ticket, _IDLE_S)
        except BaseException as error:  # whatever it is must reach the training loop
            if not self._stopping.is_set():  # which has closed: an acknowledgement under way was given up
                self._on_failure(error)

    def _serve_round(self) -> bool:
        """Handle at most one push per client; whether there was any."""
        count, posted = self._transport.count, self._posted_at + self._rank
        clients = [client for client, handled in enumerate(self._handled) if count(client, posted) > handled]
        for client in clients:
            self._end.faults.hit("daemon.before_add")
            self._add(client)
            self._end.faults.hit("daemon.after_add")
            self._handled[client] += 1
            self._transport.post(self._acked_at + client, to=client)
        return bool(clients)

    def _add(self, client: int) -> None:
        who, units = self._end.name(client), self._units
        start = client * self._header_bytes
        header = bytes(self._headers.local[start : start + self._header_bytes].numpy())
        number, unit_index, minibatch, numel, whole = _HEADER.unpack_from(header)
        expected_number = self._handled[client] + 1
        if number != expected_number:
            raise ProtocolError(
                f"rank {who} announced its push {number} where {expected_number} comes next: twice the same, or out "
                "of order"
            )
        if not 0 <= unit_index < len(units):
            raise ProtocolError(f"rank {who} pushed to unit {unit_index}: there are {len(units)}")
        unit = units[unit_index]
        present = None if whole else [bool(flag) for flag in header[_HEADER.size : _HEADER.size + len(unit.params)]]
        expected = sum(p.numel for i, p in enumerate(unit.params) if present is None or present[i])
        if numel != expected:
            raise ProtocolError(f"rank {who} pushed {numel} elements to unit {unit.name!r}: expected {expected}")
        start = client * self._slot_bytes
        grads = self._slots.local[start : start + numel * unit.grad_dtype.itemsize].view(unit.grad_dtype)
        # The client's stream had waited for this rank's sums to be open before it posted: that order holds here too.
        self._transport.order_after(client, self._posted_at + self._rank, number)
        self._store.add(self._rank, unit_index, grads, present, minibatch, client)

    def close(self) -> None:
        """Let the thread finish its current push and join it. Local and idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._transport.wake_self()
            self._thread.end()
