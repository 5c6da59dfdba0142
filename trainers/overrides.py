"""Methods of one object replaced for a while."""

from __future__ import annotations

import functools
import inspect
from types import TracebackType
from typing import Any

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
