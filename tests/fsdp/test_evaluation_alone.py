"""Layer 3: ranks as processes. One rank alone evaluates, which FSDP2 leaves with full parameters in its root."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from fsdp_scripts.run import full
from process_ranks import found_by
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from training import build, evaluated, largest_difference, loss_of, optimizer_of, shard, tokens, use_up

import odc

CLIPS: dict[str, Callable[..., Any]] = {"norm": clip_grad_norm_, "value": clip_grad_value_}


def train(rank: int, world_size: int, evaluates: Callable[[int], str], clip: str, patched: bool = True) -> Any:
    """``evaluates``: where a rank does, "inside" the minibatch or "behind" the step."""
    model = shard(build(), world_size)
    with odc.patch_fsdp(model) if patched else nullcontext():
        optimizer = optimizer_of(model)
        for step in range(4):
            loss_of(model, tokens(step, rank, 0)).backward()
            if evaluates(rank) == "inside":
                evaluated(model)
            CLIPS[clip](model.parameters(), 0.3)
            optimizer.step()
            if evaluates(rank) == "behind":
                evaluated(model)
            model.zero_grad()
    sharded: list[Any] = optimizer.param_groups[0]["params"]  # plain FSDP2 has left full ones in the model
    return {str(i): p.full_tensor().detach() for i, p in enumerate(sharded)}


def alone(rank: int, world_size: int) -> dict[tuple[str, str], float]:
    found = {}
    for where, clip in itertools.product(("inside", "behind"), CLIPS):
        expected = train(rank, world_size, lambda _: "never", clip)
        ours = train(rank, world_size, lambda r, where=where: where if r == 0 else "never", clip)  # type: ignore[misc]
        found[where, clip] = largest_difference(ours, expected)
    return found


def test_one_rank_that_evaluates_changes_nothing() -> None:
    for found in found_by(alone, TOGETHER):
        assert max(found.values()) < 1e-6, found


def together(rank: int, world_size: int) -> list[float]:
    """How far patched and plain ranks are from those that do not evaluate, inside and behind."""
    expected = train(rank, world_size, lambda _: "never", "norm")
    return [
        largest_difference(train(rank, world_size, lambda _, where=where: where, "norm", patched), expected)  # type: ignore[misc]
        for where in ("inside", "behind")
        for patched in (True, False)
    ]


def test_the_evaluations_of_all_ranks_change_nothing() -> None:
    """Plain FSDP2 neither clips the root nor clears its gradients then."""
    for ours_inside, plain_inside, ours_behind, plain_behind in found_by(together, TOGETHER):
        assert max(ours_inside, ours_behind) < 1e-6
        assert min(plain_inside, plain_behind) > 1e-4  # else docs/loops.md is out of date


def clearing_another_model(rank: int, world_size: int, patched: bool = True) -> Any:
    """Gradients are used by hand, all ranks evaluate behind the step, and rank 0 clears a model of its own then."""
    model, other = shard(build(num_blocks=1), world_size), nn.Linear(2, 2)
    with odc.patch_fsdp(model) if patched else nullcontext():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        parameters = list(model.parameters())
        for step in range(4):
            loss_of(model, tokens(step, rank, 0)).backward()
            for parameter in parameters:
                parameter.grad.mul_(0.25)
            optimizer.step()
            evaluated(model)
            if rank == 0:
                other.zero_grad()
    return {str(i): p.full_tensor().detach() for i, p in enumerate(parameters)}  # type: ignore[attr-defined]


def compared(rank: int, world_size: int) -> float:
    plain, ours = (clearing_another_model(rank, world_size, patched) for patched in (False, True))
    return largest_difference(ours, plain)


def test_to_clear_another_model_clears_nothing_here() -> None:
    assert max(found_by(compared, TOGETHER)) < 1e-6


def before_the_step(model: nn.Module, ranks: list[int]) -> dict[str, torch.Tensor]:
    """All ranks evaluate between backward and step, behind which plain FSDP2 keeps the root of before it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        for rank in ranks:
            (loss_of(model, tokens(step, rank, 0)) * (0.02 / len(ranks))).backward()
        evaluated(model)
        use_up(optimizer)
    if isinstance(model, FSDPModule):
        model.reshard()
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def beside_one_process(rank: int, world_size: int) -> tuple[float, float]:
    """How far patched and plain ranks are from one process."""
    expected = before_the_step(build(torch.float64), [0, 1])
    plain = before_the_step(shard(build(), world_size), [rank])
    model = shard(build(), world_size)
    with odc.patch_fsdp(model):
        ours = before_the_step(model, [rank])
    return largest_difference(ours, expected), largest_difference(plain, expected)


def test_an_evaluation_before_the_step_leaves_no_stale_root() -> None:
    ours, plain = found_by(beside_one_process, TOGETHER)[0]
    assert ours < 1e-6
    assert plain > 1e-4  # else docs/loops.md is out of date


TOGETHER = (alone, together, compared, beside_one_process)
