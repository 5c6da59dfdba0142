"""Layer 3: ranks as processes. ``torch.compile`` of a model, around FSDP, inside it, or of blocks: with ODC as without.

The compiler traces through both FSDPs and through hooks of modules, so it comes to everything that ODC has put there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fsdp_scripts.run import full
from process_ranks import run_ranks
from torch.distributed.fsdp import fully_shard
from training import Net, build, clip, loss_of, optimizer_of, sharded_by, tokens, use_up, wrap

import odc
from odc.fsdp_patch.automatic import AutomaticPatching

STEPS = 3
MICROBATCHES = 2

compiled = functools.partial(torch.compile, backend="eager")  # traced as for any backend, and quick


def as_it_is(model: Net, kind: str) -> Any:
    return sharded_by(kind, model, 2)


def around_fsdp(model: Net, kind: str) -> Any:
    return compiled(as_it_is(model, kind))


def in_place(model: Net, kind: str) -> Any:
    sharded = as_it_is(model, kind)
    sharded.compile(backend="eager")
    return sharded


def inside_fsdp(model: Net, kind: str) -> Any:
    if kind == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(compiled(model))
    return wrap(compiled(model), use_orig_params=kind == "fsdp1-orig")


def blocks(model: Net, kind: str) -> Any:
    for block in model.blocks:
        block.compile(backend="eager")
    return as_it_is(model, kind)


Make = Callable[[Net, str], Any]
WAYS: list[Make] = [around_fsdp, in_place, inside_fsdp, blocks]
MODES = ["patch", "run"]


def train(rank: int, make: Make, kind: str, mode: str, idle: bool = False) -> list[float]:
    """Losses of all microbatches, and the norms of the gradients.

    Args:
        mode: "plain", "patch" (in the script) or "run" (as ``odc run`` does).
        idle: in the first and in the last step rank 1 has no microbatch.
    """
    torch._dynamo.reset()
    patching = AutomaticPatching(odc.patch_fsdp, lambda text: None) if mode == "run" else None
    model = make(build(), kind)
    root = getattr(model, "_orig_mod", model) if make is around_fsdp else model
    session = odc.patch_fsdp(root) if mode == "patch" else None
    optimizer = optimizer_of(model)
    found: list[float] = []

    def step(data: list[torch.Tensor]) -> None:
        for microbatch in data:
            loss = loss_of(model, microbatch)
            (loss * 0.02).backward()
            found.append(loss.item())
        norm: Any = clip(root)
        found.append(float(full(norm)))
        use_up(optimizer)

    try:
        for number in range(STEPS):
            count = 0 if idle and rank == 1 and number != 1 else MICROBATCHES
            # Of one length: plain FSDP1 cannot compile anew for another one while it holds sharded gradients.
            step([tokens(number * MICROBATCHES + m, rank, 0) for m in range(count)])
        if patching:
            (session,) = patching.sessions
        if session:
            assert session.stats().minibatches == STEPS
            assert session.stats().pushes
    finally:
        if session:
            session.close()
        if patching:
            patching.close()
    return found


def differences(rank: int, world_size: int, kind: str, modes: Sequence[Sequence[str]]) -> dict[str, float]:
    """Of losses and norms: compiled and patched, in the ``modes`` of each way, from compiled under plain FSDP."""
    found = {}
    for make, chosen in zip(WAYS, modes, strict=True):
        theirs = train(rank, make, kind, "plain")
        for mode in chosen:
            ours = train(rank, make, kind, mode)
            found[f"{make.__name__} {mode}"] = largest(ours, theirs)
    return found


def largest(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(ours, theirs, strict=True))


extended = functools.partial(pytest.param, marks=pytest.mark.extended)


@pytest.mark.parametrize(
    ("kind", "modes"),
    [
        # Every way with both modes.
        pytest.param("fsdp2", [["patch"], ["run"]] * 2, id="fsdp2"),
        *(extended(kind, [MODES] * len(WAYS), id=f"{kind}-all") for kind in ("fsdp2", "fsdp1-orig", "fsdp1-flat")),
    ],
)
def test_compiled_models_train_to_the_numbers_of_plain_fsdp(kind: str, modes: list[list[str]]) -> None:
    for of_rank in run_ranks(2, differences, kind, modes, timeout_s=300):
        assert len(of_rank) == sum(map(len, modes))
        assert max(of_rank.values()) < 1e-6, of_rank


def with_idle_ranks(rank: int, world_size: int, kind: str) -> dict[str, float]:
    """Which no plain FSDP can run: compiled from as it is, both on demand. The first use of the model on rank 1 is that
    it clips."""
    theirs = train(rank, as_it_is, kind, "patch", idle=True)
    return {mode: largest(train(rank, around_fsdp, kind, mode, idle=True), theirs) for mode in MODES}


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1-orig"])
def test_a_compiled_model_of_which_a_rank_has_no_microbatch(kind: str) -> None:
    for of_rank in run_ranks(2, with_idle_ranks, kind, timeout_s=300):
        assert max(of_rank.values()) < 1e-6, of_rank
