"""The ``nvshmem`` transport: GPUs of several hosts, over NVSHMEM's symmetric heap.

Within a host it works like ``cuda_ipc`` with NVSHMEM's heap as memory: NVSHMEM maps the heap, and copies are plain
copies. Between hosts the network card reads and writes the heap: a gather gets each remote shard in pieces of limited
size (paper, appendix B), and a push puts a slice into the owner's slot. Signals are sent twice: from host to host over
a link, which wakes the waiting rank, and from stream to stream as a word in the heap, after the data. Signals that only
a host checks (arrived pushes and acknowledgements) are sent over the link alone, after the poster's thread has seen the
arrival.

Data outside of the heap cannot be sent directly; it is copied through staging memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch

from odc.cuda.nvshmem import NvshmemHeap, unavailable
from odc.engines.base import AfterChunk
from odc.setup.agreement import Exchange
from odc.setup.topology import Topology
from odc.transports._frames import cut
from odc.transports._peers import Peer
from odc.transports.base import HOST, SymmetricBuffer, no_way_out, not_on_this_kernel, places
from odc.transports.cuda_ipc import CudaIpcTransport

_STAGING_BYTES = 64 << 20
_WORD_BYTES = 8
_NUM_BUFFERS = 8  # at most: published shards, sums, slots, words, probes, staging
_ALIGN_BYTES = 512
_VECTOR_BYTES = 16
_RELEASED = 1 << 62


class NvshmemTransport(CudaIpcTransport):
    """See :class:`~odc.transports.base.Transport`."""

    name: ClassVar[str] = "nvshmem"
    staging_bytes: ClassVar[int] = _STAGING_BYTES

    def __init__(self, exchange: Exchange, topology: Topology, timeout_s: float, device: torch.device = HOST) -> None:
        self._heap_words = self._num_words = 0
        self._waited: dict[tuple[int, int, int], int] = {}  # (stream, rank, signal): what that stream waits for already
        self._word_view: torch.Tensor | None = None
        self._staging: dict[str, list[torch.Tensor]] = {}
        self._turns = {"read": 0, "write": 0}
        super().__init__(exchange, topology, timeout_s, device)

    @classmethod
    def unavailable(cls, topology: Topology, device: torch.device) -> str | None:
        return unavailable(device) or not_on_this_kernel() or no_way_out(topology)

    def _make_heap(self) -> NvshmemHeap:
        return NvshmemHeap(self.device, self._cuda.tensor, self._timeout_s)

    def no_atomics(self) -> str | None:
        return "NVSHMEM maps its heap in its own way, and does not say what additions to it are"

    def _require_reachable(self) -> None:
        """NVSHMEM finds a way to every rank, or says that it has none."""

    # Memory

    def open(self, *, num_signals: int, num_locks: int, num_bytes: int = 0) -> None:
        self._heap = self._make_heap()
        self._heap.start(self.exchange, num_bytes + 2 * self.staging_bytes + _NUM_BUFFERS * _ALIGN_BYTES)
        super().open(num_signals=num_signals, num_locks=num_locks, num_bytes=num_bytes)
        self._num_words = num_signals + 1  # of each rank, at each rank; one more for set-up
        word_bytes = _WORD_BYTES * self._num_words * self.topology.world_size
        self._heap_words = self._malloc(word_bytes)
        self._word_view = self._cuda.tensor(self._heap_words, word_bytes).view(torch.int64)
        for purpose in ("read", "write"):
            self.extra_bytes += self.staging_bytes
            memory = self._cuda.tensor(self._malloc(self.staging_bytes), self.staging_bytes)
            half = self.staging_bytes // 2 // _VECTOR_BYTES * _VECTOR_BYTES
            self._staging[purpose] = [memory[:half], memory[half : 2 * half]]
        self.exchange.all_gather(b"")  # nobody signals before everybody's words are there

    def _malloc(self, num_bytes: int) -> int:
        return self._together(lambda: self._heap.malloc(num_bytes))  # collective, but nothing can fail before it

    def allocate(self, num_bytes: int, label: str) -> SymmetricBuffer:
        num_bytes = max(num_bytes, 1)
        self._require_one_size(num_bytes, label)
        address = self._malloc(-(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES)
        views = [self._view_at(address, num_bytes, rank) for rank in self._world]
        far = [rank for rank in self.topology.rotation() if views[rank] is None]
        for ranks in (far, *([rank] for rank in far)):
            if ranks:
                self._heap.announce(ranks)
        self.peers.memory.append(None)
        return self._keep(views, label)

    def _view_at(self, address: int, num_bytes: int, rank: int) -> torch.Tensor | None:
        """Memory of ranks of this host counts as this device's own; that of other hosts has no address here."""
        if rank not in self._here:
            return None
        found = address if rank == self._rank else self._heap.address_at(address, rank)
        return None if found is None else self._cuda.tensor(found, num_bytes)

    def _read_far(
        self,
        parts: Sequence[tuple[Sequence[torch.Tensor], int]],
        buffer: SymmetricBuffer,
        offset_bytes: int,
        after_chunk: AfterChunk,
    ) -> None:
        """From all of them at the same time."""
        own = buffer.local[offset_bytes:]
        rows, ranks = [[out.view(torch.uint8) for out in outs] for outs, _ in parts], [rank for _, rank in parts]
        num_bytes = sum(map(len, rows[0]))
        most = self._staging["read"][0].numel() // len(parts) // _VECTOR_BYTES * _VECTOR_BYTES
        for low in range(0, num_bytes, most):
            size = min(most, num_bytes - low)
            with self._take_staging("read") as staging:
                self._heap.get(staging[: size * len(parts)], own[low : low + size], ranks)
                pieces = itertools.chain.from_iterable(cut(outs, low, size) for outs in rows)
                for piece, place in places(pieces, staging, 0):
                    self.engine.copy([piece], [place], after_chunk)

    @contextmanager
    def _take_staging(self, purpose: str) -> Iterator[torch.Tensor]:
        """The two halves in turn: while one stream empties its half, another one may fill the other."""
        turn = self._turns[purpose] = 1 - self._turns[purpose]
        with self.engine.take(f"{purpose} staging {turn}"):
            yield self._staging[purpose][turn]

    def _write_far(
        self,
        buffer: SymmetricBuffer,
        rank: int,
        offset_bytes: int,
        sources: Sequence[torch.Tensor],
        after_chunk: AfterChunk,
    ) -> None:
        own, most = buffer.local[offset_bytes:], self._staging["write"][0].numel()
        flat = [one.view(torch.uint8) for one in sources]
        num_bytes = sum(map(len, flat))
        for low in range(0, num_bytes, most):
            size = min(most, num_bytes - low)
            with self._take_staging("write") as staging:
                for piece, place in places(cut(flat, low, size), staging, 0):
                    self.engine.copy([place], [piece], after_chunk)
                self._heap.put(staging[:size], own[low : low + size], rank)

    # Signals, and the order of streams

    def _word(self, rank: int, index: int) -> int:
        """Where this rank and all others have the word of ``rank``'s signal ``index``."""
        return self._heap_words + _WORD_BYTES * (rank * self._num_words + index)

    def post(self, index: int, *, to: int | None = None, daemon: bool = False) -> None:
        far = self._elsewhere if to is None else [to] if to not in self._here else []
        if not daemon:
            for rank in far:
                self._heap.signal(self._word(self._rank, index), rank)
            super().post(index, to=to)
            return
        self._cuda.write_values([(self._word_addresses[self._rank] + 4 * index, self._next_value(index))])
        if far:
            self.to_forward.append((index, self._posted[index], far, True))
        self.peers.own.post_to(index, self.peers.sleep_word(None))  # this rank's own daemon, which forwards it, too

    def acknowledge(self, posts: Sequence[tuple[int, int]]) -> None:
        super().acknowledge(posts)
        for index, to in posts:
            if to not in self._here:
                self.to_forward.append((index, self._posted[index], [to], False))

    def has_arrived(self, rank: int, index: int, count: int) -> bool:
        return super().has_arrived(rank, index, count) if rank in self._here else self.count(rank, index) >= count

    def forward_arrivals(self) -> None:
        for entry in list(self.to_forward):  # in their order, though pushes and acknowledgements overtake each other
            index, count, ranks, daemon = entry
            if super().has_arrived(self._rank, index, count):
                for rank in ranks:
                    self._link(rank).post(index, daemon)
                self.to_forward.remove(entry)

    def order_after(self, ranks: Sequence[int], index: int, count: int) -> None:
        super().order_after([rank for rank in ranks if rank in self._here], index, count)
        stream = self.engine.stream_key()
        for rank in self._elsewhere if count else ():
            if rank in ranks and self._waited.get((stream, rank, index), 0) < count:
                self._heap.wait(self._word(rank, index), count)
                self._waited[stream, rank, index] = count

    def release_streams(self) -> None:
        super().release_streams()
        if self._word_view is not None:
            words = self._word_view
            with self.engine.on_side_stream():
                self.engine.run(lambda: words.fill_(_RELEASED))

    # The end

    def _let_go(self) -> bool:
        done = super()._let_go()
        self._owned.clear()  # the heap's memory is the process's, see odc/cuda/nvshmem.py
        return done

    def _readers(self) -> dict[int, Peer]:
        return dict(self.peers.others) if self.serves_readers and not self.peers.failing else {}
