"""Who is told what a script does with gradients. Process-wide, as torch's own optimizer hooks are.

[Note: Listeners that come late] A listener may patch a model while it is told, and the session of that model listens
from then on: to this very reading too, since its gradients are the ones that are read. So doors and hooks share one
list of listeners, and whoever joins it meanwhile is told as well.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence

import torch


class Listener:
    """What may happen to gradients; each listener looks for its own parameters and overrides what it cares for.

    An exception of a ``before_...`` goes to the script, before torch has done anything.
    """

    @property
    def waits_for_readers(self) -> bool:
        """Whether gradients are on their way, so that whoever reads one by hand must be noticed."""
        return False

    def owns(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether any of these is a parameter of this listener, which decides what is refused (LBFGS)."""
        return True

    def before_reading(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """``what`` (for example "clip_grad_norm_") is about to read the gradients of these parameters."""

    def before_reading_by_hand(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """The script itself is about to read or replace the gradients of these parameters."""
        self.before_reading(what, tensors)

    def before_clearing(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """``what`` (for example "zero_grad") is about to clear the gradients of these parameters."""

    def after_clearing(self, tensors: Sequence[torch.Tensor]) -> None:
        """The gradients of these parameters were cleared."""

    def after_scaled_step(self, tensors: Sequence[torch.Tensor]) -> None:
        """``GradScaler.step`` has returned: it has updated these parameters, or skipped that for good."""

    def after_step(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """``what`` has updated these parameters."""


class Listeners:
    """The listeners of a process, in the order in which they came. They are not kept alive by being here."""

    def __init__(self, on_first: Callable[[], None], on_none: Callable[[], None]) -> None:
        self._on_first = on_first
        self._on_none = on_none
        self._refs: list[weakref.ref[Listener]] = []

    def __bool__(self) -> bool:
        return bool(self._refs)

    def add(self, listener: Listener) -> Callable[[], None]:
        """Returns the undo, which is idempotent."""
        if not self._refs:
            self._on_first()
        ref = weakref.ref(listener, self._forget)
        self._refs.append(ref)
        return lambda: self._remove(ref)

    def _forget(self, ref: weakref.ref[Listener], is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """The listener is gone. When the interpreter ends, the modules to put things back in may be gone as well."""
        if not is_finalizing():
            self._remove(ref)

    def _remove(self, ref: weakref.ref[Listener]) -> None:
        known = [one for one in self._refs if one is not ref]
        if len(known) == len(self._refs):
            return
        self._refs[:] = known
        if not known:
            self._on_none()

    def all(self) -> list[Listener]:
        """Those alive."""
        return [listener for ref in self._refs if (listener := ref()) is not None]

    def tell(self, call: Callable[[Listener], None]) -> None:
        """``call`` for every listener. See [Note: Listeners that come late]."""
        told: list[Listener] = []
        while (listener := next((one for one in self.all() if all(one is not t for t in told)), None)) is not None:
            told.append(listener)
            call(listener)
