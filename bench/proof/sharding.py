"""What training scripts of proofs share: one interface to both FSDPs, a language model, and its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

Wrap = Callable[[nn.Module], Any]


class LanguageModel(nn.Module):
    """Embedding, blocks and head. Weights are drawn in this order."""

    def __init__(self, vocabulary: int, width: int, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits(tokens, self.blocks)

    def logits(self, tokens: torch.Tensor, blocks: Iterable[nn.Module]) -> torch.Tensor:
        """The logits by way of the given blocks, one after the other."""
        x = self.embed(tokens)
        for block in blocks:
            x = block(x)
        found: torch.Tensor = self.head(x)
        return found


def as_if_trained(model: nn.Module) -> None:
    """Change all parameters so that none is constant, in particular not zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def tokens_of(step: int, rank: int, microbatch: int, vocabulary: int, shape: tuple[int, int]) -> torch.Tensor:
    """Random tokens; every step, rank and microbatch has its own."""
    generator = torch.Generator().manual_seed(10007 * step + 101 * rank + microbatch)
    return torch.randint(0, vocabulary, shape, generator=generator)


def mesh_of(world_size: int, *, is_replicated: bool = False, device_type: str = "cpu") -> DeviceMesh:
    """A mesh of all ranks in one shard group, or in shard groups of two, which are replicas. Collective."""
    if is_replicated:
        return init_device_mesh(device_type, (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device_type, (world_size,))


def local_gradients(grads: Iterable[tuple[str, torch.Tensor | None]]) -> dict[str, torch.Tensor]:
    """A copy of this rank's part of each; a parameter that has none is left out."""
    return {
        name: (grad.to_local() if isinstance(grad, DTensor) else grad).clone()
        for name, grad in grads
        if grad is not None and grad.numel()
    }


def wrap_of(
    fsdp: str,
    mesh: DeviceMesh,
    *,
    reshard: bool | int = True,
    dtypes: tuple[torch.dtype, torch.dtype] | None = None,
    device: torch.device | None = None,
) -> Wrap:
    """A function that makes a module a unit.

    Args:
        fsdp: "fsdp2", "fsdp1-flat" or "fsdp1-orig", which has ``use_orig_params``.
        mesh: of one dimension; for replicas of two, replicas first.
        reshard: after the forward.
        dtypes: of parameters and of reduction, where they are not the model's own.
        device: for FSDP1; by default the CPU.
    """
    if fsdp == "fsdp2":
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard}
        if dtypes is not None:
            options["mp_policy"] = MixedPrecisionPolicy(*dtypes)
        return lambda module: fully_shard(module, **options)
    options = {"device_id": device or torch.device("cpu"), "use_orig_params": fsdp == "fsdp1-orig"}
    options["sharding_strategy"] = ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP
    if mesh.ndim == 2:
        options |= {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
    if dtypes is not None:
        options["mixed_precision"] = MixedPrecision(*dtypes, dtypes[0])
    return lambda module: FullyShardedDataParallel(module, **options)


def blocks_of(model: nn.Module) -> Iterator[tuple[nn.ModuleList, int]]:
    """The layers that become units, as (list, index): FSDP1 replaces them."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for index in range(len(module)):
                yield module, index


def by_unit(model: nn.Module, wrap: Wrap) -> nn.Module:
    """Shard the model: one unit per layer and one for the rest."""
    for modules, index in list(blocks_of(model)):
        modules[index] = wrap(modules[index])
    wrapped: nn.Module = wrap(model)
    return wrapped


def synchronized(model: nn.Module, is_synchronized: bool) -> AbstractContextManager[None]:
    """Inside, a backward reduces gradients, or not, in the way that the model's FSDP offers."""
    if isinstance(model, FullyShardedDataParallel):
        return nullcontext() if is_synchronized else model.no_sync()
    model.set_requires_gradient_sync(is_synchronized)  # type: ignore[operator]
    return nullcontext()


def clip(model: nn.Module, largest_norm: float) -> torch.Tensor:
    """Clip gradients; return the norm that they had."""
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(largest_norm)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), largest_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of whole parameters, on every rank. Collective."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {name: p.detach().clone() for name, p in model.named_parameters()}
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
