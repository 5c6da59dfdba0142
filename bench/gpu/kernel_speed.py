"""Check ``kernel_speed``: how far each kernel is from what the memory allows.

An operation's floor is the time in which ``copy_`` moves as many bytes, read and written, measured side by side in
every repetition. Passed if accumulate takes at most 15 % longer than that, from 64 MB on (smaller ones fit in caches,
and are shown only). Buffers take turns, so that no operation finds its own in the cache.

Not covered: peers' memory (see ``peer_bandwidth``): all tables of addresses point to this GPU. Gathers and pushes, of
one parameter or of twelve, of which four are small, launch few programs by default, to leave multiprocessors to the
model; gathers that are launched as wide as local kernels are shown beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from odc.bench.communication.primitives import size_of
from odc.bench.gpu.setting import CheckFailedError, Report, Setting
from odc.bench.gpu.timing import Operation, interleaved
from odc.bench.harness.benchmark import Column, Table
from odc.kernels.accumulate import accumulate
from odc.kernels.fill import copy_cast, fill
from odc.kernels.launching import LOCAL_PROGRAMS, REMOTE_PROGRAMS, REMOTE_WARPS
from odc.kernels.parts import COLUMNS, MAX_PARTS, PartRows, gather_parts, scatter_accumulate_parts, scatter_parts
from odc.kernels.peers import PeerTable

SIZES = (1 << 20, 1 << 23, 1 << 26, 1 << 28, 1 << 30)
QUICK_SIZES = (1 << 20, 1 << 26)
LARGEST_RATIO = 1.15
JUDGED_BYTES = 64 << 20
REPETITIONS, QUICK_REPETITIONS = 30, 8
_ROTATE_BYTES = 1 << 30  # buffers take turns over so much memory
_OWNERS = 4
_SMALL = 512  # elements of the small ones of twelve parameters, per owner


TABLE = Table(
    "rows",
    "kernels, medians (20th-80th percentile)",
    (Column("kernel", "kernel"), Column("size", size_of)),
    (
        Column("us", "time_s", ".1f", 1e6),
        Column("GB/s", "bytes_per_s", ".0f", 1e-9),
        Column("time over floor", "ratio", ".2f"),
    ),
)
Launch = Callable[[torch.Tensor, torch.Tensor], object]


@dataclass(frozen=True)
class Candidate:
    """A kernel on ``out`` of fp32 and a source of ``source_dtype`` with as many elements."""

    name: str
    launch: Launch
    source_dtype: torch.dtype
    reads_out: bool
    reads_source: bool = True
    judged: bool = False

    def moved_bytes(self, numel: int) -> int:
        read = (numel * 4 if self.reads_out else 0) + (numel * self.source_dtype.itemsize if self.reads_source else 0)
        return read + numel * 4


class Tables:
    """Tables of addresses by buffer: building one waits for the GPU."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], PeerTable] = {}

    def of(self, buffer: torch.Tensor) -> PeerTable:
        """``buffer`` in equal parts, one per owner."""
        key = (buffer.data_ptr(), buffer.numel())
        if key not in self._known:
            self._known[key] = PeerTable.of(list(buffer.view(_OWNERS, -1)))
        return self._known[key]


class Parts:
    """A buffer as the memory of ``count`` parameters, each with a row per owner."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._known: dict[tuple[int, int], tuple[PartRows, list[torch.Tensor], list[int], list[int]]] = {}

    def numels(self, length: int) -> list[int]:
        """Of slices of a shard of ``length`` elements: four small ones, if there is more than one.

        >>> Parts(1).numels(80_000), Parts(12).numels(80_000)[:6]
        ([80000], [512, 512, 512, 512, 9744, 9744])
        """
        small = [_SMALL] * min(4, self._count - 1)
        left, large = length - sum(small), self._count - len(small)
        return [*small, *[left // large // 8 * 8] * (large - 1), left - left // large // 8 * 8 * (large - 1)]

    def of(self, buffer: torch.Tensor) -> tuple[PartRows, list[torch.Tensor], list[int], list[int]]:
        """A table for its launches, the parameters, where their slices begin in a shard, and how long these are."""
        key = (buffer.data_ptr(), buffer.numel())
        if key not in self._known:
            numels = self.numels(buffer.numel() // _OWNERS)
            starts = [sum(numels[:i]) for i in range(len(numels))]
            memory = torch.zeros(MAX_PARTS, COLUMNS, dtype=torch.int64, pin_memory=buffer.is_cuda)
            parts = [buffer[_OWNERS * low : _OWNERS * (low + n)] for low, n in zip(starts, numels, strict=True)]
            self._known[key] = PartRows(memory), parts, starts, numels
        return self._known[key]


def candidates() -> list[Candidate]:
    """Kernels with the bytes they must move."""
    tables = Tables()

    def gather_of(count: int, programs: int = REMOTE_PROGRAMS, warps: int = REMOTE_WARPS) -> Launch:
        parts = Parts(count)

        def launch(out: torch.Tensor, source: torch.Tensor) -> None:
            rows, outs, _, _ = parts.of(out)
            gather_parts(rows, outs, tables.of(source), rank=0, num_programs=programs, num_warps=warps)

        return launch

    def push_of(count: int, push: Callable[..., None]) -> Launch:
        parts = Parts(count)

        def launch(out: torch.Tensor, source: torch.Tensor) -> None:
            rows, grads, starts, numels = parts.of(source)
            push(rows, tables.of(out), grads, [out.itemsize * start for start in starts], numels, rank=0)

        return launch

    fp32, bf16 = torch.float32, torch.bfloat16
    return [
        Candidate("accumulate fp32", accumulate, fp32, reads_out=True, judged=True),
        Candidate("accumulate bf16", accumulate, bf16, reads_out=True, judged=True),
        *[Candidate(f"gather_parts, {n}", gather_of(n), fp32, reads_out=False) for n in (1, 12)],
        # Not judged: nobody has measured yet how near to a copy the one of a single parameter comes.
        *[
            Candidate(f"gather_parts, {n}, {programs} x {warps} warps", gather_of(n, programs, warps), fp32, False)
            for n, programs, warps in ((1, LOCAL_PROGRAMS, 8), (12, LOCAL_PROGRAMS, 8), (12, 64, 8))
        ],
        *[
            Candidate(f"scatter_accumulate_parts, {n}", push_of(n, scatter_accumulate_parts), bf16, reads_out=True)
            for n in (1, 12)
        ],
        *[Candidate(f"scatter_parts, {n}", push_of(n, scatter_parts), fp32, reads_out=False) for n in (1, 12)],
        Candidate("copy_cast bf16->fp32", copy_cast, bf16, reads_out=False),
        Candidate("fill", lambda out, source: fill(out), fp32, reads_out=False, reads_source=False),
    ]


def check(setting: Setting) -> Report:
    device = setting.device(0)
    repetitions = QUICK_REPETITIONS if setting.quick else REPETITIONS
    rows = [
        measure(candidate, size, repetitions, device)
        for size in (QUICK_SIZES if setting.quick else SIZES)
        for candidate in candidates()
    ]
    return report(rows)


def report(rows: list[dict[str, Any]]) -> Report:
    """The figures, or what is too slow.

    Raises:
        CheckFailedError: naming the kernels and sizes.
    """
    judged = [row for row in rows if row["judged"]]
    failed = [
        f"{row['kernel']} at {size_of(row)}: {row['ratio']:.2f}" for row in judged if row["ratio"] > LARGEST_RATIO
    ]
    if failed:
        text = f"time over floor, at most {LARGEST_RATIO} expected: " + ", ".join(failed)
        raise CheckFailedError(text, {"rows": rows}, (TABLE,))
    worst = f"{max(row['ratio'] for row in judged):.2f}" if judged else "nothing judged"
    bandwidth = max(row["moved_bytes"] / row["floor_s"]["median"] for row in rows)
    text = f"time over floor at most {worst} from 64 MB on; copies reach {bandwidth * 1e-9:.0f} GB/s"
    return Report(text, {"rows": rows}, (TABLE,))


def measure(candidate: Candidate, num_bytes: int, repetitions: int, device: torch.device) -> dict[str, Any]:
    """One kernel whose output has ``num_bytes``, beside a copy that reads and writes as many bytes as it must."""
    numel = num_bytes // 4
    moved = candidate.moved_bytes(numel)
    turns = max(1, min(16, _ROTATE_BYTES // moved)) if device.type == "cuda" else 1
    outs = [torch.zeros(numel, device=device) for _ in range(turns)]
    sources = [torch.randn(numel, device=device).to(candidate.source_dtype) for _ in range(turns)]
    halves = [torch.randn(moved // 8, device=device) for _ in range(turns)]  # read, and written elsewhere
    copies = [(torch.empty_like(half), half) for half in halves]
    operations: dict[str, Operation] = {
        "kernel": lambda turn: candidate.launch(outs[turn % turns], sources[turn % turns]),
        "copy": lambda turn: copies[turn % turns][0].copy_(copies[turn % turns][1]),
    }
    for turn in range(turns):  # tables are built now
        operations["kernel"](turn)
    if device.type == "cuda":  # a table of rows is written once more by the next launch
        torch.cuda.synchronize(device)
    times = interleaved(operations, repetitions, device)
    kernel, copy = times["kernel"], times["copy"]
    return {
        "kernel": candidate.name,
        "num_bytes": num_bytes,
        "moved_bytes": moved,
        "time_s": kernel,
        "floor_s": copy,
        "num_samples": repetitions,
        "ratio": kernel["median"] / copy["median"],
        "bytes_per_s": moved / kernel["median"],
        "judged": candidate.judged and num_bytes >= JUDGED_BYTES,
    }
