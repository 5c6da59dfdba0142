"""Layer 3: ranks as processes. A patched FSDP1 model trains to the numbers of plain FSDP1 and of a float64 process.

Many scripts share one start of the ranks: each runs first as it is, then patched.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from process_ranks import found_by, run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy
from training import (
    TOLERANCE,
    Block,
    Net,
    build,
    full_parameters_of_fsdp1,
    largest_difference,
    loss_of,
    mixed_modules,
    num_tokens,
    optimizer_of,
    reference,
    tokens,
    wrap,
)

import odc

STEPS = 3
FEW_STEPS = 2  # enough where every minibatch ends in an optimizer's step


def as_it_is(model: nn.Module) -> None:
    """Change nothing."""


def freeze(model: Net) -> None:
    model.blocks[1].requires_grad_(False)  # a whole unit
    model.blocks[0].up.requires_grad_(False)  # a part of a unit


def freeze_units(model: Net) -> None:
    model.blocks[1].requires_grad_(False)


def checkpoint_blocks(model: Net, **options: Any) -> None:
    apply_activation_checkpointing(
        model, functools.partial(checkpoint_wrapper, **options), check_fn=lambda m: isinstance(m, Block)
    )


def small_ones_are_replicated(module: nn.Module) -> bool | dict[str, Any]:
    """The head is not worth sharding."""
    if isinstance(module, nn.Linear) and module.out_features == 17:
        return {"sharding_strategy": ShardingStrategy.NO_SHARD}
    return isinstance(module, Block)


@dataclass(frozen=True)
class Case:
    """What one script does unlike the others."""

    options: dict[str, Any] = field(default_factory=dict)  # of FullyShardedDataParallel
    before: Callable[[Any], None] = as_it_is  # the model, before it is wrapped
    after: Callable[[Any], None] = as_it_is  # and afterwards
    forward: dict[str, Any] = field(default_factory=dict)
    no_sync: bool = False
    minibatches_per_step: int = 1
    set_to_none: bool = True
    split_optimizer: bool = False
    evaluates: bool = False
    sgd: bool = False  # Adam makes a full step of a gradient that is rounding only
    tolerance: float = TOLERANCE


SHARD_GRAD_OP = ShardingStrategy.SHARD_GRAD_OP
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# FSDP sums bf16 here, ODC accumulates the bf16 pushes in float32: ours is the more exact one.
BF16_WIRE = MixedPrecision(param_dtype=torch.bfloat16)

CASES: dict[str, Case] = {
    "plain": Case(),
    "shard-grad-op": Case({"sharding_strategy": SHARD_GRAD_OP}),
    "bf16": Case({"mixed_precision": BF16}),
    "bf16-shard-grad-op": Case({"mixed_precision": BF16, "sharding_strategy": SHARD_GRAD_OP}),
    "bf16-wire": Case({"mixed_precision": BF16_WIRE}, sgd=True, tolerance=3e-2),
    "bf16-reduce-only": Case(
        {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)}, sgd=True, tolerance=3e-2
    ),
    "replicated-head": Case({"auto_wrap_policy": CustomPolicy(small_ones_are_replicated)}),
    "bf16-model": Case(before=lambda model: model.to(torch.bfloat16), sgd=True, tolerance=3e-2),
    "bf16-no-input-cast": Case({"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)}),
    "no-sync": Case(no_sync=True),
    "no-sync-shard-grad-op": Case({"sharding_strategy": SHARD_GRAD_OP}, no_sync=True),
    "no-sync-bf16": Case({"mixed_precision": BF16}, no_sync=True),
    "kept-gradients": Case(minibatches_per_step=2),
    "kept-gradients-zeroed-in-place": Case(minibatches_per_step=2, set_to_none=False),
    "zeroed-in-place": Case(set_to_none=False),
    "frozen-units": Case(before=freeze_units),
    "never-used": Case(forward={"skip": [1]}),
    "used-twice": Case(forward={"order": [0, 1, 1]}),
    "used-twice-bf16": Case({"mixed_precision": BF16}, forward={"order": [0, 1, 1]}),
    "backward-post": Case({"backward_prefetch": BackwardPrefetch.BACKWARD_POST}),
    "no-backward-prefetch": Case({"backward_prefetch": None}),
    "forward-prefetch": Case({"forward_prefetch": True}),
    "no-limit": Case({"limit_all_gathers": False}),
    "one-unit": Case({"auto_wrap_policy": None}),
    "checkpointing": Case(before=checkpoint_blocks),
    "checkpointing-around-fsdp": Case(after=checkpoint_blocks),
    "checkpointing-reentrant": Case(
        before=lambda model: checkpoint_blocks(model, checkpoint_impl=CheckpointImpl.REENTRANT)
    ),
    "checkpointing-reentrant-twice": Case(  # FSDP1 reduces such a unit twice in one backward
        before=lambda model: checkpoint_blocks(model, checkpoint_impl=CheckpointImpl.REENTRANT),
        forward={"order": [0, 1, 1]},
    ),
    "evaluates": Case(evaluates=True),
    "evaluates-shard-grad-op": Case({"sharding_strategy": SHARD_GRAD_OP}, evaluates=True),
    "evaluates-bf16": Case({"mixed_precision": BF16}, evaluates=True),
}
ONLY_ORIGINAL = {
    "frozen": Case(before=freeze),
    "two-optimizers": Case(split_optimizer=True),
    "two-optimizers-kept": Case(split_optimizer=True, minibatches_per_step=2),
}
HYBRID = {
    "hybrid": Case({"sharding_strategy": ShardingStrategy.HYBRID_SHARD}),
    "hybrid-zero2": Case({"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2}),
    "hybrid-bf16": Case({"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "mixed_precision": BF16}),
}
ALL = {**CASES, **ONLY_ORIGINAL, **HYBRID}
FURTHER = (
    *("shard-grad-op", "bf16", "no-sync-bf16", "no-sync-shard-grad-op", "kept-gradients", "frozen-units"),
    *("used-twice", "no-backward-prefetch", "no-limit", "checkpointing", "checkpointing-reentrant"),
    *("evaluates", "evaluates-bf16", "two-optimizers"),
)
"""With ``-m extended``: every run has others that do the same and more."""
EVERY_RUN = tuple(name for name in {**CASES, **ONLY_ORIGINAL} if name not in FURTHER)
further = functools.partial(pytest.param, marks=pytest.mark.extended)

Gradients = list[torch.Tensor | None]


def script(
    rank: int, world_size: int, use_odc: bool, case: Case, options: dict[str, Any], transport: str = "auto"
) -> tuple[Gradients, Any]:
    """Train; returns this rank's ``.grad`` after the first minibatch and the parameters in the end."""
    model = build()
    case.before(model)
    model = wrap(model, **{**case.options, **options})
    case.after(model)
    session = odc.patch_fsdp(model, transport=transport) if use_odc else None
    optimizers = optimizers_of(model, case)
    gradients: Gradients = []
    steps = STEPS if case.minibatches_per_step > 1 else FEW_STEPS
    for step in range(steps):
        with session.minibatch() if session else nullcontext():
            for m in range(2):
                with model.no_sync() if case.no_sync and m == 0 else nullcontext():
                    (loss_of(model, tokens(step, rank, m), **case.forward) * 0.02).backward()
        if step == 0:
            gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        if (step + 1) % case.minibatches_per_step == 0:
            model.clip_grad_norm_(0.5)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(case.set_to_none)
            if case.split_optimizer:  # FSDP1 forgets gradients only when all are None
                model.zero_grad(case.set_to_none)
        if case.evaluates:
            model.eval()
            with torch.no_grad():
                loss_of(model, tokens(99, rank, 0))
            model.train()
    if session:
        assert session.stats().minibatches == steps
        assert session.stats().pushes > 0
        session.close()
    return gradients, full_parameters_of_fsdp1(model)


def optimizers_of(model: nn.Module, case: Case) -> list[torch.optim.Optimizer]:
    if not case.split_optimizer:
        return [torch.optim.SGD(model.parameters(), lr=0.1) if case.sgd else optimizer_of(model)]
    named = list(model.named_parameters())
    groups = [[p for name, p in named if name.endswith("weight") == here] for here in (True, False)]
    return [torch.optim.SGD(groups[0], lr=1e-2), torch.optim.AdamW([{"params": groups[1]}], lr=1e-3)]


def differences(
    rank: int, world_size: int, names: list[str], use_orig_params: bool, transport: str = "auto"
) -> dict[str, tuple[float, float]]:
    """Per script: the largest differences of gradients and of parameters between plain and patched.

    Over ``tcp`` every rank poses as a host.
    """
    options: dict[str, Any] = {"use_orig_params": use_orig_params}
    if transport == "tcp":
        os.environ["ODC_HOST_ID"] = f"host-{rank}"
    elif world_size == 4:
        os.environ["ODC_HOST_ID"] = f"host-{rank // 2}"
    if world_size == 4:
        options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = {}
    for name in names:
        theirs = script(rank, world_size, False, ALL[name], options)
        ours = script(rank, world_size, True, ALL[name], options, transport)
        assert [g is None for g in ours[0]] == [g is None for g in theirs[0]], f"{name}: who has a gradient"
        found[name] = (gradient_difference(ours[0], theirs[0]), largest_difference(ours[1], theirs[1]))
    return found


def gradient_difference(ours: Gradients, theirs: Gradients) -> float:
    present = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    scale = max(float(b.abs().max()) for _, b in present if b.numel())
    return max(float((a - b).abs().max()) for a, b in present if b.numel()) / scale


@functools.cache
def differences_of(names: tuple[str, ...], use_orig_params: bool) -> list[dict[str, tuple[float, float]]]:
    return run_ranks(4 if names[0] in HYBRID else 2, differences, list(names), use_orig_params, timeout_s=300)


def check(found: list[dict[str, tuple[float, float]]], name: str) -> None:
    for of_rank in found:
        gradients, parameters = of_rank[name]
        assert gradients < ALL[name].tolerance
        assert parameters < ALL[name].tolerance


@pytest.mark.parametrize(
    ("names", "name"),
    [*((EVERY_RUN, name) for name in EVERY_RUN), *(further(FURTHER, name) for name in FURTHER)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_scripts_train_to_the_numbers_of_plain_fsdp1(names: tuple[str, ...], name: str) -> None:
    check(differences_of(names, True), name)


@pytest.mark.extended
@pytest.mark.parametrize("name", CASES)
def test_scripts_with_flat_parameters(name: str) -> None:
    check(differences_of(tuple(CASES), False), name)


@pytest.mark.parametrize("use_orig_params", [True, further(False)], ids=["orig", "flat"])
@pytest.mark.parametrize("name", HYBRID)
def test_hybrid_sharding_over_two_hosts(name: str, use_orig_params: bool) -> None:
    check(differences_of(tuple(HYBRID), use_orig_params), name)


# Between hosts: FSDP1 frees and allocates the memory that it gathers into, and what has no address comes over a link.

OVER_TCP = [
    *("plain", "shard-grad-op", "bf16", "bf16-wire", "no-sync-bf16", "kept-gradients", "backward-post"),
    *("forward-prefetch", "checkpointing", "evaluates-shard-grad-op"),
]


@pytest.mark.extended
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize(("num_ranks", "names"), [(2, OVER_TCP), (4, list(HYBRID))], ids=["shards", "replicas"])
def test_shards_and_replicas_that_lie_on_several_hosts(num_ranks: int, names: list[str], use_orig_params: bool) -> None:
    found = run_ranks(num_ranks, differences, names, use_orig_params, "tcp", timeout_s=300)
    for name in names:
        check(found, name)


# Unequal numbers of microbatches, which FSDP1 alone cannot run

UNEVEN: list[dict[str, Any]] = [
    {"use_orig_params": False},
    {"sharding_strategy": SHARD_GRAD_OP, "use_orig_params": False, "set_to_none": False},
    {"set_to_none": False},
    {"no_sync": True},
    {"evaluates": True, "use_orig_params": False, "sharding_strategy": SHARD_GRAD_OP},
    {"evaluates": True, "accumulate": "daemon", "deterministic": True},
]


def uneven(
    rank: int,
    world_size: int,
    counts: list[int],
    use_orig_params: bool = True,
    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    set_to_none: bool = True,
    no_sync: bool = False,
    evaluates: bool = False,
    mixed: bool = False,
    **session_options: Any,
) -> dict[str, Any]:
    """A script that says nothing about minibatches: clipping ends them."""
    options: dict[str, Any] = {}
    if sharding_strategy is ShardingStrategy.HYBRID_SHARD:
        os.environ["ODC_HOST_ID"] = f"host-{rank // 2}"
        options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = wrap(build(), use_orig_params=use_orig_params, sharding_strategy=sharding_strategy, **options)
    with odc.patch_fsdp(model, **session_options):
        optimizer = optimizer_of(model)
        for step in range(STEPS):
            scale = world_size / num_tokens(step, counts)
            for m in range(counts[rank]):
                chosen = mixed_modules(step, rank, m) if mixed else {}
                with model.no_sync() if no_sync and m + 1 < counts[rank] else nullcontext():
                    (loss_of(model, tokens(step, rank, m), **chosen) * scale).backward()
            model.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none)
            if evaluates:  # leaves parameters unsharded, which rank 1 never uses again before the next step
                with torch.no_grad():
                    loss_of(model, tokens(99, rank, 0))
    return full_parameters_of_fsdp1(model)


def without_microbatches(rank: int, world_size: int) -> list[dict[str, Any]]:
    return [uneven(rank, world_size, [2, 0], **case) for case in UNEVEN]


@functools.cache
def float64_reference(counts: tuple[int, ...], mixed: bool = False) -> dict[str, torch.Tensor]:
    return reference(counts, STEPS, mixed_modules if mixed else lambda step, rank, m: {})


def test_a_rank_without_microbatches() -> None:
    for of_rank in found_by(without_microbatches, (twice_deterministic, without_microbatches)):
        differences = [largest_difference(ours, float64_reference((2, 0))) for ours in of_rank]
        assert max(differences) < TOLERANCE, dict(zip(map(str, UNEVEN), differences, strict=True))


def four_ranks(rank: int, world_size: int, counts: list[int]) -> list[dict[str, Any]]:
    hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    return [
        uneven(rank, world_size, counts, mixed=True),
        uneven(rank, world_size, counts, mixed=True, use_orig_params=False),
        uneven(rank, world_size, counts, **hybrid),
        uneven(rank, world_size, counts, use_orig_params=False, evaluates=True, **hybrid),
    ]


def test_four_ranks_with_uneven_counts_other_modules_and_replicas() -> None:
    counts = (1, 3, 2, 0)
    for of_rank in run_ranks(4, four_ranks, list(counts), timeout_s=180):
        for ours, mixed in zip(of_rank, [True, True, False, False], strict=True):
            assert largest_difference(ours, float64_reference(counts, mixed)) < TOLERANCE


def twice_deterministic(rank: int, world_size: int) -> None:
    first, second = (uneven(rank, world_size, [1, 3], deterministic=True, mixed=True) for _ in range(2))
    assert all((first[name] == second[name]).all() for name in first)


def test_deterministic_runs_are_bit_equal() -> None:
    assert found_by(twice_deterministic, (twice_deterministic, without_microbatches)) == [None, None]


def test_one_rank_is_plain_fsdp1() -> None:
    ours = run_ranks(1, uneven, [2])[0]
    assert largest_difference(ours, float64_reference((2,))) < TOLERANCE
