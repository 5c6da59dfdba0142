"""Bandwidth of ``gather`` and ``scatter_accumulate`` beside collectives and plain memory, as nccl-tests counts it.

    odc bench primitives                                      this machine's GPUs, or two CPU ranks
    odc bench primitives -b 64M -e 1G -f 2 --dtype bf16
    torchrun --nproc-per-node 8 -m odc bench primitives       torchrun's ranks, also of several hosts

The baseline is NCCL where each rank has a GPU of its own (NCCL refuses to share one), and gloo on CPUs. All ranks
launch each operation together, after a barrier, as in the paper (section 5.4), so that one-sided operations do not
profit from their freedom. Operations take turns, so that a drift of the machine's speed affects all of them. A sample
is the slowest rank's time. The table shows medians over repetitions; ``--json`` also has the 20th and 80th percentile.

    size     of a rank's whole gathered output, or of its whole gradient
    busbw    of gathers, pushes and collectives: size / time * (ranks - 1) / ranks, the bytes that cross between ranks;
             of "copy" and "add": size / time. "copy" is ``out.copy_(x)``, "add" is ``sum.add_(x)``, both in private
             memory, by all ranks at the same time: what the memory allows (dashed in the picture)
    wrong    wrong elements on all ranks, outputs and sums, in one more minibatch

Both all-gather forms are called as FSDP2 calls them: a rank's own shard lies in its place of the output already. On a
CPU each call is timed by itself. The pushes of one repetition include the first push of a minibatch, which copies, and
later ones, which add. On a GPU ``--pushes`` calls are timed together, up to the moment when the device has done them;
for pushes this includes the end of the minibatch, when all are in their owners' sums.

Under load: one rank is 200 ms late in each microbatch, always the last rank, or each rank in turn. The others lose the
time that they need longer to their own last push than when no rank is late. The minibatch loses the time that its end
comes later. Under collectives each rank waits for the late one at once; with on-demand communication ranks wait once,
at the end.

Not covered: compute beside the communication, several units of one size.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from types import MappingProxyType
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import typer

from odc.bench.communication.late import ALL_GATHER, REDUCE_SCATTER, measure_late
from odc.bench.gpu.device import on_a_stream
from odc.bench.harness.benchmark import (
    Benchmark,
    Column,
    Entries,
    Figures,
    Picture,
    Row,
    Run,
    Table,
    check_known,
    summary,
)
from odc.bench.harness.ranks import Place, Rank
from odc.bench.harness.units import config_of, create_runtime

SIZE_LIMIT_S = 20.0  # of one size; large sizes get fewer repetitions, never fewer than five
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RIVALS = {"gather": ("all_gather", "copy"), "scatter_accumulate": ("reduce_scatter", "add")}
Operation = tuple[str, str, Callable[[], object], Callable[[], object]]
"""(name, by whom, the call, the call that ends a series of them)."""


class Workload:
    """The buffers of one size and the operations on them.

    Args:
        everything: not only the pushes.
    """

    def __init__(
        self,
        me: Rank,
        num_bytes: int,
        *,
        dtype: torch.dtype = torch.float32,
        accumulate: str = "auto",
        pushes: int = 4,
        hosts: int = 0,
        everything: bool = True,
    ) -> None:
        self.me, self.pushes, self.everything = me, pushes, everything
        numel = num_bytes // dtype.itemsize // me.world_size
        self.num_bytes = numel * dtype.itemsize * me.world_size
        self.runtime = create_runtime(me, config_of(me, hosts, accumulate=accumulate), numel, dtype=dtype)
        self.by = self.runtime.transport_name
        self.engine = self.runtime._transport.engine
        self.lags = self.engine.has_streams  # a device that is later than its host
        self.collectives = "gloo" if dist.get_backend() == "gloo" else "nccl"
        if self.collectives == "gloo" and me.device.type == "cuda":
            self.collectives = ""  # ranks share a GPU, and NCCL refuses that
        self.source = _pattern(me.rank, numel * me.world_size, dtype).to(me.device)
        self.gathered = torch.zeros_like(self.source)
        self.shard = _pattern(me.rank, numel, dtype).to(me.device)
        self.reduced = torch.zeros_like(self.shard)
        self.own = self.gathered[me.rank * numel : (me.rank + 1) * numel]
        self.sum = torch.zeros(numel * me.world_size, device=me.device)  # sums are of float32

    def repetition(self) -> Iterator[Operation]:
        """The operations of one repetition, in turn. Publishing is not timed. On a GPU the end of a minibatch is timed
        with the pushes."""
        runtime = self.runtime
        runtime.publish(0, lambda out: out.copy_(self.shard))
        runtime.begin()
        for index in range(1 if self.lags else self.pushes):
            if self.everything:
                yield "gather", self.by, lambda: runtime.gather(0, self.gathered, own_in_place=True), _nothing
                yield "copy", "torch", lambda: self.gathered.copy_(self.source), _nothing
                yield "add", "torch", lambda: self.sum.add_(self.source), _nothing
            end = runtime.finish if self.lags else _nothing
            yield "scatter_accumulate", self.by, lambda: runtime.scatter_accumulate(0, self.source), end
            if index == 0 and self.everything and self.collectives:  # gloo is slow: once per repetition is enough
                yield "all_gather", self.collectives, self._all_gather, _nothing
                yield "reduce_scatter", self.collectives, self._reduce_scatter, _nothing
        if not self.lags:
            runtime.finish()

    def _all_gather(self) -> None:
        ALL_GATHER(self.gathered, self.own)

    def _reduce_scatter(self) -> None:
        REDUCE_SCATTER(self.reduced, self.source)

    def wrong(self) -> dict[str, int]:
        """Run one minibatch with one push; return by operation how many elements of all ranks are wrong."""
        runtime, me, numel = self.runtime, self.me, self.shard.numel()
        dtype, ranks = self.shard.dtype, range(me.world_size)
        shards = torch.cat([_pattern(rank, numel, dtype) for rank in ranks])
        start = me.rank * numel
        sums = sum(_pattern(rank, numel * me.world_size, torch.float32)[start : start + numel] for rank in ranks)
        found: dict[str, torch.Tensor] = {}
        runtime.publish(0, lambda out: out.copy_(self.shard))
        runtime.begin()
        self.gathered.fill_(-1)
        runtime.gather(0, self.gathered)
        if self.lags:
            self.engine.synchronize(SIZE_LIMIT_S)
        found["gather"] = self.gathered.cpu() != shards
        runtime.scatter_accumulate(0, self.source)
        runtime.finish()
        gradient = runtime.gradient(0)
        if self.lags:
            self.engine.synchronize(SIZE_LIMIT_S)
        found["scatter_accumulate"] = (
            torch.ones(numel, dtype=torch.bool) if gradient is None else gradient[0].cpu().float() != sums
        )
        if self.collectives:
            self.own.copy_(self.shard)
            self._all_gather()
            found["all_gather"] = self.gathered.cpu() != shards
            self._reduce_scatter()
            found["reduce_scatter"] = self.reduced.cpu().float() != sums
        counts = torch.tensor([int(each.sum()) for each in found.values()], dtype=torch.int64)
        dist.all_reduce(counts)
        return dict(zip(found, counts.tolist(), strict=True))


def _pattern(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, whose sums over ranks are exact in every dtype."""
    return ((torch.arange(numel) + rank) % 4).to(dtype)


def _nothing() -> None:
    return None


def measure_size(me: Rank, num_bytes: int, repetitions: int, **options: Any) -> list[dict[str, Any]]:
    """Measure all operations at one size. Collective; every rank returns the same rows. ``options`` are those of
    :class:`Workload`."""
    workload = Workload(me, num_bytes, **options)
    samples: dict[tuple[str, str], list[float]] = {}
    started = time.monotonic()
    with workload.runtime, on_a_stream(me.device):
        for index in range(repetitions + 1):
            for operation, by, call, end in workload.repetition():
                seconds = timed(me, call, end, workload.pushes if workload.lags else 1)
                if index:  # the first repetition warms up
                    samples.setdefault((operation, by), []).append(seconds)
            if index >= 5 and me.largest(time.monotonic() - started) > SIZE_LIMIT_S:
                break
        wrong = workload.wrong()
        me.meet()
    dtype = str(options.get("dtype", torch.float32)).removeprefix("torch.")
    rows = []
    for (operation, by), seconds_of in samples.items():
        row = {"operation": operation, "by": by, "dtype": dtype, "num_bytes": workload.num_bytes}
        row |= {"ranks": me.world_size, "time_s": summary(seconds_of), "num_samples": len(seconds_of)}
        rows.append({**row, **bandwidths(row), **({"wrong": wrong[operation]} if operation in wrong else {})})
    return rows


def bandwidths(row: dict[str, Any]) -> dict[str, float]:
    """Bandwidths in GB/s, as nccl-tests counts them."""
    algbw = row["num_bytes"] / row["time_s"]["median"] * 1e-9
    between = 1.0 if row["operation"] in ("copy", "add") else (row["ranks"] - 1) / row["ranks"]
    return {"algbw": algbw, "busbw": algbw * between}


def timed(me: Rank, call: Callable[[], object], end: Callable[[], object] = _nothing, calls: int = 1) -> float:
    """Seconds of one call on the slowest rank, measured over ``calls`` calls."""
    me.meet()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    end()
    if me.device.type == "cuda":
        torch.cuda.synchronize()
    return me.largest(time.perf_counter() - started) / calls


def measure_rank(
    me: Rank, sizes: Sequence[int], dtypes: Sequence[str], repetitions: int, late: int, options: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Measure all sizes; return their rows, the rows under load, and a description of this rank."""
    rows = []
    for dtype in dtypes:
        for size in sizes:
            rows += measure_size(me, size, repetitions, dtype=DTYPES[dtype], **options)
            me.report(1.0 if me.rank == 0 else 0.0)
    device = f"{me.device} {torch.cuda.get_device_name(me.device)}" if me.device.type == "cuda" else str(me.device)
    who = {"rank": me.rank, "pid": os.getpid(), "host": socket.gethostname(), "device": device}
    return rows, measure_late(me, late, options["hosts"]) if late else [], who


def num_bytes(text: str | int) -> int:
    """
    >>> num_bytes("64K"), num_bytes("1M"), num_bytes("100")
    (65536, 1048576, 100)
    """
    words = str(text).upper().removesuffix("B")
    shift = {"K": 10, "M": 20, "G": 30}.get(words[-1:], 0)
    return int(float(words.rstrip("KMG")) * (1 << shift))


def size_text(size: int) -> str:
    """
    >>> size_text(1 << 20), size_text(1 << 16)
    ('1 MB', '64 KB')
    """
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB" if size >= 1 << 10 else f"{size} B"


def size_of(row: Row) -> str:
    """The size of a row, for the column of a table."""
    return size_text(row["num_bytes"])


def choose(place: Place, ranks: int, hosts: int) -> int:
    """The number of ranks to measure on: ``ranks``; by default one for each GPU, or two.

    Raises:
        ValueError: that cannot be done here.
    """
    ranks = ranks or max(2, place.num_gpus)
    if ranks < 2:
        raise ValueError(f"--ranks {ranks}: at least 2 can exchange anything")
    if hosts and place.device_type == "cuda":
        raise ValueError("--hosts: GPUs of one machine do not pose as several hosts; start torchrun on each of them")
    if hosts > ranks:
        raise ValueError(f"--hosts {hosts}: at most one for each of {ranks} ranks")
    return ranks


def measure(
    run: Run,
    smallest: Annotated[int, typer.Option("--smallest", "-b", parser=num_bytes, help="Bytes; K, M, G.")] = 1 << 16,
    largest: Annotated[int, typer.Option("--largest", "-e", parser=num_bytes, help="Bytes.")] = 1 << 28,
    factor: Annotated[int, typer.Option("--factor", "-f", min=2, help="From one size to the next.")] = 4,
    dtype: Annotated[list[str] | None, typer.Option(help="fp32 (default), bf16; repeatable.")] = None,
    ranks: Annotated[int, typer.Option(min=0, help="0: one for each GPU, or 2; torchrun's.")] = 0,
    hosts: Annotated[int, typer.Option(min=0, help="CPU ranks pose as so many hosts (tcp).")] = 0,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each size.")] = 15,
    pushes: Annotated[int, typer.Option(min=1, help="Gathers and pushes of a minibatch.")] = 4,
    accumulate: Annotated[Literal["auto", "direct", "daemon"], typer.Option(help="Who adds to a sum.")] = "auto",
    transport: Annotated[str, typer.Option(help="As in odc.patch_fsdp.")] = "auto",
    late: Annotated[int, typer.Option(min=0, help="Repetitions under load; 0: leave it out.")] = 5,
) -> Entries:
    dtypes = dtype or ["fp32"]
    check_known(dtype=(dtypes, DTYPES))
    place = replace(Place.of_this_machine(), transport=transport)
    world_size = choose(place, ranks or (run.launched.world_size if run.launched else 0), hosts)
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    if smallest < 4 * world_size or smallest > largest:
        raise ValueError(f"-b {smallest} -e {largest}: expected sizes from {4 * world_size} bytes on, in this order")
    run.begin(len(dtypes) * len(sizes), f"{world_size} ranks on {'GPUs' if place.device_type == 'cuda' else 'CPUs'}")
    if place.device_type == "cuda" and not place.owns_gpus(
        run.launched.local_world_size if run.launched else world_size
    ):
        run.note("ranks share a GPU, which NCCL refuses: there is no baseline")
    options = {"pushes": pushes, "hosts": hosts, "accumulate": accumulate}
    found = run.ranks(world_size, measure_rank, sizes, dtypes, repetitions, late, options, place=place)
    rows, under_load, _ = found[0]
    for row in rows:
        if row.get("wrong"):
            run.missed.append(
                f"{row['operation']} ({row['by']}), {row['num_bytes']} bytes: {row['wrong']} wrong elements"
            )
    of_all = {"ranks": world_size, "device": place.device_type, "processes": [who for *_, who in found]}
    return {**of_all, "rows": with_ratios(rows), "under_load": under_load}


def with_ratios(
    rows: list[dict[str, Any]], rivals: Mapping[str, Sequence[str]] = MappingProxyType(RIVALS)
) -> list[dict[str, Any]]:
    """Add to each gather and push how many times as fast it is as the collective and as plain memory. Plain memory
    touches as many bytes as cross between ranks in a gather, and as all that are pushed.

    Args:
        rivals: these two of each operation, or the collective alone.
    """
    by_key = {(row["operation"], row["num_bytes"], row["dtype"]): row for row in rows}
    for row in rows:
        for rival, name in zip(rivals.get(row["operation"], ()), ("x_collective", "x_memory"), strict=False):
            if other := by_key.get((rival, row["num_bytes"], row["dtype"])):
                kind = "busbw" if row["operation"] == "gather" else "algbw"
                row[name] = row[kind] / other[kind]
    return sorted(rows, key=lambda row: (row["operation"] not in rivals, row["operation"], row["dtype"]))


def as_nccl_tests(result: Entries) -> str:
    """The result as nccl-tests prints it, in 100 columns: the ranks, a line for each size with all operations side by
    side, sums."""
    rows = result["rows"]
    by = {row["operation"]: row["by"] for row in rows}
    own, others = [*RIVALS], sorted(by.keys() - RIVALS.keys(), key=lambda name: (by[name] == "torch", name))
    lines = [f"# one-sided primitives on {result['ranks']} ranks ({result['device']}), by {by['gather']}"]
    lines += [
        f"#  Rank {who['rank']:>3} Pid {who['pid']:>7} on {who['host']} {who['device']}" for who in result["processes"]
    ]
    heads = (
        ("", "", "", *own, *(name.partition("_")[0] for name in others)),
        ("size", "count", "type", *["time  busbw wrong"] * 2, *(name.partition("_")[2] for name in others)),
        ("(B)", "(elements)", "", *["(us) (GB/s)      "] * 2, *(by[name] for name in others)),
    )
    widths = (10, 10, 5, 20, 20, *(7 if "_" in name else 6 for name in others))
    lines += [
        "#" + " ".join(f"{word:>{width}}" for word, width in zip(head, widths, strict=True))[1:] for head in heads
    ]
    for size, dtype in dict.fromkeys((row["num_bytes"], row["dtype"]) for row in rows):
        of_size = {row["operation"]: row for row in rows if (row["num_bytes"], row["dtype"]) == (size, dtype)}
        short = next(name for name, known in DTYPES.items() if str(known) == f"torch.{dtype}")
        cells = [f"{size:>10}", f"{size // DTYPES[short].itemsize:>10}", f"{short:>5}"]
        for name in own:
            row, us = of_size[name], 1e6 * of_size[name]["time_s"]["median"]
            cells += [f"{us:>7.{int(us < 9999)}f} {row['busbw']:>6.2f} {row['wrong']:>5}"]
        cells += [f"{of_size[name]['busbw']:>{width}.2f}" for name, width in zip(others, widths[5:], strict=True)]
        lines.append(" ".join(cells))
    means = {name: mean(row["busbw"] for row in rows if row["operation"] == name) for name in (*own, *others)}
    lines.append(
        "# Avg bus bandwidth    : " + ", ".join(f"{means[name]:.2f} {name}" for name in by if by[name] != "torch")
    )
    wrong = sum(row.get("wrong", 0) for row in rows)
    return "\n".join([*lines, f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}"])


def _milliseconds(row: dict[str, Any]) -> str:
    return "{:.1f} ms ({:.1f}-{:.1f})".format(*(1e3 * row["time_s"][name] for name in ("median", "p20", "p80")))


def _by_size(result: Entries, size: int) -> dict[str, dict[str, Any]]:
    return {row["operation"]: row for row in result["rows"] if row["num_bytes"] == size}


def _times(rows: dict[str, dict[str, Any]], slow: str, fast: str) -> float:
    return float(rows[slow]["time_s"]["median"] / rows[fast]["time_s"]["median"])


def figures(result: Entries) -> Figures:
    rows = _by_size(result, 64 << 20)
    ranks = rows["gather"]["ranks"]
    moved = {"gather": (ranks - 1) / ranks, "scatter_accumulate": 1.0}  # of what the memory operation touches
    for name, (collective, memory) in RIVALS.items():
        yield (
            f"| `{name}` |",
            f" {_milliseconds(rows[name])} | {_times(rows, collective, name):.1f}x `{collective}`, "
            f"{_milliseconds(rows[collective])} | {_times(rows, memory, name) * moved[name]:.2f}x `{memory}_` |",
        )
    faster = _times(rows, "reduce_scatter", "add")
    yield "", f"a bare `add_` is itself {faster:.1f}x the speed of gloo's reduce-scatter here"


def figures_tcp(result: Entries) -> Figures:
    rows, small = _by_size(result, 64 << 20), _by_size(result, 1 << 16)
    words = [
        f"`{name}` {_milliseconds(rows[name])}, {_times(rows, collective, name):.1f}x `{collective}`"
        for name, (collective, _) in RIVALS.items()
    ]
    ratios = [f"{_times(small, collective, name):.1f}x" for name, (collective, _) in RIVALS.items()]
    yield "", f"{'; '.join(words)}; at 64 KB {' and '.join(ratios)}"


BENCHMARK = Benchmark(
    measure,
    (
        Table(
            "rows",
            "one-sided primitives on {ranks} ranks ({device}), bandwidths in GB/s",
            (
                Column("operation", "operation"),
                Column("by", "by"),
                Column("dtype", "dtype"),
                Column("size", size_of),
            ),
            (
                Column("time, ms", "time_s", ".3f", 1e3),
                Column("algbw", "algbw", ".2f"),
                Column("busbw", "busbw", ".2f"),
                Column("#wrong", "wrong"),
                Column("x collective", "x_collective", ".2f"),
                Column("x memory", "x_memory", ".2f"),
            ),
            text=as_nccl_tests,
        ),
        Table(
            "under_load",
            "under load: a rank is 200 ms late in each microbatch",
            (Column("late", "late"), Column("by", "by")),
            (
                Column("minibatch on time, ms", "on_time_s", ".0f", 1e3),
                Column("others lose, ms", "others_lose_s", ".0f", 1e3),
                Column("the minibatch loses, ms", "minibatch_loses_s", ".0f", 1e3),
            ),
        ),
    ),
    quick={"largest": 1 << 24, "factor": 16, "repetitions": 5, "late": 1},
    picture=Picture(
        "rows",
        Column("bus bandwidth, GB/s", "busbw"),
        ("operation", "by", "dtype"),
        Column("size, bytes", "num_bytes"),
        lambda row: row["operation"] in ("copy", "add"),
    ),
    figures=(
        ("docs/performance.md", figures, ["primitives_cpu_2ranks"]),
        ("docs/performance.md", figures_tcp, ["primitives_tcp_cpu_2ranks"]),
    ),
)
