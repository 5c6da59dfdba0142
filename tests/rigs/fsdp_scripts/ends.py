"""Ways to end a minibatch: clipping, scalers, steps, closures, several optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_  # by name, before anything is patched
from training import loss_of, optimizer_of, tokens, use_up

from fsdp_scripts.run import STEPS, Outcome, Run


def clipping_by_norm(model: Any) -> torch.Tensor:
    return clip_grad_norm_(model.parameters(), 0.5)


def clipping_twice(model: Any) -> torch.Tensor:
    """To log the norm first, then to clip one part of the model more than the other."""
    norm = clip_grad_norm_(model.parameters(), float("inf"))
    clip_grad_norm_(model.blocks.parameters(), max_norm=0.1)
    clip_grad_norm_(model.head.parameters(), max_norm=0.2)
    return norm


def clipping_by_keyword(model: Any) -> torch.Tensor:
    return clip_grad_norm_(max_norm=0.5, parameters=model.parameters())


def clipping_one_tensor(run: Run) -> Outcome:
    """A norm per parameter, as some scripts log it: a tensor instead of a list."""
    model, optimizer = run.start()
    norms = []
    for _ in run.steps(model):
        norms += [clip_grad_norm_(p, 0.1).full_tensor() for p in model.parameters()]
        use_up(optimizer)
    return {"norms": torch.stack(norms)}


def clipping_by_value(run: Run) -> None:
    model = run.patch(run.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in run.steps(model):
        clip_grad_value_([p for p in model.parameters() if p.requires_grad], clip_value=0.01)
        use_up(optimizer)


def scaler(run: Run, unscales: bool, fused: bool = False) -> Outcome:
    """A step is skipped when one rank alone has infinities."""
    model = run.patch(run.net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=fused)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    scales = []
    for step in range(6):
        loss = loss_of(model, tokens(step, run.rank, 0)) * (float("inf") if step == 2 and run.rank == 1 else 0.02)
        grad_scaler.scale(loss).backward()
        if unscales:
            grad_scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.5)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        optimizer.zero_grad()
        scales.append(grad_scaler.get_scale())
    assert scales[2] < scales[1] > scales[0], "the scale grew, then a step was skipped"
    return {"scales": torch.tensor(scales)}


def step_alone(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.steps(model):
        use_up(optimizer)


def two_optimizers(run: Run) -> None:
    """Matrices by one, the rest by another; units are split between them."""
    model = run.patch(run.net())
    matrices, others = ([p for p in model.parameters() if (p.ndim == 2) == here] for here in (True, False))
    optimizers = [torch.optim.SGD(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-3)]
    for _ in run.steps(model):
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def one_of_two_optimizers(run: Run) -> None:
    """The second optimizer steps in every other minibatch; its gradients add up in between."""
    model = run.patch(run.net())
    often = torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], lr=1e-2)
    seldom = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=1e-3)
    for step in run.steps(model):
        often.step()
        often.zero_grad()
        if step % 2:
            seldom.step()
            seldom.zero_grad()


def closure(run: Run, keyword: bool) -> Outcome:
    model = run.patch(run.net())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):

        def evaluate(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            return run.backward(model, step)

        losses.append(optimizer.step(closure=evaluate) if keyword else optimizer.step(evaluate))
    return {"losses": torch.stack(losses)}


def schedulers(run: Run) -> Outcome:
    """Schedulers wrap ``optimizer.step`` on the instance: one before patching, one after."""
    model = run.net()
    optimizer = optimizer_of(model)
    linear = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    run.patch(model)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    rates = []
    for step in run.steps(model):
        optimizer.step()
        linear.step()
        plateau.step(float(step))
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    return {"rates": torch.tensor(rates, dtype=torch.float64)}
