"""``odc run --balance``: every transformers ``Trainer`` of a script that knows nothing of it."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from odc.trainers.options import BalanceOptions, Tally
from odc.trainers.trainer import train_balanced

_current: Launched | None = None


class Launched:
    """What :func:`install` did to this process; :meth:`close` undoes it."""

    def __init__(self, options: BalanceOptions) -> None:
        self.options = options
        self.used = False
        """Whether anything was balanced."""

        self.tally = Tally()

        self._trainer: Any = None
        self._train: Any = None

    def enter(self) -> None:
        """Into ``Trainer.train``, if transformers is installed."""
        global _current
        _current = self
        if importlib.util.find_spec("transformers") is None:
            return
        from transformers import Trainer

        original = Trainer.train

        @functools.wraps(original)
        def train(trainer: Any, /, *args: Any, **kwargs: Any) -> Any:
            self.used = True
            return train_balanced(
                trainer, self.options, self.tally, functools.partial(original, trainer, *args, **kwargs)
            )

        self._trainer, self._train = Trainer, original
        Trainer.train = train

    def close(self) -> None:
        """Leave the class as it was. Idempotent."""
        global _current
        if _current is self:
            _current = None
        if self._trainer is not None:
            self._trainer.train = self._train
            self._trainer = None


def install(
    policy: str | None = None, max_tokens: int | None = None, *, online: bool = False, pool_size: int | None = None
) -> Launched:
    """Balance every ``Trainer.train()`` of this process from now on, and every :func:`~odc.trainers.minibatches`.

    Args:
        policy, max_tokens, online, pool_size: see :class:`~odc.trainers.BalanceOptions`.

    Raises:
        ValueError: the policy is not known, or an option is out of range.
    """
    launched = Launched(BalanceOptions.choose(policy, online=online, max_tokens=max_tokens, pool_size=pool_size))
    launched.enter()
    return launched


def current() -> Launched | None:
    """What ``odc run --balance`` installed in this process; None: nothing."""
    return _current
