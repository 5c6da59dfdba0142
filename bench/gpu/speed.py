"""Checks ``kernel_speed``, ``overlap`` and ``host_time``: what kernels, transfers and the calls for them cost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch

from odc.bench.communication.primitives import size_of
from odc.bench.gpu.device import Operation, interleaved, new_stream, on_a_stream
from odc.bench.gpu.kernels import part_rows
from odc.bench.gpu.setting import CheckFailedError, Report, Setting, require, run_ranks
from odc.bench.harness.benchmark import Column, Table, summary
from odc.bench.harness.ranks import Rank
from odc.cuda.runtime import CudaRuntime
from odc.engines.base import Engine, Part
from odc.kernels.accumulate import accumulate
from odc.kernels.fill import copy_cast, fill
from odc.kernels.launching import LOCAL_PROGRAMS, REMOTE_PROGRAMS, REMOTE_WARPS
from odc.kernels.parts import PartRows, gather_parts, scatter_accumulate_parts, scatter_parts
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
T = TypeVar("T")


@dataclass(frozen=True)
class Candidate:
    """A kernel with an output ``out`` of fp32 and a source of ``source_dtype`` with as many elements."""

    name: str
    launch: Launch
    source_dtype: torch.dtype
    reads_out: bool
    reads_source: bool = True
    judged: bool = False

    def moved_bytes(self, numel: int) -> int:
        read = (numel * 4 if self.reads_out else 0) + (numel * self.source_dtype.itemsize if self.reads_source else 0)
        return read + numel * 4


def _by_buffer(make: Callable[[torch.Tensor], T]) -> Callable[[torch.Tensor], T]:
    """``make``, once for each buffer: building a table of addresses waits for the GPU."""
    known: dict[tuple[int, int], T] = {}

    def of(buffer: torch.Tensor) -> T:
        key = (buffer.data_ptr(), buffer.numel())
        if key not in known:
            known[key] = make(buffer)
        return known[key]

    return of


def _numels(count: int, length: int) -> list[int]:
    """Of slices of ``count`` parameters in a shard of ``length`` elements: four small ones, if there is more than one.

    >>> _numels(1, 80_000), _numels(12, 80_000)[:6]
    ([80000], [512, 512, 512, 512, 9744, 9744])
    """
    small = [_SMALL] * min(4, count - 1)
    left, large = length - sum(small), count - len(small)
    return [*small, *[left // large // 8 * 8] * (large - 1), left - left // large // 8 * 8 * (large - 1)]


def _parts(count: int, buffer: torch.Tensor) -> tuple[PartRows, list[torch.Tensor], list[int], list[int]]:
    """A buffer as the memory of ``count`` parameters, each with a row per owner: a table for launches, the parameters,
    where their slices begin in a shard, and how long these are."""
    numels = _numels(count, buffer.numel() // _OWNERS)
    starts = [sum(numels[:i]) for i in range(len(numels))]
    parts = [buffer[_OWNERS * low : _OWNERS * (low + n)] for low, n in zip(starts, numels, strict=True)]
    return part_rows(buffer.device), parts, starts, numels


def candidates() -> list[Candidate]:
    """The kernels to measure, and the bytes that each has to move."""
    table_of = _by_buffer(lambda buffer: PeerTable.of(list(buffer.view(_OWNERS, -1))))  # equal parts, one per owner

    def gather_of(count: int, programs: int = REMOTE_PROGRAMS, warps: int = REMOTE_WARPS) -> Launch:
        parts_of = _by_buffer(partial(_parts, count))

        def launch(out: torch.Tensor, source: torch.Tensor) -> None:
            rows, outs, _, _ = parts_of(out)
            gather_parts(rows, outs, table_of(source), rank=0, num_programs=programs, num_warps=warps)

        return launch

    def push_of(count: int, push: Callable[..., None]) -> Launch:
        parts_of = _by_buffer(partial(_parts, count))

        def launch(out: torch.Tensor, source: torch.Tensor) -> None:
            rows, grads, starts, numels = parts_of(source)
            push(rows, table_of(out), grads, [out.itemsize * start for start in starts], numels, rank=0)

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


def check_kernels(setting: Setting) -> Report:
    """Check ``kernel_speed``: how far each kernel is from what the memory allows.

    An operation's floor is the time in which ``copy_`` moves as many bytes, read and written, measured side by side in
    every repetition. Passed if accumulate takes at most 15 % longer than that, from 64 MB on (smaller ones fit in
    caches, and are shown only). Buffers take turns, so that no operation finds its own in the cache.

    Not covered: peers' memory (see ``peer_bandwidth``): all tables of addresses point to this GPU. Gathers and pushes,
    of one parameter or of twelve, of which four are small, launch few programs by default, to leave multiprocessors to
    the model; gathers that are launched as wide as local kernels are shown beside them.
    """
    device = setting.device(0)
    repetitions = QUICK_REPETITIONS if setting.quick else REPETITIONS
    rows = [
        measure_kernel(candidate, size, repetitions, device)
        for size in (QUICK_SIZES if setting.quick else SIZES)
        for candidate in candidates()
    ]
    return kernels_report(rows)


def kernels_report(rows: list[dict[str, Any]]) -> Report:
    """The report, if no kernel is too slow.

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


def measure_kernel(candidate: Candidate, num_bytes: int, repetitions: int, device: torch.device) -> dict[str, Any]:
    """Measure one kernel whose output has ``num_bytes``, beside a copy that reads and writes as many bytes as the
    kernel must."""
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


LAYERS = {"1.5B": (1536, 256, 8960), "7B": (3584, 512, 18944), "32B": (5120, 1024, 27648)}
"""Widths of a layer: of the model, of its keys and values, and of its MLP."""
HOST_OWNERS = (8, 16)
_OPERATIONS = ("gather", "push, clients add", "push, daemons add", "FSDP2's copies")
_HOST_TABLE = Table(
    "cells",
    "CPU us of the host for one layer, median (20th-80th percentile)",
    (Column("layer", "layer"), Column("owners", "owners")),
    [Column(name, name, ".0f") for name in _OPERATIONS],
)


def check_host_time(setting: Setting) -> Report:
    """Check ``host_time``: what gathers and pushes of decoder layers cost the host that asks for them.

    A host that needs longer to ask than its device needs to compute holds the device up. What counts is the number of
    calls, so the parameters are those of Qwen2.5's layers, by number and size. All owners are memory of one GPU:
    nothing crosses a link, and a host does the same.
    """
    (cells,) = run_ranks(setting, 1, host_costs, 5 if setting.quick else 30)
    worst = max(cell["gather"]["median"] for cell in cells if cell["owners"] == HOST_OWNERS[0])
    return Report(
        f"a gather of a layer of {HOST_OWNERS[0]} owners takes {worst:.0f} us at most", {"cells": cells}, (_HOST_TABLE,)
    )


def host_costs(rank: Rank, repetitions: int) -> list[dict[str, Any]]:
    engine = CudaRuntime(rank.device).engine()
    bf16, fp32 = torch.bfloat16, torch.float32
    engine.prepare([(bf16, bf16, fp32)])
    with on_a_stream(rank.device):
        cells = [costs(engine, rank.device, name, owners, repetitions) for name in LAYERS for owners in HOST_OWNERS]
    engine.close()
    return cells


def parameters(layer: str) -> list[int]:
    """Numbers of elements of the parameters of a decoder layer: q, k, v with biases, o, the three of the MLP, two
    norms."""
    width, keys, inner = LAYERS[layer]
    return [width * width, width, *[keys * width, keys] * 2, width * width, *[inner * width] * 3, width, width]


def costs(engine: Engine, device: torch.device, layer: str, num_owners: int, repetitions: int) -> dict[str, Any]:
    """The cell of a table: CPU microseconds of this thread for each operation. Gradients are bf16, sums are fp32."""
    wholes = [torch.zeros(numel, dtype=torch.bfloat16, device=device) for numel in parameters(layer)]
    numels = [whole.numel() // num_owners for whole in wholes]
    sums = [torch.zeros(4 * sum(numels), dtype=torch.uint8, device=device) for _ in range(num_owners)]
    shards = [one[: 2 * sum(numels)].view(torch.bfloat16) for one in sums]
    lows = list(itertools.accumulate(numels[:-1], initial=0))
    slices = list(zip(wholes, lows, numels, strict=True))
    added, copied = ([Part(whole, size * low, numel) for whole, low, numel in slices] for size in (4, 2))
    staged = torch.zeros(num_owners, sum(numels), dtype=torch.bfloat16, device=device)
    rows, pieces = [whole.view(num_owners, -1) for whole in wholes], list(staged[0].split_with_sizes(numels))

    def copies_of_fsdp2() -> None:
        """Into the collective's input, and out of its output."""
        torch._foreach_copy_(pieces, [row[0] for row in rows])
        torch.split_with_sizes_copy(staged, numels, 1, out=rows)

    calls: tuple[Callable[[], None], ...] = (
        lambda: engine.read_rows(wholes, shards, 0, own_in_place=True),
        lambda: engine.add_rows(sums, added, 0),
        lambda: engine.write_rows(sums, copied, 0),
        copies_of_fsdp2,
    )
    samples: dict[str, list[float]] = {name: [] for name in _OPERATIONS}
    for repetition in range(-2, repetitions):
        for name, call in zip(_OPERATIONS, calls, strict=True):
            require(engine.synchronize(60.0), "the device has not come to an end within 60 s")
            started = time.thread_time_ns()
            call()
            if repetition >= 0:
                samples[name].append((time.thread_time_ns() - started) * 1e-3)
    return {"layer": layer, "owners": num_owners} | {name: summary(times) for name, times in samples.items()}


LAYER, OWNERS, SIDE = "7B", 8, 8192
WIDTHS = ((64, 8), (32, 16), (16, 32), (8, 32))
"""Numbers of programs, and of warps in each."""
_MATMULS = 4  # of a repetition
_OVERLAP_TABLE = Table(
    "rows",
    "matmuls beside transfers of one layer, medians",
    (Column("owners", "owners"), Column("transfer", "transfer"), Column("programs x warps", "width")),
    (
        Column("alone, GB/s", "bytes_per_s", ".0f", 1e-9),
        Column("matmul alone, ms", "alone_s", ".2f", 1e3),
        Column("beside, ms", "beside_s", ".2f", 1e3),
        Column("loss", "loss", ".2f"),
    ),
)


def check_overlap(setting: Setting) -> Report:
    """Check ``overlap``: what a matmul loses beside gathers and pushes of a layer, by how wide these are launched.

    Owners are memory of this GPU, or of its host, pinned: slow and far, the nearest to a link that one GPU has. In
    another stream kernels of parts go on while the matmuls are timed. A launch of few programs leaves more
    multiprocessors alone; one that is too narrow has fewer bytes under way than the link can carry. Choose by both
    columns.
    """
    (rows,) = run_ranks(setting, 1, measure_overlap, 3 if setting.quick else 20)
    narrow = [row["loss"] for row in rows if row["width"] == "16 x 32"]
    found = f"a matmul takes {max(narrow):.2f} times as long beside 16 programs of 32 warps"
    return Report(found, {"rows": rows}, (_OVERLAP_TABLE,))


def measure_overlap(rank: Rank, repetitions: int) -> list[dict[str, Any]]:
    device, sizes = rank.device, parameters(LAYER)
    numels = [size // OWNERS for size in sizes]
    starts = [4 * sum(numels[:index]) for index in range(len(numels))]
    wholes = [torch.zeros(size, dtype=torch.bfloat16, device=device) for size in sizes]
    rows = part_rows(device)
    matrix = torch.ones(SIDE, SIDE, dtype=torch.bfloat16, device=device)
    found = []
    for where in ("device", "host"):
        room: dict[str, Any] = {"device": device} if where == "device" else {"pin_memory": device.type == "cuda"}
        sums = [torch.zeros(sum(numels), **room) for _ in range(OWNERS)]
        peers = PeerTable.build([one.data_ptr() for one in sums], device)
        gather = partial(gather_parts, rows, wholes, peers, rank=0)
        push = partial(scatter_accumulate_parts, rows, peers, wholes, starts, numels, rank=0)
        transfers: list[tuple[str, Callable[..., None], int]] = [("gather", gather, 2), ("push", push, 4)]
        # Additions to a host's memory are another matter: PCIe has none of floating-point numbers.
        for (transfer, call, size), (programs, warps) in product(transfers[: 2 if where == "device" else 1], WIDTHS):
            launch = partial(call, num_programs=programs, num_warps=warps)
            times = timed(launch, partial(torch.mm, matrix, matrix), device, repetitions)
            row = {"owners": where, "transfer": transfer, "width": f"{programs} x {warps}", **times}
            found.append(row | {"bytes_per_s": sum(sizes) * size / times["transfer_s"]})
    return found


def timed(
    launch: Callable[[], object], matmul: Callable[[], object], device: torch.device, repetitions: int
) -> dict[str, float]:
    """Median seconds of a transfer alone, of a matmul alone, and of a matmul beside transfers in another stream."""
    stream = new_stream(device) if device.type == "cuda" else None

    def matmuls(repetition: int) -> None:
        for _ in range(_MATMULS):
            matmul()

    alone = interleaved({"transfer": lambda repetition: launch(), "matmuls": matmuls}, repetitions, device)
    transfer_s, alone_s = (alone[name]["median"] for name in ("transfer", "matmuls"))

    def begin(repetition: int) -> None:
        """From where the current stream is, transfers for twice as long as the matmuls take alone."""
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            for _ in range(2 + int(2 * alone_s / transfer_s)):
                launch()

    beside_s = interleaved({"begin": begin, "matmuls": matmuls}, repetitions, device)["matmuls"]["median"]
    return {
        "transfer_s": transfer_s,
        "alone_s": alone_s / _MATMULS,
        "beside_s": beside_s / _MATMULS,
        "loss": beside_s / alone_s,
    }
