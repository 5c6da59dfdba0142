"""The communication units of a model, whichever FSDP sharded it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from odc.errors import UnsupportedError
from odc.fsdp_patch.fsdp1.checks import check_fsdp1_model, check_fsdp1_units
from odc.fsdp_patch.fsdp1.find import find_fsdp1_roots, find_fsdp1_units
from odc.fsdp_patch.fsdp2.checks import check_fsdp2, check_fsdp2_meshes
from odc.fsdp_patch.fsdp2.find import find_fsdp2_units
from odc.fsdp_patch.unit import Unit


def default_group(model: nn.Module) -> tuple[dist.ProcessGroup, torch.device]:
    """The group over which the model's first unit is sharded, and its device: enough to tell the other ranks of a
    problem.

    Raises:
        ValueError: the model was not sharded.
        UnsupportedError: its meshes only replicate; every rank sees that.
    """
    roots = find_fsdp1_roots(model)
    if roots:
        return roots[0][1].process_group, roots[0][1].compute_device
    units = find_fsdp2_units(model)
    check_fsdp2_meshes(units)
    if units:
        return units[0].process_group, units[0].device
    raise ValueError(
        f"{type(model).__name__} has no FSDP modules: call torch.distributed.fsdp.fully_shard on its layers and on the "
        "model (or wrap it in FullyShardedDataParallel) first, then odc.patch_fsdp(model)"
    )


def supported_units(model: nn.Module) -> list[Unit]:
    """All units of the model, in module order.

    Raises:
        UnsupportedError: the model uses an option that cannot be honoured; names the module and the option.
    """
    if find_fsdp1_roots(model):
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            raise UnsupportedError("FullyShardedDataParallel (FSDP1) and fully_shard (FSDP2) in one model")
        check_fsdp1_model(model)
        fsdp1_units = find_fsdp1_units(model)
        check_fsdp1_units(fsdp1_units)
        _check_one_mesh(fsdp1_units)
        return list(fsdp1_units)
    fsdp2_units = find_fsdp2_units(model)
    check_fsdp2(model, fsdp2_units)
    _check_one_mesh(fsdp2_units)
    return list(fsdp2_units)


def _check_one_mesh(units: Sequence[Unit]) -> None:
    ranks = [_ranks(unit) for unit in units]
    for unit, other in zip(units, ranks, strict=True):
        if other != ranks[0]:
            raise UnsupportedError(
                f"mesh: unit {unit.name!r} is sharded over ranks {other}, {units[0].name!r} over {ranks[0]}; units on "
                "different meshes are not supported yet"
            )


def _ranks(unit: Unit) -> tuple[list[int], list[int]]:
    replicas = unit.replica_group
    return (
        dist.get_process_group_ranks(unit.process_group),
        dist.get_process_group_ranks(replicas) if replicas is not None else [],
    )
