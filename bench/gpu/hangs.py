"""Check ``synchronize_does_not_hang``: what happens where user code waits for its device.

A stream here waits only for work that another rank has submitted, so ``torch.cuda.synchronize()`` at any point waits
for devices, not for hosts. And if a rank is killed with work under way, the watchdog lets the waiting streams go on:
``synchronize`` returns (or CUDA reports an error), and the next operation raises.
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import torch

from odc import OdcError, ParamSlice, UnitSpec
from odc.bench.gpu.minibatches import Case, RandomRun, create_runtime
from odc.bench.gpu.setting import Report, Setting, require, run_ranks
from odc.bench.gpu.streams import engine_of, streams_of
from odc.bench.harness.ranks import Rank

MINIBATCHES, QUICK_MINIBATCHES = 50, 6
FREED_LIMIT_S = 10.0
_QUEUED_S = 30.0  # work that the killed rank had queued
_PIECE_S = 0.2  # in pieces: no piece is long to tear down
_LONGEST_PAUSE_S = 5e-3


def check(setting: Setting) -> Report:
    world_size = max(setting.worlds)
    waits = run_ranks(setting, world_size, synchronize_anywhere)
    freed = run_ranks(setting, 2, survive, expendable=[1])[0]
    require(freed["was_waiting"], "the stream had waited for the killed rank already, so synchronize() shows nothing")
    require(freed["seconds"] < FREED_LIMIT_S, f"{freed['how']} only after {freed['seconds']:.1f} s")
    require("PeerDiedError" in freed["next"], f"the next operation said nothing of the death, but {freed['next']!r}")
    text = (
        f"{sum(waits)} random waits on {world_size} ranks; killed peer: {freed['how']} after {freed['seconds']:.1f} s"
    )
    return Report(text, {"random_waits": waits, "killed_peer": freed})


def synchronize_anywhere(rank: Rank) -> int:
    """Random minibatches in which each rank waits for its device at random points; how often this one did."""
    minibatches = QUICK_MINIBATCHES if rank.place.quick else MINIBATCHES
    shared, own = random.Random(5), random.Random(rank.rank)
    counts = tuple(tuple(shared.randint(0, 2) for _ in range(rank.world_size)) for _ in range(minibatches))
    run = RandomRun(Case(counts=counts, seed=7, longest_delay_s=2e-3), rank)
    waits = 0

    def pause() -> None:
        nonlocal waits
        time.sleep(own.random() * _LONGEST_PAUSE_S)
        if own.random() < 0.5:
            run.streams.synchronize()
            waits += 1

    failures = run.run(before_finish=pause, after_push=pause)
    require(not failures, f"{failures[:1]} (and {max(len(failures) - 1, 0)} more)")
    return waits


def survive(rank: Rank) -> dict[str, Any]:
    """Rank 1 posts, with its stream still busy, and is killed; how rank 0's wait for its device ends."""
    numel = 1000
    runtime = create_runtime(rank, [UnitSpec("u", numel, torch.float32, (ParamSlice("w", numel),))], "daemon")
    streams = streams_of(engine_of(runtime), rank.device)
    out = torch.zeros(numel * rank.world_size, device=rank.device)

    def publish_and_gather() -> None:
        runtime.publish(0, lambda shard: shard.fill_(1.0))
        runtime.begin()
        runtime.gather(0, out)

    publish_and_gather()  # the first gather sends the device a table of addresses, for which its host waits
    runtime.finish()
    streams.synchronize()
    if rank.rank == 1:
        for _ in range(int(_QUEUED_S / _PIECE_S)):
            streams.delay(_PIECE_S)
        runtime.publish(0, lambda shard: shard.fill_(1.0))
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    publish_and_gather()
    has_gathered = streams.mark()
    was_waiting = not has_gathered()
    started = time.monotonic()
    how = "synchronize returned"
    try:
        streams.synchronize()
    except RuntimeError as error:  # the dead process took its memory along
        how = f"synchronize raised {type(error).__name__}"
    seconds = time.monotonic() - started
    following = ""
    try:
        runtime.finish()
    except (OdcError, RuntimeError) as error:
        following = f"{type(error).__name__}: {error}"
    runtime.close()
    return {"was_waiting": was_waiting, "how": how, "seconds": seconds, "next": following}
