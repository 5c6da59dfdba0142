"""Layer 3: ranks as processes. Different numbers of microbatches where nothing lets ranks run them are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loaders import known_loader
from process_ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

import odc
from odc.balance import MinibatchLoader, QuadraticCost
from odc.fsdp_patch.automatic import AutomaticPatching

LENGTHS = [6, 4, 4, 2]  # costs of 36 on either of two ranks, in one microbatch of 6 tokens and in two


def make_loader(rank: int, world_size: int, **options: Any) -> MinibatchLoader[int, torch.Tensor]:
    def collate(samples: list[int]) -> torch.Tensor:
        return torch.ones(sum(samples), 4)

    arguments: dict[str, Any] = {"minibatch_size": 2, "cost": QuadraticCost(1.0, 0.0), "max_tokens": 6, **options}
    return known_loader(LENGTHS, LENGTHS, collate, rank, world_size, **arguments)


def train(rank: int, world_size: int, patched: bool, comm: str, policy: str) -> tuple[list[int], list[float]]:
    """One minibatch. Returns how many microbatches each rank ran, and the weights."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = odc.patch_fsdp(model) if patched else None
    (minibatch,) = make_loader(rank, world_size, comm=comm, policy=policy)
    for microbatch in minibatch.microbatches:
        (model(microbatch).square().sum() * minibatch.loss_scale).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if session is not None:
        session.close()
    weights: Any = model.weight
    return list(minibatch.plan.num_microbatches), weights.full_tensor().flatten().tolist()


def test_lb_mini_without_on_demand_communication_is_refused_on_all_ranks() -> None:
    with pytest.raises(Exception, match=r"ODC is not at work .* Call odc.patch_fsdp\(model\) before"):
        run_ranks(2, train, False, "auto", "lb-mini")


def test_lb_mini_trains_patched_or_filled_up_with_empty_microbatches() -> None:
    patched = run_ranks(2, train, True, "auto", "lb-mini")
    filled_up = run_ranks(2, train, False, "collective", "lb-mini")
    equal = run_ranks(2, train, False, "auto", "lb-micro")
    assert len(set(patched[0][0])) == 2
    assert len(set(filled_up[0][0])) == len(set(equal[0][0])) == 1
    for ours in (patched, filled_up):
        assert [weights for _, weights in ours] == [pytest.approx(weights, rel=1e-5) for _, weights in equal]


def test_who_may_get_different_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process that plans for all ranks, a run under `odc run`, which patches later, and whoever says so."""
    assert len(list(make_loader(0, 2))) == 1
    ranks = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 2)
    monkeypatch.setattr("odc.balance.data.iteration.dist", ranks)
    for rank in range(2):
        with pytest.raises(RuntimeError, match=r"gives the ranks \[[12], [12]\] microbatches in minibatch 0"):
            list(make_loader(rank, 2))
    patching = AutomaticPatching(odc.patch_fsdp, print)
    try:
        assert len(list(make_loader(0, 2))) == 1
    finally:
        patching.close()
    assert len(list(make_loader(0, 2, comm="odc"))) == 1
    with pytest.raises(RuntimeError, match="ODC is not at work"):
        list(make_loader(0, 2))


def test_empty_microbatches_fill_up_what_ranks_have_less() -> None:
    (first,), (second,) = (make_loader(rank, 2, comm="collective") for rank in range(2))
    assert first.plan == second.plan
    assert sorted(tuple(map(len, one.microbatches)) for one in (first, second)) == [(6, 0), (6, 4)]
