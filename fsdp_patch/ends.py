"""Where a script that knows nothing of minibatches ends one: the first time it asks for final gradients.

That is the first of clipping (``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_``, FSDP1's own
``clip_grad_norm_``), ``GradScaler.unscale_``, reading a parameter's ``.grad`` by hand, and ``optimizer.step``. The step
has public hooks of torch. The others are doors (``doors.py``), open while anybody listens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from odc.errors import UnsupportedError
from odc.fsdp_patch.doors import (
    MODULE,
    OPTIMIZER,
    SELF_OPTIMIZER,
    Clearing,
    Door,
    InnerFunction,
    Method,
    ScaledStep,
    Wait,
    parameters_of,
    untraced,
)
from odc.fsdp_patch.grad_attribute import Gradient
from odc.fsdp_patch.listeners import Listener, Listeners

STEP = "optimizer.step"
CLIPPING_BY_NORM = "clip_grads_with_norm_"
"""Clipping by a norm that the script has computed before: too late to make the gradients final."""

_hooks: list[Any] = []


def listen(listener: Listener) -> Callable[[], None]:
    """Tell ``listener`` what this process does with gradients, until it is gone or the returned undo is called."""
    return _LISTENERS.add(listener)


def listening() -> list[Listener]:
    """All who listen."""
    return _LISTENERS.all()


def _enter() -> None:
    for door in _DOORS:
        door.open()
    _hooks[:] = [
        register_optimizer_step_pre_hook(untraced(_before_step)),
        register_optimizer_step_post_hook(untraced(_after_step)),
    ]


def _leave() -> None:
    while _hooks:
        _hooks.pop().remove()
    for door in _DOORS:
        door.shut()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """A closure runs backward inside step(): gradients are final after it, not before it."""
    tensors = parameters_of(optimizer)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
    if closure is None:
        _LISTENERS.tell(lambda listener: listener.before_reading(STEP, tensors))
        return None
    if isinstance(optimizer, torch.optim.LBFGS):
        if not any(listener.owns(tensors) for listener in _LISTENERS.all()):
            return None
        raise UnsupportedError(
            "LBFGS evaluates its closure several times inside one step() and changes the parameters in between, which "
            "on-demand communication cannot follow: use another optimizer, or plain FSDP"
        )

    def final_closure() -> Any:
        loss = closure()
        _LISTENERS.tell(lambda listener: listener.before_reading(STEP, tensors))
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": final_closure}
    return (args[0], final_closure, *args[2:]), kwargs


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _steps_inside_another(optimizer):
        return  # Lookahead and its like change the parameters again when the inner step has returned
    tensors = parameters_of(optimizer)
    _LISTENERS.tell(lambda listener: listener.after_step(STEP, tensors))


def _steps_inside_another(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step of another optimizer, as torch wraps it for its hooks, is waiting for this one."""
    frame = sys._getframe(1)
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code is _STEP_WRAPPER:
            outer = frame.f_locals["args"][0]
            if outer is not optimizer:
                return True
    return False


_LISTENERS = Listeners(_enter, _leave)
_STEP_WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__
_DOORS: tuple[Door | Gradient, ...] = (
    InnerFunction(clip_grad.clip_grad_norm_, _LISTENERS),
    InnerFunction(clip_grad.clip_grad_value_, _LISTENERS),
    InnerFunction(clip_grad._clip_grads_with_norm_, _LISTENERS),
    Method(torch.amp.GradScaler, "unscale_", _LISTENERS, OPTIMIZER),
    ScaledStep(torch.amp.GradScaler, "step", _LISTENERS, OPTIMIZER),  # a fused optimizer unscales by itself
    Method(ShardedGradScaler, "unscale_", _LISTENERS, OPTIMIZER),
    Method(FullyShardedDataParallel, "clip_grad_norm_", _LISTENERS, MODULE),
    Clearing(torch.optim.Optimizer, "zero_grad", _LISTENERS, SELF_OPTIMIZER),
    Clearing(nn.Module, "zero_grad", _LISTENERS, MODULE),
    Wait(dist.Work, "wait", _LISTENERS, MODULE),
    Wait(AsyncCollectiveTensor, "wait", _LISTENERS, MODULE),  # collectives of DTensors: checkpoints, full_tensor()
    Wait(AsyncCollectiveTensor, "trigger_wait", _LISTENERS, MODULE),
    Gradient(DTensor, _LISTENERS),
    Gradient(nn.Parameter, _LISTENERS),
)
