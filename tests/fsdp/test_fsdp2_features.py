"""Layer 3: ranks as processes. Options and habits of FSDP2 scripts that must keep working under ODC, in
place and staged.

What is only of one way, or the same either way, runs once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from process_ranks import assert_all_say, found_by, start_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from training import (
    BOTH,
    build,
    communicating,
    each_way,
    evaluated,
    full_parameters,
    largest_difference,
    loss_of,
    num_tokens,
    optimizer_of,
    reference,
    shard,
    sharded_by,
    start,
    tokens,
    train,
    use_up,
)

import odc
from odc.fsdp_patch.fsdp2_param import reaches_optimizer

COUNTS = [2, 1]
STEPS = 3

Script = Callable[..., dict[str, Any]]
SESSIONS: list[odc.Session] = []


def patched(model: Any, use_odc: bool) -> odc.Session | None:
    """A session of the script that runs now; it is closed after the script."""
    if use_odc:
        SESSIONS.append(odc.patch_fsdp(model))
    return SESSIONS[-1] if use_odc else None


Differences = dict[str, dict[str, float]]


def ways_of(name: str) -> Sequence[str]:
    """Staged are those whose units are unlike others; the rest are with ``-m extended``, in test_fsdp2_scripts.py."""
    return BOTH if name in (*OPTIONS, "with_frozen", "never_used") else BOTH[:1]


def differences(rank: int, world_size: int) -> Differences:
    """Largest parameter difference between each script patched, either way, and not; equal counts, so both can run."""
    found = dict[str, dict[str, float]]()
    for name, script in SCRIPTS.items():
        theirs = script(rank, world_size, False)
        for way in ways_of(name):
            with communicating(way):
                ours = script(rank, world_size, True)
                assert SESSIONS, name
                while SESSIONS:
                    session = SESSIONS.pop()
                    assert session.stats().pushes > 0, name
                    session.close()
            found.setdefault(name, {})[way] = largest_difference(ours, theirs)
    return found


@pytest.fixture(scope="module")
def found() -> Differences:
    return found_by(differences, TOGETHER)[0]  # type: ignore[no-any-return]


def check(found: Differences, name: str, tolerance: float = 1e-5) -> None:
    assert tuple(found[name]) == tuple(ways_of(name))
    assert max(found[name].values()) < tolerance, found[name]


def with_options(rank: int, world_size: int, use_odc: bool, **options: Any) -> dict[str, Any]:
    model = shard(build(width=12), world_size, **options)
    train(model, patched(model, use_odc), rank, world_size, [2] * world_size, STEPS)
    return full_parameters(model)


def shard_matrices_on_dim_1(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 2 == 0 else None


OPTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "bf16-compute": ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, 1e-5),
    # FSDP sums bf16 here, ODC accumulates the bf16 pushes in float32: ours is the more exact one.
    "bf16-compute-and-wire": ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}, 2e-2),
    "no-reshard": ({"reshard_after_forward": False}, 1e-5),
    "dim-1": ({"shard_placement_fn": shard_matrices_on_dim_1}, 1e-5),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_fully_shard(name: str, found: Differences) -> None:
    check(found, name, OPTIONS[name][1])


def wire_bytes(rank: int, world_size: int) -> list[int]:
    """Each way with bf16 and with fp32."""
    found = []
    for way, dtype in itertools.product(BOTH, (torch.bfloat16, torch.float32)):
        model = shard(build(), world_size, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
        with communicating(way), odc.patch_fsdp(model) as session:
            train(model, session, rank, world_size, [1, 1], 1)
            found.append(session.stats().gather_bytes)
    return found


def test_the_wire_carries_the_compute_dtype() -> None:
    bf16, fp32, *staged = found_by(wire_bytes, TOGETHER)[0]
    assert bf16 * 2 == fp32
    assert staged == [bf16, fp32]


def with_frozen(rank: int, world_size: int, use_odc: bool) -> dict[str, Any]:
    model = build()
    model.blocks[0].requires_grad_(False)  # a whole unit
    model.blocks[1].up.requires_grad_(False)  # a part of a unit
    model = shard(model, world_size)
    session = patched(model, use_odc)
    train(model, session, rank, world_size, [2] * world_size, STEPS)
    assert model.blocks[0].up.weight.grad is None
    return full_parameters(model)


def test_frozen_parameters(found: Differences) -> None:
    check(found, "with_frozen")


def never_used(rank: int, world_size: int, use_odc: bool) -> dict[str, Any]:
    """A whole unit, and a parameter of one that is used."""
    model = build()
    model.blocks[0].extra = nn.Parameter(torch.ones(6))
    model = shard(model, world_size)
    session = patched(model, use_odc)
    train(model, session, rank, world_size, [1] * world_size, STEPS, lambda step, r, m: {"skip": [1]})
    return full_parameters(model)


def test_what_nobody_uses_keeps_grad_none_so_that_weight_decay_skips_it(found: Differences) -> None:
    check(found, "never_used")


def no_sync(rank: int, world_size: int, use_odc: bool) -> dict[str, Any]:
    model = shard(build(), world_size)
    session = patched(model, use_odc)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        with session.minibatch() if session else torch.enable_grad():
            for m in range(3):
                model.set_requires_gradient_sync(m == 2)
                (loss_of(model, tokens(step, rank, m)) / 100).backward()
        use_up(optimizer)
    if session:
        assert session.stats().pushes == STEPS * 3  # one per unit and minibatch, not per microbatch
    return full_parameters(model)


def test_gradient_accumulation_without_sync(found: Differences) -> None:
    check(found, "no_sync")


Evaluated = dict[tuple[str, bool], dict[str, Any]]


def with_evaluations(rank: int, world_size: int) -> Evaluated:
    """By way, and whether one rank evaluates alone."""
    found = {}
    for way, lonely in itertools.product(BOTH, (False, True)):
        with communicating(way):
            found[way, lonely] = with_evaluation(rank, world_size, lonely)
    return found


def with_evaluation(rank: int, world_size: int, lonely: bool) -> dict[str, Any]:
    """Evaluation under no_grad inside and between minibatches, on all ranks or on one alone."""
    model, session, optimizer = start(world_size)
    for step in range(STEPS):
        evaluates = not lonely or rank == step % world_size
        scale = world_size / num_tokens(step, COUNTS)
        with session.minibatch():
            for m in range(COUNTS[rank]):
                (loss_of(model, tokens(step, rank, m)) * scale).backward()
                if evaluates:
                    assert torch.isfinite(evaluated(model, reshards=True))
        use_up(optimizer, model)
        if evaluates:
            assert torch.isfinite(evaluated(model, reshards=True))
    session.close()
    return full_parameters(model)


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("lonely", [False, True])
def test_evaluation_inside_and_between_minibatches(lonely: bool, way: str) -> None:
    found = found_by(with_evaluations, TOGETHER)[0]
    assert largest_difference(found[way, lonely], reference(COUNTS, STEPS)) < 1e-5


def two_optimizers(rank: int, world_size: int, use_odc: bool) -> dict[str, Any]:
    """Matrices by one optimizer, the rest by another, with an evaluation after both."""
    model = shard(build(), world_size)
    session = patched(model, use_odc)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [torch.optim.SGD(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-3)]
    for step in range(STEPS):
        with session.minibatch() if session else torch.enable_grad():
            (loss_of(model, tokens(step, rank, 0)) / 50).backward()
        for optimizer in optimizers:
            use_up(optimizer)
        assert torch.isfinite(evaluated(model, reshards=True))
    assert session is None or session.stats().minibatches == STEPS  # one synchronization for both
    return full_parameters(model)


def test_two_optimizers_publish_once_both_have_stepped(found: Differences) -> None:
    check(found, "two_optimizers")


def close_and_go_on(rank: int, world_size: int, use_odc: bool) -> dict[str, Any]:
    model = shard(build(), world_size)
    before = collectives_of(model)
    for _ in range(2):
        session = patched(model, use_odc)
        train(model, session, rank, world_size, [2] * world_size, 3)
        if session:
            session.close()
            session.close()
            with pytest.raises(odc.OdcError, match="session is closed"):
                session.finish()
    assert collectives_of(model) == before
    assert not any("post_backward" in vars(m._get_fsdp_state()._fsdp_param_group) for _, m in fsdp_modules(model))
    train(model, None, rank, world_size, [2] * world_size, 3)
    return full_parameters(model)


def collectives_of(model: nn.Module) -> dict[str, type]:
    return {
        name: type(module._get_fsdp_state()._fsdp_param_group._all_gather_comm) for name, module in fsdp_modules(model)
    }


def fsdp_modules(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "set_custom_all_gather")]


def test_a_closed_session_leaves_plain_fsdp2_and_can_be_opened_again(found: Differences) -> None:
    check(found, "close_and_go_on")


SCRIPTS: dict[str, Script] = {
    **{name: functools.partial(with_options, **options) for name, (options, _) in OPTIONS.items()},
    **{script.__name__: script for script in (*(with_frozen, never_used, no_sync, two_optimizers, close_and_go_on),)},
}


def in_float64(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    """Uneven; without clipping: FSDP1's own takes norms in float32, torch's takes those of this rank's part."""
    net = build(torch.float64, num_blocks=1)
    model = sharded_by(kind, net, world_size)
    with odc.patch_fsdp(model):
        train(model, None, rank, world_size, COUNTS, STEPS, clips=False)
    return full_parameters(model)


def in_float64_each(rank: int, world_size: int) -> list[dict[str, Any]]:
    return [in_float64(rank, world_size, kind) for kind in ("fsdp1", "fsdp2")]


def test_gradients_in_float64_are_summed_in_float64() -> None:
    for ours in found_by(in_float64_each, TOGETHER)[0]:
        assert largest_difference(ours, reference(COUNTS, STEPS, clips=False, num_blocks=1)) < 1e-12


def hooks_that_look(rank: int, world_size: int, use_odc: bool) -> list[float]:
    """Norms as a hook finds them. Rank 1 has no microbatch in some iterations, one of weight zero under plain FSDP2."""
    found = []
    model = shard(build(num_blocks=1), world_size)
    for parameter in model.parameters():  # of the unit that pushes first, too
        parameter.register_post_accumulate_grad_hook(lambda p: found.append(float(p.grad.full_tensor().norm())))
    with odc.patch_fsdp(model) if use_odc else nullcontext():
        optimizer = optimizer_of(model)
        for step in range(STEPS):
            idle = rank == 1 and step % 2 == 1
            if not (idle and use_odc):
                (loss_of(model, tokens(step, rank, 0)) * (0.0 if idle else 1.0)).backward()
            use_up(optimizer, model)
    return found


def looked(rank: int, world_size: int) -> list[list[float]]:
    return [hooks_that_look(rank, world_size, False), *each_way(BOTH, hooks_that_look, rank, world_size, True)]


def test_hooks_behind_accumulation_find_what_is_final() -> None:
    for theirs, *ours in found_by(looked, TOGETHER):
        for norms in ours:
            assert len(norms) == len(theirs) > STEPS
            assert sorted(norms) == pytest.approx(sorted(theirs), rel=1e-5)


TOGETHER = (differences, wire_bytes, with_evaluations, in_float64_each, looked)


class Hidden:
    """Where nobody looks for an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.deep = [[[[[optimizer]]]]]

    def step(self, parameter: torch.Tensor) -> None:
        self.deep[0][0][0][0][0].step()


def steps_in_a_hook(rank: int, world_size: int) -> None:
    model = shard(build(num_blocks=1), world_size)
    hidden = Hidden(torch.optim.SGD([model.head.weight], lr=0.1))
    model.head.weight.register_post_accumulate_grad_hook(hidden.step)
    with odc.patch_fsdp(model) as session:
        loss_of(model, tokens(0, rank, 0)).backward()
        session.finish()


def test_a_step_in_a_hook_is_refused() -> None:
    assert_all_say(start_ranks(2, steps_in_a_hook).join(60), "optimizer in backward", kinds=["UnsupportedError"])


def test_where_a_hook_may_have_its_optimizer() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    norms: list[float] = []

    class Owner:
        def __init__(self) -> None:
            self.optimizer = optimizer

        def hook(self, p: torch.Tensor) -> None:
            self.optimizer.step()

    def with_default(p: torch.Tensor, *, steps: tuple[Any, ...] = (optimizer,)) -> None: ...

    assert reaches_optimizer(lambda p: optimizer.step())
    assert reaches_optimizer(Owner().hook)
    assert reaches_optimizer(with_default)
    assert reaches_optimizer(functools.partial(print, optimizer))
    assert not reaches_optimizer(lambda p: norms.append(float(torch.norm(p.grad))))
    assert not reaches_optimizer(print)
