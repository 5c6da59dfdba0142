"""Gradients read by hand, read twice, not used, or asked for too early."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, register_fsdp_forward_method
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from training import TOLERANCE, Net, build, loss_of, optimizer_of, tokens, use_up

from fsdp_scripts.run import STEPS, Case, Outcome, Run, full, norms_of_steps, with_


def clipping_what_has_a_gradient(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.steps(model):
        clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.1)
        use_up(optimizer)


def scaling_by_hand(run: Run) -> None:
    """As for a loss that is a sum: by the tokens of all ranks, known at the end."""
    model, optimizer = run.start()
    for step in run.steps(model, microbatches=2):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= 1.0 / (step + 3)
        use_up(optimizer)


def norm_by_hand(model: nn.Module) -> torch.Tensor:
    return torch.stack([full(p.grad).norm() for p in model.parameters() if p.grad is not None]).norm()


def norm_of_a_map(model: nn.Module) -> torch.Tensor:
    """Torch itself takes the gradients out of it."""
    return get_total_norm(map(attrgetter("grad"), model.parameters()))


def few_trained(run: Run) -> tuple[Net, list[nn.Parameter]]:
    """A model of two units, and the one parameter of each that is trained."""
    model: Net = build(num_blocks=1).requires_grad_(False)
    model.embed.weight.requires_grad_()
    model.blocks[0].down.weight.requires_grad_()
    model = run.shard(model)
    run.patch(model)
    return model, [parameter for parameter in model.parameters() if parameter.requires_grad]


def compiled_scaling(run: Run) -> None:
    """Gradients are first read inside a function that is compiled. (Few: the compiler unrolls the loop.)"""
    model, trained = few_trained(run)
    optimizer = optimizer_of(model)

    def scale(parameters: list[nn.Parameter], factor: torch.Tensor) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad *= factor

    compiled = torch.compile(scale, backend="eager")
    for step in run.steps(model, microbatches=2):
        compiled(trained, torch.tensor(1.0 / (step + 3)))
        use_up(optimizer)
    torch._dynamo.reset()


def compiled_step(run: Run) -> None:
    """With what comes before it and behind it. (Few parameters and a plain optimizer: the compiler unrolls both.)"""
    model, trained = few_trained(run)
    optimizer = torch.optim.SGD(trained, lr=0.1)

    def update() -> None:
        clip_grad_norm_(trained, 0.5)
        use_up(optimizer)

    compiled = torch.compile(update, backend="eager")
    for _ in run.steps(model):
        compiled()
    torch._dynamo.reset()


def step_by_hand(run: Run, clear: str) -> None:
    """No optimizer: gradients are read, used and cleared one by one."""
    model = run.patch(run.net())
    for _ in run.steps(model):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is None:  # FSDP1, where this rank has none of it
                    continue
                if clear == "through data":
                    parameter.data.sub_(0.5 * parameter.grad.data)
                else:
                    parameter -= 0.5 * parameter.grad
                if clear != "by hand":
                    parameter.grad.zero_()
                else:
                    parameter.grad = None


def forward_method(run: Run, inside: bool) -> None:
    """Every second step is skipped and its gradients stay. The loop never calls the model itself; or it does, and the
    model calls such a method of its own without a graph."""
    model = run.net()
    register_fsdp_forward_method(model, "logits")
    register_fsdp_forward_method(model.blocks[0], "alone")
    if inside:
        model.forward = functools.partial(forward_behind_method, model, model.forward)  # type: ignore[method-assign]
    run.patch(model)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        inputs = tokens(step, run.rank, 0)
        (loss_of(model if inside else model.logits, inputs) * 0.02).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        if step % 2 == 0:
            continue
        use_up(optimizer)


def forward_behind_method(model: Net, forward: Callable[..., torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.blocks[0].alone(model.embed(inputs))  # type: ignore[operator]
    return forward(inputs)


def clipping_in_two_parts(run: Run, idle_at_first: bool = False) -> None:
    """Rank 1 may have no microbatch in the first step."""
    model, optimizer = run.start()
    for step in range(STEPS):
        run.backward_unless(idle_at_first and run.rank == 1 and step == 0, model, step)
        norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        clip_grads_with_norm_(model.parameters(), 0.2, norm)
        use_up(optimizer)


def norm_after_the_step(run: Run) -> Outcome:
    """Logged when the gradients have been used; cleared only behind the next forward."""
    model, optimizer = run.start()
    norms = []
    for step in range(STEPS):
        loss = loss_of(model, tokens(step, run.rank, 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        norms.append(full(clip_grad_norm_(model.parameters(), float("inf"))))
    return {"norms": torch.stack(norms)}


def clipping_every_microbatch(run: Run) -> None:
    model, optimizer = run.start()
    for step in range(STEPS):
        for microbatch in range(3):
            run.backward(model, step, microbatch)
            clip_grad_norm_(model.parameters(), 0.2)
        use_up(optimizer)


def skipped_steps(run: Run, in_place: bool, behind_forward: bool) -> None:
    """The script itself skips every second step when it sees the norm."""
    model, optimizer = run.start()
    for step in range(STEPS):
        loss = loss_of(model, tokens(step, run.rank, 0))
        if behind_forward:
            optimizer.zero_grad(set_to_none=not in_place)
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        if step % 2:
            optimizer.step()
        if not behind_forward:
            optimizer.zero_grad(set_to_none=not in_place)


def skipped_by_a_scaler(run: Run, in_place: bool, behind_forward: bool) -> None:
    model, optimizer = run.start()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(STEPS):
        loss = loss_of(model, tokens(step, run.rank, 0)) * (float("inf") if step == 1 else 1.0)
        if behind_forward:
            optimizer.zero_grad(set_to_none=not in_place)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if not behind_forward:
            optimizer.zero_grad(set_to_none=not in_place)


def skipped_without_gradients(run: Run) -> None:
    """No rank has a microbatch and the step is skipped; in the next minibatch one rank has none."""
    model, optimizer = run.start()
    for step in range(STEPS):
        idle = step == 1 or (step == 2 and run.rank == 0)
        run.backward_unless(idle, model, step)
        clip_grad_norm_(model.parameters(), 0.5)
        if step != 1:
            optimizer.step()
        optimizer.zero_grad()


def optimizer_state_early(run: Run, optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Asked for between backward and step, when the optimizer has none yet."""
    model = run.patch(run.net())
    optimizer = optimizer_class(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    for _ in run.steps(model):
        get_optimizer_state_dict(model, optimizer)
        use_up(optimizer, model)


class Lookahead(torch.optim.Optimizer):
    """Slow weights that follow the fast ones of another optimizer, and pull them back every second step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.steps = 0

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.steps += 1
        fast = [p for group in self.param_groups for p in group["params"]]
        if self.steps % 2 == 0:
            with torch.no_grad():
                for p, slow in zip(fast, self.slow, strict=True):
                    slow.lerp_(p.detach(), 0.5)
                    p.copy_(slow)


def nested_optimizers(run: Run) -> None:
    model = run.patch(run.net())
    optimizer = Lookahead(optimizer_of(model))
    for _ in run.steps(model):
        use_up(optimizer)


def discarded(run: Run) -> None:
    """A minibatch that every rank throws away: plain FSDP clears the gradients."""
    model, optimizer = run.start()
    for step in run.steps(model):
        if step == 1:
            if run.patched:
                run.live_sessions()[0].discard()
            optimizer.zero_grad()
            continue
        use_up(optimizer, model)


def full_gradients(run: Run, microbatches: int, by_hand: bool = False) -> Outcome:
    """FSDP1 shows them, behind each microbatch, and takes back what the script has made of them. Rank 1 has no
    microbatch in the second step. Without an optimizer, gradients are used by hand before and behind that."""
    model = run.patch(run.net())
    optimizer, norms = optimizer_of(model), []
    for step in range(STEPS):
        for microbatch in range(microbatches):
            if step != 1 or run.rank == 0:
                run.backward(model, step, microbatch)
            elif not run.patched:
                (loss_of(model, tokens(step, run.rank, microbatch)) * 0.0).backward()
            if by_hand:
                norms.append(torch.stack([p.grad.sum() for p in model.parameters() if p.grad is not None]).sum()[None])
            with FullyShardedDataParallel.summon_full_params(model, with_grads=True), torch.no_grad():
                gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
                norms.append(torch.stack([gradient.norm() for gradient in gradients]))
                for gradient in gradients:
                    gradient.mul_(0.5)
        if not by_hand:
            use_up(optimizer)
            continue
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.5 * parameter.grad)
                    parameter.grad.zero_()
    return {"norms": torch.cat(norms)}


def generating_between_microbatches(run: Run, is_resharded: bool) -> Outcome:
    """Inside ``summon_full_params``, as scripts do that call more of a model than its forward."""
    model: Any = run.patch(run.net(reshard_after_forward=is_resharded))
    optimizer, found = optimizer_of(model), []
    for step in range(STEPS):
        for microbatch in range(2):
            run.backward(model, step, microbatch)
            with FullyShardedDataParallel.summon_full_params(model, writeback=False), torch.no_grad():
                found.append(loss_of(model, tokens(99, run.rank, microbatch)))
        use_up(optimizer, model)
    return {"losses": torch.stack(found)}


CASES = {
    "clipping what has a gradient": Case(clipping_what_has_a_gradient),
    "gradients scaled by hand": Case(scaling_by_hand, TOLERANCE),
    "norm by hand": Case(with_(norms_of_steps, norm_by_hand)),
    "gradients scaled in a compiled function": Case(compiled_scaling, TOLERANCE),
    "compiled step": Case(compiled_step),
    "step by hand": Case(with_(step_by_hand, "by hand")),
    "step by hand, cleared in place": Case(with_(step_by_hand, "in place")),
    "step by hand through data": Case(with_(step_by_hand, "through data")),
    "clipping in two parts": Case(clipping_in_two_parts),
    "clipping in two parts, idle at first": Case(with_(clipping_in_two_parts, True)),
    "norm after the step": Case(norm_after_the_step, minibatches=None),
    "clipping every microbatch": Case(clipping_every_microbatch, TOLERANCE, minibatches=3 * STEPS),
    "skipped steps": Case(with_(skipped_steps, False, False)),
    "skipped steps, cleared in place": Case(with_(skipped_steps, True, False)),
    "skipped steps, cleared behind forward": Case(with_(skipped_steps, False, True)),
    "skipped steps, cleared in place behind forward": Case(with_(skipped_steps, True, True)),
    "skipped by a scaler": Case(with_(skipped_by_a_scaler, False, False)),
    "skipped by a scaler, cleared in place": Case(with_(skipped_by_a_scaler, True, False)),
    "skipped by a scaler, cleared behind forward": Case(with_(skipped_by_a_scaler, False, True)),
    "skipped without gradients": Case(skipped_without_gradients),
    "optimizer state asked for early": Case(with_(optimizer_state_early, torch.optim.AdamW)),
    "optimizer state asked for early, SGD": Case(with_(optimizer_state_early, torch.optim.SGD)),
    "nested optimizers": Case(nested_optimizers),
    "a minibatch thrown away": Case(discarded),
}
FSDP1_CASES = {
    "full gradients": Case(with_(full_gradients, 1)),
    "full gradients behind each microbatch": Case(with_(full_gradients, 2), TOLERANCE, minibatches=2 * STEPS),
    "full gradients, step by hand": Case(with_(full_gradients, 1, by_hand=True)),
    "generating between microbatches": Case(with_(generating_between_microbatches, True), TOLERANCE),
    "generating between microbatches, not resharded": Case(with_(generating_between_microbatches, False), TOLERANCE),
}
FSDP2_CASES = {
    "norm of a map": Case(with_(norms_of_steps, norm_of_a_map)),
    "forward method": Case(with_(forward_method, False)),
    "forward method inside a forward": Case(with_(forward_method, True)),
}
