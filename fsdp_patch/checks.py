"""What ODC does not support yet, found out when patching and named by its option."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel

from odc.errors import UnsupportedError
from odc.fsdp_patch.comms import OdcAllGather
from odc.fsdp_patch.internals import FsdpUnit, all_params, param_groups


def check_model(model: nn.Module, units: Sequence[FsdpUnit]) -> None:
    """Refuse what cannot be honoured, before anything is allocated or changed.

    Raises:
        ValueError: the model has nothing to patch.
        UnsupportedError: naming the module, the option and what to do.
    """
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise UnsupportedError(
                f"module {name!r} is FSDP1 (FullyShardedDataParallel): not supported yet. Use fully_shard (FSDP2)."
            )
        if len(param_groups(module)) > 1:
            raise UnsupportedError(
                f"module {name!r}: shard_placement_fn with several meshes (one module, "
                f"{len(param_groups(module))} parameter groups) is not supported yet"
            )
    if not units:
        raise ValueError(
            f"{type(model).__name__} has no FSDP2 modules: call torch.distributed.fsdp.fully_shard on its layers and "
            "on the model first, then odc.patch_fsdp(model)"
        )
    for unit in units:
        _check_unit(unit)
    ranks = [dist.get_process_group_ranks(unit.process_group) for unit in units]
    for unit, other in zip(units, ranks, strict=True):
        if other != ranks[0]:
            raise UnsupportedError(
                f"mesh: unit {unit.name!r} is sharded over ranks {other}, {units[0].name!r} over {ranks[0]}; units on "
                "different meshes are not supported yet"
            )


def _check_unit(unit: FsdpUnit) -> None:
    group, where = unit.group, f"unit {unit.name!r}"
    mesh_kind = type(group.mesh_info).__name__
    if mesh_kind != "FSDPMeshInfo":
        raise UnsupportedError(
            f"{where}: mesh with a replicate dimension (HSDP, {mesh_kind}) is not supported yet; use a 1-D mesh"
        )
    if isinstance(group._all_gather_comm, OdcAllGather):
        raise UnsupportedError(f"{where} is patched already: close() the other session first")
    for attribute, option in (
        ("_all_gather_comm", "set_custom_all_gather"),
        ("_reduce_scatter_comm", "set_custom_reduce_scatter"),
    ):
        kind = type(getattr(group, attribute)).__name__
        if not kind.startswith("Default"):
            raise UnsupportedError(f"{where}: {option} ({kind}) is set already and would be overridden")
    if group.post_forward_mesh_info is not None and group.post_forward_mesh_info != group.mesh_info:
        raise UnsupportedError(f"{where}: reshard_after_forward=<int> is not supported yet; use True or False")
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        raise UnsupportedError(f"{where}: offload_policy=CPUOffloadPolicy is not supported yet")
    if group._all_reduce_hook is not None:
        raise UnsupportedError(f"{where}: set_all_reduce_hook is not supported (gradients are final only at the end)")
    if unit.trainable and unit.grad_dtype not in (torch.float32, torch.bfloat16):
        # FSDP divides such gradients in part before the reduction, for fear of overflow.
        raise UnsupportedError(
            f"{where}: gradients are reduced in {unit.grad_dtype} (reduce_dtype of the mixed precision policy, or the "
            "parameters' own dtype), which is not supported; use float32 or bfloat16"
        )
    for param in all_params([unit]):
        _check_param(param.sharded, param.name, where)


def _check_param(param: nn.Parameter, name: str, where: str) -> None:
    if param.device.type == "meta":
        raise ValueError(f"{where}: parameter {name!r} is on the meta device; materialise the model before patching")
    if param.device_mesh.ndim > 1:  # type: ignore[attr-defined]
        raise UnsupportedError(f"{where}: parameter {name!r} has a 2-D mesh (tensor parallelism): not supported yet")
    if hasattr(param._local_tensor, "fsdp_pre_all_gather"):  # type: ignore[attr-defined]
        kind = type(param._local_tensor).__name__  # type: ignore[attr-defined]
        raise UnsupportedError(f"{where}: parameter {name!r} uses the all-gather extension of {kind}: not supported")
    if getattr(param, "_post_accumulate_grad_hooks", None):
        raise UnsupportedError(
            f"{where}: parameter {name!r} has register_post_accumulate_grad_hook (optimizer in backward); under ODC a "
            "gradient is final only at the end of the minibatch"
        )
