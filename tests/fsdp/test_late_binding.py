"""Layer 3: ranks as processes. A loader that binds samples late: the sums are those of the same samples, each once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loaders import known_loader, stream_loader
from process_ranks import run_ranks, start_ranks
from test_compute_groups import build as build_blocks
from test_compute_groups import make_mesh, shard
from test_mesh_loaders import COST, DIM, LENGTHS, Rows, Steps, collate, length_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import odc
from odc.config import HOST_ID

MOST_EPOCHS = 100


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.Tanh(), nn.Linear(2 * DIM, DIM))


def known_lengths(**where: Any) -> Any:
    return known_loader(
        Rows(), LENGTHS, collate, minibatch_size=4, max_tokens=12, cost=COST, num_loss_tokens=LENGTHS,
        late_binding=True, **where,
    )  # fmt: skip


def stream(**where: Any) -> Any:
    return stream_loader(
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
        for epoch in range(MOST_EPOCHS):
            loader.set_epoch(epoch)
            for minibatch in loader:
                mine = []
                for numbers, rows in minibatch.microbatches:
                    mine += numbers
                    time.sleep(1e-3 * len(rows) * (12 if rank == 1 else 1))  # a slow device, also beside others
                    steps.backward(rows, minibatch.loss_scale)
                steps.step()
                computed.append(mine)
            taken = torch.tensor([loader.num_taken])  # on a busy machine all ranks may be slow for a while
            dist.all_reduce(taken)
            if epoch >= 9 and taken.item():
                break
        loader.close()
        return {
            "computed": computed,
            "taken": loader.num_taken,
            "epochs": epoch + 1,
            "norms": steps.norms,
            "speeds": getattr(loader, "speeds", []),
        }


def train_in_order(rank: int, world_size: int) -> None:
    with odc.patch_fsdp(fully_shard(build()), deterministic=True):
        loader = known_loader(
            Rows(), LENGTHS, collate, rank, world_size, minibatch_size=4, cost=COST, late_binding=True
        )
        for _ in loader:
            pass


def where_partners_are_not_known(rank: int, world_size: int) -> list[str]:
    halves = [DeviceMesh("cpu", [first, first + 2]) for first in range(2)]  # columns of a mesh that nobody has made
    found = []
    for make, where in (
        (known_lengths, {"mesh": halves[rank % 2]}),
        (stream, {"mesh": halves[rank % 2]}),
        (stream, {"rank": rank // 2, "world_size": 2}),
    ):
        try:
            make(**where)
        except ValueError as error:
            found.append(str(error))
    return found


def test_partners_that_are_not_known_are_refused() -> None:
    words = "late_binding=True with a mesh of 2 of 4 ranks, which is no part of one of all ranks"
    for known, streamed, without in run_ranks(4, where_partners_are_not_known):
        assert words in known
        assert words in streamed
        assert "late_binding=True with 2 of 4 ranks, and no mesh" in without


def train_together(rank: int, world_size: int) -> dict[str, Any]:
    """Pairs of tensor parallel partners, of which the second pair is slow. By loader, as :func:`train`."""
    mesh = make_mesh(world_size)
    results = {}
    for make in (known_lengths, stream):
        steps = Steps(shard(build_blocks(), mesh))
        computed = []
        with odc.patch_fsdp(steps.model):
            loader = make(mesh=mesh["dp"])
            for epoch in range(3):
                loader.set_epoch(epoch)
                for minibatch in loader:
                    mine = []
                    for numbers, rows in minibatch.microbatches:
                        mine.append(numbers)
                        time.sleep(2e-3 * len(rows) * (4 if rank > 1 else 1))
                        steps.backward(rows, minibatch.loss_scale)
                    steps.step()
                    computed.append(mine)
            loader.close()
            results[make.__name__] = {"computed": computed, "taken": loader.num_taken, "norms": steps.norms}
    return results


def test_of_ranks_that_compute_together_one_takes_for_all() -> None:
    ranks = run_ranks(4, train_together)
    for make in ("known_lengths", "stream"):
        first, second, slow, partner = (found[make] for found in ranks)
        assert (first["computed"], slow["computed"]) == (second["computed"], partner["computed"])
        assert first["taken"] == second["taken"] > 0
        alone, samples = Steps(build_blocks().double()), Rows()
        for step in zip(first["computed"], slow["computed"], strict=True):
            numbers = sorted(i for mine in step for batch in mine for i in batch)
            assert len(set(numbers)) == len(numbers)
            for i in numbers:
                alone.backward(samples[i][1], 1 / sum(LENGTHS[j] for j in numbers))
            alone.step()
        for found in ranks:
            assert found[make]["norms"] == pytest.approx(alone.norms, rel=1e-5)


def die_before_choosing(rank: int, world_size: int) -> tuple[str, str, float]:
    mesh = make_mesh(world_size)
    steps = Steps(shard(build_blocks(), mesh))
    with odc.patch_fsdp(steps.model):
        loader = known_lengths(mesh=mesh["dp"])
        begun = time.monotonic()
        try:
            for number, minibatch in enumerate(loader):
                for _, rows in minibatch.microbatches:
                    steps.backward(rows, minibatch.loss_scale)
                    if number == 1 and rank == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    begun = time.monotonic()
                steps.step()
        except odc.OdcError as error:
            return type(error).__name__, str(error), time.monotonic() - begun
    return "", "", 0.0


def test_a_leader_that_dies_is_named_to_those_that_wait_for_its_choice() -> None:
    found = start_ranks(4, die_before_choosing).join(60.0)
    for rank in (1, 2, 3):
        name, text, seconds = found[rank].value
        assert name in ("PeerDiedError", "AbortedError"), text
        assert "rank 0" in text
        assert seconds < 20


def test_sums_in_one_order_are_no_sums_of_late_samples() -> None:
    with pytest.raises(AssertionError, match="late_binding=True with deterministic=True of ODC"):
        run_ranks(2, train_in_order)


@pytest.mark.parametrize(
    ("hosts", "make", "num_samples"),
    [
        pytest.param(1, known_lengths, 16, marks=pytest.mark.extended),
        pytest.param(2, known_lengths, 16, marks=pytest.mark.extended),
        pytest.param(1, stream, len(LENGTHS), marks=pytest.mark.extended),
        (2, stream, len(LENGTHS)),
    ],
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
    assert num_computed == ranks[0]["epochs"] * num_samples
    for found in ranks:
        assert found["speeds"] == ranks[0]["speeds"]
        assert found["norms"] == pytest.approx(alone.norms, rel=1e-5)
