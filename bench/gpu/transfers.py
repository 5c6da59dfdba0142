"""The two ways of a gather on peers' memory, copy engines or a kernel; who adds pushes, clients or daemons; and the
table that chooses.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from odc.bench.communication.primitives import size_of, size_text
from odc.bench.gpu.device import on_a_stream
from odc.bench.harness.benchmark import Column, Table
from odc.bench.harness.ranks import Rank
from odc.engines.base import COPY_ENGINE, KERNEL, TransferTable
from odc.setup.agreement import ProcessGroupExchange
from odc.setup.topology import Topology
from odc.transports import registry
from odc.transports.base import SymmetricBuffer, Transport

WORTH = 2.0
_CALLS = 4
_TIMEOUT_S = 60.0
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
    """Median seconds of the slowest rank, by way and size. Collective.

    Empty where the kernel cannot be used: on a CPU, or if a rank's memory is not addressable from all others.
    """
    if rank.device.type != "cuda":
        return {}
    exchange = ProcessGroupExchange()
    topology = Topology.discover(exchange)
    if topology.num_hosts > 1:
        return {}
    transport = registry.choose(rank.place.transport, topology, rank.device, exchange)(exchange, topology, _TIMEOUT_S)
    try:
        transport.open(num_signals=1, num_locks=0, num_bytes=2 * max(sizes))
        buffer = transport.allocate(max(sizes) // rank.world_size, "transfers")
        transport.seal()
        with on_a_stream(rank.device):
            samples = [_measure(rank, transport, buffer, size, repetitions) for size in sizes]
        rank.meet()
    finally:
        transport.close()
    by_way = {way: [times[way] for times in samples] for way in (KERNEL, COPY_ENGINE)}
    return {"sizes": list(sizes), "seconds": by_way}


def _measure(
    rank: Rank, transport: Transport, buffer: SymmetricBuffer, num_bytes: int, repetitions: int
) -> dict[str, float]:
    numel = num_bytes // rank.world_size // 4
    shards = [buffer.peer(owner)[: 4 * numel].view(torch.float32) for owner in range(rank.world_size)]
    out = torch.zeros(numel * rank.world_size, device=rank.device)
    samples: dict[str, list[float]] = {KERNEL: [], COPY_ENGINE: []}
    for repetition in range(repetitions + 1):
        for way in samples:
            transport.engine.choose_by(TransferTable(((0, way),)))
            rank.meet()
            started = time.perf_counter()
            for _ in range(_CALLS):
                transport.engine.read_rows([out], shards, rank.rank, own_in_place=True)
            torch.cuda.synchronize()
            seconds = rank.largest(time.perf_counter() - started) / _CALLS
            if repetition:
                samples[way].append(seconds)
    return {way: statistics.median(values) for way, values in samples.items()}


def choose_accumulate(direct_s: Sequence[float], daemon_s: Sequence[float]) -> str:
    """By the times of the same pushes, in rising order of size. Clients that add themselves depend on nobody, so they
    may take :data:`WORTH` times as long at the largest size; without times of both it is "direct".

    >>> choose_accumulate([1.0, 3.0], [2.0, 2.0]), choose_accumulate([1.0, 5.0], [2.0, 2.0])
    ('direct', 'daemon')
    """
    return "daemon" if direct_s and daemon_s and direct_s[-1] > WORTH * daemon_s[-1] else "direct"


def transfer_report(transfers: dict[str, Any], path: str, accumulate: str) -> tuple[list[dict[str, Any]], str]:
    """The rows of :data:`WAYS` and the measured table in a word; saved if ``path`` is not empty and there is one."""
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
