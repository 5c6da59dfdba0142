"""What ranks do when one of them is hurt: jobs of a :class:`faulty_ranks.Fault`, which go on until then."""

from __future__ import annotations

import itertools
import os
import time

import pytest
import torch
import torch.distributed as dist
from faulty_ranks import Fault
from process_ranks import wait_until
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from training import build, clip, loss_of, optimizer_of, shard, start, tokens, train, use_up, wrap
from watching import do_before, scheduler_state

import odc
from odc import ItemExchange, ParamSlice, Runtime, RuntimeConfig, UnitSpec
from odc.balance import LinearCost, balance_batch
from odc.balance.rearrange.exchange import Meeting
from odc.setup.agreement import ProcessGroupExchange


def with_a_child(rank: int, world_size: int, fault: Fault) -> None:
    """The rank has a fork, as of a DataLoader, which holds its connections open until rank 0 has ended."""
    model = shard(build(), world_size)
    session = odc.patch_fsdp(model)
    pid = session._runtime.topology.pids[0]
    if rank == fault.who and os.fork() == 0:
        wait_until(lambda: scheduler_state(pid) == "Z", "rank 0 goes on")
        os._exit(0)
    train(model, session, rank, world_size, [2] * world_size, steps=10_000)


def waits_for_rank_0(rank: int, world_size: int, fault: Fault) -> None:
    """Rank 0 comes when the other one is stopped in its wait for it, and then waits for that one in its turn."""
    units = [UnitSpec("u", 4, torch.float32, (ParamSlice("w", 4),))]
    runtime = Runtime.create(ProcessGroupExchange(), units, RuntimeConfig.from_environment())
    if rank == 0:
        stopped = runtime.topology.pids[fault.who]
        wait_until(lambda: scheduler_state(stopped) == "T", "no rank was stopped: nothing was tested")
    runtime.publish(0, lambda shard: shard.fill_(rank))
    runtime.begin()
    runtime.gather(0, torch.empty(4 * world_size))
    runtime.finish()


# Set-up


def sets_up(rank: int, world_size: int, fault: Fault) -> None:
    """The places: in front of it, and in its first exchange. In both the others are there before."""
    model = shard(build(num_blocks=1), world_size)
    fault.come_to("set-up", rank)
    if rank == fault.who:
        do_before(ProcessGroupExchange, "_await", lambda: fault.come_to("first exchange", rank))
    odc.patch_fsdp(model)


def sets_up_replicas(rank: int, world_size: int, fault: Fault) -> None:
    """Ranks 0 and 1 share one replica, 2 and 3 the other one; 0 and 2 hold the same shard."""
    model = hybrid("fsdp2")
    if rank == fault.who:
        time.sleep(1.0)
    fault.come_to("set-up", rank)
    odc.patch_fsdp(model)


def sets_up_again(rank: int, world_size: int, fault: Fault) -> None:
    """The first set-up is refused on all ranks; the script mends it and tries again."""
    model = shard(build(num_blocks=1), world_size)
    with pytest.raises(odc.SetupError, match="differs"):
        odc.patch_fsdp(model, deterministic=rank == 0)
    dist.barrier()
    fault.come_to("set-up", rank)
    odc.patch_fsdp(model)


# Replicas


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


def replicas(rank: int, world_size: int, fault: Fault) -> None:
    """Of ``fault.model``. The places: in front of clipping, and of a collective of the script."""
    model = hybrid(fault.model)
    optimizer = optimizer_of(model)
    with odc.patch_fsdp(model) as session:
        for step in itertools.count():
            loss = loss_of(model, tokens(step, rank, 0))
            loss.backward()
            if fault.where == "clipping":
                session.finish()
                fault.come_to("clipping", rank, step)
            clip(model)
            use_up(optimizer)
            if fault.where == "collective":
                fault.come_to("collective", rank, step)
                dist.all_reduce(loss.detach())


# Items

NUMEL = 100
LARGE = 100_000


def ring(world_size: int, numel: int = NUMEL) -> list[list[list[tuple[int, int, int]]]]:
    """Each rank publishes two parts for the next one, the first one for itself, too."""
    rows = [(rank, (rank + 1) % world_size) for rank in range(world_size)]
    return [[[(3 * a, 4 * numel, b), (3 * a + 1, 8, a)], [(3 * a + 2, 4 * numel, b)]] for a, b in rows]


def a_round(items: ItemExchange, rank: int, world_size: int, number: int, numel: int = NUMEL) -> None:
    one = items.begin("outputs", ring(world_size, numel))
    before = (rank - 1) % world_size
    value = torch.full((numel,), float(number * 10 + rank))
    one.publish(0, [value, torch.tensor([number])])
    own = torch.zeros(1, dtype=torch.int64)
    outs = [torch.zeros(numel), torch.zeros(numel)]
    one.read(3 * before, outs[0])
    one.publish(1, [value])
    one.read_many([3 * before + 2, 3 * rank + 1], [outs[1], own])
    assert all(out.eq(number * 10 + before).all() for out in outs)
    assert int(own) == number
    one.done()


def items(rank: int, world_size: int, fault: Fault) -> None:
    """Exchange them. The place: in front of the first large round, for which memory has to grow."""
    config = RuntimeConfig.from_environment()
    with ItemExchange.create(ProcessGroupExchange(), ["outputs"], config, capacity_bytes=1 << 12) as exchange:
        for number in itertools.count(1):
            fault.come_to("growth", rank, number)
            a_round(exchange, rank, world_size, number, LARGE if fault.where == "growth" and number > 1 else NUMEL)


# Reinforcement learning


def rollouts(rank: int, world_size: int, fault: Fault) -> None:
    """Each step rank 0 makes most of the tokens, so that rollouts change ranks. The places are the phases of a step."""

    class Watched(Meeting):
        def all_to_all(self, *args: object) -> torch.Tensor:
            fault.come_to("exchange", rank, step)
            return super().all_to_all(*args)  # type: ignore[arg-type]

    odc.balance.data.batch.Meeting = odc.balance.rearrange.exchange.Meeting = Watched  # type: ignore[misc]
    model, session, optimizer = start(world_size, num_blocks=1)
    with session:
        for step in itertools.count():
            sizes = [9, 7, 8, 6] if rank == 0 else [2]
            made = [{"ids": torch.arange(size)[None] % 17} for size in sizes]
            fault.come_to("generation", rank, step)
            batch = balance_batch(made, sizes, cost=LinearCost(), max_tokens=9)
            with torch.no_grad():
                for sample in batch.samples:
                    fault.come_to("log-probabilities", rank, step)
                    sample["reference"] = loss_of(model, sample["ids"])
            with session.minibatch():
                for sample in batch.samples:
                    loss_of(model, sample["ids"]).backward()
                    fault.come_to("training", rank, step)
            fault.come_to("step", rank, step)
            use_up(optimizer)
