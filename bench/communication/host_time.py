"""Host time of ODC's operations against the number of ranks: what Python and system calls cost, bytes aside.

    python -m odc.bench.communication.host_time --ranks 2 4 8 16 --json runs/host_time.json
    python -m odc.bench.communication.host_time --ranks 2 4 8 --hosts 2 --json runs/host_time_tcp.json
    python -m odc.bench.communication.host_time --ranks 2 4 8 16 --streams --json runs/host_time_streams.json

With --streams ranks work on streams that pose as a GPU's: all is as there, but for the driver, whose calls are counted
instead. Without, on host memory.

Many tiny units (80 of 64 elements per shard): copying them costs nothing, so what is left is the work that an operation
makes for the host, which on a GPU has to fit into the time that the kernels take. It starts the ranks itself.

How it is measured. With more ranks than cores a rank that is timed must be alone. So ranks take turns: one calls an
operation once for each unit, while the others wait in a receive of gloo, which takes no core. A sample is the mean over
the units of one turn; the tables show the median over ranks and repetitions with the 20th and 80th percentile.

    CPU us       of the thread that calls (CLOCK_THREAD_CPUTIME_ID). The headline: it does not grow when somebody else
                 has the core, and a wait is not in it.
    wall us      beside it, because the other one does not see what the caller waits for: its own daemon thread (the two
                 share one GIL), another rank's, an answer over a socket.
    calls        of the driver, by the thread that calls: launches, copies, waits for and writes of words
    all ranks    CPU of all threads of all ranks together, whoever works for the operation: an owner's daemon, a link's
                 thread. The turns' own part, measured by turns in which nothing is done, is taken off. One sample is
                 the sum over the ranks' turns, over their number.

Operations, per call (one unit), and that over the number of owners it deals with:

    publish       fill one's own shard and tell all ranks
    gather_first  the first of a unit in a minibatch, which looks whether each owner has published; all have, long ago
    gather        a later one. As FSDP2 calls it: one's own shard is in its place, so ranks - 1 owners
    push          scatter_accumulate, to all owners (one's own sum included); no other rank pushes, so no lock is waited
                  for. With the daemon a push waits until all owners have taken the one before the last (``waits``);
                 with --streams there are slots for all pushes of a turn, and it does not
    finish        per minibatch: of the last rank to come, which waits for nobody; another one each time. In its wall
                  time the ranks that it wakes want the cores, too
    gradient      of one unit, one's own sum
    yardstick     not ODC: ``sum(range(1000))``, how fast this machine's Python was just then; compare runs by it

Set-up: the slowest rank's wall time of ``Runtime.create``, all ranks at once on the cores there are; the CPU time of
one rank; how many exchanges it makes (small messages through the store of the process group); the threads and
descriptors it adds; shared memory per rank. The first of the repetitions is in it: modules are imported then.

Not covered: contention, bytes (see odc.bench.communication.primitives), GPUs, FSDP's own host time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from odc import ParamSlice, Runtime, RuntimeConfig, UnitSpec
from odc.bench.fake.cuda import FakeEngine, register_prompt_fakes
from odc.bench.harness.environment import describe_environment
from odc.bench.harness.progress import progress_bar
from odc.bench.harness.ranks import Rank, RankFailedError, run_ranks
from odc.minibatch import daemon
from odc.setup.agreement import ProcessGroupExchange

OPERATIONS = ("publish", "gather_first", "gather", "push", "finish", "gradient", "yardstick")
IDLE = "idle"  # a turn in which nothing is done
QUIET_S = 0.02  # for what a rank has set going elsewhere to come to its end
SETTLE_S = 0.1  # for all ranks but one to be asleep in finish


@dataclass(frozen=True)
class Settings:
    """What is measured at each number of ranks."""

    num_units: int = 80
    numel: int = 64
    repetitions: int = 10
    setups: int = 5
    hosts: int = 1
    streams: bool = False

    def units(self) -> list[UnitSpec]:
        """Equal ones, each of one parameter."""
        params = (ParamSlice("weight", self.numel),)
        return [UnitSpec(f"layer{i}", self.numel, torch.float32, params) for i in range(self.num_units)]

    def config(self, rank: int, world_size: int, accumulate: str) -> RuntimeConfig:
        """Ranks of one machine pose as so many hosts."""
        host_id = f"host{rank * self.hosts // world_size}" if self.hosts > 1 else ""
        transport = "fake_cuda_streams" if self.streams else "auto"
        return RuntimeConfig(accumulate=accumulate, host_id=host_id, transport=transport)


@dataclass(frozen=True)
class Sample:
    """One turn of one rank, nanoseconds of the whole turn."""

    operation: str
    wall_ns: int
    cpu_ns: int
    waits: int
    process_ns: int
    """CPU of all threads of this rank, also while the others had their turns."""
    driver_calls: int = 0


@dataclass(frozen=True)
class SetUp:
    """One ``Runtime.create`` on one rank."""

    wall_s: float
    cpu_s: float
    exchanges: int
    exchanged_bytes: int


@dataclass(frozen=True)
class RankResult:
    """What one rank measured of one way to accumulate."""

    transport: str
    set_ups: list[SetUp]
    python_threads: dict[str, int]
    num_threads: int
    num_descriptors: int
    memory: dict[str, int]
    samples: list[Sample]


class CountingExchange(ProcessGroupExchange):
    """Counts what goes through it."""

    num_exchanges = num_bytes = 0

    def all_gather(self, payload: bytes, *arguments: Any, **named: Any) -> list[bytes]:
        self.num_exchanges += 1
        self.num_bytes += len(payload)
        return super().all_gather(payload, *arguments, **named)


# A rank


def measure_rank(me: Rank, settings: Settings, modes: Sequence[str]) -> list[RankResult]:
    """One result for each mode of accumulating."""
    gc.collect()
    gc.freeze()  # or the collector would look at all that was imported, whenever it runs
    if settings.streams:
        register_prompt_fakes()
        daemon.NUM_SLOTS = settings.num_units + 1  # what the looks at slots cost depends on how long owners take
    results = []
    for mode in modes:
        runtime, result = _set_up(me.rank, me.world_size, settings, mode)
        with runtime:
            ranks = _Turns(me.rank, me.world_size, runtime, settings)
            for repetition in range(settings.repetitions + 1):
                ranks.repetition(repetition)
                if repetition == 0:  # warms up
                    ranks.samples.clear()
                me.report(1.0 if me.rank == 0 else 0.0)
            result.samples.extend(ranks.samples)
            dist.barrier()  # nobody closes while another one is timed
        results.append(result)
    return results


def _set_up(rank: int, world_size: int, settings: Settings, accumulate: str) -> tuple[Runtime, RankResult]:
    set_ups: list[SetUp] = []
    config, units = settings.config(rank, world_size, accumulate), settings.units()
    before = _own_things()
    while True:
        dist.barrier()
        time.sleep(QUIET_S)
        exchange = CountingExchange()
        wall_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        runtime = Runtime.create(exchange, units, config)
        seconds = (time.perf_counter_ns() - wall_ns) * 1e-9, (time.process_time_ns() - cpu_ns) * 1e-9
        set_ups.append(SetUp(*seconds, exchange.num_exchanges, exchange.num_bytes))
        if len(set_ups) == 1:
            after = _own_things()
            python_threads = dict(after[0] - before[0])
            added = after[1] - before[1], after[2] - before[2]
        if len(set_ups) == settings.setups:
            return runtime, RankResult(
                runtime.transport_name, set_ups, python_threads, *added, memory=runtime.memory(), samples=[]
            )
        dist.barrier()
        runtime.close()


def _own_things() -> tuple[Counter[str], int, int]:
    """This process's Python threads by name, threads, and open descriptors."""
    names = Counter(thread.name for thread in threading.enumerate())
    return names, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


class _Turns:
    """The repetitions of one runtime, each of them a minibatch in which ranks take turns."""

    def __init__(self, rank: int, world_size: int, runtime: Runtime, settings: Settings) -> None:
        self._rank, self._world_size, self._runtime = rank, world_size, runtime
        self._units = range(settings.num_units)
        self._shard = torch.full((settings.numel,), float(rank))
        self._whole = torch.ones(settings.numel * world_size)
        self._token = torch.zeros(1)
        self.samples: list[Sample] = []

    def repetition(self, number: int) -> None:
        """One minibatch. Collective."""
        runtime, shard, whole = self._runtime, self._shard, self._whole

        def fill(out: torch.Tensor) -> None:
            out.copy_(shard)

        self._take_turns(IDLE, lambda unit: None)
        self._take_turns("yardstick", lambda unit: sum(range(1000)))
        self._take_turns("publish", lambda unit: runtime.publish(unit, fill))
        runtime.begin()
        self._take_turns("gather_first", lambda unit: runtime.gather(unit, whole, own_in_place=True))
        self._take_turns("gather", lambda unit: runtime.gather(unit, whole, own_in_place=True))
        self._take_turns("push", lambda unit: runtime.scatter_accumulate(unit, whole))
        self._finish(last=number % self._world_size)
        self._take_turns("gradient", lambda unit: runtime.gradient(unit))

    def _take_turns(self, operation: str, call: Callable[[int], object]) -> None:
        dist.barrier()
        process_ns = time.process_time_ns()
        if self._rank == 0:
            time.sleep(QUIET_S)
        else:
            dist.recv(self._token, self._rank - 1)
        waits, calls = self._runtime.stats.waits, self._driver_calls()
        wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        for unit in self._units:
            call(unit)
        cpu_ns, wall_ns = time.thread_time_ns() - cpu_ns, time.perf_counter_ns() - wall_ns
        waits, calls = self._runtime.stats.waits - waits, self._driver_calls() - calls
        if self._rank + 1 < self._world_size:
            dist.send(self._token, self._rank + 1)
        dist.barrier()
        time.sleep(QUIET_S)
        self.samples.append(Sample(operation, wall_ns, cpu_ns, waits, time.process_time_ns() - process_ns, calls))

    def _driver_calls(self) -> int:
        """So far, by this thread."""
        engine = self._runtime._transport.engine
        return engine.num_launches() if isinstance(engine, FakeEngine) else 0

    def _finish(self, last: int) -> None:
        """Measured on rank ``last``, unless another rank was later than it."""
        dist.barrier()
        process_ns = time.process_time_ns()
        if self._rank != last:
            self._runtime.finish()
            return
        time.sleep(SETTLE_S)
        waits, wall_ns, cpu_ns = self._runtime.stats.waits, time.perf_counter_ns(), time.thread_time_ns()
        self._runtime.finish()
        cpu_ns, wall_ns = time.thread_time_ns() - cpu_ns, time.perf_counter_ns() - wall_ns
        waits = self._runtime.stats.waits - waits
        if waits == 0:
            self.samples.append(Sample("finish", wall_ns, cpu_ns, waits, time.process_time_ns() - process_ns))


# All ranks


def measure(
    world_size: int, settings: Settings, modes: Sequence[str], on_progress: Callable[[float], object] = lambda _: None
) -> list[dict[str, Any]]:
    """One cell of the result for each mode of accumulating."""
    results = run_ranks(world_size, measure_rank, settings, modes, on_progress=on_progress)
    return [_cell(mode, settings, [mine[index] for mine in results]) for index, mode in enumerate(modes)]


def _cell(accumulate: str, settings: Settings, ranks: Sequence[RankResult]) -> dict[str, Any]:
    most = max(ranks, key=lambda result: result.num_threads)
    attempts = list(zip(*(result.set_ups for result in ranks), strict=True))
    first = ranks[0].set_ups[0]
    return {
        "ranks": len(ranks),
        "hosts": settings.hosts,
        "transport": ranks[0].transport,
        "accumulate": accumulate,
        "setup": {
            "slowest_wall_s": _summary([max(one.wall_s for one in attempt) for attempt in attempts]),
            "cpu_s": _summary([one.cpu_s for attempt in attempts for one in attempt]),
            "exchanges": first.exchanges,
            "exchanged_bytes": max(one.exchanged_bytes for attempt in attempts for one in attempt),
        },
        "threads_per_rank": most.num_threads,
        "python_threads": most.python_threads,
        "descriptors_per_rank": max(result.num_descriptors for result in ranks),
        "memory": ranks[0].memory,
        "memory_bytes": sum(ranks[0].memory.values()),
        "operations": {name: _operation(name, settings, ranks) for name in OPERATIONS},
    }


def _operation(name: str, settings: Settings, ranks: Sequence[RankResult]) -> dict[str, Any]:
    calls = 1 if name == "finish" else settings.num_units
    owners = {"gather_first": len(ranks) - 1, "gather": len(ranks) - 1, "gradient": 1, "yardstick": 1}
    num_owners = owners.get(name, len(ranks))
    samples = [sample for result in ranks for sample in result.samples if sample.operation == name]
    if not samples:  # of finish: somebody was always later than the last one
        return {"owners": num_owners, "num_samples": 0}
    cpu_us = _summary([sample.cpu_ns * 1e-3 / calls for sample in samples])
    row = {
        "owners": num_owners,
        "num_samples": len(samples),
        "waits_per_call": statistics.mean(sample.waits / calls for sample in samples),
        "cpu_us": cpu_us,
        "cpu_us_per_owner": cpu_us["median"] / num_owners,
        "driver_calls": statistics.mean(sample.driver_calls / calls for sample in samples),
        "wall_us": _summary([sample.wall_ns * 1e-3 / calls for sample in samples]),
    }
    if name != "finish":
        idle_ns = statistics.median(_together(IDLE, ranks))
        of_all = [(together - idle_ns) * 1e-3 / (calls * len(ranks)) for together in _together(name, ranks)]
        row["all_ranks_cpu_us"] = _summary(of_all)
    return row


def _together(name: str, ranks: Sequence[RankResult]) -> list[int]:
    """CPU of all threads of all ranks while they had their turns, one number for each repetition."""
    each = [[sample.process_ns for sample in result.samples if sample.operation == name] for result in ranks]
    return [sum(same) for same in zip(*each, strict=True)]


def _summary(values: Sequence[float]) -> dict[str, float]:
    p20, median, p80 = (float(value) for value in np.quantile(values, (0.2, 0.5, 0.8)))
    return {"median": median, "p20": p20, "p80": p80}


# For people


def operations_table(cells: Sequence[dict[str, Any]]) -> Table:
    """What each operation costs at each number of ranks."""
    table = Table(title="host time of one call, microseconds: median (20th-80th percentile)")
    table.add_column("operation")
    table.add_column("ranks, accumulate")
    for name in ("CPU us", "per owner", "wall us", "calls", "all ranks", "waits"):
        table.add_column(name, justify="right")
    for name in OPERATIONS:
        for index, cell in enumerate(cells):
            row, words = cell["operations"][name], f"{cell['ranks']} {cell['accumulate']}"
            if not row["num_samples"]:
                table.add_row(name, words, "somebody was later", "", "", "", "", "")
                continue
            of_all = f"{row['all_ranks_cpu_us']['median']:.1f}" if "all_ranks_cpu_us" in row else ""
            table.add_row(
                name,
                words,
                _text(row["cpu_us"]),
                f"{row['cpu_us_per_owner']:.1f}",
                _text(row["wall_us"]),
                f"{row['driver_calls']:.1f}" if row["driver_calls"] else "",
                of_all,
                f"{row['waits_per_call']:.1f}" if row["waits_per_call"] else "",
                end_section=index == len(cells) - 1,
            )
    return table


def setup_table(cells: Sequence[dict[str, Any]]) -> Table:
    """What set-up costs at each number of ranks, and what a rank holds after it."""
    threads = ", ".join(f"{number} {name}" for name, number in cells[-1]["python_threads"].items())
    caption = f"threads of a rank, {cells[-1]['ranks']} {cells[-1]['accumulate']}: {threads or 'none'}"
    table = Table(title="set-up, and what it adds to one rank", caption=caption)
    table.add_column("ranks, accumulate")
    for name in ("slowest rank, ms", "CPU of a rank, ms", "exchanges", "threads", "descriptors", "shared KB"):
        table.add_column(name, justify="right")
    for cell in cells:
        setup = cell["setup"]
        table.add_row(
            f"{cell['ranks']} {cell['accumulate']}",
            _text(setup["slowest_wall_s"], 1e3),
            _text(setup["cpu_s"], 1e3),
            str(setup["exchanges"]),
            f"{cell['threads_per_rank']}",
            f"{cell['descriptors_per_rank']}",
            f"{cell['memory_bytes'] / 1024:.0f}",
        )
    return table


def _text(summary: dict[str, float], scale: float = 1.0) -> str:
    digits = 0 if summary["p80"] * scale >= 100 else 1
    median, p20, p80 = (f"{summary[name] * scale:.{digits}f}" for name in ("median", "p20", "p80"))
    return f"{median} ({p20}-{p80})"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="odc.bench.communication.host_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16], help="numbers of ranks (2 4 8 16)")
    parser.add_argument("--hosts", type=int, default=1, help="the ranks pose as so many hosts: tcp between them (1)")
    parser.add_argument("--streams", action="store_true", help="on streams that pose as a GPU's")
    parser.add_argument(
        "--accumulate",
        nargs="+",
        choices=["direct", "daemon"],
        help="who adds to an owner's sum: the client, or a thread of the owner (both; between hosts the daemon)",
    )
    parser.add_argument("--units", type=int, default=Settings.num_units, help="that are communicated (80)")
    parser.add_argument("--numel", type=int, default=Settings.numel, help="elements of a shard of a unit (64)")
    parser.add_argument("--repetitions", type=int, default=Settings.repetitions, help="minibatches, one more first")
    parser.add_argument("--setups", type=int, default=Settings.setups, help="runtimes that are set up in turn (5)")
    options = parser.parse_args()
    if min(*options.ranks, options.units, options.numel, options.repetitions, options.setups, options.hosts) < 1:
        parser.error("all numbers must be at least 1")
    if min(options.ranks) < max(2, options.hosts):
        parser.error("--ranks: at least 2, and one for each host")
    modes = options.accumulate or (["direct", "daemon"] if options.hosts == 1 else ["daemon"])
    if options.hosts > 1 and "direct" in modes:
        parser.error("--accumulate direct: ranks of several hosts do not share memory")
    if options.hosts > 1 and options.streams:
        parser.error("--streams: one host")
    settings = Settings(
        options.units, options.numel, options.repetitions, options.setups, options.hosts, options.streams
    )
    cells: list[dict[str, Any]] = []
    with progress_bar(Console(stderr=True)) as progress:
        total = len(options.ranks) * len(modes) * (settings.repetitions + 1)
        bar = progress.add_task("", total=total)
        for world_size in options.ranks:
            progress.update(bar, description=f"{world_size} ranks")
            try:
                cells += measure(world_size, settings, modes, lambda amount: progress.advance(bar, amount))
            except RankFailedError as error:
                print(error, file=sys.stderr)
                sys.exit(1)
    console = Console(width=None if sys.stdout.isatty() else 125)
    where = f"{settings.hosts} hosts" if settings.hosts > 1 else "one host"
    console.print(
        f"{settings.num_units} units of {settings.numel} elements per shard, {where} ({cells[0]['transport']})"
    )
    console.print(operations_table(cells))
    console.print(setup_table(cells))
    if options.json:
        document = {
            "environment": {**describe_environment(), "threads_per_rank": 1},
            "settings": asdict(settings),
            "cells": cells,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
