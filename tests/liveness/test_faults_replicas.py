"""Layer 3: ranks as processes. Two replicas of a shard group of two: whichever rank fails, and wherever the others wait
just then, each of them ends in time, and names that rank by its number in the job, with the cause.

The places where a rank waits: for a shard (gather), for a push to be taken in, for its replicas, in the all-reduce of
gradient clipping, in an all-reduce of the script.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from faulty_ranks import NOTICE_S, run_job
from process_ranks import RankGroup, RankResult, start_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from training import build, clip, loss_of, optimizer_of, tokens, use_up, wrap

import odc
from odc.bench.harness.warm_launch import WarmLauncher

SILENCE_S = 4.0
POINTS = {"gather": "gather.before", "push": "scatter.before", "replicas": "replicas.before"}
CAUSES = {
    "kill": (
        *("is dead: killed by signal 9", "is dead: its connection ended", "cannot be reached any more"),
        "is dead: [Errno 104] Connection reset by peer",  # killed with something unread
    ),
    "raise": ("sample 17 has no answer", "FaultInjected"),
    "stop": ("alive but silent",),
}


def hybrid(kind: str) -> nn.Module:
    """A model of two replicas: ranks 0 and 1 share one, ranks 2 and 3 the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = build(num_blocks=1)
    if kind == "fsdp1":
        return wrap(model, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    if kind == "int":
        whole = init_device_mesh("cpu", (4,))
        for block in model.blocks:
            fully_shard(block, mesh=whole, reshard_after_forward=2)
        return fully_shard(model, mesh=whole)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fail(do: str) -> None:
    if do == "raise":
        raise ValueError("sample 17 has no answer")
    os.kill(os.getpid(), signal.SIGKILL if do == "kill" else signal.SIGSTOP)


def training(rank: int, world_size: int, kind: str, hosts: int, place: str, do: str, victim: int) -> None:
    """Train until something happens; at ``place``, the victim makes it happen in its third step."""
    os.environ["ODC_HOST_ID"] = f"host{rank * hosts // world_size}"
    model = hybrid(kind)
    optimizer = optimizer_of(model)
    with odc.patch_fsdp(model) as session:
        for step in range(10_000):
            is_due = rank == victim and step == 2
            loss = loss_of(model, tokens(step, rank, 0))
            loss.backward()
            if place == "clip":
                session.finish()
                if is_due:
                    fail(do)
            clip(model)
            use_up(optimizer)
            if place == "script":
                if is_due:
                    fail(do)
                dist.all_reduce(loss.detach())


def run(kind: str, hosts: int, place: str, do: str, victim: int) -> tuple[RankGroup, list[RankResult]]:
    env = {"ODC_TIMEOUT": str(SILENCE_S) if do == "stop" else "60"}
    if place in POINTS:
        env["ODC_FAULT"] = f"rank={victim},point={POINTS[place]},at=9,do={do}"
    group = start_ranks(4, training, kind, hosts, place, do, victim, env=env)
    return group, group.join(100, expendable=[victim] if do == "stop" else [])


def check(kind: str, hosts: int, place: str, do: str, victim: int) -> None:
    group, results = run(kind, hosts, place, do, victim)
    survivors = [rank for rank in range(4) if rank != victim]
    for rank in survivors:
        text = (results[rank].error or "").partition("\nTraceback")[0]
        assert results[rank].error_type in ("PeerDiedError", "PeerSilentError", "PeerClosedError", "AbortedError"), text
        assert f"rank {victim} (" in text, text
        assert f"pid {group.pids[victim]}" in text, text
        assert any(cause in text for cause in CAUSES[do]), text
        assert "gloo" not in text, text
        assert results[rank].exitcode == 1, results[rank]
    times = [results[rank].seconds for rank in survivors]
    assert max(times) - min(times) < NOTICE_S


PENDING = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
model = torch.nn.Linear(4, 4)
fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
session = odc.patch_fsdp(model)
if rank == 1:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    try:
        with session.minibatch():
            raise ValueError("sample 17 has no answer")
    finally:
        dist.destroy_process_group()
time.sleep(8)
"""


def test_a_rank_that_has_raised_ends_although_a_collective_of_it_is_pending(
    tmp_path: Path, warm_launcher: WarmLauncher
) -> None:
    """Its process group would wait for the other rank, in its destructor."""
    codes, text = run_job(warm_launcher, tmp_path, PENDING)
    assert codes[1] == 1, text  # and not killed by the launcher
    assert "ValueError: sample 17 has no answer" in text, text


# Pairwise over kind of FSDP, hosts, place, fault and victim.
CASES = [
    ("fsdp2", 1, "gather", "kill", 3),
    ("fsdp2", 2, "gather", "stop", 2),
    ("fsdp1", 2, "gather", "raise", 0),
    ("fsdp1", 1, "push", "stop", 1),
    ("fsdp2", 2, "push", "kill", 0),
    ("fsdp2", 1, "replicas", "stop", 2),
    ("fsdp1", 2, "replicas", "kill", 3),
    ("int", 2, "replicas", "raise", 1),
    ("fsdp2", 2, "clip", "kill", 1),
    ("fsdp1", 1, "clip", "raise", 2),
    ("fsdp1", 2, "clip", "stop", 3),
    ("int", 1, "script", "kill", 0),
    ("fsdp1", 2, "script", "stop", 1),
    ("fsdp2", 2, "script", "raise", 3),
]
FURTHER = [
    ("fsdp2", 1, "gather", "kill", 3),
    ("fsdp1", 2, "gather", "raise", 0),
    ("fsdp2", 1, "replicas", "stop", 2),
    ("fsdp2", 2, "clip", "kill", 1),
    ("fsdp1", 2, "clip", "stop", 3),
    ("int", 1, "script", "kill", 0),
    ("fsdp1", 2, "script", "stop", 1),
]
"""With ``-m extended``: every run has each of their places, faults, kinds and numbers of hosts, and two who stop, whom
others name behind a time limit."""
ALL = [
    (kind, hosts, place, do, victim)
    for kind in ("fsdp2", "fsdp1")
    for hosts in (1, 2)
    for place in ("gather", "push", "replicas", "clip", "script")
    for do in CAUSES
    for victim in range(4)
]


@pytest.mark.parametrize(
    ("kind", "hosts", "place", "do", "victim"),
    [pytest.param(*case, marks=pytest.mark.extended if case in FURTHER else ()) for case in CASES],
)
def test_every_rank_of_the_job_names_the_one_that_failed(
    kind: str, hosts: int, place: str, do: str, victim: int
) -> None:
    check(kind, hosts, place, do, victim)


@pytest.mark.extended
@pytest.mark.parametrize(("kind", "hosts", "place", "do", "victim"), [case for case in ALL if case not in CASES])
def test_in_all_combinations(kind: str, hosts: int, place: str, do: str, victim: int) -> None:
    check(kind, hosts, place, do, victim)
