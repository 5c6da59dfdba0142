"""What a script does with the gradients of one session, and what that means for its minibatch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from odc.errors import ProtocolError, UnsupportedError
from odc.fsdp_patch import ends
from odc.fsdp_patch.fsdp2.forward_methods import watch_forward_methods
from odc.fsdp_patch.listeners import Listener
from odc.fsdp_patch.publishing import Publisher
from odc.protocol import State
from odc.runtime import Runtime

if TYPE_CHECKING:
    from odc.fsdp_patch.session import Session


class GradientWatch(Listener):
    """Ends the minibatch of a session where the script asks for gradients, and refuses what comes too late.

    Gradients that are final are *used up* by a step, by clearing them, or by a step that ``GradScaler`` has skipped.
    """

    def __init__(self, session: Session, publisher: Publisher, runtime: Runtime) -> None:
        self.session = weakref.ref(session)
        self._publisher = publisher
        self._runtime = runtime
        self._sent: set[int] = set()  # units of which this rank has pushed gradients in this minibatch
        self._cleared: set[int] = set()  # ids of parameters, since the minibatch ended
        self._ended_by = ""
        self._is_only_read = False  # by hand, which has ended the minibatch
        self._in_forward = False
        self._in_training_forward = False
        self.in_block = False
        """Inside ``with session.minibatch()``, which ends it."""
        self.has_gradients = False
        """The last minibatch left any gradient on this rank."""

    # What the session says

    def pushed(self, unit: int) -> None:
        """This rank has sent its gradients of a unit."""
        self._sent.add(unit)

    def ended(self) -> None:
        """The minibatch is over; its gradients are about to be installed."""
        self._publisher.forget_steps()
        self._sent.clear()
        self._cleared.clear()
        self._ended_by = "session.finish()"
        self._is_only_read = False
        self.has_gradients = False

    @property
    def num_sent(self) -> int:
        """Units of which this rank has pushed gradients that no step has used."""
        return len(self._sent)

    def is_used_up(self) -> bool:
        """Whether parameters can go out although no optimizer has updated them all.

        That is an evaluation after the step, with units that no optimizer owns completely; or a step was skipped, and
        its gradients are gone. A training forward means the same where they are not: they stay in ``.grad`` and the
        next ones are added to them. Not where somebody has only read them: then a step should follow, by an optimizer
        or by hand.
        """
        publisher = self._publisher
        if publisher.has_stepped or publisher.gradients_are_cleared() or self._cleared >= publisher.unstepped():
            return True
        if self._is_only_read and publisher.is_any_changed():
            return True
        return self._in_training_forward and not self._is_only_read

    def watch_forwards(self, model: nn.Module) -> Callable[[], None]:
        """Note when ``model`` computes, and whether it keeps a graph: FSDP gathers without one. Returns the undo."""

        def begin(module: nn.Module, args: object) -> None:
            self._in_forward = True
            self._in_training_forward = torch.is_grad_enabled()

        def end(module: nn.Module, args: object, output: object) -> None:
            self._in_forward = self._in_training_forward = False

        # A method that raises has no end, so `_in_forward`, which silences readers, must not depend on one.
        def begin_method() -> None:
            if not self._in_forward:
                self._in_training_forward = torch.is_grad_enabled()

        def end_method() -> None:
            if not self._in_forward:
                self._in_training_forward = False

        hooks = [
            model.register_forward_pre_hook(begin, prepend=True),
            model.register_forward_hook(end, always_call=True),
        ]
        undo_methods = watch_forward_methods(model, begin_method, end_method)

        def undo() -> None:
            for hook in hooks:
                hook.remove()
            undo_methods()

        return undo

    @property
    def ended_by(self) -> str:
        """What has made the gradients final."""
        return self._ended_by

    @property
    def advice(self) -> str:
        """What to do where the model is needed before the gradients are used."""
        if self._is_only_read:
            return (
                "Read gradients behind the last microbatch of a step only, then step or clear them; or evaluate after "
                "the step."
            )
        return "Step or clear them first. Evaluate inside the minibatch, or after optimizer.step()."

    # What torch and the script do

    @property
    def waits_for_readers(self) -> bool:
        if not self._sent or self._runtime.state is not State.OPEN or self._in_forward:
            return False
        return torch._C._current_graph_task_id() == -1  # hooks in backward see what FSDP has at that moment

    def owns(self, tensors: Sequence[torch.Tensor]) -> bool:
        return bool(self._publisher.owned(tensors))

    def before_reading(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        owned = self._publisher.owned(tensors)
        if not owned:
            return
        if self.in_block:
            raise ProtocolError(
                f"{what} inside the minibatch: gradients are final only after it. Move it behind the `with "
                "session.minibatch():` block, or call session.finish() before it."
            )
        if self._runtime.state is State.FINISHED and not self._is_next_minibatch(owned):
            return
        if what == ends.CLIPPING_BY_NORM:
            raise UnsupportedError(
                f"{what} before the minibatch has ended: this rank has no gradients yet, so the norm cannot be theirs. "
                "Use clip_grad_norm_, which computes it, or call session.finish() before computing the norm "
                "(odc.session_of(model) finds the session)."
            )
        self._live_session().finish()
        self._ended_by = what

    def before_reading_by_hand(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        ends_it = self.waits_for_readers and self.owns(tensors)
        self.before_reading(what, tensors)
        self._is_only_read |= ends_it

    def _is_next_minibatch(self, owned: set[int]) -> bool:
        """Gradients are about to be read, and the last minibatch is final: is it the next one, in which this rank had
        no microbatch, or are the same gradients read a second time?

        It is the next one if they have been used up.
        """
        used = self._publisher.already_stepped(owned) or not self._cleared.isdisjoint(owned)
        return used or (self.has_gradients and self._publisher.gradients_are_cleared())

    def before_clearing(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        if self._runtime.state is not State.OPEN:
            return
        sent = self._publisher.units_of(tensors) & self._sent
        if sent:
            first = self._runtime.units[min(sent)].name
            raise ProtocolError(
                f"{what} between backward and step: gradients of {len(sent)} units (the first is {first!r}) have gone "
                "to the other ranks, which have added them up. Clear gradients after the step, or before the first "
                "backward. To throw a minibatch away (microbatches left over at the end of an epoch, a loss that is "
                "not finite), call odc.session_of(model).discard() on every rank instead."
            )

    def after_clearing(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._runtime.state is State.FINISHED:
            self._cleared |= self._publisher.owned(tensors)
        self._live_session().release_gradients()

    def after_scaled_step(self, tensors: Sequence[torch.Tensor]) -> None:
        owned = self._publisher.owned(tensors)
        if self._runtime.state is State.FINISHED and not self._publisher.already_stepped(owned):
            self._cleared |= owned

    def after_step(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        owned = self._publisher.owned(tensors)
        if owned and self._runtime.state is State.FINISHED:
            self._publisher.after_step(owned)
            self._live_session().release_gradients()

    def _live_session(self) -> Session:
        session = self.session()
        assert session is not None, "whoever is told is alive: the session keeps its watch"
        return session
