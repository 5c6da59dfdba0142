"""A model that sleeps where another one computes, for :mod:`.emulated`: real FSDP2 units around it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

FORWARD_SHARE = 1 / 3


class Clock:
    """Emulates compute by sleeping. What a sleep lasts too long is taken off the next ones."""

    def __init__(self) -> None:
        self._owed_ns = 0
        self.slept_ns = 0
        """Since the last :meth:`take`."""
        self.meet: Callable[[], None] = lambda: None
        """Called before each forward and backward of a layer."""

    def compute(self, seconds: float) -> None:
        self._owed_ns += round(seconds * 1e9)
        if self._owed_ns <= 0:
            return
        started_ns = time.monotonic_ns()
        time.sleep(self._owed_ns * 1e-9)
        spent_ns = time.monotonic_ns() - started_ns
        self._owed_ns -= spent_ns
        self.slept_ns += spent_ns

    def take(self) -> int:
        """What has been slept since the last call, nanoseconds. What was too long of it is not owed any more."""
        spent_ns, self.slept_ns, self._owed_ns = self.slept_ns, 0, 0
        return spent_ns


class _Sleep(torch.autograd.Function):
    """A layer's forward and backward: time passes, and the weight has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, clock: Clock, seconds: float) -> torch.Tensor:
        ctx.clock, ctx.seconds, ctx.weight = clock, seconds, weight
        clock.meet()
        clock.compute(FORWARD_SHARE * seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.clock.meet()
        ctx.clock.compute((1 - FORWARD_SHARE) * ctx.seconds)
        return grads[0], torch.ones_like(ctx.weight), None, None


class SleepingLayer(nn.Module):
    """One weight of ``numel`` elements, and the time that the layer takes."""

    def __init__(self, numel: int, clock: Clock) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self.seconds = 0.0
        """Of a forward and backward."""
        self._clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Sleep.apply(x, self.weight, self._clock, self.seconds)  # type: ignore[no-untyped-call]
        return out


class SleepingModel(nn.Module):
    """Layers of equal cost, each a unit of FSDP2, as decoder layers usually are."""

    def __init__(self, num_layers: int, numel: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.clock = Clock()
        self._sleeping = [SleepingLayer(numel, self.clock) for _ in range(num_layers)]
        self.layers = nn.ModuleList(self._sleeping)
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def microbatch(self, seconds: float) -> None:
        """A forward and backward that compute for so long."""
        for layer in self._sleeping:
            layer.seconds = seconds / len(self._sleeping)
        self(torch.zeros(1, requires_grad=True)).sum().backward()
