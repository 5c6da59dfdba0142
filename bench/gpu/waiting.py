"""Checks ``no_host_sync`` and ``synchronize_does_not_hang``: hosts that run ahead, and hosts that wait."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import torch
from torch import nn

import odc
from odc import OdcError
from odc.bench.gpu.setting import CheckFailedError, Report, Setting, require, run_ranks
from odc.bench.gpu.streams import MODES, Case, RandomRun, create_runtime
from odc.bench.gpu.training import Perceptron, shard, step
from odc.bench.harness.ranks import Rank
from odc.fsdp_patch.publishing import FIRST_MINIBATCHES

BUSY_S = 1.0
WARM_UP, STEPS = FIRST_MINIBATCHES + 2, 3
"""In the first minibatches hosts wait on purpose: for what a script may have changed without torch's knowledge."""
_GATHERS, _NUMEL = 3, 50_000


def check_no_host_sync(setting: Setting) -> Report:
    """Check ``no_host_sync``: a training step under ODC makes no host wait for its device.

    Two ways to see it. The host goes through a whole minibatch while its stream is still at work that was queued before
    it; and torch raises at every synchronizing operation that it knows of during steps of FSDP2 under ODC. What each
    way would miss, the other sees: a wait outside of torch, a wait that is over before the queued work is.

    Not so with a daemon, on purpose: a host is at most two pushes ahead of its device, which is as many as the slots
    hold, and at the end of a minibatch it waits for what all ranks have pushed.
    """
    world_size = min(setting.worlds)
    data: dict[str, object] = {}
    modes = [mode for mode in MODES if mode != "daemon"]
    for mode in modes:
        data[mode] = max(run_ranks(setting, world_size, run_ahead, mode))
    steps = "steps under sync debug not run"
    if setting.device_type == "cuda":
        data["steps"] = run_ranks(setting, world_size, train_without_waiting)[0]
        steps = f"{data['steps']} steps of FSDP2 without a synchronizing operation"
    hosts = max(float(str(data[mode])) for mode in modes)
    return Report(f"a minibatch takes a host {hosts * 1e3:.1f} ms with its stream busy for {BUSY_S:g} s; {steps}", data)


def run_ahead(rank: Rank, mode: str) -> float:
    """Seconds that this host needed for a minibatch while its stream was busy.

    Raises:
        CheckFailedError: the stream was done when the host was, so the host has waited.
    """
    runtime, streams = create_runtime(rank, mode, _NUMEL)
    grads = torch.ones(_NUMEL * rank.world_size, device=rank.device)
    out = torch.empty_like(grads)

    def minibatch() -> None:
        runtime.publish(0, lambda shard: shard.fill_(1.0))
        runtime.begin()
        for _ in range(_GATHERS):
            runtime.gather(0, out)
            runtime.scatter_accumulate(0, grads)
        runtime.finish()
        runtime.gradient(0)

    with runtime:
        for _ in range(WARM_UP):
            minibatch()
        streams.synchronize()
        rank.meet()
        streams.delay(BUSY_S)
        done = streams.mark()
        started = time.monotonic()
        minibatch()
        seconds = time.monotonic() - started
        waited = done()
        streams.synchronize()
        require(done(), "the mark of a stream that is idle says that it is busy")
        rank.meet()
    too_short = waited and seconds < BUSY_S / 2
    require(not too_short, f"the stream was busy for less than {seconds:.3f} s: nothing was shown")
    require(not waited, f"{mode}: the host took {seconds:.3f} s for a minibatch, as long as its stream was busy")
    return seconds


def train_without_waiting(rank: Rank) -> int:
    """Train while torch raises at synchronizing operations; return the number of steps. CUDA only."""
    torch.manual_seed(0)
    model = shard(Perceptron(), rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(16, 128, device=rank.device)
    with odc.patch_fsdp(model, transport=rank.place.transport):
        for _ in range(WARM_UP):
            _step(model, optimizer, data, 1 + rank.rank)
        rank.meet()
        torch.cuda.set_sync_debug_mode("error")  # of the process: the daemon's thread and autograd's too
        try:
            _require_alert(data)
            for _ in range(STEPS):
                _step(model, optimizer, data, 1 + rank.rank)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        rank.meet()
    return STEPS


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor, microbatches: int) -> None:
    for _ in range(microbatches):
        model(data).square().mean().backward()
    step(model, optimizer)


def _require_alert(tensor: torch.Tensor) -> None:
    """The debug mode works here."""
    try:
        tensor.sum().item()
    except RuntimeError:
        return
    raise CheckFailedError("torch.cuda.set_sync_debug_mode('error') does not raise at .item()")


MINIBATCHES, QUICK_MINIBATCHES = 50, 6
FREED_LIMIT_S = 10.0
_QUEUED_S = 30.0  # work that the killed rank had queued
_PIECE_S = 0.2  # in pieces: no piece is long to tear down
_LONGEST_PAUSE_S = 5e-3


def check_hangs(setting: Setting) -> Report:
    """Check ``synchronize_does_not_hang``: what happens where user code waits for its device.

    A stream here waits only for work that another rank has submitted, so ``torch.cuda.synchronize()`` at any point
    waits for devices, not for hosts. And if a rank is killed with work under way, the watchdog lets the waiting streams
    go on: ``synchronize`` returns (or CUDA reports an error), and the next operation raises.
    """
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
    """Run random minibatches in which each rank waits for its device at random points; return how often this rank
    did."""
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
    """Rank 1 posts while its stream is busy, and is killed. Returns how rank 0's wait for its device ends."""
    runtime, streams = create_runtime(rank, "daemon", _NUMEL)
    out = torch.zeros(_NUMEL * rank.world_size, device=rank.device)

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
