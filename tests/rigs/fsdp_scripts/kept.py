"""Gradients that outlive the end of their minibatch: kept over steps, added to, and a rank that has nothing to add."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from training import TOLERANCE, use_up

from fsdp_scripts import loops
from fsdp_scripts.run import Case, Outcome, Run, full, with_


def clipped_before_each_second_step(run: Run, clip: Callable[..., Any]) -> None:
    """Rank 1 has no microbatch where gradients were kept."""
    model, optimizer = run.start()
    for step in range(6):
        run.backward_unless(run.rank == 1 and step % 2 == 1, model, step)
        clip(model.parameters(), 0.3)
        if step % 2 == 1:
            use_up(optimizer)


def clipped_twice_alike(run: Run) -> None:
    """The second time could be that of a rank without a microbatch in the next minibatch, and is taken for that."""
    model, optimizer = run.start()
    for step in range(3):
        run.backward_unless(run.rank == 1 and step == 1, model, step)
        for _ in range(2):
            clip_grad_norm_(model.parameters(), 0.3)
        use_up(optimizer)


def cleared_instead_of_a_step(run: Run, clear: str) -> None:
    """As scripts skip a step whose loss is not a number, without asking for a norm."""
    model, optimizer = run.start()
    for step in range(4):
        for microbatch in range(2):
            run.backward(model, step, microbatch)
        if step == 1:
            loops.clear(model, optimizer, clear)
            continue
        use_up(optimizer)


def read_after_each_microbatch(run: Run) -> Outcome:
    """A log of norms; what follows is added."""
    model, optimizer = run.start()
    norms = []
    for step in range(3):
        for microbatch in range(3):
            run.backward(model, step, microbatch)
            norms.append(torch.stack([full(p.grad).norm() for p in model.parameters() if p.grad is not None]).norm())
        use_up(optimizer)
    return {"norms": torch.stack(norms)}


CASES = {
    **{
        f"cleared instead of a step, {clear}": Case(with_(cleared_instead_of_a_step, clear), TOLERANCE, minibatches=4)
        for clear in ("none", "in place", "module", "by hand")
    },
    "read after each microbatch": Case(read_after_each_microbatch, TOLERANCE, minibatches=9),
    "clip_grad_norm_ twice alike": Case(clipped_twice_alike, TOLERANCE, minibatches=6),
    "clip_grad_value_, each second step, idle": Case(
        with_(clipped_before_each_second_step, clip_grad_value_), TOLERANCE, minibatches=6
    ),
    "clip_grad_norm_, each second step, idle": Case(
        with_(clipped_before_each_second_step, clip_grad_norm_), TOLERANCE, minibatches=6
    ),
}
