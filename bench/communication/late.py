"""What the other ranks lose when one rank is late: minibatches of emulated compute, over collectives and with ODC."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from odc import Runtime
from odc.bench.harness.benchmark import summary
from odc.bench.harness.ranks import Rank
from odc.bench.harness.units import config_of, create_runtime, use_units

# torch 2.13 renamed them.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
LATE_S = 0.2
NUM_UNITS, NUM_MICROBATCHES, NUMEL = 4, 4, 1 << 16
COMPUTE_S = 0.005  # of a unit, forward and backward each
NOBODY, LAST, IN_TURN = "nobody", "the last rank", "each in turn"


def measure_late(me: Rank, repetitions: int, hosts: int) -> list[dict[str, Any]]:
    """Measure the rows of the table under load. Collective; every rank returns the same rows."""
    with create_runtime(me, config_of(me, hosts), NUMEL, NUM_UNITS) as runtime:
        ways = {runtime.transport_name: _Minibatches(me, runtime)}
        backend = dist.get_backend()
        if backend != "gloo" or me.device.type == "cpu":
            ways["gloo" if me.device.type == "cpu" else "nccl"] = _Minibatches(me, _Collectives(me))
        found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
        for repetition in range(repetitions + 1):
            for by, minibatches in ways.items():
                _, on_time = minibatches.run(me, NOBODY)
                own, _ = minibatches.run(me, NOBODY)
                for late in (LAST, IN_TURN):
                    pushed, ended = minibatches.run(me, late)
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


class _Minibatches:
    """Minibatches on operations that gather and push: a runtime's, or collectives."""

    def __init__(self, me: Rank, operations: Runtime | _Collectives) -> None:
        self.operations = operations
        self.whole = torch.zeros(NUMEL * me.world_size, device=me.device)
        self.shard = torch.zeros(NUMEL, device=me.device)
        self.gradient = torch.ones_like(self.whole)

    def run(self, me: Rank, late: str) -> tuple[float, float]:
        """Run one minibatch; return the seconds to this rank's last push, and to the end of the minibatch."""
        operations = self.operations
        for unit in range(NUM_UNITS):
            operations.publish(unit, lambda out: out.copy_(self.shard))
        me.meet()
        started = time.perf_counter()
        operations.begin()
        for microbatch in range(NUM_MICROBATCHES):
            whose = {LAST: me.world_size - 1, IN_TURN: microbatch % me.world_size}.get(late)
            time.sleep(LATE_S if whose == me.rank else 0.0)
            use_units(
                NUM_UNITS,
                lambda unit: operations.gather(unit, self.whole),
                lambda share: time.sleep(COMPUTE_S),
                lambda unit: operations.scatter_accumulate(unit, self.gradient),
            )
        if me.device.type == "cuda":
            torch.cuda.synchronize()
        pushed = time.perf_counter() - started
        operations.finish()
        if me.device.type == "cuda":
            torch.cuda.synchronize()
        return pushed, time.perf_counter() - started


class _Collectives:
    """What a runtime does, by collectives: all are done where their last one is."""

    def __init__(self, me: Rank) -> None:
        self._shard = torch.zeros(NUMEL, device=me.device)

    def publish(self, unit: int, fill: object) -> None:
        """Do nothing: an all-gather reads the shard itself."""

    def begin(self) -> None:
        """Do nothing."""

    def gather(self, unit: int, out: torch.Tensor) -> None:
        ALL_GATHER(out, self._shard)

    def scatter_accumulate(self, unit: int, gradient: torch.Tensor) -> None:
        REDUCE_SCATTER(self._shard, gradient)

    def finish(self) -> None:
        """Do nothing: each collective was complete when it returned."""
