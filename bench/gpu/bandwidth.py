"""Check ``bandwidth`` and ``peer_bandwidth``: the primitives, with both ways to push, and the two ways of a gather.

The operations and their times are those of :mod:`odc.bench.communication.primitives`. The GB/s column counts what a
rank receives, (ranks - 1) / ranks of the size, and for "copy" and "add" the size. The table of transfers compares the
two ways of a gather, copy engines and a kernel, on the peers' memory itself: ``--transfer-table`` saves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from odc import ParamSlice, Runtime, RuntimeConfig, UnitSpec
from odc.bench.communication.primitives import measure_size, size_of, with_ratios
from odc.bench.gpu.setting import Report, Setting, require, run_ranks
from odc.bench.gpu.transfers import WAYS, choose_accumulate, measure_transfers, transfer_report
from odc.bench.harness.benchmark import Column, Table
from odc.bench.harness.ranks import Rank
from odc.setup.agreement import ProcessGroupExchange

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
"""Of :func:`odc.bench.communication.primitives.measure_size`, pushes by the name of their way."""


def check_shared(setting: Setting) -> Report:
    """Ranks that share GPUs: memory of other processes, but of the same device."""
    return _check(setting, [world for world in setting.worlds if not setting.owns_gpus(world)])


def check_peers(setting: Setting) -> Report:
    """A GPU per rank: the links between them, and NCCL."""
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
    """What "auto" should do on this machine."""
    times: dict[str, list[float]] = {mode: [] for mode in PUSHES}
    for row in sorted(rows, key=lambda row: int(row["num_bytes"])):
        for mode, operation in PUSHES.items():
            if row["operation"] == operation and row["ranks"] == world_size:
                times[mode].append(row["time_s"]["median"])
    return choose_accumulate(times["direct"], times["daemon"])


def measure_all(rank: Rank) -> tuple[list[Row], dict[str, Any]]:
    """All sizes, then the two ways of a gather. Collective; the same on every rank."""
    quick = rank.place.quick
    sizes, repetitions = (QUICK_SIZES, QUICK_REPETITIONS) if quick else (SIZES, REPETITIONS)
    modes = [mode for mode in PUSHES if mode == "daemon" or _can_add_directly(rank)]
    rows = [row for size in sizes for mode in modes for row in measure(rank, size, repetitions, mode, mode == modes[0])]
    return rows, measure_transfers(rank, sizes, repetitions)


def _can_add_directly(rank: Rank) -> bool:
    """Whether atomic additions reach all peers, whatever was chosen by an earlier measurement. Collective."""
    unit = UnitSpec("probe", 64, torch.float32, (ParamSlice("weight", 64),))
    config = replace(RuntimeConfig.from_environment(transport=rank.place.transport), transfer_table="")
    with Runtime.create(ProcessGroupExchange(), [unit], config, device=rank.device) as runtime:
        return not runtime.memory()["slots"]


def measure(rank: Rank, num_bytes: int, repetitions: int, mode: str = "daemon", everything: bool = True) -> list[Row]:
    """The pushes of one ``mode`` at one size; with ``everything``, the other operations too.

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
