"""Layer 3: ranks as processes. Loaders over the data-parallel dimension of a mesh that is tensor parallel, too, and
checkpoints of such a training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from loaders import known_loader, stream_loader
from process_ranks import run_ranks
from test_compute_groups import DIM, build, make_mesh, part, shard
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from training import largest_difference

import odc
from odc.balance import QuadraticCost

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
    "known lengths": lambda mesh: known_loader(
        Rows(), LENGTHS, collate, mesh=mesh, minibatch_size=2, max_tokens=12, cost=COST, num_loss_tokens=LENGTHS,
        drop_last=False,
    ),
    "stream": lambda mesh: stream_loader(
        Rows(), collate, mesh=mesh, length=length_of, num_loss_tokens=length_of, grouping="pack", align="minibatch",
        minibatch_size=2, max_tokens=12, pool_size=8, cost=COST,
    ),
}  # fmt: skip


class Steps:
    """One model and its optimizer, here or on a rank."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
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

    def save(self, folder: str) -> None:
        parameters, moments = get_state_dict(self.model, self._optimizer)
        dcp.save({"model": parameters, "optimizer": moments}, checkpoint_id=folder)

    def load(self, folder: str) -> None:
        parameters, moments = get_state_dict(self.model, self._optimizer)
        dcp.load({"model": parameters, "optimizer": moments}, checkpoint_id=folder)
        set_state_dict(self.model, self._optimizer, model_state_dict=parameters, optim_state_dict=moments)


EPOCHS, SAVED_IN, SAVED_AT = 2, 0, 3
"""A checkpoint is saved behind this many steps of this epoch."""


def train(rank: int, world_size: int, folder: str, resumes: bool) -> dict[str, Any]:
    """By loader: samples of each microbatch of each step on this rank, norms and parameters. With sums in one order."""
    mesh = make_mesh(world_size)
    results = {}
    for name, make in LOADERS.items():
        model = build()
        if resumes:  # with other parameters until they are loaded
            for parameter in model.parameters():
                nn.init.normal_(parameter)
        steps = Steps(shard(model, mesh))
        taken, place = [], Path(folder, name)
        place.mkdir(exist_ok=True)
        state = place / f"loader-{rank}.json"
        with odc.patch_fsdp(steps.model, deterministic=True):
            loader: Any = make(mesh["dp"])
            if resumes:
                steps.load(str(place / "model"))
                loader.load_state_dict(json.loads(state.read_text()))
            for epoch in range(SAVED_IN if resumes else 0, EPOCHS):
                loader.set_epoch(epoch)
                for minibatch in loader:
                    taken.append([numbers for numbers, _ in minibatch.microbatches])
                    for _, rows in minibatch.microbatches:
                        steps.backward(rows, minibatch.loss_scale)
                    steps.step()
                    if len(taken) == SAVED_AT and not resumes:
                        steps.save(str(place / "model"))
                        state.write_text(json.dumps(loader.state_dict()))
            loader.close()
            results[name] = taken, steps.norms, steps.parameters()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def of_ranks(folder: str) -> list[dict[str, Any]]:
    return run_ranks(4, train, folder, False)


@pytest.mark.parametrize("name", LOADERS)
def test_partners_train_on_the_same_and_groups_as_one_process(name: str, of_ranks: list[dict[str, Any]]) -> None:
    """Also where groups have different numbers of microbatches, or none."""
    taken = [found[name][0] for found in of_ranks]
    assert (taken[0], taken[2]) == (taken[1], taken[3])
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


@pytest.fixture(scope="module")
def resumed(folder: str, of_ranks: object) -> list[dict[str, Any]]:
    """What other processes make of the checkpoints."""
    return run_ranks(4, train, folder, True)


@pytest.mark.extended
@pytest.mark.parametrize("name", LOADERS)
def test_a_training_goes_on_from_a_checkpoint_bit_for_bit(name: str, of_ranks: Any, resumed: Any) -> None:
    """Model, optimizer and the place in the data, on a mesh that divides parameters twice."""
    for whole, rest in zip(of_ranks, resumed, strict=True):
        taken, norms, parameters = whole[name]
        assert rest[name][0] == taken[SAVED_AT:]
        assert rest[name][1] == norms[SAVED_AT:]
        assert largest_difference(rest[name][2], parameters) == 0.0
