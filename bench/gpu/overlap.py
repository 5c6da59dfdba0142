"""Check ``overlap``: what a matmul loses beside gathers and pushes of a layer, by how wide these are launched.

Owners are memory of this GPU, or of its host, pinned: slow and far, the nearest to a link that one GPU has. In another
stream kernels of parts go on while the matmuls are timed. A launch of few programs leaves more multiprocessors alone;
one that is too narrow has fewer bytes under way than the link can carry. Choose by both columns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch

from odc.bench.gpu import host_time
from odc.bench.gpu.device import new_stream
from odc.bench.gpu.setting import Report, Setting, run_ranks
from odc.bench.gpu.timing import interleaved
from odc.bench.harness.benchmark import Column, Table
from odc.bench.harness.ranks import Rank
from odc.kernels.parts import COLUMNS, MAX_PARTS, PartRows, gather_parts, scatter_accumulate_parts
from odc.kernels.peers import PeerTable

LAYER, OWNERS, SIDE = "7B", 8, 8192
WIDTHS = ((64, 8), (32, 16), (16, 32), (8, 32))
"""Programs, and warps of each."""
_MATMULS = 4  # of a repetition
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
