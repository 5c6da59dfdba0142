"""Check ``forms``: further models and ways to end a step train under ODC as one process does.

As ``sft``, each form for itself: steps by unit; parameters that a script changes between steps; weights of which
float8 travels, by FSDP2's all-gather extension, with a collective in it; parameters that are kept on the CPU; replicas
and several meshes of one model, both on four ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils._pytree import tree_map_only

import odc
from odc.bench.gpu.models import language_model
from odc.bench.gpu.setting import CheckFailedError, Report, Setting, run_ranks
from odc.bench.gpu.training import End, microbatches_of_all, step, train, train_alone
from odc.bench.harness.ranks import Rank
from odc.bench.proof.sharding import blocks_of, by_unit

STEPS, QUICK_STEPS = 6, 3
_FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FLOAT8).max
_aten = torch.ops.aten


def shard(model: nn.Module, rank: Rank, **options: Any) -> nn.Module:
    """One unit per layer and one for the rest. Collective."""
    options.setdefault("mesh", init_device_mesh(rank.device.type, (rank.world_size,)))
    return by_unit(model.to(rank.device), lambda module: fully_shard(module, **options))


def offloaded(model: nn.Module, rank: Rank) -> nn.Module:
    return shard(model, rank, offload_policy=CPUOffloadPolicy(pin_memory=rank.device.type == "cuda"))


@torch.no_grad()
def step_and_change(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Some by an operation that torch counts, others past it."""
    step(model, optimizer)
    for number, parameter in enumerate(model.parameters()):
        (parameter.data if number % 2 else parameter).mul_(0.99)


def replicated(model: nn.Module, rank: Rank) -> nn.Module:
    mesh = init_device_mesh(rank.device.type, (2, rank.world_size // 2), mesh_dim_names=("replicate", "shard"))
    return shard(model, rank, mesh=mesh)


def on_two_meshes(model: nn.Module, rank: Rank) -> nn.Module:
    """The first layer has replicas."""
    mesh = init_device_mesh(rank.device.type, (2, rank.world_size // 2), mesh_dim_names=("replicate", "shard"))
    everyone = init_device_mesh(rank.device.type, (rank.world_size,))
    model = model.to(rank.device)
    for modules, index in list(blocks_of(model)):
        fully_shard(modules[index], mesh=everyone if index else mesh)
    fully_shard(model, mesh=everyone)
    return model


def _rounded(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight * scale).clamp(-_LARGEST, _LARGEST).to(_FLOAT8)


class Float8(torch.Tensor):
    """A weight that travels in float8 with one scale for all of it, as torchao's."""

    high: torch.Tensor

    @staticmethod
    def __new__(cls, high: torch.Tensor) -> Float8:
        made = torch.Tensor._make_wrapper_subclass(
            cls, high.size(), strides=high.stride(), dtype=high.dtype, device=high.device
        )
        assert isinstance(made, cls)
        return made

    def __init__(self, high: torch.Tensor) -> None:
        self.high = high

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["high"], None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Float8({self.high})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Float8, lambda one: one.high, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, cls, result) if func in _KEPT else result

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
        largest = self.high.abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.get_group())
        scale = _LARGEST / largest
        return (_rounded(self.high, scale),), (scale,)

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        full = outputs[0].to(dtype) / metadata[0].to(dtype)
        if out is None:
            return full, (full,)
        with torch.no_grad(), torch.autograd.grad_mode._unsafe_preserve_version_counter(out):
            out.copy_(full)
        return None


_KEPT = {
    *(_aten.detach.default, _aten.clone.default, _aten.empty_like.default, _aten.new_zeros.default),
    *(_aten.view.default, _aten.as_strided.default, _aten.slice.Tensor, _aten.split.Tensor),
    *(_aten.copy_.default, _aten._to_copy.default),
}


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    """Inside the blocks."""
    return [m for modules, i in blocks_of(model) for m in modules[i].modules() if isinstance(m, nn.Linear)]


def in_float8(model: nn.Module, rank: Rank) -> nn.Module:
    model = model.to(rank.device)
    for module in _linear_layers(model):
        module.weight = nn.Parameter(Float8(module.weight.detach()))
    return shard(model, rank)


class _Rounding(nn.Module):
    """The same in one process: the forward has the rounded weight, the gradient is that weight's."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        scale = _LARGEST / weight.detach().abs().max()
        rounded = _rounded(weight.detach(), scale).to(weight.dtype) / scale
        return weight + (rounded - weight.detach())


def _round_weights(model: nn.Module) -> None:
    for module in _linear_layers(model):
        nn.utils.parametrize.register_parametrization(module, "weight", _Rounding())


def _as_it_is(model: nn.Module) -> None:
    pass


@dataclass(frozen=True)
class Form:
    """How a model is sharded and a step ended, and how the same is done in one process."""

    shard: Callable[[nn.Module, Rank], nn.Module]
    end: End = step
    end_alone: End = step
    alone: Callable[[nn.Module], object] = _as_it_is
    world_size: int = 2
    tolerance: float = 1e-5


FORMS = {
    "steps by unit": Form(shard, end=odc.step_by_unit),
    "changed between steps": Form(shard, end=step_and_change, end_alone=step_and_change),
    # A weight in the middle of two numbers of float8 may be rounded the other way.
    "float8 travels": Form(in_float8, alone=_round_weights, tolerance=1e-3),
    "parameters on the CPU": Form(offloaded),
    "replicas": Form(replicated, world_size=4),
    "two meshes": Form(on_two_meshes, world_size=4),
}


def check(setting: Setting) -> Report:
    steps = QUICK_STEPS if setting.quick else STEPS
    errors: dict[str, float] = {}
    failures = []
    for name, form in FORMS.items():
        try:
            wanted, losses = run_ranks(setting, form.world_size, run, form, steps)[0]
        except CheckFailedError as failure:
            failures.append(f"{name}: {failure}")
            continue
        errors[name] = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
        if not errors[name] <= form.tolerance:
            failures.append(f"{name}: losses {losses}, reference {wanted}: off by {errors[name]:.1e}")
    data = {"steps": steps, "errors": errors}
    if failures:
        raise CheckFailedError("; ".join(failures), data)
    exact = max(error for name, error in errors.items() if FORMS[name].tolerance == Form.tolerance)
    figures = f"{len(errors)} forms; largest relative error of a loss {exact:.0e}"
    return Report(f"{figures}, with float8 {errors['float8 travels']:.0e}", data)


def run(rank: Rank, form: Form, steps: int) -> tuple[list[float], list[float]]:
    """Losses of one process (rank 0 only), and of all ranks."""
    wanted = []
    if rank.rank == 0:
        model = language_model()
        form.alone(model)
        wanted = train_alone(model.to(rank.device), microbatches_of_all(rank.world_size, steps), form.end_alone)
    rank.meet()
    return wanted, train(rank, form.shard(language_model(), rank), steps, form.end)
