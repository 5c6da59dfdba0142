"""Layer 3: what ODC does inside verl, on a stand-in for its actor that makes the same calls in the same order.

tests/trainers/test_trainers_verl.py has verl's own, where it is installed.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from process_ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.clip_grad import _clip_grads_with_norm_, _get_total_norm

import odc
from odc.balance import QuadraticCost, get_policy

LENGTHS = [10, 5, 5, 5]


class Actor:
    """One update: microbatches, clipping, a step unless the norm is not finite. No word of ODC in it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        fully_shard(self.module[0])
        fully_shard(self.module)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1)

    def forward_backward_batch(self, microbatches: Sequence[torch.Tensor], num_tokens: int, world_size: int) -> None:
        """The loss is a sum over tokens, divided by those of the global minibatch."""
        for tokens in microbatches:
            (self.module(tokens).square().sum() * world_size / num_tokens).backward()

    def optimizer_step(self) -> float:
        parameters = list(self.module.parameters())
        grads = [p.grad for p in parameters if p.grad is not None]  # read by hand, before torch is called
        norm = _get_total_norm(grads, 2.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        _clip_grads_with_norm_(parameters, 1.0, norm)
        if torch.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


class OdcActor(Actor):
    """As odc/trainers/verl.py enters an engine."""

    def __init__(self) -> None:
        super().__init__()
        self.odc = odc.patch_fsdp(self.module)

    def forward_backward_batch(self, microbatches: Sequence[torch.Tensor], num_tokens: int, world_size: int) -> None:
        with self.odc.minibatch():
            super().forward_backward_batch(microbatches, num_tokens, world_size)


def samples(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    made = [torch.randn(length, 6, generator=generator) for length in LENGTHS]
    if step == 1:
        made[0][0, 0] = float("inf")  # the norm of this step is not finite: it must be skipped
    return made


def dealt_out(step: int, rank: int, world_size: int, policy: str) -> list[torch.Tensor]:
    plan = get_policy(policy).plan(LENGTHS, world_size=world_size, max_tokens=10, cost=QuadraticCost(1.0, 0.0))
    data = samples(step)
    return [torch.cat([data[i] for i in part]) if part else torch.zeros(0, 6) for part in plan.microbatches[rank]]


def train(rank: int, world_size: int, ours: bool, policy: str) -> tuple[list[float], list[list[float]], list[int]]:
    actor = OdcActor() if ours else Actor()
    norms, counts = [], []
    for step in range(4):
        microbatches = dealt_out(step, rank, world_size, policy)
        counts.append(len(microbatches))
        actor.forward_backward_batch(microbatches, sum(LENGTHS), world_size)
        norms.append(actor.optimizer_step())
    if isinstance(actor, OdcActor):
        actor.odc.close()
    weights = [p.full_tensor().flatten().tolist() for p in actor.module.parameters() if isinstance(p, DTensor)]
    return norms, weights, counts


def test_the_recipe_trains_as_verl_does_with_unequal_counts_and_a_skipped_step() -> None:
    plain = run_ranks(2, train, False, "lb-micro")
    ours = run_ranks(2, train, True, "lb-mini")
    assert [a != b for a, b in zip(ours[0][2], ours[1][2], strict=True)] == [True] * 4
    for (norms, weights, _), (plain_norms, plain_weights, _) in zip(ours, plain, strict=True):
        assert not torch.isfinite(torch.tensor(norms[1]))
        assert [norms[i] for i in (0, 2, 3)] == pytest.approx([plain_norms[i] for i in (0, 2, 3)], rel=1e-4)
        for mine, theirs in zip(weights, plain_weights, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
