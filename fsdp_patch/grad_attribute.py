"""The attribute ``grad`` of parameters, while anybody listens to who reads it."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

import torch

from odc.fsdp_patch.doors import Door, untraced
from odc.fsdp_patch.listeners import Listeners, Reader, module_of

_INITIALISES_OPTIMIZERS = "torch.distributed.checkpoint.state_dict"
"""Asked for the state of an optimizer that has none, it takes a step with gradients of zero unless it finds some."""

_READS_FOR_SCRIPTS = "torch.nn.utils.clip_grad"
"""Given ``map(attrgetter("grad"), parameters)``, it is who reads. Its own readings are behind doors."""

_PASSES_BY = "torch._dynamo.eval_frame"
"""Its wrapper stands between, see [Note: Compiled scripts] in doors.py. The compiler itself, which looks at gradients
of what it is given, is in other modules."""


class Gradient:
    """The attribute ``grad`` of a class of parameters: told when a script reads or sets it by hand.

    Only while a listener waits for readers of its own parameters, or notes them. What torch itself does with ``.grad``
    is not told: FSDP and autograd handle gradients that are not final yet, and where torch reads final ones on behalf
    of a script there is another door.
    """

    def __init__(self, owner: type, listeners: Listeners) -> None:
        self._owner: Any = owner
        self._listeners = listeners
        self._telling: property | None = None

    def open(self) -> None:
        """Shadow the attribute, which the class inherits from ``torch.Tensor``."""
        inherited = inspect.getattr_static(self._owner, "grad")

        def read(tensor: torch.Tensor) -> torch.Tensor | None:
            reader, is_waited_for = self._reader(tensor, "reading")
            if reader is not None:
                if reader.module == _INITIALISES_OPTIMIZERS and is_waited_for:
                    return tensor
                self._listeners.tell(lambda listener: listener.before_reading_by_hand(reader, [tensor]))
            gradient: torch.Tensor | None = inherited.__get__(tensor)
            if gradient is None:
                gradient = inherited.__get__(self._meant_by_script(tensor))
            return gradient

        def write(tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
            reader, is_waited_for = self._reader(tensor, "setting")
            if reader is not None and gradient is None and is_waited_for:
                self._listeners.tell(lambda listener: listener.before_clearing(str(reader), [tensor]))
            elif reader is not None and gradient is not None:
                self._listeners.tell(lambda listener: listener.before_reading_by_hand(reader, [tensor]))
            inherited.__set__(self._meant_by_script(tensor), gradient)
            if reader is not None and gradient is None:
                self._listeners.tell(lambda listener: listener.after_clearing([tensor]))

        self._telling = property(untraced(read), untraced(write), lambda tensor: inherited.__delete__(tensor))
        self._owner.grad = self._telling

    def shut(self) -> None:
        """Take the shadow away, unless somebody else has put another one there."""
        if self._telling is not None and self._owner.__dict__.get("grad") is self._telling:
            delattr(self._owner, "grad")
        self._telling = None

    def _reader(self, tensor: torch.Tensor, does: str) -> tuple[Reader | None, bool]:
        """Who is reading, if that is news; and whether a listener waits for that."""
        if Door.inside:
            return None, False
        frame = _asking_frame()
        module = module_of(frame)
        if _is_torch(module) and module not in (_INITIALISES_OPTIMIZERS, _READS_FOR_SCRIPTS):
            return None, False
        listeners = self._listeners.all()
        is_waited_for = any(one.waits_for_readers and one.owns([tensor]) for one in listeners)
        is_noted = is_waited_for or any(one.notes_readers and one.owns([tensor]) for one in listeners)
        return (Reader(frame, does) if is_noted else None), is_waited_for

    def _meant_by_script(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sharded parameter instead of the full one, unless it is torch itself that asks."""
        sharded = self._listeners.sharded(tensor)
        return tensor if sharded is tensor or _is_torch(module_of(_asking_frame())) else sharded


def _is_torch(module: str) -> bool:
    return module.split(".")[0] in ("torch", "odc")


def _asking_frame() -> FrameType:
    """Who asks for the attribute, beyond this module and what tells the compiler to pass by."""
    frame = sys._getframe(1)
    while frame.f_back is not None and module_of(frame) in (__name__, _PASSES_BY):
        frame = frame.f_back
    return frame
