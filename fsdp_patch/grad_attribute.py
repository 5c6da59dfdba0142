"""The attribute ``grad`` of parameters, while anybody listens to who reads it."""

from __future__ import annotations

import inspect
import os
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from odc.fsdp_patch.doors import Door, untraced
from odc.fsdp_patch.listeners import Listener, Listeners

_INITIALISES_OPTIMIZERS = "torch.distributed.checkpoint.state_dict"
"""Asked for the state of an optimizer that has none, it takes a step with gradients of zero unless it finds some."""

_READS_FOR_SCRIPTS = "torch.nn.utils.clip_grad"
"""Given ``map(attrgetter("grad"), parameters)``, it is who reads. Its own readings are behind doors."""

_PASSES_BY = "torch._dynamo.eval_frame"
"""Its wrapper stands between, see [Note: Compiled scripts] in doors.py. The compiler itself, which looks at gradients
of what it is given, is in other modules."""


class Gradient:
    """The attribute ``grad`` of a class of parameters: told when a script reads or sets it by hand.

    Only while a listener waits for readers of its own parameters (:attr:`Listener.waits_for_readers`). What torch
    itself does with ``.grad`` is not told: FSDP and autograd handle gradients that are not final yet, and where torch
    reads final ones on behalf of a script there is another door.
    """

    def __init__(self, owner: type, listeners: Listeners) -> None:
        self._owner: Any = owner
        self._listeners = listeners
        self._telling: property | None = None

    def open(self) -> None:
        """Shadow the attribute, which the class inherits from ``torch.Tensor``."""
        inherited = inspect.getattr_static(self._owner, "grad")

        def read(tensor: torch.Tensor) -> torch.Tensor | None:
            reader = self._reader(tensor)
            if reader is not None:
                if reader.module == _INITIALISES_OPTIMIZERS:
                    return tensor
                what = f"reading .grad {reader}"
                self._listeners.tell(lambda listener: listener.before_reading_by_hand(what, [tensor]))
            gradient: torch.Tensor | None = inherited.__get__(tensor)
            return gradient

        def write(tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
            reader = self._reader(tensor)
            if reader is not None:
                tell = _clearing if gradient is None else _reading
                self._listeners.tell(lambda listener: tell(listener, f"setting .grad {reader}", tensor))
            inherited.__set__(tensor, gradient)

        self._telling = property(untraced(read), untraced(write), lambda tensor: inherited.__delete__(tensor))
        self._owner.grad = self._telling

    def shut(self) -> None:
        """Take the shadow away, unless somebody else has put another one there."""
        if self._telling is not None and self._owner.__dict__.get("grad") is self._telling:
            delattr(self._owner, "grad")
        self._telling = None

    def _reader(self, tensor: torch.Tensor) -> _Reader | None:
        """Who is reading, if that is news."""
        if Door.inside or not any(one.waits_for_readers and one.owns([tensor]) for one in self._listeners.all()):
            return None
        frame = _asking_frame()
        module = _module_of(frame)
        asks_for_script = module in (_INITIALISES_OPTIMIZERS, _READS_FOR_SCRIPTS)
        if module.split(".")[0] in ("torch", "odc") and not asks_for_script:
            return None
        return _Reader(module, frame.f_code.co_filename, frame.f_lineno)


@dataclass(frozen=True)
class _Reader:
    """A place in a script."""

    module: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"({os.path.basename(self.file)}, line {self.line})"


def _asking_frame() -> FrameType:
    """Who asks for the attribute, beyond this module and what tells the compiler to pass by."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _module_of(frame) in (__name__, _PASSES_BY):
        frame = frame.f_back
    return frame


def _module_of(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


def _clearing(listener: Listener, what: str, tensor: torch.Tensor) -> None:
    listener.before_clearing(what, [tensor])


def _reading(listener: Listener, what: str, tensor: torch.Tensor) -> None:
    listener.before_reading_by_hand(what, [tensor])
