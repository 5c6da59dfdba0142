"""Methods of one object replaced for a while; TRL's training metrics without a gather in every microbatch, by that.

``SFTTrainer.compute_loss`` gathers four numbers over the ranks in each microbatch, for the log only. Ranks that run
different numbers of microbatches would wait for ever, and with equal numbers they would still wait for one another
every time.
"""

from __future__ import annotations

import functools
import inspect
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

    A logged metric is the mean over all loss tokens since the last log. (TRL's is the mean over microbatches of their
    means.)
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._compute_loss = trainer.compute_loss
        self._log = trainer.log
        self._sums: defaultdict[str, float] = defaultdict(float)
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
        if not self._trainer.model.training:
            return self._compute_loss(model, inputs, *args, **kwargs)
        weight = count_loss_tokens(inputs["labels"])
        metrics = self._trainer._metrics["train"]
        before = {name: len(values) for name, values in metrics.items()}
        with Overrides(self._trainer.accelerator) as accelerator:
            accelerator.set("gather_for_metrics", self._of_partners)
            result = self._compute_loss(model, inputs, *args, **kwargs)
        for name, values in metrics.items():
            if name != _NUM_TOKENS and len(values) > before.get(name, 0):
                self._sums[name] += values.pop() * weight
        self._weight += weight
        return result

    def _of_partners(self, input_data: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """What a gather over the ranks with this microbatch gives. (The trainer divides by their number.)"""
        return input_data.reshape(-1).repeat(self._num_partners)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        """The trainer's own. Every rank comes here with a training loss at the same step."""
        if "loss" in logs:
            self._share()
        return self._log(logs, *args, **kwargs)

    def _share(self) -> None:
        trainer, metrics = self._trainer, self._trainer._metrics["train"]
        names = sorted(name for name in metrics if name != _NUM_TOKENS)
        mine = [trainer._total_train_tokens - self._tokens_agreed, self._weight, *(self._sums[n] for n in names)]
        total = torch.tensor(mine, dtype=torch.float64, device=trainer.args.device)
        tokens, weight, *sums = trainer.accelerator.reduce(total, "sum").tolist()
        self._tokens_agreed += int(tokens) // self._num_partners
        trainer._total_train_tokens = self._tokens_agreed
        metrics[_NUM_TOKENS] = [self._tokens_agreed]
        for name, value in zip(names, sums, strict=True):
            metrics[name] = [value / weight if weight else 0.0]
        self._sums.clear()
        self._weight = 0
