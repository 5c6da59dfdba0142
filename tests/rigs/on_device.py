"""The ranks of tests on a GPU, where ``ODC_TEST_DEVICE=cuda`` says so. All share it; what there is of ODC is its own.

Tests do not say on which device their models are. Here a mode puts what they make there, as
``torch.set_default_device`` does, but with the random numbers of a CPU: references are computed on one. Collectives of
plain FSDP and of DTensor, for which gloo has no memory of devices, go through the host. Two posing hosts need NVSHMEM,
so tests with more than one are left out (``process_ranks``), as are those of a host's memory (marker ``on_host``).
"""

from __future__ import annotations

import functools
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
_KEPT: list[torch.library.Library] = []


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


def through_the_host() -> torch.library.Library:
    """From now on collectives of tensors on a GPU, of which gloo has few, are its collectives of copies on the host.

    DTensor's too: what a process group calls is an operator, and this is another implementation of it. They end before
    they return. It lasts as long as the returned object.
    """
    library = torch.library.Library("c10d", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("c10d::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            operator = getattr(torch.ops.c10d, name.removeprefix("c10d::")).default
            library.impl(operator, functools.partial(_on_copies, operator), "CUDA")
    return library


def _on_copies(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # and the copies, by their identity

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().cpu()
        originals[id(copy)] = (tensor, copy)
        return copy

    moved_args, moved_kwargs = tree_map_only(torch.Tensor, copied, (args, kwargs))
    result = operator(*moved_args, **moved_kwargs)
    dist.distributed_c10d.Work.unbox(result[-1] if isinstance(result, tuple) else result).wait()
    for tensor, copy in originals.values():
        tensor.detach().copy_(copy)
    return tree_map_only(
        torch.Tensor, lambda tensor: originals[id(tensor)][0] if id(tensor) in originals else tensor, result
    )


def prepare() -> None:
    """In the process that forks the ranks, before it imports what they do."""
    if DEVICE.type != "cuda":
        return
    _KEPT.append(through_the_host())
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
