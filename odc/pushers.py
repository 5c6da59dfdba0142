"""How a client's push reaches its owners: by the client's own hand, or through a slot and the owner's daemon."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch

from odc.accumulators import AccumulatorStore
from odc.endpoint import Endpoint
from odc.errors import ProtocolError
from odc.threads import HelperThread
from odc.transports.base import aligned
from odc.units import UnitSpec
from odc.waiting import GONE


class Pusher(ABC):
    """Client side of scatter_accumulate for one owner at a time."""

    @staticmethod
    def num_signals(world_size: int) -> int:
        """How many transport signals of each rank are set aside: posted and acknowledged, per rank."""
        return 2 * world_size

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory this rank spends on pushes."""

    @abstractmethod
    def start(self) -> None:
        """Begin what runs in the background, once set-up is over."""

    @abstractmethod
    def push(self, owner: int, unit: int, grads: torch.Tensor, present: Sequence[bool], minibatch: int) -> None:
        """Send ``grads`` (flat, the ``present`` parameters of ``unit``) to ``owner``. ``grads`` may be reused on
        return."""

    @abstractmethod
    def drain(self) -> None:
        """Return when every push of this rank has been accumulated."""

    @abstractmethod
    def close(self) -> None:
        """Stop what runs in the background. Local and idempotent."""


class DirectPusher(Pusher):
    """The client adds into the owner's accumulator itself."""

    def __init__(self, rank: int, store: AccumulatorStore) -> None:
        self._rank = rank
        self._store = store

    @property
    def num_bytes(self) -> int:
        return 0

    def start(self) -> None:
        """Nothing runs in the background."""

    def push(self, owner: int, unit: int, grads: torch.Tensor, present: Sequence[bool], minibatch: int) -> None:
        self._store.add(owner, self._rank, unit, grads, present, minibatch)

    def drain(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing runs in the background."""


# Header of a slot: int64 words. The number counts the client's pushes to this owner, from 1.
_NUMBER, _UNIT, _MINIBATCH, _NUMEL, _PRESENT = range(5)


class DaemonPusher(Pusher):
    """The client fills its slot at the owner and rings; the owner's daemon thread adds and acknowledges.

    One slot per client, large enough for the largest unit's slice and shared by all units (paper section 3.2 and
    appendix B): ``world_size * max(slice)`` elements per rank.
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
        self._units = units
        self._rank = end.rank
        self._posted_at, self._acked_at = signals_at, signals_at + end.world_size
        self._slot_bytes = self.slot_bytes(units)
        self._header_words = _PRESENT + max((len(u.params) for u in units), default=0)
        self._slots = end.transport.allocate(end.world_size * self._slot_bytes, "slots")
        self._headers = end.transport.allocate_host(8 * end.world_size * self._header_words, "slot headers")
        self._sent = [0] * end.world_size
        self._daemon = AccumulationDaemon(self, units, end, store, on_failure)

    @staticmethod
    def slot_bytes(units: Sequence[UnitSpec]) -> int:
        """Size of one client's slot."""
        return aligned(max((u.grad_numel * u.grad_dtype.itemsize for u in units), default=1))

    @property
    def num_bytes(self) -> int:
        return self._slots.num_bytes + self._headers.num_bytes

    def start(self) -> None:
        self._daemon.start()

    def slot(self, client: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """What ``client`` has put into its slot here."""
        start = client * self._slot_bytes
        return self._slots.local[start : start + numel * dtype.itemsize].view(dtype)

    def header(self, client: int) -> torch.Tensor:
        """What ``client`` says of its slot here."""
        start = client * self._header_words
        return self._headers.local.view(torch.int64)[start : start + self._header_words]

    def push(self, owner: int, unit: int, grads: torch.Tensor, present: Sequence[bool], minibatch: int) -> None:
        self._await_acks([owner], f"slot at rank {self._end.name(owner)} for {self._units[unit].name!r}")
        try:
            self._fill_slot(owner, unit, grads, present, minibatch)
        except GONE as error:
            raise self._end.waiter.explain(error, f"push to unit {self._units[unit].name!r}") from None
        self._end.faults.hit("scatter.before_post")
        self._sent[owner] += 1
        self._end.transport.post(owner, self._posted_at + self._rank, daemon=True)

    def _fill_slot(self, owner: int, unit: int, grads: torch.Tensor, present: Sequence[bool], minibatch: int) -> None:
        """This rank's slot at ``owner``, and the words that tell its daemon what is in it."""
        transport, after_chunk = self._end.transport, self._end.waiter.after_scatter_chunk
        transport.write(self._slots, owner, self._rank * self._slot_bytes, grads, after_chunk)
        number = self._sent[owner] + 1
        header = np.array([number, unit, minibatch, grads.numel(), *present], dtype=np.int64)
        transport.write_host(self._headers, owner, 8 * self._rank * self._header_words, header.tobytes())

    def drain(self) -> None:
        self._await_acks(range(self._end.world_size), "acknowledgement of this rank's pushes")

    def _await_acks(self, owners: Sequence[int], what: str) -> None:
        self._end.waiter.wait(
            lambda: [r for r in owners if self._end.transport.count(self._acked_at + r) < self._sent[r]],
            lambda: what,
        )
        for owner in owners:
            self._end.transport.order_after(self._acked_at + owner, self._sent[owner])

    def posted(self, client: int) -> int:
        return self._end.transport.count(self._posted_at + client)

    def order_after(self, client: int, posted: int) -> None:
        """The daemon's stream goes on when the slot of that push is filled. See :meth:`Transport.order_after`."""
        self._end.transport.order_after(self._posted_at + client, posted)

    def acknowledge(self, client: int) -> None:
        self._end.transport.post(client, self._acked_at + self._rank)

    def close(self) -> None:
        self._daemon.stop()


class AccumulationDaemon:
    """Owner side: a thread that adds clients' slots to the accumulators while the training loop computes.

    A thread, not a process: it lives and dies with its rank. Torch releases the GIL while it adds.
    """

    def __init__(
        self,
        pusher: DaemonPusher,
        units: Sequence[UnitSpec],
        end: Endpoint,
        store: AccumulatorStore,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._pusher = pusher
        self._units = units
        self._end = end
        self._store = store
        self._on_failure = on_failure
        self._handled = [0] * end.world_size
        self._stopping = threading.Event()
        self._thread = HelperThread(self._run, "odc-accumulation")

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._end.engine.background():
                while not self._stopping.is_set():
                    if not self._serve_round():
                        self._end.transport.block(1.0, [], daemon=True)
        except BaseException as error:  # whatever it is must reach the training loop
            if not self._stopping.is_set():  # which has closed: an acknowledgement under way was given up
                self._on_failure(error)

    def _serve_round(self) -> bool:
        """Handle at most one push per client; whether there was any."""
        clients = [c for c in range(len(self._handled)) if self._pusher.posted(c) > self._handled[c]]
        for client in clients:
            self._end.faults.hit("daemon.before_add")
            self._add(client)
            self._end.faults.hit("daemon.after_add")
            self._handled[client] += 1
            self._pusher.acknowledge(client)
        return bool(clients)

    def _add(self, client: int) -> None:
        rank, who = self._end.rank, self._end.name(client)
        words = self._pusher.header(client).tolist()
        number, unit_index, minibatch, numel = words[:_PRESENT]
        units, expected_number = self._units, self._handled[client] + 1
        if number != expected_number:
            raise ProtocolError(
                f"rank {who} announced its push {number} where {expected_number} comes next: twice the same, or out "
                "of order"
            )
        if not 0 <= unit_index < len(units):
            raise ProtocolError(f"rank {who} pushed to unit {unit_index}: there are {len(units)}")
        unit = units[unit_index]
        present = [bool(word) for word in words[_PRESENT : _PRESENT + len(unit.params)]]
        expected = sum(p.numel for p, here in zip(unit.params, present, strict=True) if here)
        if numel != expected:
            raise ProtocolError(f"rank {who} pushed {numel} elements to unit {unit.name!r}: expected {expected}")
        grads = self._pusher.slot(client, unit.grad_dtype, numel)
        # The client's stream had waited for this rank's sums to be open before it posted: that order holds here too.
        self._pusher.order_after(client, number)
        self._store.add(rank, client, unit_index, grads, present, minibatch, daemon=True)

    def stop(self) -> None:
        """Let the thread finish its current push and join it."""
        self._stopping.set()
        if self._thread.is_alive():
            self._end.transport.wake_self()
            self._thread.end()
