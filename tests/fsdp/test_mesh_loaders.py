"""Layer 3: ranks as processes. Loaders over the data-parallel dimension of a mesh that is tensor parallel, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from process_ranks import run_ranks
from test_compute_groups import DIM, build, make_mesh, part, shard
from torch import nn
from torch.distributed.tensor import DTensor
from training import largest_difference

import odc
from odc.balance import MinibatchLoader, QuadraticCost, StreamLoader

LENGTHS = [12, 8, 6, 4, 9, 9, 2, 2, 3, 11, 1, 7, 5, 10, 4, 6, 8]  # the last minibatch of a loader has one sample
COST = QuadraticCost(1.0, 0.1)


class Rows:
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(LENGTHS[index], DIM, generator=torch.Generator().manual_seed(index))


def collate(samples: list[tuple[int, torch.Tensor]]) -> tuple[list[int], torch.Tensor]:
    return [index for index, _ in samples], torch.cat([rows for _, rows in samples])


def length_of(sample: tuple[int, torch.Tensor]) -> int:
    return len(sample[1])


LOADERS = {
    "known lengths": lambda mesh: MinibatchLoader(
        Rows(), LENGTHS, collate, mesh=mesh, minibatch_size=2, max_tokens=12, cost=COST, num_loss_tokens=LENGTHS,
        drop_last=False,
    ),
    "stream": lambda mesh: StreamLoader(
        Rows(), collate, mesh=mesh, length=length_of, num_loss_tokens=length_of, grouping="pack", align="minibatch",
        minibatch_size=2, max_tokens=12, pool_size=8, cost=COST,
    ),
}  # fmt: skip


class Steps:
    """One model and its optimizer, here or on a rank."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.norms: list[float] = []

    def backward(self, rows: torch.Tensor, scale: float) -> None:
        dtype = next(self.model.parameters()).dtype
        (self.model(rows.to(dtype)).square().sum() * scale).backward()

    def step(self) -> None:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        self._optimizer.step()
        self._optimizer.zero_grad()

    def parameters(self) -> dict[str, Any]:
        found = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in self.model.named_parameters()}
        return {name: value.detach().numpy() for name, value in found.items()}


def train(rank: int, world_size: int) -> dict[str, Any]:
    """By loader: samples of each microbatch of each step on this rank, norms and parameters."""
    mesh = make_mesh(world_size)
    results = {}
    for name, make in LOADERS.items():
        steps = Steps(shard(build(), mesh))
        taken = []
        with odc.patch_fsdp(steps.model):
            loader: Any = make(mesh["dp"])
            for epoch in range(2):
                loader.set_epoch(epoch)
                for minibatch in loader:
                    taken.append([numbers for numbers, _ in minibatch.microbatches])
                    for _, rows in minibatch.microbatches:
                        steps.backward(rows, minibatch.loss_scale)
                    steps.step()
            loader.close()
            results[name] = taken, steps.norms, steps.parameters()
    return results


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, Any]]:
    return run_ranks(4, train)


@pytest.mark.parametrize("name", LOADERS)
def test_partners_train_on_the_same_and_groups_as_one_process(name: str, of_ranks: list[dict[str, Any]]) -> None:
    """Also where groups have different numbers of microbatches, or none."""
    taken = [found[name][0] for found in of_ranks]
    assert taken[0] == taken[1]
    assert taken[2] == taken[3]
    counts = [(len(ours), len(theirs)) for ours, theirs in zip(taken[0], taken[2], strict=True)]
    assert any(ours != theirs for ours, theirs in counts)
    assert any(0 in pair for pair in counts) or name == "stream"
    half = len(counts) // 2
    for epoch in (slice(half), slice(half, None)):
        steps = taken[0][epoch] + taken[2][epoch]
        assert sorted(i for step in steps for batch in step for i in batch) == list(range(len(LENGTHS)))

    alone, samples = Steps(build().double()), Rows()
    for ours, theirs in zip(taken[0], taken[2], strict=True):
        numbers = [i for batch in ours + theirs for i in batch]
        for i in numbers:
            alone.backward(samples[i][1], 1 / sum(LENGTHS[j] for j in numbers))
        alone.step()
    expected = alone.parameters()
    for rank, found in enumerate(of_ranks):
        _, norms, parameters = found[name]
        assert norms == pytest.approx(alone.norms, rel=1e-5)
        assert largest_difference(parameters, {n: part(n, whole, rank) for n, whole in expected.items()}) < 1e-5
