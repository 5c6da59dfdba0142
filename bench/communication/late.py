"""What ranks lose when another one is late: minibatches of emulated compute, over collectives and with ODC."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from odc import ParamSlice, Runtime, RuntimeConfig, UnitSpec
from odc.bench.harness.benchmark import summary
from odc.bench.harness.ranks import Rank
from odc.setup.agreement import ProcessGroupExchange

LATE_S = 0.2
NUM_UNITS, NUM_MICROBATCHES, NUMEL = 4, 4, 1 << 16
COMPUTE_S = 0.005  # of a unit, forward and backward each
NOBODY, LAST, IN_TURN = "nobody", "the last rank", "each in turn"


def measure_late(me: Rank, repetitions: int, hosts: int) -> list[dict[str, Any]]:
    """The rows under load. Collective; every rank returns the same ones."""
    units = [UnitSpec(f"u{i}", NUMEL, torch.float32, (ParamSlice("weight", NUMEL),)) for i in range(NUM_UNITS)]
    config = RuntimeConfig.from_environment(transport=me.place.transport)
    if hosts:
        config = replace(config, host_id=f"host{me.rank * hosts // me.world_size}")
    with Runtime.create(ProcessGroupExchange(), units, config, device=me.device) as runtime:
        ways: dict[str, Callable[[Rank, str], tuple[float, float]]] = {
            runtime.transport_name: _OnDemand(me, runtime).minibatch
        }
        backend = dist.get_backend()
        if backend != "gloo" or me.device.type == "cpu":
            ways["gloo" if me.device.type == "cpu" else "nccl"] = _Collectives(me).minibatch
        found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
        for repetition in range(repetitions + 1):
            for by, minibatch in ways.items():
                _, on_time = minibatch(me, NOBODY)
                own, _ = minibatch(me, NOBODY)
                for late in (LAST, IN_TURN):
                    pushed, ended = minibatch(me, late)
                    # Who is late by itself is so for its own reasons.
                    is_other = late == LAST and me.rank != me.world_size - 1
                    lost = pushed - own if is_other or late == IN_TURN else 0.0
                    if late == IN_TURN:
                        lost -= LATE_S * len(range(me.rank, NUM_MICROBATCHES, me.world_size))
                    row = (me.largest(on_time), me.largest(lost), me.largest(ended) - me.largest(on_time))
                    if repetition:  # the first one warms up
                        found.setdefault((late, by), []).append(row)
        me.meet()
    return [
        {
            "late": late,
            "by": by,
            "on_time_s": summary([row[0] for row in rows]),
            "others_lose_s": summary([row[1] for row in rows]),
            "minibatch_loses_s": summary([row[2] for row in rows]),
        }
        for (late, by), rows in sorted(found.items())
    ]


class _OnDemand:
    """A minibatch as in FSDP: a gather before each forward and backward of a unit, a push behind its backward."""

    def __init__(self, me: Rank, runtime: Runtime) -> None:
        self.runtime = runtime
        self.whole = torch.zeros(NUMEL * me.world_size, device=me.device)
        self.shard = torch.zeros(NUMEL, device=me.device)
        self.gradient = torch.ones_like(self.whole)

    def minibatch(self, me: Rank, late: str) -> tuple[float, float]:
        """Seconds to this rank's last push, and to the end of the minibatch."""
        for unit in range(NUM_UNITS):
            self.publish(unit)
        me.meet()
        started = time.perf_counter()
        self.begin()
        for microbatch in range(NUM_MICROBATCHES):
            whose = {LAST: me.world_size - 1, IN_TURN: microbatch % me.world_size}.get(late)
            time.sleep(LATE_S if whose == me.rank else 0.0)
            for unit in range(NUM_UNITS):
                self.gather(unit)
                time.sleep(COMPUTE_S)
            for unit in reversed(range(NUM_UNITS)):
                self.gather(unit)
                time.sleep(COMPUTE_S)
                self.push(unit)
        if me.device.type == "cuda":
            torch.cuda.synchronize()
        pushed = time.perf_counter() - started
        self.finish()
        if me.device.type == "cuda":
            torch.cuda.synchronize()
        return pushed, time.perf_counter() - started

    def publish(self, unit: int) -> None:
        self.runtime.publish(unit, lambda out: out.copy_(self.shard))

    def begin(self) -> None:
        self.runtime.begin()

    def gather(self, unit: int) -> None:
        self.runtime.gather(unit, self.whole)

    def push(self, unit: int) -> None:
        self.runtime.scatter_accumulate(unit, self.gradient)

    def finish(self) -> None:
        self.runtime.finish()


class _Collectives(_OnDemand):
    """The same, with collectives in the place of gathers and pushes."""

    def __init__(self, me: Rank) -> None:
        super().__init__(me, None)  # type: ignore[arg-type]

    def publish(self, unit: int) -> None:
        """There is nothing to tell."""

    def begin(self) -> None:
        """Nor here."""

    def gather(self, unit: int) -> None:
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(self.whole, self.shard)

    def push(self, unit: int) -> None:
        getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(self.shard, self.gradient)

    def finish(self) -> None:
        """All are done where their last collective is."""
