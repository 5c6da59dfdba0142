"""Temporarily replaces methods of an object. With this, TRL's training metrics work without a gather in every
microbatch.

``SFTTrainer.compute_loss`` gathers four numbers over the ranks in each microbatch, only for the log. Ranks with
different numbers of microbatches would wait forever, and with equal numbers they would synchronize every time.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from odc.balance.data.collate import count_loss_tokens


class Overrides(ExitStack):
    """Attributes set on one object, not on its class. Leaving the ``with`` block, or ``close()``, puts back what was
    there."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        self._target = target

    def replace(self, name: str, value: Any) -> Any:
        """Shadow ``name``, and return what it was. What takes the place of a method looks like it: callers inspect
        signatures."""
        own = dict(vars(self._target))
        replaced = getattr(self._target, name, None)
        looks_alike = inspect.isroutine(replaced) and inspect.isroutine(value)
        setattr(self._target, name, _looking_like(replaced, value) if looks_alike else value)
        if name in own:
            self.callback(setattr, self._target, name, own[name])
        else:
            self.callback(delattr, self._target, name)
        return replaced


def _looking_like(original: Any, function: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def gather_by(gather: Callable[..., torch.Tensor], accelerator: Overrides) -> None:
    """Until these overrides of an accelerator are closed it gathers by this function, and a sum is this rank's own."""
    accelerator.replace("gather", gather)
    accelerator.replace("gather_for_metrics", gather)
    accelerator.replace("reduce", lambda tensor, *_, **__: tensor)


_NUM_TOKENS = "num_tokens"  # a running total, not a mean


class RankMetrics:
    """Sums the metrics of this rank's microbatches, weighted by their loss tokens; ranks add up when they log.

    A logged metric is the mean over all loss tokens since the last log, and a minimum or maximum that of all. (TRL's is
    the mean over microbatches of their means, minima and maxima.)

    Args:
        trainer: of TRL, which keeps such metrics.
        overrides: of the trainer, which logs what this sums up until they are closed.
        num_partners: ranks that have the same microbatches.
    """

    def __init__(self, trainer: Any, overrides: Overrides, num_partners: int) -> None:
        self._trainer = trainer
        self._num_partners = num_partners
        self._compute_loss = trainer.compute_loss
        self._log = overrides.replace("log", self.log)
        self._values: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        """Of metrics that the loss of a microbatch gives (the trainer may have others), each with its loss tokens."""

        self._weight = 0
        self._tokens_agreed: int = trainer._total_train_tokens

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own, with its gathers kept on this rank."""
        if not torch.is_grad_enabled():
            return self._compute_loss(model, inputs, *args, **kwargs)
        return self.measured(count_loss_tokens(inputs["labels"]), model, inputs, *args, **kwargs)

    def measured(self, weight: int, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss of a microbatch of so many loss tokens; of 0, its metrics do not count."""
        trainer = self._trainer
        metrics, tokens = trainer._metrics["train"], trainer._total_train_tokens
        before = {name: len(values) for name, values in metrics.items()}
        with Overrides(trainer.accelerator) as accelerator:
            gather_by(self._of_partners, accelerator)
            result = self._compute_loss(model, inputs, *args, **kwargs)
        for name, values in metrics.items():
            if name == _NUM_TOKENS or len(values) <= before.get(name, 0):
                continue
            value, known = values.pop(), self._values[name]
            if weight and not math.isnan(value):
                known.append((value, weight))
        self._weight += weight
        if not weight:
            trainer._total_train_tokens = tokens
        return result

    def _of_partners(self, input_data: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """What a gather over the ranks with this microbatch gives. (The trainer divides by their number.)"""
        return input_data.reshape(-1, *input_data.shape[1:]).repeat(self._num_partners, *[1] * (input_data.dim() - 1))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        """The trainer's own. Every rank comes here with a training loss at the same step."""
        if "loss" in logs:
            self._share()
        return self._log(logs, *args, **kwargs)

    def _share(self) -> None:
        trainer, metrics = self._trainer, self._trainer._metrics["train"]
        names = sorted(self._values)
        own = [sum(value * weight for value, weight in self._values[name]) for name in names]
        mine = [trainer._total_train_tokens - self._tokens_agreed, self._weight, *own]
        device = trainer.args.device
        total = torch.tensor(mine, dtype=torch.float64, device=device)
        tokens, weight, *sums = trainer.accelerator.reduce(total, "sum").tolist()
        if tokens:
            self._tokens_agreed += int(tokens) // self._num_partners
            trainer._total_train_tokens = self._tokens_agreed
            metrics[_NUM_TOKENS] = [self._tokens_agreed]
        for name, value in zip(names, sums, strict=True):
            metrics[name] = [value / weight if weight else 0.0]
        if sharp := [name for name in names if _sign(name)]:
            extremes = [[_extreme(name, [value for value, _ in self._values[name]]) for name in sharp]]
            of_ranks = trainer.accelerator.gather(torch.tensor(extremes, dtype=torch.float64, device=device))
            for name, values in zip(sharp, of_ranks.T.tolist(), strict=True):
                found = [value for value in values if not math.isnan(value)]
                metrics[name] = [_extreme(name, found)] if found else []
        for known in self._values.values():
            known.clear()
        self._weight = 0


def _sign(name: str) -> int:
    """1 of a maximum, -1 of a minimum, by a metric's name; 0 of a mean."""
    words = re.split(r"[^a-z]+", name)
    return ("max" in words) - ("min" in words)


def _extreme(name: str, values: list[float]) -> float:
    """The maximum or minimum; nan: there are no values."""
    return _sign(name) * max((_sign(name) * value for value in values), default=math.nan)
