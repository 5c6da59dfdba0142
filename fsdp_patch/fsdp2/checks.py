"""What ODC does not support of FSDP2, found out when patching and named by its option."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from odc.errors import UnsupportedError
from odc.fsdp_patch.compat import param_groups
from odc.fsdp_patch.fsdp2.comms import OdcAllGather
from odc.fsdp_patch.fsdp2.spread import SpreadUnit, smaller_mesh
from odc.fsdp_patch.fsdp2.unit import Fsdp2Unit


def check_fsdp2(model: nn.Module, units: Sequence[Fsdp2Unit]) -> None:
    """Refuse what cannot be honoured, before anything is allocated or changed.

    Raises:
        UnsupportedError: naming the module, the option and what to do.
    """
    for name, module in model.named_modules():
        if len(param_groups(module)) > 1:
            raise UnsupportedError(
                f"module {name!r}: shard_placement_fn with several meshes (one module, "
                f"{len(param_groups(module))} parameter groups) is not supported yet"
            )
    for unit in units:
        _check_unit(unit)


def check_fsdp2_meshes(units: Sequence[Fsdp2Unit]) -> None:
    """Refuse units that are not sharded at all (``replicate()`` of torch 2.10 and later is FSDP2 with such a mesh)."""
    for unit in units:
        if not unit.is_sharded:
            raise UnsupportedError(f"unit {unit.name!r}: a mesh that only replicates has nothing to gather on demand")


def _check_unit(unit: Fsdp2Unit) -> None:
    group, where = unit.group, f"unit {unit.name!r}"
    if isinstance(group._all_gather_comm, OdcAllGather):
        raise UnsupportedError(f"{where} is patched already: close() the other session first")
    for attribute, option in (
        ("_all_gather_comm", "set_custom_all_gather"),
        ("_reduce_scatter_comm", "set_custom_reduce_scatter"),
    ):
        kind = type(getattr(group, attribute)).__name__
        if not kind.startswith("Default"):
            raise UnsupportedError(f"{where}: {option} ({kind}) is set already and would be overridden")
    _check_smaller_mesh(unit, where)
    if group._all_reduce_hook is not None:
        raise UnsupportedError(f"{where}: set_all_reduce_hook is not supported (gradients are final only at the end)")
    if unit.trainable and unit.grad_dtype not in (torch.float32, torch.bfloat16):
        # FSDP divides such gradients in part before the reduction, for fear of overflow.
        raise UnsupportedError(
            f"{where}: gradients are reduced in {unit.grad_dtype} (reduce_dtype of the mixed precision policy, or the "
            "parameters' own dtype), which is not supported; use float32 or bfloat16"
        )
    for param in unit.params:
        _check_param(param.sharded, param.name, where, group.mesh_info.mesh.ndim)
    unit.check_hooks()


def _check_smaller_mesh(unit: Fsdp2Unit, where: str) -> None:
    smaller = smaller_mesh(unit.group)
    if smaller is None:
        return
    if hasattr(unit.group.mesh_info, "replicate_process_group"):
        raise UnsupportedError(f"{where}: reshard_after_forward=<int> on a mesh with replicas (HSDP) is not supported")
    assert isinstance(unit, SpreadUnit)
    if smaller.shard_mesh_size != unit.smaller.shard_mesh_size:
        raise UnsupportedError(
            f"{where}: reshard_after_forward={smaller.shard_mesh_size}, other units have "
            f"{unit.smaller.shard_mesh_size}; one number for the whole model is supported"
        )


def _check_param(param: nn.Parameter, name: str, where: str, mesh_ndim: int) -> None:
    if param.device.type == "meta":
        raise ValueError(f"{where}: parameter {name!r} is on the meta device; materialise the model before patching")
    if param.device_mesh.ndim > mesh_ndim:  # type: ignore[attr-defined]
        raise UnsupportedError(f"{where}: parameter {name!r} is also sharded by tensor parallelism: not supported yet")
    if hasattr(param._local_tensor, "fsdp_pre_all_gather"):  # type: ignore[attr-defined]
        kind = type(param._local_tensor).__name__  # type: ignore[attr-defined]
        raise UnsupportedError(f"{where}: parameter {name!r} uses the all-gather extension of {kind}: not supported")
