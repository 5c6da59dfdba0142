"""Runtimes without FSDP: units of one parameter, and the order in which FSDP uses its units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from odc import ParamSlice, Runtime, RuntimeConfig, UnitSpec
from odc.balance.multimodal.schedule import FORWARD_SHARE
from odc.bench.harness.ranks import Rank
from odc.setup.agreement import ProcessGroupExchange


def config_of(me: Rank, hosts: int = 0, **options: Any) -> RuntimeConfig:
    """The configuration of this rank's runtime: the transport of its place, ``options``, and the environment's
    variables.

    Args:
        hosts: the ranks pose as so many hosts; 0: they are where they are.
    """
    config = RuntimeConfig.from_environment(transport=me.place.transport, **options)
    return replace(config, host_id=f"host{me.rank * hosts // me.world_size}") if hosts else config


def create_runtime(
    me: Rank, config: RuntimeConfig, numel: int, num_units: int = 1, dtype: torch.dtype = torch.float32
) -> Runtime:
    """A runtime without FSDP, for units of one parameter of which each rank has ``numel`` elements. Collective."""
    units = [UnitSpec(f"u{i}", numel, dtype, (ParamSlice("weight", numel),), dtype) for i in range(num_units)]
    return Runtime.create(ProcessGroupExchange(), units, config, device=me.device)


def use_units(
    num_units: int,
    gather: Callable[[int], object],
    compute: Callable[[float], object],
    push: Callable[[int], object],
) -> None:
    """Run a microbatch as FSDP does: gather before each forward and backward of a unit, push after its backward.

    Args:
        compute: called with the share of the unit's computation that is due.
    """
    for unit in range(num_units):
        gather(unit)
        compute(FORWARD_SHARE)
    for unit in reversed(range(num_units)):
        gather(unit)
        compute(1 - FORWARD_SHARE)
        push(unit)
