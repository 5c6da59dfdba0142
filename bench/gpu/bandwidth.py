"""Checks ``bandwidth`` and ``peer_bandwidth``: the primitives, with both ways to push, and the two ways of a gather.

Operations and their times are those of :mod:`odc.bench.communication.primitives`. The GB/s column counts the bytes that
a rank receives, (ranks - 1) / ranks of the size; for "copy" and "add" it counts the size. The table of transfers
compares the two ways of a gather, copy engines and a kernel, on the peers' memory itself. ``--transfer-table`` saves
this table.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from odc.bench.communication.primitives import measure_size, size_of, size_text, timed, with_ratios
from odc.bench.gpu.device import on_a_stream
from odc.bench.gpu.setting import Report, Setting, require, run_ranks
from odc.bench.gpu.transport import open_transport
from odc.bench.harness.benchmark import Column, Table
from odc.bench.harness.ranks import Rank
from odc.bench.harness.units import config_of, create_runtime
from odc.engines.base import COPY_ENGINE, KERNEL, TransferTable
from odc.setup.agreement import ProcessGroupExchange
from odc.setup.topology import Topology
from odc.transports.base import SymmetricBuffer, Transport

SIZES = tuple(1 << shift for shift in range(20, 29))
QUICK_SIZES = (1 << 20, 1 << 24)
REPETITIONS, QUICK_REPETITIONS = 15, 5
PUSHES = {"direct": "push, direct", "daemon": "push, daemon"}
_RIVALS = {"gather": ("all_gather",), **dict.fromkeys(PUSHES.values(), ("reduce_scatter",))}
TABLE = Table(
    "rows",
    "operations, medians (20th-80th percentile)",
    (Column("ranks", "ranks"), Column("operation", "operation"), Column("by", "by"), Column("size", size_of)),
    (
        Column("ms", "time_s", ".3f", 1e3),
        Column("GB/s", "busbw", ".1f"),
        Column("x collective", "x_collective", ".2f"),
    ),
)
Row = dict[str, Any]
"""A row of :func:`odc.bench.communication.primitives.measure_size`, in which a push has the name of its way."""


def check_shared(setting: Setting) -> Report:
    """Check ``bandwidth``: ranks that share GPUs, so that memory of other processes is memory of the same device."""
    return _check(setting, [world for world in setting.worlds if not setting.owns_gpus(world)])


def check_peers(setting: Setting) -> Report:
    """Check ``peer_bandwidth``: a GPU per rank, the links between them, and NCCL."""
    return _check(setting, [world for world in setting.worlds if setting.owns_gpus(world)])


def _check(setting: Setting, worlds: Sequence[int]) -> Report:
    rows: list[Row] = []
    transfers: dict[str, Any] = {}
    for world_size in worlds:
        found, transfers = run_ranks(setting, world_size, measure_all, limit_s=600.0)[0]
        rows += with_ratios(found, _RIVALS)
    ways, text = transfer_report(transfers, setting.transfer_table, accumulate_of(rows, max(worlds)))
    data = {"rows": rows, "transfers": transfers, "ways": ways}
    return Report(f"{_fastest(rows)}; {text}", data, (TABLE, WAYS))


def _fastest(rows: Sequence[Row]) -> str:
    words = []
    for operation in ("gather", *PUSHES.values()):
        rates = [row["busbw"] for row in rows if row["operation"] == operation]
        words += [f"{operation} up to {max(rates):.0f} GB/s"] * bool(rates)
    return ", ".join(words)


def accumulate_of(rows: Sequence[Row], world_size: int) -> str:
    """Who should add pushes on this machine, by the rows of ``world_size`` ranks: what "auto" chooses."""
    of_world = sorted((row for row in rows if row["ranks"] == world_size), key=lambda row: int(row["num_bytes"]))
    times = {row["operation"]: row["time_s"]["median"] for row in of_world}  # at last of the largest size
    return choose_accumulate(*(times.get(operation) for operation in PUSHES.values()))


def measure_all(rank: Rank) -> tuple[list[Row], dict[str, Any]]:
    """Measure all sizes, then the two ways of a gather. Collective; every rank returns the same."""
    quick = rank.place.quick
    sizes, repetitions = (QUICK_SIZES, QUICK_REPETITIONS) if quick else (SIZES, REPETITIONS)
    modes = [mode for mode in PUSHES if mode == "daemon" or _can_add_directly(rank)]
    rows = [row for size in sizes for mode in modes for row in measure(rank, size, repetitions, mode, mode == modes[0])]
    return rows, measure_transfers(rank, sizes, repetitions)


def _can_add_directly(rank: Rank) -> bool:
    """Whether atomic additions reach all peers, whatever was chosen by an earlier measurement. Collective."""
    with create_runtime(rank, replace(config_of(rank), transfer_table=""), 64) as runtime:
        return not runtime.memory()["slots"]


def measure(rank: Rank, num_bytes: int, repetitions: int, mode: str = "daemon", everything: bool = True) -> list[Row]:
    """Measure the pushes of one ``mode`` at one size; with ``everything``, the other operations too.

    Raises:
        CheckFailedError: an element is wrong.
    """
    rows = measure_size(rank, num_bytes, repetitions, accumulate=mode, everything=everything)
    for row in rows:
        require(
            not row.get("wrong"), f"{row['operation']} of {num_bytes} bytes, {mode}: {row.get('wrong')} wrong elements"
        )
        if row["operation"] == "scatter_accumulate":
            row["operation"] = PUSHES[mode]
    return rows


# The two ways of a gather on peers' memory; who adds pushes; and the table that chooses


WORTH = 2.0
_CALLS = 4
WAYS = Table(
    "ways",
    "one gather, two ways",
    (Column("size", size_of),),
    (
        Column("kernel, ms", "kernel_s", ".3f", 1e3),
        Column("copy engines, ms", "copy_s", ".3f", 1e3),
        Column("faster", "faster"),
    ),
)


def measure_transfers(rank: Rank, sizes: Sequence[int], repetitions: int) -> dict[str, Any]:
    """Median seconds of a gather on the slowest rank, by way and size. Collective.

    Empty where the kernel cannot be used: on a CPU, or if a rank's memory is not addressable from all others.
    """
    if rank.device.type != "cuda" or Topology.discover(ProcessGroupExchange()).num_hosts > 1:
        return {}
    with open_transport(rank, 2 * max(sizes)) as transport:
        buffer = transport.allocate(max(sizes) // rank.world_size, "transfers")
        with on_a_stream(rank.device):
            samples = [_measure_ways(rank, transport, buffer, size, repetitions) for size in sizes]
        rank.meet()
    by_way = {way: [times[way] for times in samples] for way in (KERNEL, COPY_ENGINE)}
    return {"sizes": list(sizes), "seconds": by_way}


def _measure_ways(
    rank: Rank, transport: Transport, buffer: SymmetricBuffer, num_bytes: int, repetitions: int
) -> dict[str, float]:
    numel = num_bytes // rank.world_size // 4
    shards = [buffer.peer(owner)[: 4 * numel].view(torch.float32) for owner in range(rank.world_size)]
    out = torch.zeros(numel * rank.world_size, device=rank.device)
    gather = partial(transport.engine.read_rows, [out], shards, rank.rank, own_in_place=True)
    samples: dict[str, list[float]] = {KERNEL: [], COPY_ENGINE: []}
    for repetition in range(repetitions + 1):
        for way in samples:
            transport.engine.choose_by(TransferTable(((0, way),)))
            seconds = timed(rank, gather, calls=_CALLS)
            if repetition:
                samples[way].append(seconds)
    return {way: statistics.median(values) for way, values in samples.items()}


def choose_accumulate(direct_s: float | None, daemon_s: float | None) -> str:
    """Choose who adds pushes, by the times of the largest ones. Direct additions depend on no other rank, so they may
    take :data:`WORTH` times as long as a daemon's. Without both times the choice is "direct".

    >>> choose_accumulate(3.0, 2.0), choose_accumulate(5.0, 2.0)
    ('direct', 'daemon')
    """
    return "daemon" if direct_s and daemon_s and direct_s > WORTH * daemon_s else "direct"


def transfer_report(transfers: dict[str, Any], path: str, accumulate: str) -> tuple[list[dict[str, Any]], str]:
    """The rows of :data:`WAYS`, and the measured table in words. The table is saved to ``path`` if that is not
    empty."""
    if not transfers:
        return [], "transfers not compared"
    sizes, seconds = transfers["sizes"], transfers["seconds"]
    chosen = TransferTable.of_measurements(sizes, seconds[KERNEL], seconds[COPY_ENGINE])
    chosen = replace(chosen, accumulate=accumulate)
    if path:
        chosen.save(Path(path))
    rows = [
        {"num_bytes": size, "kernel_s": kernel, "copy_s": copy, "faster": KERNEL if kernel < copy else COPY_ENGINE}
        for size, kernel, copy in zip(sizes, seconds[KERNEL], seconds[COPY_ENGINE], strict=True)
    ]
    text = ", ".join(f"{way} {f'up to {size_text(limit)}' if limit else 'beyond'}" for limit, way in chosen.rows)
    return rows, f"gathers by {text}; additions: {accumulate}"
