"""The real CudaEngine on :class:`host_cuda.HostCuda`, and what its tests share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from host_cuda import HostCuda, Stream

from odc.engines.base import Engine

INDEX = 1  # not the first device: a thread that is new to CUDA has that one
DEVICE = torch.device("cuda", INDEX)
CPU = Engine()


class Rig:
    """An engine, and what there is around it."""

    def __init__(self, k: SimpleNamespace, cuda: HostCuda) -> None:
        self.k, self.cuda = k, cuda
        self.given_back: list[Any] = []
        cuda.set_device(INDEX)
        new_stream, copy = (functools.partial(call, INDEX) for call in (cuda.new_stream, cuda.copy_memory))
        self.engine: Any = k.engine.CudaEngine(DEVICE, new_stream, self.given_back.append, copy)

    def put(self, values: torch.Tensor, shift: int = 0) -> torch.Tensor:
        return self.cuda.put(values, INDEX, shift)

    def stream(self) -> Stream:
        return self.cuda.new_stream(INDEX)

    def done(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is there when all streams have come to their end."""
        self.cuda.run()
        return self.cuda.read(tensor)

    def same_as_cpu(self, outs: Sequence[torch.Tensor], work: Callable[[Any, Sequence[torch.Tensor]], object]) -> None:
        """``work(engine, outs)`` leaves the bits that the CPU's engine leaves; on the device, and only later."""
        expected = [out.clone() for out in outs]
        ours = [self.put(out, 16 // out.itemsize) for out in outs]  # not where its storage begins
        work(self.engine, ours)
        work(CPU, expected)
        assert not any(differs(self.cuda.read(a), b) for a, b in zip(ours, outs, strict=True)), "done within the call"
        self.cuda.run()
        for mine, wanted in zip(ours, expected, strict=True):
            assert not differs(self.cuda.read(mine), wanted)


def differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
