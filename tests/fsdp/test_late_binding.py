"""Layer 3: ranks as processes. A loader that binds samples late: the sums are those of the same samples, each once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from process_ranks import run_ranks
from test_mesh_loaders import COST, DIM, LENGTHS, Rows, Steps, collate, length_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import odc
from odc.balance import MinibatchLoader, StreamLoader
from odc.config import HOST_ID


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.Tanh(), nn.Linear(2 * DIM, DIM))


def known_lengths(**where: Any) -> Any:
    return MinibatchLoader(
        Rows(), LENGTHS, collate, minibatch_size=4, max_tokens=12, cost=COST, num_loss_tokens=LENGTHS,
        late_binding=True, **where,
    )  # fmt: skip


def stream(**where: Any) -> Any:
    return StreamLoader(
        Rows(), collate, length=length_of, num_loss_tokens=length_of, grouping="pack", align="minibatch",
        minibatch_size=4, max_tokens=12, pool_size=16, cost=COST, late_binding=True, **where,
    )  # fmt: skip


def train(rank: int, world_size: int, hosts: int, make: Callable[..., Any]) -> dict[str, Any]:
    """Samples that this rank computed in each step, how many it took from others, norms and parameters."""
    os.environ[HOST_ID] = f"host-{rank * hosts // world_size}"
    model = build()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    steps = Steps(fully_shard(model))
    computed = []
    with odc.patch_fsdp(steps.model):
        loader = make(rank=rank, world_size=world_size)
        for epoch in range(20):
            loader.set_epoch(epoch)
            for minibatch in loader:
                mine = []
                for numbers, rows in minibatch.microbatches:
                    mine += numbers
                    time.sleep(1e-3 * len(rows) * (4 if rank == 1 else 1))  # a slow device
                    steps.backward(rows, minibatch.loss_scale)
                steps.step()
                computed.append(mine)
        loader.close()
        return {
            "computed": computed,
            "taken": loader.num_taken,
            "norms": steps.norms,
            "speeds": getattr(loader, "speeds", []),
        }


def train_in_order(rank: int, world_size: int) -> None:
    with odc.patch_fsdp(fully_shard(build()), deterministic=True):
        loader = MinibatchLoader(
            Rows(), LENGTHS, collate, rank, world_size, minibatch_size=4, cost=COST, late_binding=True
        )
        for _ in loader:
            pass


def make_on_a_mesh(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    MinibatchLoader(Rows(), LENGTHS, collate, mesh=mesh["dp"], minibatch_size=4, cost=COST, late_binding=True)


def test_ranks_that_compute_together_take_nothing() -> None:
    with pytest.raises(AssertionError, match="late_binding=True with a mesh of 2 of 4 ranks"):
        run_ranks(4, make_on_a_mesh)


def test_sums_in_one_order_are_no_sums_of_late_samples() -> None:
    with pytest.raises(AssertionError, match="late_binding=True with deterministic=True of ODC"):
        run_ranks(2, train_in_order)


@pytest.mark.parametrize(
    ("hosts", "make", "num_samples"), [(1, known_lengths, 16), (2, known_lengths, 16), (1, stream, len(LENGTHS))]
)
def test_each_sample_counts_once_whoever_computes_it(hosts: int, make: Callable[..., Any], num_samples: int) -> None:
    ranks = run_ranks(4, train, hosts, make)
    assert sum(found["taken"] for found in ranks) > 0
    alone, samples, num_computed = Steps(build().double()), Rows(), 0
    for step in zip(*(found["computed"] for found in ranks), strict=True):
        numbers = sorted(i for mine in step for i in mine)
        assert len(set(numbers)) == len(numbers)
        num_computed += len(numbers)
        for i in numbers:
            alone.backward(samples[i][1], 1 / sum(LENGTHS[j] for j in numbers))
        alone.step()
    assert num_computed == 20 * num_samples
    for found in ranks:
        assert found["speeds"] == ranks[0]["speeds"]
        assert found["norms"] == pytest.approx(alone.norms, rel=1e-5)
