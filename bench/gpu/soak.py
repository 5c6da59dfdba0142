"""Check ``soak``: many pushes under uneven load, and none is lost or counted twice.

Rank 0 only owns; the others push whole numbers, every one a random number of times in each minibatch, on streams that
are busy for random times. The sums of each minibatch are compared on the device, exactly, and the count of wrong
elements is read once, at the end. A control leaves out one push and must be noticed.
"""

from __future__ import annotations

import random
import time

import torch

from odc import ParamSlice, UnitSpec
from odc.bench.gpu.minibatches import create_runtime
from odc.bench.gpu.setting import CheckFailedError, Report, Setting, run_ranks
from odc.bench.gpu.streams import engine_of, streams_of
from odc.bench.harness.ranks import Rank

NUMEL = 65_537
MOST_PUSHES = 4
_LIMIT_S = 600.0
_LONGEST_DELAY_S = 3e-4
_MODES = ("daemon", "direct")
_CONTROL_MINIBATCHES = 3


def check(setting: Setting) -> Report:
    world_size, minibatches = max(setting.worlds), setting.minibatches
    data: dict[str, object] = {"ranks": world_size, "minibatches": minibatches}
    for mode in _MODES:
        started = time.monotonic()
        wrong, pushes = _run(setting, world_size, mode, minibatches, False)
        data[mode] = {"pushes": pushes, "seconds": time.monotonic() - started}
        if wrong:
            raise CheckFailedError(f"{mode}: {wrong} elements of sums over {pushes} pushes are wrong")
        lost, _ = _run(setting, world_size, mode, _CONTROL_MINIBATCHES, True)
        if not lost:
            raise CheckFailedError(f"{mode}: a push that was left out on purpose was not noticed")
    total = minibatches * len(_MODES)
    return Report(f"{world_size - 1} clients, {total} minibatches, {pushes} pushes by atomics, none lost", data)


def _run(setting: Setting, world_size: int, mode: str, minibatches: int, lose_one: bool) -> tuple[int, int]:
    """(wrong elements, pushes of one unit) over all ranks."""
    results = run_ranks(setting, world_size, soak, mode, minibatches, lose_one, limit_s=_LIMIT_S)
    return sum(wrong for wrong, _ in results), sum(pushes for _, pushes in results)


def _pushes(minibatch: int, client: int) -> int:
    return 0 if client == 0 else random.Random(f"{minibatch} {client}").randint(0, MOST_PUSHES)


def _value(minibatch: int, client: int, push: int) -> float:
    return float((minibatch * 13 + client * 7 + push) % 97 + 1)


def soak(rank: Rank, mode: str, minibatches: int, lose_one: bool) -> tuple[int, int]:
    """(wrong elements of this rank's sums, how often it has pushed)."""
    generator = random.Random(rank.rank)
    numel = NUMEL if rank.device.type == "cuda" else NUMEL // 64
    runtime = create_runtime(rank, [UnitSpec("u", numel, torch.float32, (ParamSlice("w", numel),))], mode)
    streams = streams_of(engine_of(runtime), rank.device)
    places = torch.arange(numel * rank.world_size, device=rank.device).remainder_(5).to(torch.float32)
    mine = places[rank.rank * numel : (rank.rank + 1) * numel]
    wrong = torch.zeros((), dtype=torch.int64, device=rank.device)
    streams.synchronize()  # from here on every stream may read these
    done = 0
    with runtime:
        for minibatch in range(1, minibatches + 1):
            runtime.publish(0, lambda shard: shard.fill_(0.0))
            runtime.begin()
            with streams.on("push"):
                for push in range(_pushes(minibatch, rank.rank)):
                    streams.delay(generator.random() * _LONGEST_DELAY_S)
                    value = _value(minibatch, rank.rank, push)
                    if not (lose_one and done == 0):
                        runtime.scatter_accumulate(0, places + value)
                    done += 1
            runtime.finish()
            pushes = [(c, p) for c in range(rank.world_size) for p in range(_pushes(minibatch, c))]
            result = runtime.gradient(0)
            if result is not None:
                wanted = mine * float(len(pushes)) + sum(_value(minibatch, c, p) for c, p in pushes)
                found = result[0]
                streams.engine.run(lambda found=found, wanted=wanted: wrong.add_(torch.ne(found, wanted).sum()))  # type: ignore[misc]
            elif pushes:
                wrong.add_(numel)
        streams.synchronize()
        return int(wrong), done
