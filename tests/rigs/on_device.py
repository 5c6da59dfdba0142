"""The ranks of tests on a GPU, where ``ODC_TEST_DEVICE=cuda`` says so. All share it; what there is of ODC is its own.

Tests do not say on which device their models are. Here a mode puts what they make there, as
``torch.set_default_device`` does, but with the random numbers of a CPU: references are computed on one. Collectives of
plain FSDP, for which gloo has no memory of devices, go through the host. Two posing hosts need NVSHMEM, so tests with
more than one fail there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map_only

NAME = os.environ.get("ODC_TEST_DEVICE", "")
DEVICE = torch.device(f"{NAME}:0" if NAME == "cuda" else "cpu")
_RANDOM = {torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal}
_RANDOM_IN_PLACE = {torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.random_, torch.Tensor.bernoulli_}
_OF_HOSTS = {torch.Tensor.numpy, torch.Tensor.__array__}


class OnDevice(TorchFunctionMode):
    """What is made without a device is made on :data:`DEVICE`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _RANDOM_IN_PLACE or getattr(func, "__module__", "") == "torch.nn.init":
            tensor, *rest = args or (kwargs.pop("tensor"),)
            with torch.no_grad():
                return tensor.copy_(func(tensor.detach().cpu(), *rest, **kwargs))
        if func in _OF_HOSTS:
            return func(args[0].cpu(), *args[1:], **kwargs)
        if func in _RANDOM and kwargs.get("device") is None:
            requires_grad = kwargs.pop("requires_grad", False)
            return func(*args, **kwargs).to(DEVICE).requires_grad_(requires_grad)
        if func in _device_constructors() and kwargs.get("device") is None and not kwargs.get("pin_memory"):
            kwargs["device"] = DEVICE
        return func(*args, **kwargs)


class _Done:
    def wait(self, *_: object) -> bool:
        return True


def _through_the_host(collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(out: torch.Tensor, data: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if not out.is_cuda:
            return collective(out, data, *args, async_op=async_op, **kwargs)
        there, here = torch.empty_like(out, device="cpu"), data.detach().cpu()
        collective(there, here, *args, **kwargs)
        out.copy_(there)
        return _Done() if async_op else None

    def named(*args: Any, **kwargs: Any) -> Any:
        names = ("output_tensor", "output"), ("input_tensor", "input")
        found = [next(kwargs.pop(name) for name in pair if name in kwargs) for pair in names[len(args) :]]
        return call(*args, *found, **kwargs)

    return named


def prepare() -> None:
    """In the process that forks the ranks, before it imports what they do."""
    if DEVICE.type != "cuda":
        return
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        collective = _through_the_host(getattr(dist, name))
        setattr(dist, name, collective)
        setattr(dist.distributed_c10d, name, collective)
    make_mesh = device_mesh.init_device_mesh

    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> device_mesh.DeviceMesh:
        return make_mesh("cuda" if device_type == "cpu" else device_type, *args, **kwargs)

    device_mesh.init_device_mesh = init_device_mesh  # type: ignore[assignment]


def enter() -> None:
    """In each rank."""
    if NAME:
        if DEVICE.type == "cuda":
            torch.cuda.set_device(DEVICE)
        OnDevice().__enter__()


def leave(value: Any) -> Any:
    """What a rank has found, in the host's memory."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), value) if NAME else value


prepare()
