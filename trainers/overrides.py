"""Methods of one object replaced for a while."""

from __future__ import annotations

from types import TracebackType
from typing import Any

_ABSENT = object()


class Overrides:
    """Attributes set on one object, not on its class; leaving the ``with`` block puts back what was there."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._before: dict[str, Any] = {}

    def set(self, name: str, value: Any) -> None:
        """Shadow ``name``."""
        self._before.setdefault(name, vars(self._target).get(name, _ABSENT))
        setattr(self._target, name, value)

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
