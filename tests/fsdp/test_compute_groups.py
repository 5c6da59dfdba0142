"""Layer 3: ranks as processes. Ranks that compute together: tensor parallel partners beside FSDP2."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from process_ranks import assert_all_say, run_ranks, start_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training import largest_difference, use_up

import odc

DIM, HIDDEN, NUM_BLOCKS, STEPS = 6, 10, 2, 2


class Block(nn.Module):
    """Its hidden units are divided among partners, unevenly among shards."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM, elementwise_affine=False)  # torch clips no parameters of several meshes
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))


@functools.cache
def make_mesh(world_size: int) -> DeviceMesh:
    """Of pairs of partners: in two shard groups, or on 8 ranks in two replicas of such. One for each process: DTensor's
    cache takes two equal ones for one, on ranks that have computed with both."""
    shape, names = (world_size // 2, 2), ("dp", "tp")
    if world_size == 8:
        shape, names = (2, 2, 2), ("replicate", "dp", "tp")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Over "tp", and over the other dimensions by FSDP2."""
    rest = mesh["replicate", "dp"] if mesh.ndim == 3 else mesh["dp"]
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=rest)
    fully_shard(model, mesh=rest)
    return model


def batch(step: int, group: int, microbatch: int) -> torch.Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(1000 * step + 100 * group + microbatch))


def train(
    model: nn.Module, counts: Sequence[int], groups: Sequence[int], num_steps: int = STEPS
) -> tuple[list[float], Any]:
    """Clip norms, and this rank's parameters after the last step; ``groups``: whose microbatches these are."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    dtype, norms = next(model.parameters()).dtype, []
    for step in range(num_steps):
        for group in groups:
            for m in range(counts[group]):
                (model(batch(step, group, m).to(dtype)).square().sum() / 10).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        use_up(optimizer)
    own = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return norms, {name: value.detach().numpy() for name, value in own.items()}


def part(name: str, whole: Any, rank: int) -> Any:
    """What a rank has of a parameter: not by ``full_tensor()``, which mixes up uneven shards in torch 2.9."""
    if not name.endswith("down.bias"):
        whole = np.split(whole, 2, axis=1 if name.endswith("down.weight") else 0)[rank % 2]
    return np.array_split(whole, 2)[rank // 2 % 2]


def runs(rank: int, world_size: int, counts: Sequence[int], hosts: Sequence[int] = ()) -> list[Any]:
    """Without ODC, if all have as many microbatches, and with it. ``hosts``: which one each rank poses to be on."""
    if hosts:
        os.environ["ODC_HOST_ID"] = f"host-{hosts[rank]}"
    found = []
    for use_odc in (False, True) if len(set(counts)) == 1 else (True,):
        model = shard(build(), make_mesh(world_size))
        with odc.patch_fsdp(model) if use_odc else nullcontext() as session:
            found.append(train(model, counts, [rank // 2]))
            assert session is None or (session.stats().pushes > 0) == (counts[rank // 2] > 0)
    return found


def all_runs(rank: int, world_size: int) -> dict[tuple[int, ...], list[Any]]:
    """By microbatches of each compute group."""
    return {counts: runs(rank, world_size, counts) for counts in ((2, 2), (2, 3), (0, 2))}


@pytest.fixture(scope="module")
def on_one_host() -> list[dict[tuple[int, ...], list[Any]]]:
    return run_ranks(4, all_runs, timeout_s=180)


def test_tensor_parallel_partners_train_as_under_plain_fsdp2(on_one_host: Any) -> None:
    for of_rank in on_one_host:
        (their_norms, theirs), (our_norms, ours) = of_rank[2, 2]
        assert our_norms == pytest.approx(their_norms, rel=1e-6)
        assert largest_difference(ours, theirs) < 1e-6


def check(found: Sequence[Any], counts: Sequence[int]) -> None:
    """What each rank has found is that of one process."""
    model = build().double()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad / len(counts))  # as FSDP divides
    expected_norms, expected = train(model, counts, range(len(counts)))
    for rank, (norms, ours) in enumerate(found):
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        assert largest_difference(ours, {name: part(name, whole, rank) for name, whole in expected.items()}) < 1e-5


@pytest.mark.parametrize("counts", [(2, 3), (0, 2)])
def test_uneven_compute_groups_train_as_one_process(counts: tuple[int, ...], on_one_host: Any) -> None:
    check([of_rank[counts][-1] for of_rank in on_one_host], counts)


@pytest.mark.parametrize(
    ("counts", "hosts"),
    [
        pytest.param([1, 2], [0, 0, 1, 1], id="partners-on-one-host"),
        pytest.param([1, 2], [0, 1, 0, 1], id="shards-on-one-host", marks=pytest.mark.extended),
        pytest.param([2, 0, 3, 1], [0, 0, 0, 0, 1, 1, 1, 1], id="replicas", marks=pytest.mark.extended),
    ],
)
def test_compute_groups_on_several_hosts_train_as_one_process(counts: Sequence[int], hosts: Sequence[int]) -> None:
    check([found[-1] for found in run_ranks(2 * len(counts), runs, counts, hosts, timeout_s=120)], counts)


def failing_run(rank: int, world_size: int, failing: int, where: str) -> None:
    model = shard(build(), make_mesh(world_size))

    def fail(*args: Any) -> None:
        raise RuntimeError("out of luck")

    with odc.patch_fsdp(model):
        train(model, [2, 2], [rank // 2], 1)
        if rank == failing and where == "forward":
            model[1].register_forward_pre_hook(fail)
        elif rank == failing:
            model[1].register_full_backward_hook(fail)
        train(model, [2, 2], [rank // 2], 1)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_all_ranks_hear_of_a_failure_in_a_compute_group(where: str) -> None:
    results = start_ranks(4, failing_run, 3, where).join(60)
    assert [result.error_type for result in results] == ["AbortedError"] * 3 + ["RuntimeError"]
    assert_all_say(results[:3], "rank 3", "out of luck")


def differing_run(rank: int, world_size: int, counts: Sequence[int]) -> None:
    """``counts``: each rank's microbatches in the second step."""
    model = shard(build(), make_mesh(world_size))
    with odc.patch_fsdp(model):
        train(model, [2, 2], [rank // 2], 1)
        train(model, [counts[rank]] * 2, [rank // 2], 1)


@pytest.mark.parametrize("counts", [[2, 1, 2, 2], pytest.param([2, 2, 0, 1], marks=pytest.mark.extended)])
def test_partners_with_different_numbers_of_microbatches_are_named(counts: Sequence[int]) -> None:
    results = start_ranks(4, differing_run, counts).join(60)
    who, other = (0, 1) if counts[0] != counts[1] else (2, 3)
    assert_all_say(results, "have different numbers of microbatches", f"rank {who}", f"rank {other}")
