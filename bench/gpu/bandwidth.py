"""Bandwidth of ``gather`` and ``scatter_accumulate`` between GPUs, beside NCCL's collectives and a plain copy.

    torchrun --nproc-per-node 8 -m odc.bench.gpu.bandwidth --json bandwidth.json

All ranks launch each operation together, after a barrier. A sample is the slowest rank's wall-clock time for several
calls and the wait for its device behind them, divided by the calls; operations take turns, so that a drift of the
machine meets all. ``gather`` keeps the rank's own shard in place, as FSDP2 does. Pushes are measured with clients that
add themselves ("direct") and with daemons; their time holds the end of the minibatch too: a push is complete when it is
in the owner's sum. "copy" is ``copy_`` of the whole size within a GPU. The GB/s column counts what a rank receives,
(world_size - 1) / world_size of the size, and for "copy" the size.

NCCL is measured where every rank has a GPU of its own; it refuses to share one. The table of transfers compares the two
ways of a gather, copy engines and a kernel, on the peers' memory itself: ``--transfer-table`` saves it.

Not covered: compute beside the communication, skewed arrival, more than one unit, bf16.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from odc import ParamSlice, Runtime, RuntimeConfig, UnitSpec
from odc.bench.gpu.setting import Report, Setting, TableData, run_ranks
from odc.bench.gpu.timing import Spread, size_text
from odc.bench.gpu.transfers import choose_accumulate, measure_transfers, transfer_report
from odc.bench.harness.ranks import Rank
from odc.config import LaunchEnvironment
from odc.setup.agreement import ProcessGroupExchange

SIZES = tuple(1 << shift for shift in range(20, 29))
QUICK_SIZES = (1 << 20, 1 << 24)
REPETITIONS, QUICK_REPETITIONS = 15, 5
CALLS = 4
PUSHES = {"direct": "push, direct", "daemon": "push, daemon"}
# torch 2.13 renamed them.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class Row:
    """One operation at one size."""

    operation: str
    by: str
    world_size: int
    num_bytes: int
    time: Spread

    @property
    def received_bytes(self) -> float:
        within = self.operation == "copy"
        return self.num_bytes * (1.0 if within else (self.world_size - 1) / self.world_size)


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
        rows += found
    tables = tuple(table(rows, world_size) for world_size in worlds)
    shown, text = transfer_report(transfers, setting.transfer_table, accumulate_of(rows, max(worlds)))
    data = {"rows": [asdict(row) for row in rows], "transfers": transfers}
    return Report(f"{_fastest(rows)}; {text}", data, (*tables, *shown))


def _fastest(rows: Sequence[Row]) -> str:
    words = []
    for operation in ("gather", *PUSHES.values()):
        if all(row.operation != operation for row in rows):
            continue
        rates = [row.received_bytes / row.time.median_s for row in rows if row.operation == operation]
        words.append(f"{operation} up to {max(rates) * 1e-9:.0f} GB/s")
    return ", ".join(words)


def accumulate_of(rows: Sequence[Row], world_size: int) -> str:
    """What "auto" should do on this machine."""
    times: dict[str, list[float]] = {mode: [] for mode in PUSHES}
    for row in sorted(rows, key=lambda row: row.num_bytes):
        for mode, operation in PUSHES.items():
            if row.operation == operation and row.world_size == world_size:
                times[mode].append(row.time.median_s)
    return choose_accumulate(times["direct"], times["daemon"])


def measure_all(rank: Rank) -> tuple[list[Row], dict[str, Any]]:
    """All sizes, then the two ways of a gather. Collective; the same on every rank."""
    quick = rank.place.quick
    sizes, repetitions = (QUICK_SIZES, QUICK_REPETITIONS) if quick else (SIZES, REPETITIONS)
    modes = [mode for mode in PUSHES if mode == "daemon" or _can_add_directly(rank)]
    rows = [row for size in sizes for mode in modes for row in measure(rank, size, repetitions, mode, mode == modes[0])]
    return rows, measure_transfers(rank, sizes, repetitions)


class Workload:
    """The buffers of one size and the operations on them.

    Args:
        everything: not only the pushes of this ``mode``.
    """

    def __init__(self, rank: Rank, num_bytes: int, mode: str, everything: bool) -> None:
        self.rank, self.mode, self.everything = rank, mode, everything
        numel = num_bytes // 4 // rank.world_size
        self.num_bytes = numel * 4 * rank.world_size
        unit = UnitSpec("bench", numel, torch.float32, (ParamSlice("weight", numel),))
        config = RuntimeConfig.from_environment(transport=rank.place.transport, accumulate=mode)
        self.runtime = Runtime.create(ProcessGroupExchange(), [unit], config, device=rank.device)
        self.source = torch.randn(numel * rank.world_size, device=rank.device)
        self.out = torch.zeros_like(self.source)
        self.shard = torch.randn(numel, device=rank.device)
        self.own = self.out[rank.rank * numel : (rank.rank + 1) * numel]

    def repetition(self) -> Iterator[tuple[str, str, Callable[[], object], Callable[[], object]]]:
        """(operation, by whom, what is called several times, what ends it), in turn."""
        runtime, name = self.runtime, self.runtime.transport_name
        runtime.publish(0, lambda out: out.copy_(self.shard))
        runtime.begin()
        if self.everything:
            yield "gather", name, lambda: runtime.gather(0, self.out, own_in_place=True), _nothing
        yield PUSHES[self.mode], name, lambda: runtime.scatter_accumulate(0, self.source), runtime.finish
        if not self.everything:
            return
        yield "copy", "torch", lambda: self.out.copy_(self.source), _nothing
        if dist.get_backend() != "gloo":
            yield "all_gather", "nccl", lambda: ALL_GATHER(self.out, self.own), _nothing
            yield "reduce_scatter", "nccl", lambda: REDUCE_SCATTER(self.shard, self.source), _nothing


def _can_add_directly(rank: Rank) -> bool:
    """Whether atomic additions reach all peers, whatever was chosen by an earlier measurement. Collective."""
    unit = UnitSpec("probe", 64, torch.float32, (ParamSlice("weight", 64),))
    config = replace(RuntimeConfig.from_environment(transport=rank.place.transport), transfer_table="")
    with Runtime.create(ProcessGroupExchange(), [unit], config, device=rank.device) as runtime:
        return not runtime.memory()["slots"]


def _nothing() -> None:
    return None


def measure(rank: Rank, num_bytes: int, repetitions: int, mode: str = "daemon", everything: bool = True) -> list[Row]:
    """The pushes of one ``mode`` at one size; with ``everything``, the other operations too."""
    workload = Workload(rank, num_bytes, mode, everything)
    samples: dict[tuple[str, str], list[float]] = {}
    with workload.runtime:
        for repetition in range(repetitions + 1):
            for operation, by, call, end in workload.repetition():
                seconds = timed(rank, call, end)
                if repetition:  # the first one warms up
                    samples.setdefault((operation, by), []).append(seconds)
        rank.meet()
    return [Row(*key, rank.world_size, workload.num_bytes, Spread.of(values)) for key, values in samples.items()]


def timed(rank: Rank, call: Callable[[], object], end: Callable[[], object] = _nothing, calls: int = CALLS) -> float:
    """Seconds of one call, on the slowest rank."""
    rank.meet()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    end()
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
    return rank.largest(time.perf_counter() - started) / calls


def table(rows: Sequence[Row], world_size: int) -> TableData:
    """Medians with spread, bandwidths, and what a collective takes of the time of its rival."""
    by_key = {(row.operation, row.num_bytes): row for row in rows if row.world_size == world_size}
    rivals = {"gather": "all_gather", **dict.fromkeys(PUSHES.values(), "reduce_scatter")}
    lines = []
    for (operation, num_bytes), row in sorted(by_key.items()):
        rival = by_key.get((rivals.get(operation, ""), num_bytes))
        lines.append(
            (
                f"{operation} ({row.by})",
                size_text(num_bytes),
                f"{row.time.median_s * 1e3:.3f} ms",
                f"{row.time.p20_s * 1e3:.3f}-{row.time.p80_s * 1e3:.3f}",
                f"{row.received_bytes / row.time.median_s * 1e-9:.1f}",
                f"{rival.time.median_s / row.time.median_s:.2f}" if rival else "",
            )
        )
    columns = ("operation", "size", "median", "p20-p80", "GB/s", "x collective")
    return TableData(f"{world_size} ranks", columns, tuple(lines))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="odc.bench.gpu.bandwidth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--transport", default="auto", help="as in odc.patch_fsdp (default: %(default)s)")
    parser.add_argument("--transfer-table", default="", help="write the table of transfers to this file")
    parser.add_argument("--quick", action="store_true", help="two sizes, few repetitions")
    return parser


def main() -> None:
    """One rank under torchrun."""
    from odc.bench.gpu.machine import environment_of
    from odc.bench.gpu.show import print_tables

    arguments = _parser().parse_args()
    launched = LaunchEnvironment.from_environment()
    if not torch.cuda.is_available() or not launched.master_addr:
        raise SystemExit("odc.bench.gpu.bandwidth needs GPUs and torchrun: torchrun --nproc-per-node 8 -m ...")
    local = launched.local_rank
    if local >= torch.cuda.device_count():
        raise SystemExit("odc.bench.gpu.bandwidth needs a GPU per rank; python -m odc.bench.gpu_check shares them")
    torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    setting = Setting(transport=arguments.transport, num_gpus=torch.cuda.device_count(), quick=arguments.quick)
    rank = Rank(dist.get_rank(), dist.get_world_size(), setting, torch.device("cuda", local))
    rows, transfers = measure_all(rank)
    if rank.rank == 0:
        shown, _ = transfer_report(transfers, arguments.transfer_table, accumulate_of(rows, rank.world_size))
        print_tables([table(rows, rank.world_size), *shown])
        if arguments.json:
            document = {"environment": environment_of(), "rows": [asdict(row) for row in rows], "transfers": transfers}
            arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    rank.meet()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
