"""Check ``overlap``: what a matmul loses beside gathers and pushes of a layer, by how wide these are launched.

Owners are memory of this GPU, or of its host, pinned: slow and far, the nearest to a link that one GPU has. In another
stream kernels of parts go on while the matmuls are timed. A launch of few programs leaves more multiprocessors alone;
one that is too narrow has fewer bytes under way than the link can carry. Choose by both columns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch

from odc.bench.gpu import host_time
from odc.bench.gpu.device import new_stream
from odc.bench.gpu.setting import Report, Setting, run_ranks
from odc.bench.gpu.timing import by_clock, by_events
from odc.bench.harness.benchmark import Column, Table
from odc.bench.harness.ranks import Rank
from odc.kernels.parts import COLUMNS, MAX_PARTS, PartRows, gather_parts, scatter_accumulate_parts
from odc.kernels.peers import PeerTable

LAYER, OWNERS, SIDE = "7B", 8, 8192
WIDTHS = ((64, 8), (32, 16), (16, 32), (8, 32))
"""Programs, and warps of each."""
_MATMULS, _LAUNCHES = 4, 12  # of a repetition: launches go on for longer than matmuls
_TABLE = Table(
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


def check(setting: Setting) -> Report:
    (rows,) = run_ranks(setting, 1, measure, 3 if setting.quick else 20)
    narrow = [row["loss"] for row in rows if row["width"] == "16 x 32"]
    found = f"a matmul takes {max(narrow):.2f} times as long beside 16 programs of 32 warps"
    return Report(found, {"rows": rows}, (_TABLE,))


def measure(rank: Rank, repetitions: int) -> list[dict[str, Any]]:
    device, sizes = rank.device, host_time.parameters(LAYER)
    numels = [size // OWNERS for size in sizes]
    starts = [4 * sum(numels[:index]) for index in range(len(numels))]
    wholes = [torch.zeros(size, dtype=torch.bfloat16, device=device) for size in sizes]
    rows = PartRows(torch.zeros(MAX_PARTS, COLUMNS, dtype=torch.int64, pin_memory=device.type == "cuda"))
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
    """Median seconds of a transfer and of a matmul alone, and of a matmul beside transfers in another stream."""
    is_cuda = device.type == "cuda"
    stream = new_stream(device) if is_cuda else None

    def beside(repetition: int) -> None:
        """From where the current stream is."""
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            for _ in range(_LAUNCHES):
                launch()

    operations = {
        "transfer_s": lambda repetition: launch(),
        "alone_s": lambda repetition: [matmul() for _ in range(_MATMULS)],
        "begin": beside,
        "beside_s": lambda repetition: [matmul() for _ in range(_MATMULS)],
    }
    samples: dict[str, list[float]] = {name: [] for name in operations}
    for repetition in range(-1, repetitions):
        for name, seconds in (by_events if is_cuda else by_clock)(operations, repetition).items():
            if repetition >= 0:
                samples[name].append(seconds / (_MATMULS if name in ("alone_s", "beside_s") else 1))
    medians = {name: statistics.median(values) for name, values in samples.items() if name != "begin"}
    return medians | {"loss": medians["beside_s"] / medians["alone_s"]}
