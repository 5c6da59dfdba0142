"""Layer 3: ranks as processes. Minibatches of several modalities through a sharded model, with ODC and without.

What is trained is compared after each step with one process: with encoders that are frozen, minibatches of text alone,
ranks without anything to do, evaluations in between, and replicas.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_ranks import run_ranks
from test_multimodal_run import lengths_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from toy_modalities import CHANNELS, RATES, WIDTH, Toy, make_sample, orchestrator, rows_of, split

import odc
from odc import AbortedError
from odc.balance.multimodal import (
    Encoder,
    InStep,
    MinibatchLengths,
    MultimodalMinibatch,
    OnDemand,
    channels_of,
    run_minibatch,
)

Numbers = Sequence[Sequence[int]]
TOLERANCE = 2e-4


class ToyEncoder(torch.nn.Module):
    def __init__(self, modality: str, weight: torch.Tensor) -> None:
        super().__init__()
        self.modality, self.weight = modality, torch.nn.Parameter(weight.detach().float())

    def forward(self, items: Sequence[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        found = []
        for (item,) in items:
            hidden = torch.tanh(item.float() @ self.weight)
            rate, rows = RATES[self.modality], rows_of(self.modality, len(item))
            found.append((hidden + hidden.mean(dim=0))[: rows * rate].view(rows, rate, WIDTH).sum(dim=1))
        return found


class ToyLanguage(torch.nn.Module):
    def __init__(self, toy: Toy) -> None:
        super().__init__()
        self.embedding = torch.nn.Parameter(toy.embedding.detach().float())
        self.head = torch.nn.Parameter(toy.head.detach().float())

    forward = Toy.loss


class ShardedToy(torch.nn.Module):
    """In float32, which ODC adds up in."""

    def __init__(self) -> None:
        super().__init__()
        toy = Toy()
        self.vision, self.audio = (ToyEncoder(name, toy.encoders[name]) for name in CHANNELS)
        self.language = ToyLanguage(toy)

    def encode_vision(self, items: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = self.vision(items)
        return found

    def encode_audio(self, items: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = self.audio(items)
        return found

    def loss(self, samples: Any, outputs: Any) -> Any:
        return self.language(samples, outputs)


def sharded(mesh: Any) -> ShardedToy:
    model = ShardedToy()
    for part in (model.vision, model.audio, model.language, model):
        fully_shard(part, mesh=mesh)
    for method in ("encode_vision", "encode_audio", "loss"):
        register_fsdp_forward_method(model, method)  # type: ignore[arg-type]
    return model


def encoders(model: ShardedToy) -> dict[str, Encoder]:
    return {
        name: Encoder(getattr(model, f"encode_{name}"), WIDTH, dummy=lambda n=channels: (torch.zeros(2, n),))  # type: ignore[misc]
        for name, channels in CHANNELS.items()
    }


def minibatch_of(numbers: Numbers, rank: int, **options: Any) -> MultimodalMinibatch:
    plan = orchestrator(len(numbers), **options)
    rows = [lengths_of(list(mine), 0, plan.modalities) for mine in numbers]
    schedule = plan.plan(MinibatchLengths.of_ranks(rows, plan.modalities))
    return MultimodalMinibatch(schedule, rank, [split(make_sample(number)) for number in numbers[rank]])


def steps_of(num_ranks: int) -> list[Numbers]:
    """Samples of each rank, step by step."""
    texts = [n for n in range(200) if not any(make_sample(n)["items"].values())]
    others = [n for n in range(200) if any(make_sample(n)["items"].values())]
    ranks = range(num_ranks)
    return [
        [others[3 * r : 3 * r + 3] + texts[:1] * (r == 0) for r in ranks],
        [texts[1 + 2 * r : 3 + 2 * r] for r in ranks],  # text alone
        [others[20:23] if r == 0 else [] for r in ranks],
        [others[30:31] if r == num_ranks - 1 else [] for r in ranks],  # no microbatch at all for most
        [others[40 + 4 * r : 44 + 4 * r] for r in ranks],
    ]


def train_alone(model: ShardedToy, optimizer: Any, numbers: Numbers, frozen: Sequence[str]) -> tuple[float, float]:
    """One step in one process: the loss, and the norm of the gradients, which FSDP averages over the ranks."""
    optimizer.zero_grad()
    total = 0.0
    for sample in [split(make_sample(n)) for mine in numbers for n in mine]:
        outputs = {name: getattr(model, name)(items) for name, items in sample.items.items()}
        loss = model.loss([sample.text], {n: [t.detach() if n in frozen else t for t in o] for n, o in outputs.items()})
        loss.backward()
        total += float(loss.detach())
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= len(numbers)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total, float(norm)


def total_of(losses: Sequence[torch.Tensor], group: Any) -> float:
    total = torch.stack([torch.zeros(()), *losses]).sum()
    dist.all_reduce(total, group=group)
    return float(total)


def train(rank: int, world_size: int, comm: Any, move: str, frozen: Sequence[str], num_replicas: int) -> int:
    """Steps that were as in one process."""
    mesh = init_device_mesh("cpu", (num_replicas, world_size // num_replicas), mesh_dim_names=("replica", "shard"))
    group = mesh.get_group("shard")
    num_ranks, mine = dist.get_world_size(group), dist.get_rank(group)
    model, alone = sharded(mesh if num_replicas > 1 else mesh["shard"]), ShardedToy()
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01, weight_decay=0.1) for m in (model, alone)]
    session = odc.patch_fsdp(model) if comm == "odc" else None
    items = (
        session.exchange_items(channels_of(list(CHANNELS)), capacity_bytes=64)
        if session and move == "on demand"
        else None
    )
    mover = OnDemand(items, mine) if items else InStep(group)
    options = {"comm": comm, "policy": "lb-mini" if comm == "odc" else "lb-micro-global", "frozen": frozen}
    steps = steps_of(num_ranks)
    for number, numbers in enumerate(steps):
        # With the block around it, and without: clipping ends the minibatch then.
        with session.minibatch() if session and number % 2 else nullcontext():
            losses = run_minibatch(minibatch_of(numbers, mine, **options), encoders(model), model.loss, mover=mover)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers[0].step()
        optimizers[0].zero_grad()
        expected = train_alone(alone, optimizers[1], numbers, frozen)
        found = total_of(losses, group), float(norm.full_tensor())  # type: ignore[attr-defined]
        assert found == pytest.approx(expected, abs=TOLERANCE), number

        with torch.no_grad():  # of other samples, so that other ranks have nothing to do
            other = minibatch_of(steps[number - 1], mine, **options)
            losses = run_minibatch(other, encoders(model), model.loss, mover=mover)
            texts = [split(make_sample(n)) for numbers in steps[number - 1] for n in numbers]
            wanted = sum(
                float(alone.loss([s.text], {name: getattr(alone, name)(i) for name, i in s.items.items()}))
                for s in texts
            )
        assert total_of(losses, group) == pytest.approx(wanted, abs=TOLERANCE), number
        weights: Mapping[str, torch.Tensor] = {k: v.full_tensor() for k, v in model.state_dict().items()}
        for name, weight in alone.state_dict().items():
            torch.testing.assert_close(weights[name], weight, rtol=0.0, atol=TOLERANCE)
    for part in (items, session):
        if part is not None:
            part.close()
    return len(steps)


@pytest.mark.parametrize(
    ("world_size", "comm", "move", "frozen", "num_replicas"),
    [
        (2, "odc", "on demand", (), 1),
        pytest.param(3, "odc", "on demand", ("audio",), 1, marks=pytest.mark.extended),
        pytest.param(4, "odc", "on demand", (), 2, marks=pytest.mark.extended),
        pytest.param(2, "odc", "in step", (), 1, marks=pytest.mark.extended),
        (2, "collective", "in step", ("audio",), 1),
    ],
)
def test_a_sharded_model_trains_as_in_one_process(
    world_size: int, comm: str, move: str, frozen: tuple[str, ...], num_replicas: int
) -> None:
    assert run_ranks(world_size, train, comm, move, frozen, num_replicas) == [5] * world_size


def hear(rank: int, world_size: int) -> str:
    """What rank 1 fails with in its session, rank 0 hears while it waits for items."""
    model = sharded(init_device_mesh("cpu", (world_size,)))
    session = odc.patch_fsdp(model)
    items = session.exchange_items(["c"], capacity_bytes=64)
    one = items.begin("c", [[], [[(7, 8, 0)]]])
    dist.barrier()  # or rank 0 might hear of it where it begins
    if rank == 1:
        session.abort(RuntimeError("out of memory"))
        dist.barrier()
        return ""
    started = time.monotonic()
    try:
        one.read(7, torch.zeros(1, dtype=torch.int64))
    except AbortedError as error:
        dist.barrier()
        assert time.monotonic() - started < 10
        return str(error)
    return "read"


def test_what_fails_in_the_session_is_heard_by_who_waits_for_items() -> None:
    assert "RuntimeError: out of memory" in run_ranks(2, hear)[0]
