"""Moving and adding bytes on a GPU: in the current stream, by copy engines or by kernels."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from odc.engine import AfterChunk, Engine, TransferTable, no_op
from odc.errors import SetupError
from odc.kernels.accumulate import accumulate, scatter_accumulate_direct
from odc.kernels.fill import copy_cast, fill
from odc.kernels.gather import gather_from_peers
from odc.kernels.peers import PeerTable

_POLL_S = 1e-3


class CudaEngine(Engine):
    """See :class:`~odc.engine.Engine`. Never waits for the device, but in :meth:`synchronize`."""

    has_streams = True

    def __init__(
        self,
        device: torch.device,
        new_stream: Callable[[], torch.cuda.Stream],
        give_back_stream: Callable[[torch.cuda.Stream], None],
    ) -> None:
        self._device = device
        self._transfers = TransferTable.default()
        self._background, self._aside = new_stream(), new_stream()
        self._give_back_stream = give_back_stream
        self._used: dict[int, torch.cuda.Stream] = {}
        self._home: torch.cuda.Stream | None = None
        self._taken: dict[str, torch.cuda.Event] = {}
        self._lock = threading.Lock()  # backward runs in a thread of its own
        self._tables: dict[tuple[int, ...], PeerTable] = {}

    def copy(self, out: torch.Tensor, source: torch.Tensor, after_chunk: AfterChunk = no_op) -> None:
        if out.dtype != source.dtype and out.is_floating_point() and out.itemsize * 2 >= source.itemsize:
            copy_cast(out, source)
        else:
            out.copy_(source)  # cudaMemcpyAsync: a copy engine where memory of two devices is involved
        after_chunk()

    def prepare(self) -> None:
        sums = torch.zeros(64, device=self._device)
        try:
            for dtype in (torch.float32, torch.bfloat16):
                addend = torch.zeros(32, dtype=dtype, device=self._device)
                accumulate(sums[:32], addend)
                copy_cast(sums[:32], addend)
                self.add_to_peers([sums[32:].view(torch.uint8)], 0, addend.view(1, -1), 0)
                gather_from_peers(sums[:32], PeerTable.of([addend]), 32, rank=0, source_dtype=dtype)
            fill(sums)
        except Exception as problem:  # whatever a compiler has to say
            raise SetupError(
                f"the kernels cannot be compiled or launched: {type(problem).__name__}: {problem}. Triton needs a C "
                "compiler (gcc) and a folder for its cache that can be written (TRITON_CACHE_DIR)"
            ) from problem

    def choose_by(self, table: TransferTable) -> None:
        self._transfers = table

    def copy_rows(
        self,
        out: torch.Tensor,
        shards: Sequence[torch.Tensor],
        rank: int,
        own_in_place: bool,
        after_chunk: AfterChunk = no_op,
    ) -> None:
        if not out.is_floating_point() or not self._transfers.by_kernel(out.nbytes):
            super().copy_rows(out, shards, rank, own_in_place, after_chunk)
            return
        dtype, numel = shards[0].dtype, shards[0].numel()
        table, offset = self._table_of(shards)
        gather_from_peers(out, table, numel, rank=rank, source_dtype=dtype, offset=offset, own_in_place=own_in_place)
        after_chunk()

    def _table_of(self, parts: Sequence[torch.Tensor]) -> tuple[PeerTable, int]:
        """The addresses of the buffers that ``parts`` lie in, all at the same offset, and that offset in elements.

        By buffer, so that nothing is sent to the device once every buffer has been met: that would wait for it.
        """
        addresses = tuple(part.untyped_storage().data_ptr() for part in parts)
        with self._lock:
            if addresses not in self._tables:
                self._tables[addresses] = PeerTable.build(addresses, self._device)
            return self._tables[addresses], int(parts[0].storage_offset())

    def add(self, total: torch.Tensor, addend: torch.Tensor, after_chunk: AfterChunk = no_op) -> None:
        if addend.itemsize <= total.itemsize:
            accumulate(total, addend)
        else:
            total.add_(addend)
        after_chunk()

    def add_to_peers(
        self,
        buffers: Sequence[torch.Tensor],
        offset_bytes: int,
        rows: torch.Tensor,
        rank: int,
        after_chunk: AfterChunk = no_op,
    ) -> None:
        if rows.itemsize > torch.float32.itemsize or not rows.is_floating_point():
            rows = rows.to(torch.float32)  # float64, integers: the kernel reads what a wire carries
        table, offset = self._table_of(buffers)
        offset += offset_bytes // torch.float32.itemsize
        scatter_accumulate_direct(table, rows.contiguous().view(-1), rank=rank, offset=offset)
        after_chunk()

    def zero(self, out: torch.Tensor, after_chunk: AfterChunk = no_op) -> None:
        fill(out)
        after_chunk()

    def run(self, work: Callable[[], object]) -> None:
        work()

    @contextmanager
    def background(self) -> Iterator[None]:
        with self._on(self._background):
            yield

    @contextmanager
    def aside(self) -> Iterator[None]:
        with self._on(self._aside):
            yield

    @contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        torch.cuda.set_device(self._device)  # a thread's own: a new one begins with the first device
        with torch.cuda.stream(stream):
            yield

    def note_use(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        with self._lock:
            self._used[stream.cuda_stream] = stream

    def join(self) -> None:
        self._home = current = torch.cuda.current_stream(self._device)
        with self._lock:
            streams, self._used = self._used, {}
        for handle, stream in streams.items():
            if handle != current.cuda_stream:
                current.wait_stream(stream)

    def join_background(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._background)

    def stream_key(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def hold(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self._device))

    @contextmanager
    def at_home(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        home = self._home or current
        home.wait_stream(current)
        with torch.cuda.stream(home):
            yield
        current.wait_stream(home)

    @contextmanager
    def take(self, memory: str) -> Iterator[None]:
        stream = torch.cuda.current_stream(self._device)
        if memory in self._taken:
            stream.wait_event(self._taken[memory])
        yield
        self._taken[memory] = stream.record_event()

    def synchronize(self, timeout_s: float) -> bool:
        streams = {torch.cuda.current_stream(self._device), self._background, self._aside, *self._used.values()}
        if self._home is not None:
            streams.add(self._home)
        events = [stream.record_event() for stream in streams]
        deadline = time.monotonic() + timeout_s
        while not all(event.query() for event in events):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def close(self) -> None:
        for stream in (self._background, self._aside):
            self._give_back_stream(stream)
