"""What README.md and docs/gpu.md say of a committed result; see :mod:`odc.bench.harness.figures`."""

from __future__ import annotations

from typing import Any

from odc.bench.communication.primitives import size_text
from odc.bench.gpu.bandwidth import PUSHES
from odc.bench.gpu.isolation import PASSED
from odc.bench.harness.benchmark import Entries, Figures
from odc.engines.base import COPY_ENGINE, KERNEL

KERNEL_BYTES = (1 << 26, 1 << 30)
TRANSFER_BYTES = (1 << 20, 1 << 23, 1 << 26, 1 << 28)
RANKS = 2


def passed(*results: Entries) -> Figures:
    """Checks that have passed in one of the results."""
    rows = [check for result in results for check in result["checks"]]
    names = {check["name"] for check in rows if check["status"] == PASSED}
    yield "", f"passes {len(names)} of {len({check['name'] for check in rows})} checks"


def measured(result: Entries, *others: Entries) -> Figures:
    """Rows of tables: kernels, operations of ranks that share a GPU, the two ways of a gather."""
    *more, of_bandwidth = others
    yield from passed(result, *more)
    for kernel, by_size in _ratios(result).items():
        yield f"| {kernel} |", " " + " | ".join(f"{by_size[num_bytes]:.2f}" for num_bytes in KERNEL_BYTES) + " |"
    cells = _data(result)["uneven"]["cells"]
    own, longest = (max(cell[key] for cell in cells) for key in ("of_own", "of_longest"))
    yield "", f"at most {own:.2f} times its own computation to its last push, and a minibatch {longest:.2f} times"
    data = _data(of_bandwidth)
    rows = {(r["operation"], r["num_bytes"]): r for r in data["bandwidth"]["rows"] if r["ranks"] == RANKS}
    transfers = data["bandwidth"]["transfers"]
    for num_bytes in TRANSFER_BYTES:
        cells = [rows[name, num_bytes] for name in ("gather", *PUSHES.values())]
        texts = [f"{1e3 * cell['time_s']['median']:.2f} ms, {cell['busbw']:.1f} GB/s" for cell in cells]
        yield f"| {size_text(num_bytes)} |", " " + " | ".join(texts) + " |"
    for num_bytes in TRANSFER_BYTES:
        at = transfers["sizes"].index(num_bytes)
        times = [f"{1e3 * transfers['seconds'][way][at]:.2f} ms" for way in (KERNEL, COPY_ENGINE)]
        yield f"| {size_text(num_bytes)} |", " " + " | ".join(times) + " |"


def _data(result: Entries) -> dict[str, Any]:
    """What each check has measured."""
    return {check["name"]: check["data"] for check in result["checks"]}


def _ratios(result: Entries) -> dict[str, dict[int, float]]:
    """Time over floor, by kernel and size."""
    ratios: dict[str, dict[int, float]] = {}
    for row in _data(result)["kernel_speed"]["rows"]:
        ratios.setdefault(row["kernel"], {})[row["num_bytes"]] = row["ratio"]
    return ratios
