"""Layer 3: ranks as processes. What each rank knows of a minibatch at its end, of itself and of the others."""

from __future__ import annotations

import time

import pytest
from process_ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import build, train

import odc
from odc.timeline import MinibatchStats, Stats

COUNTS = [1, 0, 3, 1]
SLOW = 2
STEPS = 3


def observed(rank: int, world_size: int, shape: tuple[int, ...]) -> tuple[list[MinibatchStats], Stats]:
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = build()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    session = odc.patch_fsdp(model)
    assert session.last_minibatch is None
    found: list[MinibatchStats] = []
    remove = session.on_minibatch(found.append)
    model.register_forward_pre_hook(lambda *_: time.sleep(0.1 * (rank == SLOW)))
    train(model, session, rank, world_size, COUNTS, STEPS)
    remove()
    assert session.last_minibatch is found[-1]
    stats = session.stats()
    train(model, session, rank, world_size, COUNTS, 1)
    assert len(found) == STEPS
    assert session.last_minibatch is not found[-1]
    session.close()
    return found, stats


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["fsdp", "hsdp"])
def test_ranks_know_of_each_other_how_long_they_computed(shape: tuple[int, ...]) -> None:
    ranks = run_ranks(4, observed, shape)
    for rank, (found, stats) in enumerate(ranks):
        assert [one.microbatches for one in found] == [COUNTS[rank]] * STEPS
        assert sum(one.done.push_bytes for one in found) == stats.push_bytes
        assert all((one.done.gathers > 0) == (COUNTS[rank] > 0) for one in found)
        assert all(0 < one.bubble_rate < 1 and one.compute_s[rank] <= one.seconds for one in found)
        if len(shape) == 1 and rank != SLOW:
            assert all(max(waited := one.done.waited_for_s, key=waited.__getitem__) == SLOW for one in found)
    for same in zip(*(found for found, _ in ranks), strict=True):
        assert {one.slowest_rank for one in same} == {SLOW}
        assert {one.number for one in same} == {same[0].number}
        assert [sorted(one.compute_s) for one in same] == [[0, 1, 2, 3]] * 4
        assert [one.compute_s for one in same] == [same[0].compute_s] * 4
