"""Check ``no_host_sync``: a training step under ODC makes no host wait for its device.

Two ways to see it. The host goes through a whole minibatch while its stream is still at work that was queued before
it; and torch raises at every synchronizing operation that it knows of during steps of FSDP2 under ODC. What each way
would miss, the other sees: a wait outside of torch, a wait that is over before the queued work is.

Not so with a daemon, on purpose: a host is at most two pushes ahead of its device, which is as many as the slots hold,
and at the end of a minibatch it waits for what all ranks have pushed.
"""

from __future__ import annotations

import time

import torch
from torch import nn

import odc
from odc import ParamSlice, UnitSpec
from odc.bench.gpu.minibatches import MODES, create_runtime
from odc.bench.gpu.models import Perceptron, shard
from odc.bench.gpu.setting import CheckFailedError, Report, Setting, require, run_ranks
from odc.bench.gpu.streams import engine_of, streams_of
from odc.bench.harness.ranks import Rank
from odc.fsdp_patch.publishing import FIRST_MINIBATCHES

BUSY_S = 1.0
WARM_UP, STEPS = FIRST_MINIBATCHES + 2, 3
"""In the first minibatches hosts wait on purpose: for what a script may have changed without torch's knowledge."""
_GATHERS = 3


def check(setting: Setting) -> Report:
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
    """Seconds that a minibatch took this host while its stream was busy.

    Raises:
        CheckFailedError: the stream was done when the host was, so the host has waited.
    """
    numel = 50_000
    runtime = create_runtime(rank, [UnitSpec("u", numel, torch.float32, (ParamSlice("w", numel),))], mode)
    streams = streams_of(engine_of(runtime), rank.device)
    grads = torch.ones(numel * rank.world_size, device=rank.device)
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
    if waited and seconds < BUSY_S / 2:
        raise CheckFailedError(f"the stream was busy for less than {seconds:.3f} s: nothing was shown")
    require(not waited, f"{mode}: the host took {seconds:.3f} s for a minibatch, as long as its stream was busy")
    return seconds


def train_without_waiting(rank: Rank) -> int:
    """How many steps ran while torch raised at synchronizing operations; CUDA only."""
    torch.manual_seed(0)
    model = shard(Perceptron(), "fsdp2", "fp32", rank.device, rank.world_size)
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
    optimizer.step()
    optimizer.zero_grad()


def _require_alert(tensor: torch.Tensor) -> None:
    """The debug mode works here."""
    try:
        tensor.sum().item()
    except RuntimeError:
        return
    raise CheckFailedError("torch.cuda.set_sync_debug_mode('error') does not raise at .item()")
