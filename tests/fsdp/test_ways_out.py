"""Layer 3: ranks as processes. Every way from final gradients to the next minibatch, beside whatever a script does next
on another rank.

A rank that has final gradients waits for nobody until it has used them, kept them or thrown them away; nobody waits for
it meanwhile, wherever it waits itself: for a collective of the script, that the others come to behind their forward.
"""

from __future__ import annotations

import fcntl
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_ranks import assert_one_says, run_ranks, start_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from training import (
    build,
    evaluated,
    full_parameters,
    largest_difference,
    loss_of,
    multiply,
    shard,
    sharded_by,
    tokens,
    use_up,
)

import odc

STEPS = 3


class Loop:
    """A training loop on one rank; ``patched``: under ODC, where ranks may be idle and evaluate alone."""

    def __init__(self, rank: int, world_size: int, fsdp: int, way: str, patched: bool) -> None:
        self.rank, self.fsdp, self.way, self.patched = rank, fsdp, way, patched
        net = build(num_blocks=1)
        self.model = sharded_by(f"fsdp{fsdp}", net, world_size)
        self.session = odc.patch_fsdp(self.model) if patched else None
        named = list(self.model.named_parameters())
        of_head = [p for name, p in named if "head" in name or "embed" in name]
        rest = [p for _, p in named if all(p is not one for one in of_head)]
        groups = [of_head, rest] if way == "one of two optimizers" else [of_head + rest]
        self.optimizers = [torch.optim.AdamW(group, lr=3e-3, fused=True) for group in groups]

    def backward(self, step: int, idle: bool) -> torch.Tensor:
        if idle and self.patched:
            return torch.zeros(())
        loss = loss_of(self.model, tokens(step, self.rank, 0))
        (loss * (0.0 if idle else 1.0)).backward()
        return loss.detach()

    def clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def step_and_clear(loop: Loop, before_clearing: Callable[[], None]) -> None:
    loop.step()
    before_clearing()
    loop.clear()


def clear_model(loop: Loop, before_clearing: Callable[[], None]) -> None:
    loop.model.zero_grad()
    before_clearing()


def clear_in_place(loop: Loop, before_clearing: Callable[[], None]) -> None:
    for optimizer in loop.optimizers:
        optimizer.zero_grad(set_to_none=False)
    before_clearing()


def clear_by_hand(loop: Loop, before_clearing: Callable[[], None]) -> None:
    for parameter in loop.model.parameters():
        parameter.grad = None
    before_clearing()


def keep(loop: Loop, before_clearing: Callable[[], None]) -> None:
    """To add to them in the next iteration."""


def step_one(loop: Loop, before_clearing: Callable[[], None]) -> None:
    loop.optimizers[0].step()
    before_clearing()
    loop.clear()


def load(loop: Loop, before_clearing: Callable[[], None]) -> None:
    state = {name: value.detach().clone() for name, value in loop.model.state_dict().items()}
    loop.step()
    loop.clear()
    loop.model.load_state_dict(state)
    before_clearing()


def publish(loop: Loop, before_clearing: Callable[[], None]) -> None:
    loop.step()
    loop.clear()
    multiply(loop.model, 0.99)
    if loop.session is not None:
        loop.session.publish()
    before_clearing()


WAYS: dict[str, Callable[[Loop, Callable[[], None]], None]] = {
    "a step": step_and_clear,
    "cleared by the model": clear_model,
    "cleared in place": clear_in_place,
    "cleared by hand": clear_by_hand,
    "kept": keep,
    "one of two optimizers": step_one,
    "loaded": load,
    "published": publish,
}


def run(loop: Loop, following: str) -> dict[str, Any]:
    """``following``: what a rank does next that the other one does not: it is "idle", or "evaluates". Or both evaluate,
    "between" clipping and step, and one is idle: which changes nothing. (Plain FSDP, 1 and 2, computes its next forward
    with the root's parameters of before that step.)"""

    def alone() -> None:
        if following == "evaluates" and loop.patched:
            if loop.rank == 0:
                evaluated(loop.model)
            dist.barrier()

    for step in range(STEPS):
        idle = following in ("idle", "between") and loop.rank == step % 2
        loss = loop.backward(step, idle)
        dist.all_reduce(loss)  # for the log
        clip_grad_norm_(loop.model.parameters(), 0.5)
        if following == "between" and loop.patched:
            evaluated(loop.model)
        if step % 3 == 2:
            step_and_clear(loop, alone)
        else:
            WAYS[loop.way](loop, alone)
    if loop.session is not None:
        loop.session.close()
    if loop.fsdp == 1:
        return full_parameters(loop.model)
    sharded: list[Any] = [p for optimizer in loop.optimizers for p in optimizer.param_groups[0]["params"]]
    return {str(i): p.full_tensor().detach() for i, p in enumerate(sharded)}  # those of the model may be full ones


def compared(rank: int, world_size: int, cases: Sequence[tuple[str, int]]) -> dict[tuple[str, int], dict[str, float]]:
    found: dict[tuple[str, int], dict[str, float]] = {case: {} for case in cases}
    for way, fsdp in cases:
        # Behind an evaluation of all ranks FSDP2's model has full parameters, and who goes by those clears nothing.
        clears_full = fsdp == 2 and way in ("cleared by the model", "cleared by hand")
        for following in ("idle", "evaluates", *(() if clears_full else ("between",))):
            plain, loop = (Loop(rank, world_size, fsdp, way, patched) for patched in (False, True))
            expected = run(plain, following)
            found[way, fsdp][following] = largest_difference(run(loop, following), expected)
    return found


EVERY_RUN = (*((way, 2) for way in WAYS), ("a step", 1), ("kept", 1))
FURTHER = tuple((way, 1) for way in WAYS if (way, 1) not in EVERY_RUN)


@functools.cache
def found(cases: Sequence[tuple[str, int]]) -> list[dict[tuple[str, int], dict[str, float]]]:
    return run_ranks(2, compared, cases, env={"ODC_TIMEOUT": "15"}, timeout_s=200)


@pytest.mark.parametrize(
    ("way", "fsdp"),
    [*EVERY_RUN, *(pytest.param(*case, marks=pytest.mark.extended) for case in FURTHER)],
)
def test_nobody_waits_for_a_rank_on_its_way(way: str, fsdp: int) -> None:
    for of_rank in found(EVERY_RUN if (way, fsdp) in EVERY_RUN else FURTHER):
        assert max(of_rank[way, fsdp].values()) < 1e-5, of_rank


def evaluates_on_one_rank(rank: int, world_size: int) -> None:
    model = shard(build(num_blocks=1), world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with odc.patch_fsdp(model):
        for step in range(2):
            loss_of(model, tokens(step, rank, 0)).backward()
            clip_grad_norm_(model.parameters(), 0.5)
            if rank == 0:
                evaluated(model)
            use_up(optimizer)


def test_one_rank_that_evaluates_between_clipping_and_step_is_named() -> None:
    results = start_ranks(2, evaluates_on_one_rank, env={"ODC_TIMEOUT": "15"}).join(60)
    assert_one_says(
        results,
        "ProtocolError",
        "rank 0 has used the model (an evaluation, a checkpoint) between the end",
        "evaluate inside the minibatch, or after optimizer.step()",
    )


def changed_on_one_rank(rank: int, world_size: int, publishes: bool) -> None:
    model = shard(build(num_blocks=1), world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with odc.patch_fsdp(model) as session:
        loss_of(model, tokens(0, rank, 0)).backward()
        session.finish()
        if rank == 1:
            multiply(model, 0.5)
        if publishes:
            evaluated(model)
            session.publish()
        loss_of(model, tokens(1, rank, 0)).backward()
        optimizer.step()


@pytest.mark.parametrize("publishes", [False, True])
def test_parameters_changed_by_hand_on_one_rank_only_get_into_no_step(publishes: bool) -> None:
    results = start_ranks(2, changed_on_one_rank, publishes, env={"ODC_TIMEOUT": "15"}).join(60)
    assert_one_says(
        results,
        "ProtocolError",
        "rank 1 has changed parameters by hand before minibatch 2, rank 0 has not",
        "call odc.session_of(model).publish() on every rank",
    )


def loss_of_rank_1(model: nn.Module, session: odc.Session, rank: int) -> float:
    """Of a minibatch in which rank 0, which was first, perhaps, is idle; as all know it."""
    loss = torch.zeros(())
    if rank:
        loss = loss_of(model, tokens(0, rank, 0))
        loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss)
    session.finish()
    return float(loss)


def change_on_one_rank(rank: int, world_size: int, fsdp: int) -> None:
    net = build(num_blocks=1)
    model = sharded_by(f"fsdp{fsdp}", net, world_size)
    with odc.patch_fsdp(model) as session:
        if fsdp == 1:
            net.head.bias.data.mul_(0.5)  # it lies on rank 1, and nothing tells of it on rank 0
        elif rank == 0:
            model.load_state_dict(model.state_dict())
        loss_of(model, tokens(0, 0, 0)).backward()
        session.finish()


@pytest.mark.parametrize("fsdp", [1, 2])
def test_to_load_or_change_on_one_rank_alone_is_an_error_by_name(fsdp: int) -> None:
    results = start_ranks(2, change_on_one_rank, fsdp, env={"ODC_TIMEOUT": "15"}).join(60)
    assert_one_says(
        results,
        "ProtocolError",
        "the ranks have ended minibatch 1 in different ways",
        "where that changes nothing on some (through .data, of a parameter that",
    )


def wait_in_vain(rank: int, world_size: int) -> None:
    model = shard(build(num_blocks=1), world_size)
    with odc.patch_fsdp(model) as session:
        if rank == 1:
            dist.barrier()
        session.finish()


def test_who_waits_in_a_collective_of_the_script_is_said_to() -> None:
    results = start_ranks(2, wait_in_vain, env={"ODC_TIMEOUT": "600"}).join(60)
    said = [result.error or "" for result in results]
    assert any("in a collective of the script, to which all ranks have to come" in text for text in said), said


def step_by_hand(rank: int, world_size: int, patched: bool) -> list[float]:
    """Of the only parameter that is trained rank 1 has no part, and sees no change of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1, bias=False))
    model[0].requires_grad_(False)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    with odc.patch_fsdp(model) if patched else nullcontext() as session:
        weight, losses = model[1].weight, []
        for step in range(4):
            data = torch.full((2, 4), 1.0 + step + rank)
            model(data).square().sum().backward()
            weight.data.add_(weight.grad, alpha=-0.001)
            weight.grad = None
            with torch.no_grad():
                losses.append(float(model(data).sum()))
            if session is not None:
                session.publish()
    return losses


def stepped_by_hand(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    return step_by_hand(rank, world_size, False), step_by_hand(rank, world_size, True)


def test_a_rank_without_a_part_sees_what_others_change_by_hand() -> None:
    for plain, ours in run_ranks(2, stepped_by_hand, env={"ODC_TIMEOUT": "15"}, timeout_s=60):
        assert ours == pytest.approx(plain, rel=1e-5)


def load_under_a_lock(rank: int, world_size: int, path: str) -> float:
    model = shard(build(num_blocks=1), world_size)
    with odc.patch_fsdp(model) as session:
        state = {name: value.detach() * 0.5 for name, value in model.state_dict().items()}
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            model.load_state_dict(state)
        return loss_of_rank_1(model, session, rank)


def load_in_turn(rank: int, world_size: int, path: str) -> float:
    """As scripts do whose hosts have memory for one checkpoint at a time."""
    model = shard(build(num_blocks=1), world_size)
    with odc.patch_fsdp(model) as session:
        state = {name: value.detach() * 0.5 for name, value in model.state_dict().items()}
        for one in range(world_size):
            if one == rank:
                model.load_state_dict(state)
            dist.barrier()
        return loss_of_rank_1(model, session, rank)


@pytest.mark.parametrize("loads", [load_under_a_lock, load_in_turn])
def test_a_rank_that_has_loaded_first_may_be_idle_next(loads: Callable[[int, int, str], float], tmp_path: Path) -> None:
    halved = build(num_blocks=1)
    multiply(halved, 0.5)
    expected = float(loss_of(halved, tokens(0, 1, 0)).detach())
    found = run_ranks(2, loads, str(tmp_path / "lock"), env={"ODC_TIMEOUT": "20"}, timeout_s=60)
    assert found == pytest.approx([expected] * 2)
