"""Events of a script's use of gradients, and their listeners. Process-wide, like torch's optimizer hooks.

[Note: Listeners that come late] A listener may patch a model during an event. The session of that model must get this
event, too, since its gradients are being read. So all interceptions share one list of listeners, and a listener that
joins during an event is also called.

[Note: Watched waits] Clipping sums the norm over the ranks by a collective, and scripts have their own collectives. ODC
cannot check for failures inside them. So the session records that its rank is in one, and its watchdog makes the
collective fail if a rank of the job has failed (:mod:`odc.rank.watchdog`).
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

import torch

T = TypeVar("T")


def script_frame(*libraries: str) -> FrameType:
    """The innermost frame that is neither torch's nor ours, nor of these packages."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _module_of(frame).split(".")[0] in ("torch", "odc", *libraries):
        frame = frame.f_back
    return frame


def place_of(frame: FrameType) -> int:
    """The place in a script, and all the calls that have led to it, as a positive number. Ranks run the same script, so
    they can tell each other where that was: by what does not depend on where the script lies on a host."""
    callers = [frame]
    while (caller := callers[-1].f_back) is not None:
        callers.append(caller)
    return number_of(";".join(f"{_module_of(one)}:{one.f_code.co_name}:{one.f_lasti}" for one in callers))


def _module_of(frame: FrameType) -> str:
    """The name of the module whose code a frame runs."""
    name: str = frame.f_globals.get("__name__", "")
    return name


def number_of(text: str) -> int:
    """The same positive number in every process."""
    return zlib.crc32(text.encode()) + 1


class Listener:
    """What may happen to gradients; each listener looks for its own parameters and overrides what it cares for.

    An exception of a ``before_...`` goes to the script, before torch has done anything.
    """

    is_deterministic: bool = False
    """Whether gradients are to be bit-equal whatever the timing."""

    def sharded(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The sharded parameter of which ``tensor`` is the full one, if it is one of this listener's."""
        return None

    def owns(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether any of these is a parameter of this listener, which decides what is refused (LBFGS)."""
        return True

    def before_reading(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """``what`` (for example "clip_grad_norm_") is about to read the gradients of these parameters."""

    def before_initialising(self, tensors: Sequence[torch.Tensor]) -> None:
        """The state of an optimizer of these parameters, which has taken no step, is about to be initialised: by a step
        with gradients of zero, if there are none."""

    def before_clearing(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """``what`` (for example "zero_grad") is about to clear the gradients of these parameters."""

    def after_clearing(self, tensors: Sequence[torch.Tensor]) -> None:
        """The gradients of these parameters were cleared."""

    def before_moving(self, tensors: Sequence[torch.Tensor]) -> None:
        """A module with these parameters, and their gradients, is about to be moved to another device, or the like."""

    def after_moving(self, tensors: Sequence[torch.Tensor]) -> None:
        """It was moved, or that has failed."""

    def after_scaled_step(self, tensors: Sequence[torch.Tensor]) -> None:
        """``GradScaler.step`` has returned: it has updated these parameters, or skipped that for good."""

    def enters_collective(self, what: str, tensors: Sequence[torch.Tensor] | None) -> None:
        """The training loop may wait for other ranks in ``what``, which is about the gradients of these parameters
        (None: the script's own affair)."""

    def leaves_collective(self) -> None:
        """It is not there any more."""

    def wait_until(self, is_there: Callable[[], bool], what: str, rank: int | None) -> bool:
        """Wait for what a rank, by its number in the job, does outside of collectives, and for its failure. False: of
        that rank nothing is heard here.

        Args:
            rank: None: no rank does it, but a process outside of the job, which is given one limit.
        """
        return False

    def enters_backward(self) -> None:
        """Autograd is about to work."""

    def leaves_backward(self) -> None:
        """It has ended, or failed."""

    def after_backward(self) -> None:
        """It has ended well."""

    def explain(self, error: RuntimeError, what: str, waited_s: float) -> RuntimeError | None:
        """What is behind an error of a collective; None if that is not known here."""
        return None

    def after_step(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """``what`` has updated these parameters."""


@dataclass
class Trained:
    """What a process has trained with ODC since it began, in all sessions: it only grows."""

    minibatches: int = 0
    """Ends of minibatches, at which the ranks have met."""
    backwards: int = 0
    met_s: float = 0.0
    """When the ranks last met at such an end, on the monotonic clock. They leave it together."""


class Listeners:
    """The listeners of a process, in the order in which they came. They are not kept alive by being here."""

    def __init__(self, on_first: Callable[[], None], on_none: Callable[[], None]) -> None:
        self.trained = Trained()
        self._on_first = on_first
        self._on_none = on_none
        self._refs: list[weakref.ref[Listener]] = []
        self._is_in_collective = False

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

    def sharded(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sharded parameter where ``tensor`` is the full one of a listener; else ``tensor``.

        After an evaluation FSDP2 leaves some units unsharded, and a script that lists the parameters of the model then
        is given full ones. Under plain FSDP the next backward ends that on all ranks, before gradients are asked for;
        on demand a rank may have no backward before that.
        """
        found = (listener.sharded(tensor) for listener in self.all())
        return next((parameter for parameter in found if parameter is not None), tensor)

    def tell(self, call: Callable[[Listener], None]) -> None:
        """``call`` for every listener. See [Note: Listeners that come late]."""
        told: list[Listener] = []
        while (listener := next((one for one in self.all() if all(one is not t for t in told)), None)) is not None:
            told.append(listener)
            call(listener)

    def run_collective(self, what: str, tensors: Sequence[torch.Tensor] | None, call: Callable[[], T]) -> T:
        """``call``, in which the training loop may wait for other ranks; what it returns. See [Note: Watched waits].

        Raises:
            OdcError: in place of an error of the process group, where a rank's failure is behind it.
        """
        if self._is_in_collective or threading.current_thread() is not threading.main_thread():
            return call()
        listeners = self.all()
        self._is_in_collective = True
        try:
            for listener in listeners:
                listener.enters_collective(what, tensors)
            return self.explaining(what, call)
        finally:
            self._is_in_collective = False
            for listener in listeners:
                listener.leaves_collective()

    def run_backward(self, call: Callable[[], T]) -> T:
        """``call``, a backward, in which the training loop may wait for others. Raises as :meth:`run_collective`."""
        listeners = self.all()
        for listener in listeners:
            listener.enters_backward()
        try:
            result = self.explaining("a collective of a backward", call)
        finally:
            for listener in listeners:
                listener.leaves_backward()
        self.trained.backwards += 1
        for listener in self.all():
            listener.after_backward()
        return result

    def explaining(self, what: str, call: Callable[[], T]) -> T:
        """``call``, in which collectives may fail; what it returns. Raises as :meth:`run_collective`."""
        started = time.monotonic()
        try:
            return call()
        except RuntimeError as error:
            for listener in self.all():
                if (cause := listener.explain(error, what, time.monotonic() - started)) is not None:
                    raise cause from None
            raise
