"""How a client's push reaches its owners: by the client's own hand, or through a slot and the owner's daemon."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from odc.accumulators import AccumulatorStore
from odc.endpoint import Endpoint
from odc.errors import ProtocolError
from odc.kernels import copy_chunked
from odc.transports.base import aligned
from odc.units import UnitSpec


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


# Header of a slot: int64 words.
_UNIT, _MINIBATCH, _NUMEL, _PRESENT = range(4)


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
        self._slot_bytes = aligned(max((u.grad_numel * u.grad_dtype.itemsize for u in units), default=1))
        self._header_words = _PRESENT + max((len(u.params) for u in units), default=0)
        self._slots = end.transport.allocate(end.world_size * self._slot_bytes, "slots")
        self._headers = end.transport.allocate(8 * end.world_size * self._header_words, "slot headers")
        self._sent = [0] * end.world_size
        self._daemon = AccumulationDaemon(self, units, end, store, on_failure)

    @property
    def num_bytes(self) -> int:
        return self._slots.num_bytes + self._headers.num_bytes

    def start(self) -> None:
        self._daemon.start()

    def slot(self, owner: int, client: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        start = client * self._slot_bytes
        return self._slots.peer(owner)[start : start + numel * dtype.itemsize].view(dtype)

    def header(self, owner: int, client: int) -> torch.Tensor:
        start = client * self._header_words
        return self._headers.peer(owner).view(torch.int64)[start : start + self._header_words]

    def push(self, owner: int, unit: int, grads: torch.Tensor, present: Sequence[bool], minibatch: int) -> None:
        self._await_acks([owner], f"slot at rank {owner} for {self._units[unit].name!r}")
        slot = self.slot(owner, self._rank, grads.dtype, grads.numel())
        copy_chunked(slot, grads, self._end.waiter.after_scatter_chunk)
        header = self.header(owner, self._rank)
        header[:_PRESENT] = torch.tensor([unit, minibatch, grads.numel()])
        header[_PRESENT : _PRESENT + len(present)] = torch.tensor(list(present), dtype=torch.int64)
        self._end.faults.hit("scatter.before_post")
        self._sent[owner] += 1
        self._end.transport.post(owner, self._posted_at + self._rank, daemon=True)

    def drain(self) -> None:
        self._await_acks(range(self._end.world_size), "acknowledgement of this rank's pushes")

    def _await_acks(self, owners: Sequence[int], what: str) -> None:
        self._end.waiter.wait(
            lambda: [r for r in owners if self._end.transport.count(self._acked_at + r) < self._sent[r]],
            lambda: what,
        )

    def posted(self, client: int) -> int:
        return self._end.transport.count(self._posted_at + client)

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
        self._thread = threading.Thread(target=self._run, name="odc-accumulation", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if not self._serve_round():
                    self._end.transport.block(1.0, [], daemon=True)
        except BaseException as error:  # whatever it is must reach the training loop
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
        rank = self._end.rank
        words = self._pusher.header(rank, client).tolist()
        unit_index, minibatch, numel = words[:_PRESENT]
        units = self._units
        if not 0 <= unit_index < len(units):
            raise ProtocolError(f"rank {client} pushed to unit {unit_index}: there are {len(units)}")
        unit = units[unit_index]
        present = [bool(word) for word in words[_PRESENT : _PRESENT + len(unit.params)]]
        expected = sum(p.numel for p, here in zip(unit.params, present, strict=True) if here)
        if numel != expected:
            raise ProtocolError(f"rank {client} pushed {numel} elements to unit {unit.name!r}: expected {expected}")
        grads = self._pusher.slot(rank, client, unit.grad_dtype, numel)
        self._store.add(rank, client, unit_index, grads, present, minibatch, daemon=True)

    def stop(self) -> None:
        """Let the thread finish its current push and join it."""
        self._stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._end.transport.wake_self()
            self._thread.join()
