"""The interface of engines, which move and add the bytes of one rank, and the order of these operations.

On a CPU an operation is complete when its call returns. On a GPU a call puts work into the current stream. The order
between streams, of one rank or of several, is kept by :meth:`odc.transports.base.Transport.post` and
:meth:`~odc.transports.base.Transport.order_after`. The protocol is written once, for both.

A measured :class:`TransferTable` says for each size whether copy engines or a kernel gather faster on a GPU. Copy
engines occupy no multiprocessor, so they do not slow down overlapping compute; but each owner's shard needs its own
copy, which takes microseconds to start. One kernel reads from all owners at once. The sizes depend on the machine:
``odc bench gpu`` measures them and prints the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from odc.errors import ConfigError, UnsupportedError
from odc.kernels import add_chunked, copy_chunked, zero_chunked

KERNEL, COPY_ENGINE = "kernel", "copy_engine"


@dataclass(frozen=True)
class TransferTable:
    """Rows of (up to so many bytes, "kernel" or "copy_engine"), in rising order; the last one has 0 bytes: no limit."""

    rows: tuple[tuple[int, str], ...]
    accumulate: str = "direct"
    """"direct" or "daemon": what accumulate="auto" means where additions to peers are atomic."""

    def __post_init__(self) -> None:
        limits = [limit for limit, _ in self.rows]
        if not self.rows or limits[-1] != 0 or any(limit <= 0 for limit in limits[:-1]):
            raise ConfigError(f"transfer table {self.rows}: the last row, and no other, has 0 bytes, for no limit")
        if limits[:-1] != sorted(set(limits[:-1])):
            raise ConfigError(f"transfer table {self.rows}: bytes must rise from row to row")
        unknown = {way for _, way in self.rows} - {KERNEL, COPY_ENGINE}
        if unknown:
            raise ConfigError(f"transfer table: {sorted(unknown)} is neither {KERNEL!r} nor {COPY_ENGINE!r}")
        if self.accumulate not in ("direct", "daemon"):
            raise ConfigError(f"transfer table: accumulate is {self.accumulate!r}, neither 'direct' nor 'daemon'")

    @classmethod
    def default(cls) -> TransferTable:
        """Copy engines, as the paper has it within a node (appendix B); but kernels where a link carries all rows in
        less time than a host takes to ask for a copy of each."""
        return cls(((8 << 20, KERNEL), (0, COPY_ENGINE)))

    @classmethod
    def of_measurements(cls, sizes: Sequence[int], kernel_s: Sequence[float], copy_s: Sequence[float]) -> TransferTable:
        """From times of the same gathers done both ways; a limit is the geometric mean of the sizes around a crossing.

        >>> TransferTable.of_measurements([1000, 4000, 16000], [1.0, 2.0, 9.0], [3.0, 3.0, 8.0]).rows
        ((8000, 'kernel'), (0, 'copy_engine'))
        """
        ways = [KERNEL if kernel < copy else COPY_ENGINE for kernel, copy in zip(kernel_s, copy_s, strict=True)]
        rows = [
            (int((sizes[i] * sizes[i + 1]) ** 0.5), ways[i]) for i in range(len(sizes) - 1) if ways[i] != ways[i + 1]
        ]
        return cls((*rows, (0, ways[-1])))

    @classmethod
    def load(cls, path: Path) -> TransferTable:
        """From a JSON file that :meth:`save` or ``odc bench gpu`` wrote.

        Raises:
            ConfigError: the file cannot be read, or holds no such table.
        """
        try:
            document = json.loads(path.read_text())
            rows, accumulate = document["transfer_table"], document.get("accumulate", "direct")
            return cls(tuple((int(limit), str(way)) for limit, way in rows), accumulate)
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise ConfigError(f"{path} holds no transfer table: {problem!r}") from None

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"transfer_table": self.rows, "accumulate": self.accumulate}) + "\n")

    def by_kernel(self, num_bytes: int) -> bool:
        """Whether a kernel is the faster way to gather ``num_bytes``."""
        return next(way for limit, way in self.rows if limit == 0 or num_bytes <= limit) == KERNEL


AfterChunk = Callable[[], None]


class Addition(NamedTuple):
    """``total += `` what lies at ``offset_bytes`` of each of ``slots``, in this order; see :meth:`Engine.add_slots`."""

    total: torch.Tensor
    """Flat; a part of one sum."""
    slots: Sequence[int]
    offset_bytes: int = 0
    first: bool = False
    """The sum is overwritten; without any slot it becomes zero."""


class Part(NamedTuple):
    """What a push has of one parameter, or of several, for every owner; see :meth:`Engine.write_rows`."""

    grads: torch.Tensor
    """Flat, dense. Row r begins at element ``r * numel``; the last rows may be short or missing."""
    offset_bytes: int
    """Of an owner's row in its buffer."""
    numel: int
    """Elements of a row."""

    def row(self, owner: int) -> torch.Tensor:
        """As much as there is of an owner's row.

        >>> [Part(torch.tensor([1, 2, 3]), 0, 2).row(owner).tolist() for owner in range(3)]
        [[1, 2], [3], []]
        """
        return self.grads[owner * self.numel : (owner + 1) * self.numel]


def no_op() -> None:
    """The default of ``after_chunk``."""


class Engine:
    """Moves and adds bytes: this one by plain torch on host memory, chunk by chunk, so that all is done when a call
    returns. ``after_chunk`` is called at least once per call: progress, and a fault point."""

    has_streams: ClassVar[bool] = False
    """Whether work happens later than the call, in the order of a stream."""

    copy = staticmethod(copy_chunked)
    """``copy(outs, sources, after_chunk)``: ``outs[i][:] = sources[i]`` for every i, of equal shapes, casting to the
    dtype of ``outs[i]``."""
    add = staticmethod(add_chunked)
    """``add(totals, addends, after_chunk)``: ``totals[i] += addends[i]`` for every i, in the total's dtype."""
    zero = staticmethod(zero_chunked)
    """``zero(out, after_chunk)``: ``out[:] = 0``."""

    # Operations on the memory of all ranks at once, a row of it for each. Flat memory is one part.

    def read_rows(
        self,
        outs: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        rank: int,
        own_in_place: bool = False,
        after_chunk: AfterChunk = no_op,
    ) -> None:
        """Row r of ``outs[i]`` from slice i of ``shards[r]``, for every r and i, beginning after ``rank``.

        Args:
            outs: flat, dense, each of ``len(shards)`` equal rows.
            shards: flat; the slices lie in them back to back. Each lies at the same place of one rank's copy of an
                allocation.
            own_in_place: rows of ``rank`` are there already.
        """
        for step in range(len(shards) - own_in_place):
            row, low = (rank + 1 + step) % len(shards), 0
            for out in outs:
                numel = out.numel() // len(shards)
                self.copy([out[row * numel : (row + 1) * numel]], [shards[row][low : low + numel]], after_chunk)
                low += numel

    def write_rows(
        self, buffers: Sequence[torch.Tensor], parts: Sequence[Part], rank: int, after_chunk: AfterChunk = no_op
    ) -> None:
        """Row r of every part into ``buffers[r]`` at the part's offset, for every r, beginning after ``rank``. What a
        row lacks is zeros there.

        Args:
            buffers: each rank's copy of one allocation, flat uint8.
        """
        for step in range(len(buffers)):
            owner = (rank + 1 + step) % len(buffers)
            for part in parts:
                row, size = part.row(owner), part.grads.itemsize
                target = buffers[owner][part.offset_bytes : part.offset_bytes + part.numel * size].view(row.dtype)
                self.copy([target[: row.numel()]], [row], after_chunk)
                if row.numel() < part.numel:
                    self.zero(target[row.numel() :], after_chunk)

    def add_rows(
        self, buffers: Sequence[torch.Tensor], parts: Sequence[Part], rank: int, after_chunk: AfterChunk = no_op
    ) -> None:
        """Row r of every part to the float32 sums that lie in ``buffers[r]`` from the part's offset on, for every r,
        element by element, whoever else adds there at the same time.

        Raises:
            UnsupportedError: this engine has no such operation.
        """
        raise UnsupportedError("torch has no atomic addition on a CPU: processors add under a lock")

    def add_slots(
        self,
        slots: torch.Tensor,
        slot_bytes: int,
        dtype: torch.dtype,
        additions: Sequence[Addition],
        after_chunk: AfterChunk = no_op,
    ) -> None:
        """Add what lies in ``slots``, consecutive ones of ``slot_bytes``, as ``dtype``. The totals are all apart."""
        for total, numbers, offset_bytes, first in additions:
            starts = [number * slot_bytes + offset_bytes for number in numbers]
            num_bytes = total.numel() * dtype.itemsize
            if first and not starts:
                self.zero(total, after_chunk)
            for index, start in enumerate(starts):
                addend = slots[start : start + num_bytes].view(dtype)
                (self.copy if first and index == 0 else self.add)([total], [addend], after_chunk)

    def prepare(self, dtypes: Iterable[tuple[torch.dtype, torch.dtype, torch.dtype]]) -> None:
        """Compile and load what will be launched: a missing compiler shows at set-up, and no step waits for one.

        Args:
            dtypes: of each unit's published shards, its gradients as they are pushed, and their sums.

        Raises:
            SetupError: it cannot be.
        """

    def choose_by(self, table: TransferTable) -> None:
        """Decide between copy engines and kernels by ``table``. A CPU has one way only."""

    def run(self, work: Callable[[], object]) -> None:
        """Have ``work``, torch operations of the caller, done in order with this thread's calls of the engine."""
        work()

    def stream_key(self) -> int:
        """Names the current stream."""
        return 0

    def background(self) -> AbstractContextManager[object]:
        """Inside, this thread's work does not queue behind that of the training loop."""
        return nullcontext()

    def on_side_stream(self) -> AbstractContextManager[object]:
        """Inside, this thread's work queues behind no other."""
        return nullcontext()

    def note_use(self) -> None:
        """The current stream reads what others will overwrite: :meth:`join` has to wait for it."""

    def join(self) -> None:
        """The current stream goes on after everything noted by :meth:`note_use`."""

    def join_background(self) -> None:
        """The current stream goes on after everything that was done inside :meth:`background`."""

    def at_home(self) -> AbstractContextManager[object]:
        """Inside, the stream that called :meth:`join` last, where gradients became final, is the current one; behind
        it, the current stream goes on after what was done inside. FSDP calls from streams of its own, and a sum is the
        other ranks' again only after it was read there."""
        return nullcontext()

    def take(self, memory: str) -> AbstractContextManager[object]:
        """Inside, the current stream has the memory of this name to itself: it goes on when the stream that had it
        before has done what it was given inside."""
        return nullcontext()

    def hold(self, tensor: torch.Tensor) -> None:
        """Whoever lets go of ``tensor`` now: its memory is used for nothing else before the current stream has done
        what it was given. (Its own engine's memory; on a host nothing is under way.)"""

    def synchronize(self, timeout_s: float) -> bool:
        """Let the host wait until this rank's device is idle; False if it still works after ``timeout_s``. Set-up and
        close only."""
        return True

    def close(self) -> None:
        """Give back what this engine holds of its device, which is idle."""
