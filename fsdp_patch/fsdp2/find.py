"""Finding the FSDP2 units of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from odc.fsdp_patch.compat import param_groups
from odc.fsdp_patch.fsdp2.spread import SpreadUnit, smaller_mesh
from odc.fsdp_patch.fsdp2.unit import Fsdp2Unit


def find_fsdp2_units(model: nn.Module) -> list[Fsdp2Unit]:
    """All FSDP2 units below ``model`` in module order (a unit shared by several modules appears once).

    Where ``reshard_after_forward=<int>`` is used, all units are spread over the groups that it makes.
    """
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    found = list(_groups(model))
    mesh = next((smaller_mesh(group) for _, _, group in found if smaller_mesh(group) is not None), None)
    if mesh is None:
        return [Fsdp2Unit(module, group, name, names) for name, module, group in found]
    return [SpreadUnit(module, group, name, names, mesh) for name, module, group in found]


def _groups(model: nn.Module) -> Iterator[tuple[str, FSDPModule, Any]]:
    seen: set[int] = set()
    for name, module in model.named_modules():
        for group in param_groups(module):
            assert isinstance(module, FSDPModule)
            if id(group) not in seen:
                seen.add(id(group))
                yield name or "<root>", module, group
