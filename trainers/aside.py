"""Forwards beside the training, of which nothing is left behind."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from odc.trainers.overrides import Overrides


@contextmanager
def aside(trainer: Any, model: nn.Module) -> Iterator[None]:
    """In the block ``model`` and ``trainer.compute_loss`` can be called as in an evaluation.

    Without gradients, so nothing is reduced and no minibatch begins. Behind it random states, every module's mode and
    TRL's metrics are what they were.
    """
    modes = [(module, module.training) for module in model.modules()]
    device: torch.device = trainer.args.device
    devices = [] if device.type in ("cpu", "mps") else [device]
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices, device_type=device.type),
        _uncompiled(),
        Overrides(trainer) as of_trainer,
        Overrides(trainer.accelerator) as of_accelerator,
    ):
        if hasattr(trainer, "_metrics"):
            of_trainer.set("_metrics", copy.deepcopy(trainer._metrics))
            of_accelerator.set("gather_for_metrics", lambda input_data, *_, **__: input_data)
        try:
            for module, _ in modes:
                module.training = False  # not eval(): some modules do more in it (merge adapters)
            yield
        finally:
            for module, training in modes:
                module.training = training


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """A few tiny shapes are not worth compiling, and each would count towards dynamo's limit of recompilations."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
