"""Host time of ODC's operations against the number of ranks: what Python and system calls cost, bytes aside.

    odc bench host-time --ranks 2,4,8,16
    odc bench host-time --ranks 2,4,8 --hosts 2

Many tiny units (80 of 64 elements per shard): copying them costs nothing, so what is left is the work that an operation
makes for the host. It starts the ranks itself.

How it is measured. With more ranks than cores a rank that is timed must be alone. So ranks take turns: one calls an
operation once for each unit, while the others wait in a receive of gloo, which takes no core. A sample is the mean over
the units of one turn; the tables show the median over ranks and repetitions with the 20th and 80th percentile.

    CPU us       of the thread that calls (CLOCK_THREAD_CPUTIME_ID). The headline: it does not grow when somebody else
                 has the core, and a wait is not in it.
    wall us      beside it, because the other one does not see what the caller waits for: its own daemon thread (the two
                 share one GIL), another rank's, an answer over a socket.
    all ranks    CPU of all threads of all ranks together, whoever works for the operation: an owner's daemon, a link's
                 thread. The turns' own part, measured by turns in which nothing is done, is taken off. One sample is
                 the sum over the ranks' turns, over their number.

Operations, per call (one unit), and that over the number of owners it deals with:

    publish       fill one's own shard and tell all ranks
    gather_first  the first of a unit in a minibatch, which looks whether each owner has published; all have, long ago
    gather        a later one. As FSDP calls it: into rows that it has made before; one's own is in its
                  place, so ranks - 1 owners
    push          scatter_accumulate, to all owners (one's own sum included); no other rank pushes, so no lock is waited
                  for. With the daemon a push waits until all owners have taken the one before the last (``waits``)
    finish        per minibatch: of the last rank to come, which waits for nobody; another one each time. In its wall
                  time the ranks that it wakes want the cores, too
    gradient      of one unit, one's own sum
    yardstick     not ODC: ``sum(range(1000))``, how fast this machine's Python was just then; compare runs by it

Set-up: the slowest rank's wall time of ``Runtime.create``, all ranks at once on the cores there are; the CPU time of
one rank; how many exchanges it makes (small messages through the store of the process group); the threads and
descriptors it adds; shared memory per rank. The first of the repetitions is in it: modules are imported then.

Not covered: contention, bytes (``odc bench primitives``), GPUs (``odc bench gpu --only host_time``), FSDP itself.
"""

from __future__ import annotations

import gc
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from odc import ParamSlice, Runtime, RuntimeConfig, UnitSpec
from odc.bench.harness.benchmark import (
    Benchmark,
    Column,
    Entries,
    Figures,
    Numbers,
    Run,
    Table,
    check_known,
    numbers,
    summary,
)
from odc.bench.harness.ranks import Rank
from odc.setup.agreement import ProcessGroupExchange
from odc.units import Destination, Rows

OPERATIONS = ("publish", "gather_first", "gather", "push", "finish", "gradient", "yardstick")
IDLE = "idle"  # a turn in which nothing is done
RANKS = Numbers(2, 4, 8, 16)
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

    def units(self) -> list[UnitSpec]:
        """Equal ones, each of one parameter."""
        params = (ParamSlice("weight", self.numel),)
        return [UnitSpec(f"layer{i}", self.numel, torch.float32, params) for i in range(self.num_units)]

    def config(self, rank: int, world_size: int, accumulate: str) -> RuntimeConfig:
        """Ranks of one machine pose as so many hosts."""
        host_id = f"host{rank * self.hosts // world_size}" if self.hosts > 1 else ""
        return RuntimeConfig(accumulate=accumulate, host_id=host_id)


@dataclass(frozen=True)
class Sample:
    """One turn of one rank, nanoseconds of the whole turn."""

    operation: str
    wall_ns: int
    cpu_ns: int
    waits: int
    process_ns: int
    """CPU of all threads of this rank, also while the others had their turns."""


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
        whole = torch.ones(world_size, settings.numel)
        self._places, self._grads = Destination([whole]), [Rows(whole, settings.numel)]
        self._token = torch.zeros(1)
        self.samples: list[Sample] = []

    def repetition(self, number: int) -> None:
        """One minibatch. Collective."""
        runtime, shard, places = self._runtime, self._shard, self._places

        def fill(out: torch.Tensor) -> None:
            out.copy_(shard)

        self._take_turns(IDLE, lambda unit: None)
        self._take_turns("yardstick", lambda unit: sum(range(1000)))
        self._take_turns("publish", lambda unit: runtime.publish(unit, fill))
        runtime.begin()
        self._take_turns("gather_first", lambda unit: runtime.gather(unit, places, own_in_place=True))
        self._take_turns("gather", lambda unit: runtime.gather(unit, places, own_in_place=True))
        self._take_turns("push", lambda unit: runtime.scatter_accumulate(unit, self._grads))
        self._finish(last=number % self._world_size)
        self._take_turns("gradient", lambda unit: runtime.gradient(unit))

    def _take_turns(self, operation: str, call: Callable[[int], object]) -> None:
        dist.barrier()
        process_ns = time.process_time_ns()
        if self._rank == 0:
            time.sleep(QUIET_S)
        else:
            dist.recv(self._token, self._rank - 1)
        waits = self._runtime.stats.waits
        wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        for unit in self._units:
            call(unit)
        cpu_ns, wall_ns = time.thread_time_ns() - cpu_ns, time.perf_counter_ns() - wall_ns
        waits = self._runtime.stats.waits - waits
        if self._rank + 1 < self._world_size:
            dist.send(self._token, self._rank + 1)
        dist.barrier()
        time.sleep(QUIET_S)
        self.samples.append(Sample(operation, wall_ns, cpu_ns, waits, time.process_time_ns() - process_ns))

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


def cells_of(run: Run, world_size: int, settings: Settings, modes: Sequence[str]) -> list[dict[str, Any]]:
    """One cell of the result for each mode of accumulating."""
    results = run.ranks(world_size, measure_rank, settings, modes)
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
            "slowest_wall_s": summary([max(one.wall_s for one in attempt) for attempt in attempts]),
            "cpu_s": summary([one.cpu_s for attempt in attempts for one in attempt]),
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
    cpu_us = summary([sample.cpu_ns * 1e-3 / calls for sample in samples])
    row = {
        "owners": num_owners,
        "num_samples": len(samples),
        "waits_per_call": statistics.mean(sample.waits / calls for sample in samples),
        "cpu_us": cpu_us,
        "cpu_us_per_owner": cpu_us["median"] / num_owners,
        "wall_us": summary([sample.wall_ns * 1e-3 / calls for sample in samples]),
    }
    if name != "finish":
        idle_ns = statistics.median(_together(IDLE, ranks))
        of_all = [(together - idle_ns) * 1e-3 / (calls * len(ranks)) for together in _together(name, ranks)]
        row["all_ranks_cpu_us"] = summary(of_all)
    return row


def _together(name: str, ranks: Sequence[RankResult]) -> list[int]:
    """CPU of all threads of all ranks while they had their turns, one number for each repetition."""
    each = [[sample.process_ns for sample in result.samples if sample.operation == name] for result in ranks]
    return [sum(same) for same in zip(*each, strict=True)]


def measure(
    run: Run,
    ranks: Annotated[Numbers, typer.Option(parser=numbers, help="Numbers of ranks.")] = RANKS,
    hosts: Annotated[int, typer.Option(min=1, help="The ranks pose as so many hosts: tcp between them.")] = 1,
    accumulate: Annotated[
        list[str] | None,
        typer.Option(help="Who adds to an owner's sum: direct (the client), daemon (a thread of the owner), or both."),
    ] = None,
    units: Annotated[int, typer.Option(min=1, help="That are communicated.")] = Settings.num_units,
    numel: Annotated[int, typer.Option(min=1, help="Elements of a shard of a unit.")] = Settings.numel,
    repetitions: Annotated[int, typer.Option(min=1, help="Minibatches, one more first.")] = Settings.repetitions,
    setups: Annotated[int, typer.Option(min=1, help="Runtimes that are set up in turn.")] = Settings.setups,
) -> Entries:
    modes = accumulate or (["direct", "daemon"] if hosts == 1 else ["daemon"])
    if min(ranks) < max(2, hosts):
        raise ValueError(f"--ranks {ranks}: expected at least 2, and one for each host")
    check_known(accumulate=(modes, ("direct", "daemon")))
    if hosts > 1 and "direct" in modes:
        raise ValueError("--hosts: ranks of several hosts share no memory, so not --accumulate direct")
    settings = Settings(units, numel, repetitions, setups, hosts)
    run.begin(len(ranks) * len(modes) * (repetitions + 1))
    cells: list[dict[str, Any]] = []
    for world_size in ranks:
        run.describe(f"{world_size} ranks")
        cells += cells_of(run, world_size, settings, modes)
    return {"cells": cells}


def figures(result: Entries) -> Figures:
    for cell in result["cells"]:
        if cell["accumulate"] == "direct":
            calls = [cell["operations"][name]["cpu_us"]["median"] for name in ("publish", "gather", "push", "finish")]
            costs = " | ".join(f"{microseconds:.0f} us" for microseconds in calls)
            yield f"| {cell['ranks']} |", f" {costs} | {1e3 * cell['setup']['cpu_s']['median']:.0f} ms |"


_KEYS = (Column("ranks", "ranks"), Column("accumulate", "accumulate"))
_WHERE = "{settings[units]} units of {settings[numel]} elements per shard"


def _costs(title: str, key: str, form: str) -> Table:
    return Table("cells", title, _KEYS, [Column(name, f"operations.{name}.{key}", form) for name in OPERATIONS])


BENCHMARK = Benchmark(
    measure,
    "3 min, quick 40 s",
    (
        _costs(f"CPU us of the calling thread, one call, median (20th-80th percentile); {_WHERE}", "cpu_us", ".1f"),
        _costs("the same over the number of owners", "cpu_us_per_owner", ".1f"),
        _costs("wall us", "wall_us", ".0f"),
        _costs("CPU us of all ranks together", "all_ranks_cpu_us", ".0f"),
        _costs("waits", "waits_per_call", ".1f"),
        Table(
            "cells",
            "set-up, and what it adds to one rank",
            _KEYS,
            (
                Column("slowest rank, ms", "setup.slowest_wall_s", ".1f", 1e3),
                Column("CPU of a rank, ms", "setup.cpu_s", ".1f", 1e3),
                Column("exchanges", "setup.exchanges"),
                Column("threads", "threads_per_rank"),
                Column("descriptors", "descriptors_per_rank"),
                Column("shared KB", "memory_bytes", ".0f", 1 / 1024),
            ),
        ),
    ),
    quick={"ranks": Numbers(2, 4), "repetitions": 3, "setups": 2},
    figures=(("docs/performance.md", figures, ["host_time"]),),
)
