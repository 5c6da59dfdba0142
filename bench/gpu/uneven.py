"""Checks ``uneven`` and ``late_binding``: ranks of different speed, or with different amounts of work."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

import odc
from odc import Runtime
from odc.balance import MinibatchLoader, MinibatchSampler, QuadraticCost
from odc.bench.gpu.device import cycles_per_s, spin
from odc.bench.gpu.setting import CheckFailedError, Report, Setting, require, run_ranks
from odc.bench.gpu.streams import Streams, create_runtime
from odc.bench.gpu.training import (
    TIMEOUT_S,
    VOCABULARY,
    language_model,
    loss_of,
    optimizer_of,
    shard,
    step,
    train_alone,
)
from odc.bench.harness.benchmark import Column, Table, summary
from odc.bench.harness.ranks import Rank
from odc.bench.harness.units import use_units
from odc.engines.base import Part

MODES = ("direct", "daemon")
"""All ways to accumulate that "auto" can choose."""
MOST_OF_OWN, MOST_OF_LONGEST = 1.3, 1.15
NUM_UNITS, NUMEL = 6, 4096
WARM_UP = 1
TABLE = Table(
    "cells",
    "uneven minibatches: medians (20th-80th percentile)",
    (Column("minibatch", "plan"), Column("accumulate", "accumulate")),
    (
        Column("fast ranks, s", "fast_s", ".3f"),
        Column("of own", "of_own", ".2f"),
        Column("minibatch, s", "total_s", ".3f"),
        Column("of longest", "of_longest", ".2f"),
        Column("lockstep, s", "lockstep_s", ".2f"),
    ),
)


@dataclass(frozen=True)
class Plan:
    """The computation of each rank in one minibatch."""

    name: str
    microbatches: tuple[int, ...]
    unit_s: tuple[float, ...]
    """Seconds of one unit of one microbatch, forward and backward together, by rank."""

    @property
    def compute_s(self) -> list[float]:
        return [count * NUM_UNITS * unit_s for count, unit_s in zip(self.microbatches, self.unit_s, strict=True)]

    @property
    def lockstep_s(self) -> float:
        """Seconds of the minibatch if ranks waited for each other at every unit of every microbatch."""
        rows = zip(self.microbatches, self.unit_s, strict=True)
        units = [[unit_s if i < count else 0.0 for i in range(max(self.microbatches))] for count, unit_s in rows]
        return float(NUM_UNITS * sum(max(column) for column in zip(*units, strict=True)))


def plans(world_size: int) -> tuple[Plan, ...]:
    fast = world_size - 1
    return (
        Plan("one rank 10x slower", (3,) * world_size, (0.072, *(0.0072,) * fast)),
        Plan("1 microbatch beside 4, equal totals", (1, *(4,) * fast), (0.168, *(0.042,) * fast)),
    )


def check_uneven(setting: Setting) -> Report:
    """Check ``uneven``: a device that has less to do than others is held up by none of them.

    Two minibatches: one rank computes ten times as slowly as the others; and one has a single long microbatch where the
    others have four short ones of the same total. What a rank's device needs from the first gather to its last push is
    compared with what its computation alone takes, beside it, in the same run. So is what the minibatch takes all ranks
    with the longest computation. Computation is a kernel that only takes time, on the stream that gathers and pushes.

    "Alone" has the same launches: where the minibatch gathers or pushes, the same operation on memory of this rank
    only. They take microseconds. But ranks that share a GPU take turns on it, each for a slice of time, and a launch
    may have to wait for its rank's next turn: so what the two differ in is what other ranks do to this one's gathers
    and pushes.
    """
    world_size = max(setting.worlds)
    rows = [
        measure_plan(setting, plan, mode, 3 if setting.quick else 7) for plan in plans(world_size) for mode in MODES
    ]
    data, tables = {"cells": rows}, (TABLE,)
    late = [
        f"{row['plan']}, {row['accumulate']}: {row['of_own']:.2f} and {row['of_longest']:.2f}"
        for row in rows
        if row["of_own"] > MOST_OF_OWN or row["of_longest"] > MOST_OF_LONGEST
    ]
    if late:
        text = (
            f"times a rank's own computation to its last push, at most {MOST_OF_OWN} expected, and times the longest "
            f"computation to the end of the minibatch, at most {MOST_OF_LONGEST}: "
        )
        raise CheckFailedError(text + "; ".join(late), data, tables)
    worst = max(row["of_own"] for row in rows), max(row["of_longest"] for row in rows)
    figures = f"at most {worst[0]:.2f} times a rank's own computation, {worst[1]:.2f} times the longest"
    return Report(figures, data, tables)


def measure_plan(setting: Setting, plan: Plan, mode: str, repetitions: int) -> dict[str, Any]:
    """Measure one plan with one way to accumulate."""
    results = run_ranks(setting, len(plan.microbatches), run, plan, mode, repetitions)
    alone, own, total = ([[one[kind] for one in rank] for rank in results] for kind in range(3))
    longest = max(plan.compute_s)
    fast = [rank for rank in range(len(results)) if rank > 0]
    of_own = [max(own[rank][i] / alone[rank][i] for rank in fast) for i in range(repetitions)]
    of_longest = [max(rank[i] for rank in total) / max(rank[i] for rank in alone) for i in range(repetitions)]
    return {
        "plan": plan.name,
        "accumulate": mode,
        "ranks": len(results),
        "repetitions": repetitions,
        "of_own": statistics.median(of_own),
        "of_longest": statistics.median(of_longest),
        "fast_s": summary([max(own[rank][i] for rank in fast) for i in range(repetitions)]),
        "fast_alone_s": summary([max(alone[rank][i] for rank in fast) for i in range(repetitions)]),
        "total_s": summary([max(rank[i] for rank in total) for i in range(repetitions)]),
        "longest_s": longest,
        "lockstep_s": plan.lockstep_s,
        **asdict(plan),
    }


def run(rank: Rank, plan: Plan, mode: str, repetitions: int) -> list[tuple[float, float, float]]:
    """Run the repetitions on this rank. Returns for each, on this rank's device, the seconds of the computation alone,
    of the minibatch to the last push, and of the minibatch to final gradients."""
    runtime, streams = create_runtime(rank, mode, NUMEL, NUM_UNITS)
    out = torch.zeros(NUMEL * rank.world_size, device=rank.device)
    grads = torch.ones_like(out)
    gather, push = _operations_on_own_memory(rank, mode, streams, out, grads)
    streams.synchronize()
    found = []
    with runtime:
        for repetition in range(WARM_UP + repetitions):
            _meet(rank, streams)
            alone_s = _compute(rank, plan, streams, gather, push)
            streams.synchronize()
            own_s, total_s = _minibatch(rank, plan, streams, runtime, out, grads)
            if repetition >= WARM_UP:
                found.append((alone_s(), own_s(), total_s()))
    return found


Operation = Callable[[int], object]
"""An operation is called with the number of a unit."""


def _operations_on_own_memory(
    rank: Rank, mode: str, streams: Streams, out: torch.Tensor, grads: torch.Tensor
) -> tuple[Operation, Operation]:
    """The launches of a gather and of a push, where every owner's memory is this rank's."""
    shards = [torch.zeros(NUMEL, device=rank.device) for _ in range(rank.world_size)]
    buffers = [shard.view(torch.uint8) for shard in shards]
    engine, part = streams.engine, Part(grads, 0, NUMEL)

    def gather(unit: int) -> None:
        engine.read_rows([out], shards, rank.rank)

    def add(unit: int) -> None:
        engine.add_rows(buffers, [part], rank.rank)

    def fill_slots(unit: int) -> None:
        engine.write_rows(buffers, [part], rank.rank)
        streams.mark()  # in place of the word that says so

    return gather, add if mode == "direct" else fill_slots


def _compute(rank: Rank, plan: Plan, streams: Streams, gather: Operation, push: Operation) -> Callable[[], float]:
    """This rank's microbatches; seconds from before the first gather to after the last push, to be asked later."""
    unit_s = plan.unit_s[rank.rank]
    started = streams.stamp()
    for _ in range(plan.microbatches[rank.rank]):
        use_units(NUM_UNITS, gather, lambda share: streams.delay(unit_s * share), push)
    ended = streams.stamp()
    return lambda: ended() - started()


def _minibatch(
    rank: Rank, plan: Plan, streams: Streams, runtime: Runtime, out: torch.Tensor, grads: torch.Tensor
) -> tuple[Callable[[], float], Callable[[], float]]:
    for unit in range(NUM_UNITS):
        runtime.publish(unit, lambda shard: shard.fill_(1.0))
    _meet(rank, streams)
    runtime.begin()
    started = streams.stamp()
    own_s = _compute(
        rank,
        plan,
        streams,
        lambda unit: runtime.gather(unit, out),
        lambda unit: runtime.scatter_accumulate(unit, grads),
    )
    runtime.finish()
    ended = streams.stamp()
    streams.synchronize()
    return own_s, lambda: ended() - started()


def _meet(rank: Rank, streams: Streams) -> None:
    streams.synchronize()
    rank.meet()


STEPS, QUICK_STEPS = 24, 8
PER_RANK, MAX_TOKENS = 6, 12
TOLERANCE = 1e-5
SLOW_RANK, SLOWER, SECONDS_PER_TOKEN = 1, 4, 1e-3
Sample = tuple[int, torch.Tensor]


class Samples:
    """Samples of a few lengths. The plan takes ``lengths`` for their costs."""

    def __init__(self, num_samples: int) -> None:
        generator = random.Random(0)
        self.lengths = [generator.randint(1, 8) for _ in range(num_samples)]

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(index)
        return index, torch.randint(0, VOCABULARY, (1, 9), generator=generator)


def check_late_binding(setting: Setting) -> Report:
    """Check ``late_binding``: a loader that binds microbatches late, on ranks whose hosts are ahead of their devices.

    One rank's device takes four times as long as the plan says: computation is a kernel that only takes time, in front
    of a small model's. Its events tell how fast each rank is, and a microbatch is bound when the device has begun the
    one before. Each sample must be computed once, some by ranks that have taken them, and the losses must be those of
    one process that trains alone in float64 on the same minibatches.

    Ranks that share a GPU take turns on it, so that the minibatch is not shorter for it: that wants a GPU per rank.
    """
    steps = QUICK_STEPS if setting.quick else STEPS
    data: dict[str, object] = {"steps": steps}
    errors, taken = [], 0
    for world_size in setting.worlds:
        ranks = run_ranks(setting, world_size, train, steps)
        computed = [indices for indices, *_ in ranks]
        minibatches = [sorted(itertools.chain(*of_ranks)) for of_ranks in zip(*computed, strict=True)]
        samples = sorted(itertools.chain(*minibatches))
        require(samples == list(range(len(samples))), f"{world_size} ranks: a sample was computed twice, or not at all")
        dataset = Samples(len(samples))
        together = [(torch.cat([dataset[index][1] for index in indices]), len(indices)) for indices in minibatches]
        wanted = train_alone(language_model(), [([tokens], count) for tokens, count in together])
        losses = ranks[0][1]
        errors.append(max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)))
        text = f"{world_size} ranks: losses {losses}, reference {wanted}: off by {errors[-1]:.1e}"
        require(errors[-1] <= TOLERANCE, text)
        of_world = sum(num_taken for *_, num_taken, _ in ranks)
        require(of_world > 0, f"{world_size} ranks: nobody has taken a sample of the slow rank")
        taken += of_world
        data[f"{world_size} ranks"] = {"taken": of_world, "speeds": ranks[0][3], "largest_error": errors[-1]}
    return Report(f"{taken} samples taken, each computed once; largest relative error {max(errors):.0e}", data)


def _delay(device: torch.device, seconds: float) -> None:
    if device.type == "cuda":
        spin(int(seconds * cycles_per_s()))
    else:
        time.sleep(seconds)


def train(rank: Rank, steps: int) -> tuple[list[list[int]], list[float], int, list[float]]:
    """Train; return this rank's samples in each step, the losses of all, how many samples this rank has taken, and
    learned speeds."""
    dataset = Samples(rank.world_size * PER_RANK * steps)
    slower = SLOWER if rank.rank == SLOW_RANK else 1
    model = shard(language_model(), rank)
    optimizer = optimizer_of(model)
    computed, losses = list[list[int]](), list[torch.Tensor]()
    sampler = MinibatchSampler(
        dataset.lengths, minibatch_size=PER_RANK, world_size=rank.world_size, max_tokens=MAX_TOKENS,
        cost=QuadraticCost(a=0.0, b=1.0),
    )  # fmt: skip
    with odc.patch_fsdp(model, transport=rank.place.transport, timeout_s=TIMEOUT_S):
        loader = MinibatchLoader[Sample, list[Sample]](dataset, sampler, list, rank.rank, late_binding=True)
        for minibatch in loader:
            own, mine = torch.zeros((), device=rank.device), list[int]()
            for samples in minibatch.microbatches:
                indices = [index for index, _ in samples]
                tokens = torch.cat([tokens for _, tokens in samples]).to(rank.device, non_blocking=True)
                _delay(rank.device, SECONDS_PER_TOKEN * slower * sum(dataset.lengths[index] for index in indices))
                loss = loss_of(model, tokens) / (rank.world_size * PER_RANK)
                (loss * rank.world_size).backward()  # type: ignore[no-untyped-call]
                own, mine = own + loss.detach(), mine + indices
            step(model, optimizer)
            computed.append(mine)
            losses.append(own)
        loader.close()
        total = torch.stack(losses).double().cpu()
        dist.all_reduce(total)
        return computed, total.tolist(), loader.num_taken, loader.speeds
