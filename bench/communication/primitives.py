"""Bandwidth of ``gather`` and ``scatter_accumulate`` against collectives and against plain memory operations.

    torchrun --nproc-per-node 2 -m odc.bench.communication.primitives --json primitives.json
    torchrun --nproc-per-node 2 -m odc.bench.communication.primitives --hosts 2 --json primitives_tcp.json

As in the paper (section 5.4) all ranks launch each primitive together, after a barrier, so that the one-sided
primitives do not profit from their freedom. Each repetition runs every primitive once on every rank, in turn, so that
a drift of the machine's speed meets all of them. A repetition's time is the slowest rank's; the table shows the median
over repetitions and the 20th and 80th percentile.

``num_bytes`` is the whole gathered output of a rank, or its whole gradient. Both all-gather forms are called as FSDP2
calls them: the rank's own shard lies in its place of the output already, so ``(world_size - 1) / world_size`` of
``num_bytes`` move (``--copy-own`` makes both copy their own shard too). "copy" is ``out.copy_(x)`` and "add"
``acc.add_(x)`` of all ``num_bytes`` in private memory, by all ranks at the same time: what the memory allows. The GB/s
column and the "x memory op" column count the bytes that move; the JSON has times only.

Not covered: contention by compute (the ranks do nothing else), more than one unit, bf16, skewed arrival. The pushes of
one repetition include the first one of a minibatch, which copies, and later ones, which add (``--pushes``, default 4,
all timed).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from odc import ParamSlice, Runtime, RuntimeConfig, UnitSpec
from odc.bench.harness.environment import describe_environment
from odc.setup.agreement import ProcessGroupExchange

DEFAULT_SIZES = [1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28]
SIZE_LIMIT_S = 20.0  # of one size; large sizes get fewer repetitions, never fewer than five
# torch 2.13 renamed them.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class Row:
    """One measured primitive at one size."""

    primitive: str
    backend: str
    world_size: int
    num_bytes: int
    median_s: float
    p20_s: float
    p80_s: float
    num_samples: int

    def seconds_per_gb(self, in_place: bool) -> float:
        """Of the bytes that move."""
        peers_only = in_place and self.primitive in ("gather", "all_gather")
        moved = self.num_bytes * (self.world_size - 1) / self.world_size if peers_only else self.num_bytes
        return self.median_s / moved * 1e9


class Workload:
    """The buffers of one size and the primitives on them."""

    def __init__(self, num_bytes: int, options: argparse.Namespace) -> None:
        self.world_size = dist.get_world_size()
        numel = num_bytes // 4 // self.world_size
        unit = UnitSpec("bench", numel, torch.float32, (ParamSlice("weight", numel),))
        config = RuntimeConfig.from_environment(accumulate=options.accumulate)
        if options.hosts:
            config = replace(config, host_id=f"host{dist.get_rank() * options.hosts // self.world_size}")
        self.runtime = Runtime.create(ProcessGroupExchange(), [unit], config)
        self.num_bytes = numel * 4 * self.world_size
        self.pushes = options.pushes
        self.in_place = not options.copy_own
        self.source = torch.randn(numel * self.world_size)
        self.gathered = torch.zeros_like(self.source)
        self.shard = torch.randn(numel)
        start = dist.get_rank() * numel
        self.gather_input = self.gathered[start : start + numel] if self.in_place else self.shard
        self.accumulator = torch.zeros_like(self.source)

    def repetition(self) -> Iterator[tuple[str, str, Callable[[], object]]]:
        """The operations of one repetition: (primitive, backend, call). Publishing and finishing are not timed."""
        runtime, name = self.runtime, self.runtime.transport_name
        runtime.publish(0, lambda out: out.copy_(self.shard))
        runtime.begin()
        for index in range(self.pushes):
            yield "gather", name, lambda: runtime.gather(0, self.gathered, own_in_place=self.in_place)
            yield "copy", "torch", lambda: self.gathered.copy_(self.source)
            yield "scatter_accumulate", name, lambda: runtime.scatter_accumulate(0, self.source)
            yield "add", "torch", lambda: self.accumulator.add_(self.source)
            if index == 0:  # gloo is slow: once per repetition is enough
                yield "all_gather", "gloo", lambda: ALL_GATHER(self.gathered, self.gather_input)
                yield "reduce_scatter", "gloo", lambda: REDUCE_SCATTER(self.shard, self.source)
        runtime.finish()

    def close(self) -> None:
        self.runtime.close()


def measure(num_bytes: int, options: argparse.Namespace) -> list[Row]:
    """All primitives at one size. Collective; every rank returns the same rows."""
    workload = Workload(num_bytes, options)
    samples: dict[tuple[str, str], list[float]] = {}
    started = time.monotonic()
    try:
        for index in range(options.repetitions + 1):
            for primitive, backend, call in workload.repetition():
                seconds = _slowest(_timed(call))
                if index:  # the first repetition warms up
                    samples.setdefault((primitive, backend), []).append(seconds)
            if index >= 5 and _slowest(time.monotonic() - started) > SIZE_LIMIT_S:
                break
    finally:
        workload.close()
    return [_row(key, workload, values) for key, values in samples.items()]


def _timed(call: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _slowest(seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value.item())


def _row(key: tuple[str, str], workload: Workload, values: list[float]) -> Row:
    times = torch.tensor(values, dtype=torch.float64)
    p20, median, p80 = (float(q) for q in torch.quantile(times, torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)))
    return Row(*key, workload.world_size, workload.num_bytes, median, p20, p80, len(values))


def table(rows: list[Row], in_place: bool) -> Table:
    """Bandwidths with their spread, and each primitive's ratio to its collective and its memory bound."""
    by_key = {(r.primitive, r.num_bytes): r for r in rows}
    out = Table(title=f"one-sided primitives on {rows[0].world_size} ranks")
    for column in ("primitive", "size", "median", "p20-p80", "GB/s", "x collective", "x memory op"):
        out.add_column(column, justify="left" if column == "primitive" else "right")
    rivals = {"gather": ("all_gather", "copy"), "scatter_accumulate": ("reduce_scatter", "add")}
    for row in sorted(rows, key=lambda r: (r.primitive not in rivals, r.primitive, r.num_bytes)):
        seconds = row.seconds_per_gb(in_place)
        ratios = [
            f"{by_key[rival, row.num_bytes].seconds_per_gb(in_place) / seconds:.2f}"
            for rival in rivals.get(row.primitive, ())
        ]
        spread = f"{row.p20_s * 1e3:.2f}-{row.p80_s * 1e3:.2f}"
        out.add_row(
            f"{row.primitive} ({row.backend})",
            _size(row.num_bytes),
            f"{row.median_s * 1e3:.2f} ms",
            spread,
            f"{1 / seconds:.2f}",
            *(ratios or ["", ""]),
        )
    return out


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KB"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="odc.bench.communication.primitives",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--sizes", type=int, nargs="+", default=DEFAULT_SIZES, help="bytes per rank")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--pushes", type=int, default=4, help="gathers and pushes per minibatch")
    parser.add_argument("--copy-own", action="store_true", help="gathers copy the rank's own shard too")
    parser.add_argument("--accumulate", choices=["auto", "direct", "daemon"], default="auto")
    parser.add_argument("--hosts", type=int, default=0, help="ranks of one machine pose as so many hosts (tcp)")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rows: list[Row] = []
    console = Console(stderr=True, quiet=dist.get_rank() != 0)
    with Progress(console=console, disable=dist.get_rank() != 0) as progress:
        task = progress.add_task("sizes", total=len(args.sizes))
        for size in args.sizes:
            progress.update(task, description=_size(size))
            rows += measure(size, args)
            progress.advance(task)
    if dist.get_rank() == 0:
        Console(width=100).print(table(rows, not args.copy_own))
        if args.json:
            document = {"environment": describe_environment(), "rows": [vars(row) for row in rows]}
            args.json.write_text(json.dumps(document, indent=1) + "\n")
    dist.destroy_process_group()  # waits for gloo's threads, which must not need Python when it has begun to end


if __name__ == "__main__":
    main()
