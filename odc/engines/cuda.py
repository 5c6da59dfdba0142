"""Moving and adding bytes on a GPU: in the current stream, by copy engines or by kernels."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

from odc import limits
from odc.engines.base import Addition, AfterChunk, Engine, Part, TransferTable, no_op
from odc.errors import SetupError
from odc.kernels.accumulate import PAIRS, accumulate
from odc.kernels.arguments import FLOATS
from odc.kernels.chunked import Tensors
from odc.kernels.fill import copy_cast, fill
from odc.kernels.launching import LOCAL_PROGRAMS, blocks
from odc.kernels.parts import COLUMNS as PART_COLUMNS
from odc.kernels.parts import GRADIENTS, MAX_PARTS, PartRows, gather_parts, scatter_accumulate_parts, scatter_parts
from odc.kernels.peers import PeerTable, rotated
from odc.kernels.prepare import UnitDtypes, prepare_kernels
from odc.kernels.slots import COLUMNS, MAX_SLOTS, SlotRow, accumulate_slots, write_rows

_ROW_TABLES, _ROWS = 128, 64
_PART_TABLES = 256
Memory = TypeVar("Memory")


def _has_kernels(source: torch.dtype, out: torch.dtype) -> bool:
    """Whether kernels know both dtypes, and round once from one to the other. torch itself copies all others."""
    return source in FLOATS and out in FLOATS and out.itemsize * 2 >= source.itemsize


@functools.lru_cache(maxsize=4096)
def _ways_to_gather(
    sizes: tuple[int, ...], num_owners: int, has_kernel: bool, transfers: TransferTable
) -> tuple[list[tuple[list[int], tuple[int, ...]]], list[tuple[int, int, int]]]:
    """The launches, each with the numbers of parts and where in a shard their slices begin, in bytes; and the parts
    for copy engines, each with that and its slice's bytes. ``sizes``: of the slices, which lie back to back."""
    offsets = list(itertools.accumulate(sizes[:-1], initial=0))
    numbers = [n for n, size in enumerate(sizes) if has_kernel and transfers.by_kernel(size * num_owners)]
    chunks = [numbers[low : low + MAX_PARTS] for low in range(0, len(numbers), MAX_PARTS)]
    launched = set(numbers)
    copies = [(n, offsets[n], size) for n, size in enumerate(sizes) if size and n not in launched]
    return [(chunk, tuple([offsets[n] for n in chunk])) for chunk in chunks], copies


def _two_by_two(owners: Sequence[int]) -> list[int]:
    """So that two copy engines which share what is to be copied are with two owners; see ``odc bench links``.

    >>> _two_by_two([1, 2, 3, 4, 5])
    [1, 4, 2, 5, 3]
    """
    half = -(-len(owners) // 2)
    return [
        owner for pair in itertools.zip_longest(owners[:half], owners[half:]) for owner in pair if owner is not None
    ]


def _row(addition: Addition, low: int) -> SlotRow | None:
    """What of ``addition`` lies in the :data:`MAX_SLOTS` slots from ``low`` on; None: nothing."""
    here = [slot - low for slot in addition.slots if low <= slot < low + MAX_SLOTS]
    is_first = addition.first and not any(slot < low for slot in addition.slots)
    if not here and (addition.slots or low or not addition.first):
        return None
    total = addition.total
    return SlotRow(total.data_ptr(), addition.offset_bytes, total.numel(), sum(1 << slot for slot in here), is_first)


class _Piece(Generic[Memory]):
    """Host memory that kernels read: nothing is copied to the device, which would wait for it. ``with`` this, a kernel
    that reads it is launched on the current stream of ``device``."""

    def __init__(self, memory: Memory, device: torch.device, free: deque[_Piece[Memory]]) -> None:
        self._memory, self._device, self._free = memory, device, free
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Memory:
        while not self._done.query():  # type: ignore[no-untyped-call]  # as many launches ago as there are pieces
            time.sleep(limits.STREAM_PAUSE_S)
        return self._memory

    def __exit__(self, *_: object) -> None:
        self._done.record(torch.cuda.current_stream(self._device))
        self._free.append(self)


def _pieces(memory: Iterable[Memory], device: torch.device) -> deque[_Piece[Memory]]:
    """The least recently used one is on the left."""
    free: deque[_Piece[Memory]] = deque()
    free.extend([_Piece(one, device, free) for one in memory])
    return free


class CudaEngine(Engine):
    """See :class:`~odc.engines.base.Engine`. Never waits for the device, but in :meth:`synchronize`."""

    has_streams = True

    def __init__(
        self,
        device: torch.device,
        new_stream: Callable[[], torch.cuda.Stream],
        give_back_stream: Callable[[torch.cuda.Stream], None],
        copy_memory: Callable[[Sequence[int], Sequence[int], Sequence[int]], None],
    ) -> None:
        """``copy_memory(targets, sources, sizes)``: the current stream copies so many bytes from address to address."""
        self._device = device
        self._copy_memory = copy_memory
        self._transfers = TransferTable.default()
        self._background, self._aside = new_stream(), new_stream()
        self._give_back_stream = give_back_stream
        self._used: dict[int, torch.cuda.Stream] = {}
        self._home: torch.cuda.Stream | None = None
        self._taken: dict[str, tuple[int, torch.cuda.Event]] = {}  # by which stream, until when
        self._lock = threading.Lock()  # backward runs in a thread of its own
        self._tables: dict[tuple[int, ...], PeerTable] = {}
        self._places: dict[tuple[int, ...], tuple[PeerTable, int]] = {}
        memory = torch.zeros(_ROW_TABLES, _ROWS, COLUMNS, dtype=torch.int64, device="cpu", pin_memory=True)
        self._row_tables = _pieces(memory, device)
        memory = torch.zeros(_PART_TABLES, MAX_PARTS, PART_COLUMNS, dtype=torch.int64, device="cpu", pin_memory=True)
        self._part_rows = _pieces(map(PartRows, memory), device)

    def copy(self, outs: Tensors, sources: Tensors, after_chunk: AfterChunk = no_op) -> None:
        for out, source in zip(outs, sources, strict=True):
            if out.dtype != source.dtype and _has_kernels(source.dtype, out.dtype):
                copy_cast(out, source)
            else:
                out.copy_(source)  # cudaMemcpyAsync: a copy engine where memory of two devices is involved
        after_chunk()

    def add(self, totals: Tensors, addends: Tensors, after_chunk: AfterChunk = no_op) -> None:
        for total, addend in zip(totals, addends, strict=True):
            if (total.dtype, addend.dtype) in PAIRS:
                accumulate(total, addend)
            else:
                total.add_(addend)
        after_chunk()

    def prepare(self, dtypes: Iterable[tuple[torch.dtype, torch.dtype, torch.dtype]]) -> None:
        try:
            prepare_kernels(self._device, [UnitDtypes(*each) for each in dtypes])
            fill(torch.zeros(64, device=self._device))
        except Exception as problem:  # whatever a compiler has to say
            raise SetupError(
                f"the kernels cannot be compiled or launched: {type(problem).__name__}: {problem}. Triton needs a C "
                "compiler (gcc) and a folder for its cache that can be written (TRITON_CACHE_DIR)"
            ) from problem

    def choose_by(self, table: TransferTable) -> None:
        self._transfers = table

    def _table_of(self, parts: Sequence[torch.Tensor]) -> tuple[PeerTable, int]:
        """The addresses of the buffers that ``parts`` lie in, all at the same offset, and that offset in elements.

        By buffer, so that nothing is sent to the device once every buffer has been met: that would wait for it.
        """
        addresses = tuple(part.untyped_storage().data_ptr() for part in parts)
        with self._lock:
            if addresses not in self._tables:
                self._tables[addresses] = PeerTable.build(addresses, self._device)
            return self._tables[addresses], int(parts[0].storage_offset())

    def read_rows(
        self,
        outs: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        rank: int,
        own_in_place: bool = False,
        after_chunk: AfterChunk = no_op,
    ) -> None:
        dtype, num_owners = shards[0].dtype, len(shards)
        if {out.dtype for out in outs} != {dtype}:  # torch casts
            super().read_rows(outs, shards, rank, own_in_place, after_chunk)
            return
        launches, copies = _ways_to_gather(
            tuple([out.nbytes // num_owners for out in outs]), num_owners, dtype in FLOATS, self._transfers
        )
        for numbers, offsets in launches:
            table, low = self._place_of(shards)
            with self._part_rows.popleft() as rows:
                gather_parts(
                    rows,
                    [outs[number] for number in numbers],
                    table,
                    rank=rank,
                    offset_bytes=low * dtype.itemsize,
                    offsets=offsets,
                    own_in_place=own_in_place,
                )
        if copies and num_owners > own_in_place:
            owners = _two_by_two(rotated(rank, num_owners)[: num_owners - own_in_place])
            targets, sources = [out.data_ptr() for out in outs], [shard.data_ptr() for shard in shards]
            self._copy_memory(
                [targets[number] + owner * size for owner in owners for number, _, size in copies],
                [sources[owner] + offset for owner in owners for _, offset, _ in copies],
                [size for _, _, size in copies] * len(owners),
            )
        after_chunk()

    def _place_of(self, parts: Sequence[torch.Tensor]) -> tuple[PeerTable, int]:
        """:meth:`_table_of`, in a tenth of the time where it has been asked for before. To know storages is slow."""
        key = (parts[0].itemsize, *[part.data_ptr() for part in parts])
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = self._table_of(parts)
        return found

    def write_rows(
        self, buffers: Sequence[torch.Tensor], parts: Sequence[Part], rank: int, after_chunk: AfterChunk = no_op
    ) -> None:
        launched, copied, others = list[Part](), list[Part](), list[Part]()
        for part in parts:
            has_kernel, numel = part.grads.dtype in FLOATS, part.grads.numel()
            if has_kernel and self._transfers.by_kernel(part.grads.nbytes):
                launched.append(part)
            elif numel == len(buffers) * part.numel:
                copied.append(part)
            else:
                (launched if has_kernel else others).append(part)  # what a row lacks has to be zeros
        if others:
            super().write_rows(buffers, others, rank)
        if launched:
            self._launch_parts(scatter_parts, buffers, launched, {part.grads.dtype for part in launched}, rank)
        if copied:
            owners = _two_by_two(rotated(rank, len(buffers)))
            targets, sources = [buffer.data_ptr() for buffer in buffers], [part.grads.data_ptr() for part in copied]
            sizes = [part.numel * part.grads.itemsize for part in copied]
            self._copy_memory(
                [targets[owner] + part.offset_bytes for owner in owners for part in copied],
                [source + owner * size for owner in owners for source, size in zip(sources, sizes, strict=True)],
                sizes * len(owners),
            )
        after_chunk()

    def add_rows(
        self, buffers: Sequence[torch.Tensor], parts: Sequence[Part], rank: int, after_chunk: AfterChunk = no_op
    ) -> None:
        dtypes = {part.grads.dtype for part in parts}
        if not dtypes.issubset(GRADIENTS):  # float64, integers: the kernel reads what a wire carries
            parts = [part._replace(grads=part.grads.to(torch.float32)) for part in parts]
            dtypes = {torch.float32}
        self._launch_parts(scatter_accumulate_parts, buffers, parts, dtypes, rank)
        after_chunk()

    def _launch_parts(
        self,
        launch: Callable[..., None],
        buffers: Sequence[torch.Tensor],
        parts: Sequence[Part],
        dtypes: set[torch.dtype],
        rank: int,
    ) -> None:
        """One launch; but one per dtype, and as many more as there are tables full of parts."""
        table, offset = self._place_of(buffers)
        for group in [parts] if len(dtypes) == 1 else [[p for p in parts if p.grads.dtype == one] for one in dtypes]:
            for start in range(0, len(group), MAX_PARTS):
                grads, offsets, numels = zip(*group[start : start + MAX_PARTS], strict=True)
                with self._part_rows.popleft() as rows:
                    launch(rows, table, grads, offsets, numels, rank=rank, offset_bytes=offset)

    def add_slots(
        self,
        slots: torch.Tensor,
        slot_bytes: int,
        dtype: torch.dtype,
        additions: Sequence[Addition],
        after_chunk: AfterChunk = no_op,
    ) -> None:
        total_dtype = additions[0].total.dtype
        if (total_dtype, dtype) not in PAIRS:
            super().add_slots(slots, slot_bytes, dtype, additions, after_chunk)
            return
        for low in range(0, slots.numel() // slot_bytes, MAX_SLOTS):
            part = slots[low * slot_bytes : (low + MAX_SLOTS) * slot_bytes]
            rows = [row for addition in additions if (row := _row(addition, low)) is not None]
            for start in range(0, len(rows), _ROWS):
                self._launch_rows(rows[start : start + _ROWS], part, slot_bytes, total_dtype, dtype)
        after_chunk()

    def _launch_rows(
        self, rows: Sequence[SlotRow], slots: torch.Tensor, slot_bytes: int, total: torch.dtype, addend: torch.dtype
    ) -> None:
        with self._row_tables.popleft() as table:
            aligned = write_rows(table, rows, slots, slot_bytes, total_dtype=total, addend_dtype=addend)
            accumulate_slots(
                table.data_ptr(),
                len(rows),
                slots,
                slot_bytes,
                total_dtype=total,
                addend_dtype=addend,
                aligned=aligned,
                num_programs=min(sum(blocks(row.numel) for row in rows), LOCAL_PROGRAMS) or 1,
            )

    def zero(self, out: torch.Tensor, after_chunk: AfterChunk = no_op) -> None:
        if out.dtype in FLOATS:
            fill(out)
        else:
            out.zero_()
        after_chunk()

    def run(self, work: Callable[[], object]) -> None:
        work()

    @contextmanager
    def background(self) -> Iterator[None]:
        with self._on(self._background):
            yield

    @contextmanager
    def on_side_stream(self) -> Iterator[None]:
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
        handle, end = self._taken.get(memory, (stream.cuda_stream, None))
        if end is not None and handle != stream.cuda_stream:
            stream.wait_event(end)
        yield
        self._taken[memory] = stream.cuda_stream, stream.record_event()

    def synchronize(self, timeout_s: float) -> bool:
        streams = {torch.cuda.current_stream(self._device), self._background, self._aside, *self._used.values()}
        if self._home is not None:
            streams.add(self._home)
        events = [stream.record_event() for stream in streams]
        deadline = time.monotonic() + timeout_s
        while not all(event.query() for event in events):
            if time.monotonic() > deadline:
                return False
            time.sleep(limits.STREAM_PAUSE_S)
        return True

    def close(self) -> None:
        for stream in (self._background, self._aside):
            self._give_back_stream(stream)
        self._row_tables.clear()
        self._part_rows.clear()
