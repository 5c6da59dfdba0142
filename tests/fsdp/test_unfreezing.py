"""Layer 3: ranks as processes. Parameters that were frozen when the model was patched, and are trained later: gradual
unfreezing, a discriminator that is frozen first. Nothing is kept for those that stay frozen."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
from process_ranks import assert_one_says, found_by, start_ranks
from torch.nn.utils import clip_grad_norm_
from training import (
    build,
    full_parameters,
    largest_difference,
    loss_of,
    optimizer_of,
    shard,
    sharded_by,
    tokens,
    use_up,
)

import odc

UNFROZEN = {2: ("blocks.1.",), 4: ("embed.",)}
"""By the iteration before which they are."""


def train(rank: int, world_size: int, fsdp: int, idle: bool, how: str, patched: bool) -> tuple[Any, Any]:
    """``idle``: rank 1 has no microbatch where parameters are unfrozen."""
    net = build()
    net.blocks[1].up.weight.requires_grad_(False)
    if fsdp == 2:  # FSDP1 does not train a flat parameter that was frozen as a whole
        net.blocks[1].requires_grad_(False)
        net.embed.requires_grad_(False)
    model = sharded_by(f"fsdp{fsdp}", net, world_size)
    with odc.patch_fsdp(model) if patched else nullcontext() as session:
        optimizer = optimizer_of(model)
        parameters = list(model.parameters())
        for step in range(6):
            for name, parameter in model.named_parameters():
                if any(part in name for part in UNFROZEN.get(step, ())):
                    parameter.requires_grad_(True)
            is_idle = idle and rank == 1 and step in UNFROZEN
            with session.minibatch() if "block" in how and session is not None else nullcontext():
                if not (is_idle and patched):
                    (loss_of(model, tokens(step, rank, 0)) * (0.0 if is_idle else 0.05)).backward()
            if how == "clipping":
                clip_grad_norm_(parameters, 0.5)
            if how == "by unit" and patched:
                odc.step_by_unit(model, optimizer)
            else:
                use_up(optimizer)
        counts = session.stats() if session is not None else None
    if fsdp == 1:
        return full_parameters(model), counts
    return {str(i): p.full_tensor().detach() for i, p in enumerate(parameters)}, counts


def compared(rank: int, world_size: int) -> dict[tuple[str, int], tuple[float, int]]:
    found = {}
    for how, fsdp in CASES:
        expected, _ = train(rank, world_size, fsdp, how != "block", how, False)
        ours, counts = train(rank, world_size, fsdp, how != "block", how, True)
        found[how, fsdp] = largest_difference(ours, expected), counts.minibatches
    return found


CASES = [(how, fsdp) for how in ("clipping", "step", "by unit", "block", "idle in a block") for fsdp in (1, 2)]
"""What uses the gradients, and whether a rank is idle: it is, but in a block."""


@pytest.mark.parametrize(("how", "fsdp"), CASES)
def test_what_is_unfrozen_is_trained(how: str, fsdp: int) -> None:
    for of_rank in found_by(compared, (compared, in_turn)):
        difference, minibatches = of_rank[how, fsdp]
        assert difference < 1e-5
        assert minibatches == 6  # of all that was patched, one after the other


def unfrozen_beside_an_exchange(rank: int, world_size: int) -> None:
    model = build(num_blocks=1)
    model.head.requires_grad_(False)
    model = shard(model, world_size)
    with odc.patch_fsdp(model) as session, session.exchange_items(["images"], capacity_bytes=64):
        model.head.requires_grad_(True)
        loss_of(model, tokens(0, rank, 0))


def test_beside_an_exchange_of_items_it_is_refused() -> None:
    results = start_ranks(2, unfrozen_beside_an_exchange, env={"ODC_TIMEOUT": "20"}).join(60)
    assert_one_says(results, "UnsupportedError", "set requires_grad before patch_fsdp")


def unfrozen_on_one_rank(rank: int, world_size: int) -> None:
    model = build(num_blocks=1)
    model.head.requires_grad_(False)
    model = shard(model, world_size)
    with odc.patch_fsdp(model):
        if rank == 0:
            model.head.requires_grad_(True)
        for step in range(2):
            loss_of(model, tokens(step, rank, 0)).backward()
            clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.5)


def test_what_one_rank_alone_unfreezes_does_not_pass_in_silence() -> None:
    results = start_ranks(2, unfrozen_on_one_rank, env={"ODC_TIMEOUT": "10"}).join(90)
    assert all(result.error for result in results), results


def frozen_in_turn(rank: int, world_size: int, fsdp: int, patched: bool) -> tuple[Any, int]:
    """As the parts of a GAN: the biases first, the rest frozen, then the other way round."""
    net = build(num_blocks=1)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("bias" in name)
    model, runtimes = sharded_by(f"fsdp{fsdp}", net, world_size), set()
    with odc.patch_fsdp(model) if patched else nullcontext() as session:
        optimizer = optimizer_of(model)
        for step in range(6):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(("bias" in name) == (step % 2 == 0))
            loss_of(model, tokens(step, rank, 0)).backward()
            use_up(optimizer)
            if session is not None:
                runtimes.add(session._runtime)  # kept, or another one could have its address
    return full_parameters(model), len(runtimes)


def in_turn(rank: int, world_size: int) -> list[tuple[float, int]]:
    results = []
    for fsdp in (1, 2):
        (expected, _), (found, runtimes) = (
            frozen_in_turn(rank, world_size, fsdp, patched) for patched in (False, True)
        )
        results.append((largest_difference(found, expected), runtimes))
    return results


def test_what_is_frozen_in_turn_is_patched_anew_once() -> None:
    for difference, runtimes in itertools.chain(*found_by(in_turn, (compared, in_turn))):
        assert difference < 1e-5
        assert runtimes == 2


def unfrozen_and_used_by_hand(rank: int, world_size: int) -> None:
    model = build(num_blocks=1)
    model.head.requires_grad_(False)
    model = shard(model, world_size)
    optimizer = optimizer_of(model)
    odc.patch_fsdp(model)
    for step in range(3):
        if step == 2:
            model.requires_grad_(True)
        if rank == 0 or step != 2:
            loss_of(model, tokens(step, rank, 0)).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        total = sum(grad.to_local().pow(2).sum() for grad in grads)  # type: ignore[attr-defined]
        for grad in grads:
            grad.mul_(0.1 / float(total))
        use_up(optimizer)


def test_gradients_of_before_used_by_hand_are_refused_where_that_would_patch_anew() -> None:
    results = start_ranks(2, unfrozen_and_used_by_hand, env={"ODC_TIMEOUT": "20"}).join(90)
    assert results[1].error_type == "UnsupportedError"
    assert "call odc.session_of(model).finish() on every rank" in (results[1].error or "")
    assert results[0].error
