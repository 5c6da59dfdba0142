"""What ODC does not support of FSDP1, found out when patching and named by its option."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from odc.errors import UnsupportedError
from odc.fsdp_patch.fsdp1.find import find_fsdp1_roots
from odc.fsdp_patch.fsdp1.unit import Fsdp1Unit

_SHARDED = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy._HYBRID_SHARD_ZERO2,
)


def check_fsdp1_model(model: nn.Module) -> None:
    """Refuse what cannot be honoured, before FSDP is initialised.

    Raises:
        UnsupportedError: naming the module, the option and what to do.
        ValueError: parameters are on the meta device.
    """
    for name, root in find_fsdp1_roots(model):
        if root._is_root is False:
            raise UnsupportedError(f"{_where(name)} is a part of a larger FSDP model: patch the whole model")
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            _check_module(module, _where(name))


def _check_module(module: Any, where: str) -> None:
    # FSDP1 makes NO_SHARD of every strategy in a group of one, where ODC has nothing to do either.
    if module.sharding_strategy not in _SHARDED and module.process_group.size() > 1:
        raise UnsupportedError(
            f"{where}: sharding_strategy={module.sharding_strategy.name} shards nothing, so there is nothing to gather "
            "on demand; use FULL_SHARD, SHARD_GRAD_OP or HYBRID_SHARD"
        )
    if module.cpu_offload.offload_params:
        raise UnsupportedError(f"{where}: cpu_offload=CPUOffload(offload_params=True) is not supported under FSDP1")
    if module._comm_hook is not None and "_all_gather_flat_param" not in _vars_of_handle(module):
        raise UnsupportedError(f"{where}: register_comm_hook is in use already and would be overridden")
    if module._fsdp_extension is not None:
        raise UnsupportedError(f"{where}: FSDP1 together with tensor parallelism is not supported")
    if module._handle is not None and module._handle.flat_param.device.type == "meta":
        raise ValueError(f"{where}: its parameters are on the meta device; materialise the model before patching")


def _vars_of_handle(module: Any) -> dict[str, object]:
    return vars(module._handle) if module._handle is not None else {}


def _where(name: str) -> str:
    return f"module {name!r}" if name else "the model"


def check_fsdp1_units(units: Sequence[Fsdp1Unit]) -> None:
    """As :func:`check_fsdp1_model`, for what is known once FSDP is initialised."""
    if not units:
        raise ValueError("the model's FullyShardedDataParallel modules have no parameters")
    for unit in units:
        _check_unit(unit)


def _check_unit(unit: Fsdp1Unit) -> None:
    where = f"unit {unit.name!r}"
    if "_all_gather_flat_param" in _vars_of_handle(unit.module):
        raise UnsupportedError(f"{where} is patched already: close() the other session first")
    if unit.handle._keep_low_precision_grads:
        raise UnsupportedError(
            f"{where}: MixedPrecision(keep_low_precision_grads=True) is not supported: gradients are summed in float32"
        )
    if unit.handle._has_optim_in_backward:
        raise UnsupportedError(
            f"{where}: an optimizer in backward is not supported; under ODC a gradient is final only at the end of the "
            "minibatch"
        )
    if unit.trainable_parameters() and unit.grad_dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedError(
            f"{where}: gradients are reduced in {unit.grad_dtype} (reduce_dtype of MixedPrecision, or the parameters' "
            "own dtype), which is not supported; use float32 or bfloat16"
        )
