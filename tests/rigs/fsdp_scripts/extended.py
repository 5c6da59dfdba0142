"""Weights of which something else travels than their shard in the compute dtype (FSDP2's all-gather extension)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from extended_weights import Extended, Rounded, RowScaled, Scaled, extend, is_extended, precompute_scales
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils import clip_grad_norm_
from training import build, optimizer_of, use_up

from fsdp_scripts import loops
from fsdp_scripts.run import Case, Outcome, Run, with_

STEPS = 4
Kind = Callable[[torch.Tensor], Extended]


def net(run: Run, kind: Kind, *, frozen: bool = False, **options: Any) -> nn.Module:
    """Those that are divided evenly, where what travels has no padding."""
    model = build()
    if frozen:
        for block in model.blocks:
            block.up.weight.requires_grad_(False)
    extend(model, kind, 1 if kind is RowScaled else run.world_size)
    return run.shard(model, **options)


def train(
    run: Run,
    model: nn.Module,
    *,
    behind_step: Callable[[nn.Module], object] = lambda model: None,
    in_step: Callable[[nn.Module], object] | None = None,
    context: Callable[[], Any] = torch.inference_mode,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = optimizer_of,
) -> Outcome:
    """Ranks in turn have no microbatch. ``in_step`` in a hook of the optimizer; ``context`` of an evaluation."""
    optimizer, found = make_optimizer(model), list[torch.Tensor]()
    if in_step is not None:
        optimizer.register_step_post_hook(lambda *_: in_step(model))
    for step in range(STEPS):
        run.backward_unless(step % 3 == 1 + run.rank % 2, model, step)
        found.append(clip_grad_norm_(model.parameters(), 0.5).full_tensor())  # type: ignore[attr-defined]
        use_up(optimizer)
        behind_step(model)
        if step == 1:
            found.append(loops.evaluate(model, context))
    return {"norms and losses": torch.stack(found)}


def trained(run: Run, kind: Kind, **options: Any) -> Outcome:
    model = net(run, kind, **options)
    run.patch(model)
    return train(run, model)


def with_precomputed_scales(run: Run, in_step: bool) -> Outcome:
    model = net(run, Scaled)
    run.patch(model)
    if in_step:
        return train(run, model, in_step=precompute_scales)
    return train(run, model, behind_step=precompute_scales)


def changed(run: Run, kind: Kind, through_data: bool) -> Outcome:
    """Weights of all kinds clamped behind each step."""
    model = net(run, kind)
    run.patch(model)

    def clamp(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if through_data:
                    local = parameter.to_local()  # type: ignore[attr-defined]
                    (local.inner if is_extended(parameter) else local).data.clamp_(-0.15, 0.15)
                else:
                    parameter.clamp_(-0.15, 0.15)

    return train(run, model, behind_step=clamp)


def changed_on_one_rank(run: Run) -> Outcome:
    """One weight clamped in a way that torch does not count, and to no effect on rank 1; another one on all ranks."""
    model = net(run, Scaled)
    run.patch(model)

    def clamp(model: nn.Module) -> None:
        with torch.no_grad():
            limit = 10.0 if run.rank == 1 else 0.15
            model.blocks[0].up.weight.to_local().inner.data.clamp_(-limit, limit)  # type: ignore[index, union-attr]
            model.head.bias.mul_(0.9)  # type: ignore[operator, union-attr]

    return train(run, model, behind_step=clamp)


def accumulated(run: Run) -> Outcome:
    """Full weights stay between microbatches, whose gradients are sent with the last one."""
    model = net(run, Scaled, reshard_after_forward=False)
    run.patch(model)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        for m in range(3):
            model.set_requires_gradient_sync(m == 2)  # type: ignore[operator]
            run.backward(model, step, m)
        use_up(optimizer, model)
    return {}


def loaded(run: Run) -> Outcome:
    """A state of such weights, as FSDP2 gives it, loaded into another model behind patching."""
    first, second = net(run, RowScaled), net(run, RowScaled)
    state = {name: value * 1.5 for name, value in first.state_dict().items()}
    run.patch(second)
    second.load_state_dict(state)
    return train(run, second)


MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def case(script: Callable[..., Outcome], *args: object, fences: bool = False, **options: object) -> Case:
    """``fences``: what has changed between steps is published anew."""
    return Case(with_(script, *args, **options), minibatches=None if fences else STEPS)


CASES = {
    "weights that travel in bfloat16": case(trained, Rounded),
    "weights in float8, scales by all ranks": case(trained, Scaled),
    "weights in float8, scales by all ranks, bfloat16": case(trained, Scaled, mp_policy=MIXED),
    "weights in float8, scales by all ranks, clamped": case(changed, Scaled, False, fences=True),
    "weights in float8, scales by all ranks, changed on one": case(changed_on_one_rank, fences=True),
    "weights in float8, scales by all ranks, accumulated": case(accumulated),
    "weights in float8, scales computed behind the step": case(with_precomputed_scales, False, fences=True),
    "weights in float8, scales computed in a step hook": case(with_precomputed_scales, True),
    "weights in float8, a scale for each row": case(trained, RowScaled),
    "weights in float8, a scale for each row, frozen": case(trained, RowScaled, frozen=True),
    "weights in float8, a scale for each row, clamped": case(changed, RowScaled, True, fences=True),
    "weights in float8, a scale for each row, loaded": case(loaded, fences=True),
}
