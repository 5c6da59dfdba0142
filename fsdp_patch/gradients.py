"""Final sums become ``.grad``."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from odc.fsdp_patch.internals import FsdpParam, FsdpUnit


def install(unit: FsdpUnit, total: torch.Tensor, touched: list[bool]) -> None:
    """Add the summed gradient of a unit, divided as FSDP divides, to ``.grad`` of its touched parameters.

    Args:
        total: this rank's flat sum over all ranks and microbatches, in the accumulator's dtype; not kept.
        touched: per trainable parameter, whether any rank contributed. The others keep ``.grad`` as it is (None
            stays None, so the optimizer skips them as it does under FSDP).
    """
    mean = total / unit.divide_factor
    offset = 0
    for param, here in zip(unit.trainable, touched, strict=True):
        if here:
            _add_to_grad(param, mean[offset : offset + param.local.numel()])
        offset += param.padded.numel()


def _add_to_grad(param: FsdpParam, flat: torch.Tensor) -> None:
    # FSDP lays a shard out contiguously in its own shape, whichever dimension is sharded.
    local = flat.view(param.local.shape).to(param.dtype)
    sharded = param.sharded
    assert isinstance(sharded, DTensor)
    if isinstance(sharded.grad, DTensor):
        sharded.grad.to_local().add_(local)
        return
    sharded.grad = DTensor.from_local(
        local,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.size(),
        stride=sharded.stride(),
    )
