"""Loops: accumulation, ways to clear gradients, ranks without work, evaluation between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.utils import clip_grad_norm_
from training import TOLERANCE, loss_of, optimizer_of, tokens, use_up

from fsdp_scripts.run import STEPS, Case, Outcome, Run


def accumulation(run: Run, before: Callable[[Any, bool], object] = lambda *_: None, **options: Any) -> None:
    """``before`` each microbatch the model is told whether it is the last."""
    model, optimizer = run.start(**options)
    for step in range(STEPS):
        for m in range(3):
            before(model, m == 2)
            run.backward(model, step, m)
        use_up(optimizer, model)


def sync_last_only(model: Any, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)
    model.set_is_last_backward(is_last)


def reduce_last_only(model: Any, is_last: bool) -> None:
    """Over replicas."""
    model.set_requires_all_reduce(is_last)


def kept_between(model: Any, is_last: bool) -> None:
    """Parameters stay whole between the microbatches of a minibatch."""
    model.set_reshard_after_backward(is_last)


def accumulation_without_sync_and_deterministic(run: Run) -> None:
    """Both add a rank's microbatches first, then the ranks."""
    model = run.net()
    run.patch(model, deterministic=True)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        for m in range(3):
            model.set_requires_gradient_sync(m == 2)
            run.backward(model, step, m)
        use_up(optimizer)


def divided_by_microbatch(run: Run) -> None:
    """A mean over the tokens of each microbatch. The last factor is the one of the next step."""
    model, optimizer = run.start()
    for step in range(STEPS):
        for m in range(3):
            divide_by(model, 3.0 + 10 * m + step)
            run.backward(model, step, m)
        divide_by(model, 100.0)
        use_up(optimizer, model)


def divided_without_sync(run: Run) -> None:
    """The factor at the reduction divides all that it reduces."""
    model = run.patch(run.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for m in range(4):
            divide_by(model, 3.0 + 10 * m)
            with without_sync(model, m % 2 == 0):
                run.backward(model, step, m)
        use_up(optimizer)


def divide_by(model: nn.Module, factor: float) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        elif isinstance(module, FullyShardedDataParallel):
            module._gradient_predivide_factor, module._gradient_postdivide_factor = 1.0, factor


@contextlib.contextmanager
def without_sync(model: Any, is_without: bool) -> Iterator[None]:
    if isinstance(model, FullyShardedDataParallel):
        with model.no_sync() if is_without else contextlib.nullcontext():
            yield
    else:
        model.set_requires_gradient_sync(not is_without)
        yield


def clear(model: nn.Module, optimizer: torch.optim.Optimizer, how: str) -> None:
    if how == "in place":
        optimizer.zero_grad(set_to_none=False)
    elif how == "module":
        model.zero_grad()
    elif how == "by hand":
        for parameter in model.parameters():
            parameter.grad = None
    elif how == "by hand in place":
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
    else:
        assert how == "none"
        optimizer.zero_grad()


def clearing(run: Run, how: str, first: bool = False) -> None:
    model, optimizer = run.start()
    for step in range(STEPS):
        if first:
            clear(model, optimizer, how)
        run.backward(model, step)
        if not first:
            clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if not first:
            clear(model, optimizer, how)


def cleared_between_backward_passes(run: Run) -> None:
    """A microbatch whose gradients the script throws away: ``zero_grad`` before the step."""
    model, optimizer = run.start()
    for _ in run.steps(model):
        use_up(optimizer)
        optimizer.zero_grad()


def never_cleared(run: Run) -> Outcome:
    """Gradients add up over the steps."""
    model = run.patch(run.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(2):
        run.backward(model, step)
        optimizer.step()
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}


def gradients_moved_by_hand(run: Run) -> None:
    """Scaled in place, replaced, copied for the next step."""
    model, optimizer = run.start()
    kept = None
    for _ in run.steps(model):
        clip_grad_norm_(model.parameters(), float("inf"))
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 0.5
        model.head.weight.grad.mul_(3.0)
        if kept is not None:
            model.head.bias.grad.add_(kept)
        kept = model.head.bias.grad.clone()
        use_up(optimizer)


def gradients_kept_by_reference(run: Run) -> Outcome:
    """The last minibatch's gradients without a copy, as for the angle between two steps."""
    model, optimizer = run.start()
    kept, products = None, []
    for _ in run.steps(model):
        clip_grad_norm_(model.parameters(), 0.5)
        grads = [p.grad for p in model.parameters()]
        if kept is not None:
            products.append(sum((a * b).sum().full_tensor() for a, b in zip(grads, kept, strict=True)))
        kept = grads
        use_up(optimizer)
    return {"products": torch.stack(products)}


def without_microbatches(run: Run) -> None:
    """Rank 1 has no microbatch in some minibatches, rank 0 none in others. Under FSDP it needs one of weight zero."""
    model, optimizer = run.start()
    for step in range(6):
        idle = step % 3 == 1 + run.rank
        run.backward_unless(idle, model, step)
        use_up(optimizer, model)


def evaluation(run: Run, context: Callable[[], Any]) -> Outcome:
    model, optimizer = run.start()
    losses = []
    for step in run.steps(model):
        losses.append(evaluate(model, context))  # inside the minibatch
        run.backward(model, step)
        optimizer.step()
        losses.append(evaluate(model, context))  # before zero_grad
        optimizer.zero_grad()
        losses.append(evaluate(model, context))
    return {"losses": torch.stack(losses)}


def evaluate(model: nn.Module, context: Callable[[], Any] = torch.no_grad) -> torch.Tensor:
    model.eval()
    with context():
        loss = loss_of(model, tokens(999, 0, 0))
    model.train()
    return loss.clone()


def evaluation_only(run: Run) -> Outcome:
    model = run.net()
    model.requires_grad_(False)
    run.patch(model)
    return {"losses": torch.stack([evaluate(model), evaluate(model, torch.inference_mode)])}


def logging_between(run: Run) -> Outcome:
    """Collectives of the script itself in every microbatch."""
    model, optimizer = run.start()
    losses = []
    for step in range(STEPS):
        loss = run.backward(model, step)
        dist.all_reduce(loss)
        losses.append(loss)
        use_up(optimizer, model)
    return {"losses": torch.stack(losses)}


CASES = {
    "another divide factor for each microbatch": Case(divided_by_microbatch, TOLERANCE),
    "another divide factor, without sync": Case(divided_without_sync, TOLERANCE),
}
"""Under either FSDP."""
