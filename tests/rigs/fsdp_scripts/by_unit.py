"""A step unit by unit: by ``odc.step_by_unit`` in place of the usual lines, and by hooks of the script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from training import build, evaluated, loss_of, optimizer_of, tokens, use_up

import odc
from fsdp_scripts.models import Checkpointed
from fsdp_scripts.run import STEPS, Case, Outcome, Run, full, with_

CLOSE = 1e-6
"""Norms are sums in another order."""

Make = Callable[[nn.Module], Any]


class Mine(torch.optim.SGD):
    """Not torch's own: each must be of one unit."""


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def adamw_by_parameter(model: nn.Module) -> dict[Any, torch.optim.Optimizer]:
    return {p: torch.optim.AdamW([p], lr=3e-3, weight_decay=0.01) for p in model.parameters()}


def momentum_by_parameter(model: nn.Module) -> dict[Any, torch.optim.Optimizer]:
    return {p: torch.optim.SGD([p], lr=1e-2, momentum=0.9) for p in model.parameters()}


def one_of_each_unit(model: nn.Module) -> list[torch.optim.Optimizer]:
    blocks = [list(block.parameters()) for block in model.blocks]  # type: ignore[union-attr]
    own = {id(p) for block in blocks for p in block}
    return [Mine(part, lr=1e-2) for part in (*blocks, [p for p in model.parameters() if id(p) not in own])]


def step(run: Run, model: nn.Module, optimizers: Any, max_norm: float | None = None) -> torch.Tensor:
    """Plain and by unit; the norm, if there is one."""
    norm = torch.zeros(())
    if run.patched:
        found = odc.step_by_unit(model, optimizers, max_norm=max_norm, skip_nonfinite=max_norm is not None)
        return norm if found is None else found
    each = optimizers.values() if isinstance(optimizers, dict) else optimizers
    each = [each] if isinstance(each, torch.optim.Optimizer) else list(each)
    if max_norm is not None:
        clip: Any = getattr(model, "clip_grad_norm_", None)  # FSDP1's own
        norm = clip(max_norm) if clip else full(clip_grad_norm_(model.parameters(), max_norm))
    for optimizer in each:
        if bool(torch.isfinite(norm)):
            optimizer.step()
        optimizer.zero_grad()
    return norm


def loop(run: Run, make: Make, max_norm: float | None = None) -> Outcome:
    """One rank has no microbatch in the second step, the other none in the third."""
    model = run.patch(run.net())
    optimizers, norms = make(model), []
    for number in range(4):
        run.backward_unless(number in (1, 2) and run.rank % 2 == number - 1, model, number)
        norms.append(step(run, model, optimizers, max_norm))
    return {"norms": torch.stack(norms)}


def frozen(run: Run) -> Outcome:
    """A unit is frozen, and a part of another one; there is a scheduler."""
    model = build()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    model = run.shard(model)
    run.patch(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2, momentum=0.9)
    scheduler, norms = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), []
    for _ in run.steps(model):
        norms.append(step(run, model, optimizer, 0.1))
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.5**STEPS
    return {"norms": torch.stack(norms)}


def in_turn_with_others(run: Run) -> None:
    """By unit in some steps; one is thrown away; behind each there is an evaluation."""
    model, optimizer = run.start()
    for number in range(2 * STEPS):
        run.backward(model, number)
        if number == 3:
            optimizer.zero_grad()
        elif number % 2:
            use_up(optimizer)
        else:
            step(run, model, optimizer)
        evaluated(model)


def not_finite(run: Run) -> Outcome:
    model = run.patch(run.net())
    optimizer, norms = optimizer_of(model), []
    for number in range(STEPS):
        factor = float("inf") if number == run.rank == 1 else 1.0
        (loss_of(model, tokens(number, run.rank, 0)) * factor).backward()
        norms.append(step(run, model, optimizer, 0.5).nan_to_num())
    return {"norms": torch.stack(norms)}


def two_models(run: Run) -> None:
    """Each has its own minibatch; only one steps by unit."""
    first, second = run.net(), run.net()
    run.patch(first)
    run.patch(second)
    optimizers = adamw_by_parameter(first), momentum(second)
    for number in range(STEPS):
        run.backward(first, number)
        run.backward(second, number + 100)
        step(run, first, optimizers[0])
        use_up(optimizers[1])


def unsharded_rest(run: Run) -> None:
    """Only the blocks are units. The script reduces the rest itself, and one optimizer has it all."""
    from torch.distributed.fsdp import fully_shard

    model = build()
    for block in model.blocks:
        fully_shard(block, mesh=run.mesh)
    run.patch(model)
    parts = [model.blocks, nn.ModuleList([model.embed, model.head])]  # torch steps each by itself
    optimizer = torch.optim.SGD([{"params": part.parameters()} for part in parts], lr=1e-2, momentum=0.9)
    for _ in run.steps(model):
        for parameter in (*model.embed.parameters(), *model.head.parameters()):
            torch.distributed.all_reduce(parameter.grad)
        step(run, model, optimizer)


def in_backward(run: Run, make: Make, microbatches: int = 1, without_sync: bool = False) -> Outcome:
    """As torch's tutorial has it, unedited: hooks step and clear in each backward."""
    model = run.net()
    hook_each(model, make(model))
    run.patch(model)
    losses = []
    for number in range(STEPS):
        for microbatch in range(microbatches):
            model.set_requires_gradient_sync(not without_sync or microbatch == microbatches - 1)
            losses.append(run.backward(model, number, microbatch))
    return {"losses": torch.stack(losses)}


def hook_each(model: nn.Module, optimizers: dict[Any, torch.optim.Optimizer]) -> None:
    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)


def checkpointed_in_backward(run: Run) -> None:
    """Backward passes inside a backward."""
    torch.manual_seed(0)
    model = Checkpointed(num_blocks=2)
    model.use_reentrant = True
    model = run.shard(model)
    hook_each(model, momentum_by_parameter(model))
    run.patch(model)
    for number in range(STEPS):
        run.backward(model, number)


def idle_in_backward(run: Run) -> None:
    """A rank that has no backward says so."""
    model = run.net()
    hook_each(model, momentum_by_parameter(model))
    run.patch(model)
    for number in range(STEPS):
        idle = number == run.rank == 1
        run.backward_unless(idle, model, number)
        if idle and run.patched:
            odc.session_of(model).finish()


def partly_in_backward(run: Run) -> None:
    """Hooks step the blocks; the rest of the model steps behind the backward."""
    model = run.net()
    optimizers = {p: torch.optim.SGD([p], lr=1e-2) for p in model.blocks.parameters()}
    own = set(map(id, optimizers))
    rest = torch.optim.AdamW([p for p in model.parameters() if id(p) not in own], lr=1e-3)

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    run.patch(model)
    for _ in run.steps(model):
        use_up(rest)


CASES: dict[str, Case] = {
    "step by unit": Case(with_(loop, optimizer_of), minibatches=4),
    "step by unit, clipped": Case(with_(loop, momentum, 0.05), CLOSE, minibatches=4),
    "step by unit, two models": Case(two_models),
    "step by unit, steps as usual between": Case(in_turn_with_others, minibatches=6),
    "step by unit, norms that are not finite": Case(not_finite, CLOSE),
}
FSDP2_CASES: dict[str, Case] = {
    **CASES,
    "step by unit, an optimizer for each parameter": Case(with_(loop, adamw_by_parameter), minibatches=4),
    "step by unit, an optimizer for each unit, clipped": Case(
        with_(loop, one_of_each_unit, 0.05), CLOSE, minibatches=4
    ),
    "step by unit, frozen parameters": Case(frozen, CLOSE),
    "step by unit, parameters in no unit": Case(unsharded_rest),
    "optimizer in backward": Case(with_(in_backward, adamw_by_parameter)),
    "optimizer in backward, several microbatches": Case(
        with_(in_backward, momentum_by_parameter, microbatches=2), minibatches=2 * STEPS
    ),
    "optimizer in backward, accumulation without sync": Case(
        with_(in_backward, momentum_by_parameter, microbatches=2, without_sync=True)
    ),
    "optimizer in backward, of some parameters": Case(partly_in_backward),
    "optimizer in backward, reentrant checkpointing": Case(checkpointed_in_backward),
    "optimizer in backward, a rank without microbatches": Case(idle_in_backward),
}
