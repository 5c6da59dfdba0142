"""Finding the FSDP1 units of a model."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp._runtime_utils import _lazy_init

from odc.fsdp_patch.fsdp1.unit import Fsdp1Unit


def find_fsdp1_roots(model: nn.Module) -> list[tuple[str, Any]]:
    """The outermost ``FullyShardedDataParallel`` modules, with their names."""
    roots: list[tuple[str, Any]] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and id(module) not in inside:
            roots.append((name, module))
            inside.update(id(m) for m in module.modules())
    return roots


def find_fsdp1_units(model: nn.Module) -> list[Fsdp1Unit]:
    """All FSDP1 units below ``model`` in module order, initialised as their first forward would."""
    for _, root in find_fsdp1_roots(model):
        _lazy_init(root, root)
    return [
        Fsdp1Unit(module, clean_tensor_name(name + ".").rstrip("."))
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None
    ]
