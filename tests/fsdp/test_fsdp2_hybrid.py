"""Layer 3: ranks as processes. Hybrid sharding of FSDP2 on 4 ranks that pose as 2 hosts, and CPU offload; with replicas
in place and staged, all else is staged either way."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from process_ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from training import (
    BOTH,
    Net,
    build,
    communicating,
    each_way,
    full_parameters,
    largest_difference,
    loss_of,
    optimizer_of,
    reference,
    tokens,
    train,
    use_up,
)

import odc
from odc.fsdp_patch.compat import torch_version

WAYS_OF = {"hsdp": BOTH, "int": ("small",), "offload": ("small",)}
"""Ways to communicate that differ, by kind of sharding."""
FULL_PRECISION = MixedPrecisionPolicy()
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def shard_hybrid(model: Net, rank: int, world_size: int, kind: str, policy: MixedPrecisionPolicy) -> Net:
    """Two replicas of a shard group of two ("hsdp"), or all ranks with a smaller group of two ("int")."""
    options: dict[str, Any] = {"mp_policy": policy}
    if kind == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        options["mesh"] = init_device_mesh("cpu", (world_size,))
    if kind == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    else:
        os.environ["ODC_HOST_ID"] = f"host-{rank // 2}"
    for block in model.blocks:
        fully_shard(block, **options, **({"reshard_after_forward": 2} if kind == "int" else {}))
    fully_shard(model, **options)
    return model


def unused_on_host_1(step: int, rank: int, microbatch: int) -> dict[str, Any]:
    """Block 1 runs on one host only in odd steps, so one replica has no sum of it."""
    return {"skip": [1]} if step % 2 and rank >= 2 else {}


def hybrid_run(rank: int, world_size: int, kind: str, policy: MixedPrecisionPolicy, use_odc: bool) -> Any:
    """Gradients of the first step and parameters after the last."""
    model = shard_hybrid(build(), rank, world_size, kind, policy)
    with odc.patch_fsdp(model) if use_odc else nullcontext() as session:
        optimizer, gradients = optimizer_of(model), {}
        for step in range(3):
            for m in range(2):
                (loss_of(model, tokens(step, rank, m)) / 40).backward()
            if session:
                session.finish()
            if step == 0:
                gradients = {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}
            use_up(optimizer, model)
        assert session is None or session.stats().pushes > 0
    return gradients, full_parameters(model)


def hybrid_runs(rank: int, world_size: int, kind: str, policy: MixedPrecisionPolicy) -> list[Any]:
    plain = hybrid_run(rank, world_size, kind, policy, False)
    return [plain, *each_way(WAYS_OF[kind], hybrid_run, rank, world_size, kind, policy, True)]


@pytest.mark.parametrize(
    "kind", ["int", *(pytest.param(kind, marks=pytest.mark.extended) for kind in ("hsdp", "offload"))]
)
@pytest.mark.parametrize(
    "policy", [pytest.param(FULL_PRECISION, id="fp32"), pytest.param(BF16, id="bf16", marks=pytest.mark.extended)]
)
def test_hybrid_sharding_matches_plain_fsdp2(kind: str, policy: MixedPrecisionPolicy) -> None:
    theirs, *each = run_ranks(4, hybrid_runs, kind, policy, timeout_s=180)[0]
    for ours in each:
        assert largest_difference(ours[0], theirs[0]) < 2e-6
        assert largest_difference(ours[1], theirs[1]) < 1e-5


def uneven_runs(rank: int, world_size: int, kind: str) -> list[dict[str, Any]]:
    return each_way(WAYS_OF[kind], uneven_run, rank, world_size, kind)


def uneven_run(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    model = shard_hybrid(build(), rank, world_size, kind, FULL_PRECISION)
    with odc.patch_fsdp(model) as session:
        train(model, session, rank, world_size, [3, 0, 1, 2], 4, unused_on_host_1)
        return full_parameters(model)


@pytest.mark.parametrize("kind", [pytest.param("hsdp", marks=pytest.mark.extended), "int"])
def test_uneven_microbatches_and_units_unused_on_one_host(kind: str) -> None:
    expected = reference([3, 0, 1, 2], 4, unused_on_host_1)
    for ours in run_ranks(4, uneven_runs, kind, timeout_s=180)[0]:
        assert largest_difference(ours, expected) < 1e-5


class MixedDtypes(nn.Module):
    """One unit whose parameters are computed in different dtypes, so that it travels as bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 5)
        self.table = nn.Parameter(torch.arange(24, dtype=torch.int32).view(8, 3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.table.sum()


def mixed_runs(rank: int, world_size: int) -> list[list[float]]:
    return [mixed_run(rank, world_size, use_odc) for use_odc in (False, True)]


def mixed_run(rank: int, world_size: int, use_odc: bool) -> list[float]:
    os.environ["ODC_HOST_ID"] = f"host-{rank // 2}"
    torch.manual_seed(0)
    model = nn.Sequential(MixedDtypes(), nn.Linear(5, 3))
    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(model[0], mesh=mesh, mp_policy=BF16, reshard_after_forward=2)
    fully_shard(model, mesh=mesh, mp_policy=BF16)
    losses = []
    with odc.patch_fsdp(model) if use_odc else nullcontext():
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for step in range(3):
            x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step * 7 + rank))
            loss = model(x).float().pow(2).mean() * 1e-4
            loss.backward()
            use_up(optimizer)
            losses.append(loss.item())
    return losses


@pytest.mark.skipif(torch_version() < (2, 12), reason="torch shards no integer parameters before 2.12")
def test_a_unit_of_several_dtypes_that_groups_share() -> None:
    for theirs, ours in run_ranks(4, mixed_runs, timeout_s=180):
        assert ours == theirs


def repeated_run(rank: int, world_size: int, kind: str) -> list[dict[str, Any]]:
    """Bit-equal repeats with ``deterministic=True``, whichever way."""
    results = []
    for way in WAYS_OF[kind] * 2:
        model = shard_hybrid(build(), rank, world_size, kind, FULL_PRECISION)
        with communicating(way), odc.patch_fsdp(model, deterministic=True) as session:
            train(model, session, rank, world_size, [2, 1, 1, 2], 4)
        results.append(full_parameters(model))
    return results


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["hsdp", "int"])
def test_deterministic_includes_the_replicas(kind: str) -> None:
    first, *others = run_ranks(4, repeated_run, kind, timeout_s=180)[0]
    assert [largest_difference(first, other) for other in others] == [0.0] * len(others)
