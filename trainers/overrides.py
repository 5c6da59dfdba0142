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
from types import TracebackType
from typing import Any

import torch

from odc.balance.data.collate import count_loss_tokens
from odc.trainers.prepared import DataRanks

_ABSENT = object()


class Overrides:
    """Attributes set on one object, not on its class; leaving the ``with`` block puts back what was there."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._before: dict[str, Any] = {}

    def set(self, name: str, value: Any) -> None:
        """Shadow ``name``. What takes the place of a method looks like it: callers inspect signatures."""
        self._before.setdefault(name, vars(self._target).get(name, _ABSENT))
        replaced = getattr(self._target, name, None)
        looks_alike = inspect.isroutine(replaced) and inspect.isroutine(value)
        setattr(self._target, name, _looking_like(replaced, value) if looks_alike else value)

    def undo(self) -> None:
        """Put everything back. Idempotent."""
        while self._before:
            name, value = self._before.popitem()
            if value is _ABSENT:
                delattr(self._target, name)
            else:
                setattr(self._target, name, value)

    def __enter__(self) -> Overrides:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def _looking_like(original: Any, function: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


_NUM_TOKENS = "num_tokens"  # a running total, not a mean


class RankMetrics:
    """Sums the metrics of this rank's microbatches, weighted by their loss tokens; ranks add up when they log.

    A logged metric is the mean over all loss tokens since the last log, and a minimum or maximum that of all. (TRL's is
    the mean over microbatches of their means, minima and maxima.)
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._compute_loss = trainer.compute_loss
        self._log = trainer.log
        self._names: set[str] = set()
        """Of metrics that the loss of a microbatch gives; the trainer may have others."""

        self._sums: defaultdict[str, float] = defaultdict(float)
        self._extremes: dict[str, float] = {}
        self._weight = 0
        self._tokens_agreed: int = trainer._total_train_tokens
        num_ranks = trainer.accelerator.num_processes
        self._num_partners = num_ranks // DataRanks.of(trainer.accelerator).world_size
        """Ranks that have the same microbatches."""

    @classmethod
    def enter(cls, overrides: Overrides, trainer: Any) -> None:
        """Into a trainer that keeps such metrics; nothing where there are none."""
        if hasattr(trainer, "_metrics") and hasattr(trainer, "_total_train_tokens"):
            metrics = cls(trainer)
            overrides.set("compute_loss", metrics.compute_loss)
            overrides.set("log", metrics.log)

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
            for name in ("gather", "gather_for_metrics"):
                accelerator.set(name, self._of_partners)
            accelerator.set("reduce", lambda tensor, *_, **__: tensor)
            result = self._compute_loss(model, inputs, *args, **kwargs)
        for name, values in metrics.items():
            if name == _NUM_TOKENS or len(values) <= before.get(name, 0):
                continue
            self._names.add(name)
            value = values.pop()
            if not weight or math.isnan(value):
                continue
            self._sums[name] += value * weight
            self._extremes[name] = _sharper(name, value, self._extremes.get(name, value))
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
        names = sorted(self._names)
        mine = [trainer._total_train_tokens - self._tokens_agreed, self._weight, *(self._sums[n] for n in names)]
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
            # As sums of one number for each rank.
            rows = torch.zeros(len(sharp), trainer.accelerator.num_processes, dtype=torch.float64, device=device)
            own = [self._extremes.get(name, math.nan) for name in sharp]
            rows[:, trainer.accelerator.process_index] = torch.tensor(own, dtype=torch.float64, device=device)
            for name, row in zip(sharp, trainer.accelerator.reduce(rows, "sum").tolist(), strict=True):
                found = [value for value in row if not math.isnan(value)]
                metrics[name] = [_sign(name) * max(_sign(name) * value for value in found)] if found else []
        self._sums.clear()
        self._extremes.clear()
        self._weight = 0


def _sign(name: str) -> int:
    """1 of a maximum, -1 of a minimum, by a metric's name; 0 of a mean."""
    words = re.split(r"[^a-z]+", name)
    return ("max" in words) - ("min" in words)


def _sharper(name: str, value: float, other: float) -> float:
    return max(value, other) if _sign(name) >= 0 else min(value, other)
