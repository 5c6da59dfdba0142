"""Reacts to a script's use of gradients in one session, and ends the minibatch if needed."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch
from torch import nn

from odc.errors import UnsupportedError
from odc.fsdp_patch.fsdp2 import watch_forward_methods
from odc.fsdp_patch.gradient_events import Listener, place_of, script_frame
from odc.fsdp_patch.gradient_state import Asker, Notes, Said
from odc.fsdp_patch.interception import STEP, listening
from odc.fsdp_patch.pending import Pending, Use
from odc.fsdp_patch.publishing import Publisher, UnitStep
from odc.fsdp_patch.unit import Unit
from odc.minibatch.protocol import End
from odc.minibatch.runtime import Runtime
from odc.minibatch.state import Phase


class Owner(Protocol):
    """The session, which keeps its :class:`GradientUse` and is not kept by it."""

    def finish(self, step: UnitStep | None = None) -> None:
        """End the minibatch for a step."""
        ...

    def discard(self) -> None:
        """Throw the minibatch away."""
        ...

    def before_training(self, *, is_method: bool) -> None:
        """A forward of the model that keeps a graph begins, or another method that is one."""
        ...

    def publish_changed(self, *, may_leave: bool = False, is_evaluation: bool = False) -> None:
        """Publish anew what the script has changed."""
        ...


class GradientUse(Listener):
    """Ends the minibatch of a session where the script asks for gradients, and refuses what comes too late.

    Gradients that are final are *used up* by a step, by clearing them, or by a step that ``GradScaler`` has skipped.

    [Note: Full parameters] FSDP2 leaves the root's parameters full behind a forward without a graph, and who lists the
    parameters then clips, or clears, those, which have no gradients. Here the sharded ones are meant, as in one
    process: also where only one rank has evaluated, or one has had no backward, which ends that.
    """

    def __init__(self, session: Owner, publisher: Publisher, runtime: Runtime, units: Sequence[Unit]) -> None:
        self.session = weakref.ref(session)
        self._publisher = publisher
        self._runtime = runtime
        self._units = units
        self.gradients = publisher.gradients
        self._ending = ("", 0)  # what is about to make them final, and at which place of the script, if by hand
        self._addresses: list[tuple[int, int]] = []  # before parameters are moved
        self._in_forward = False
        self._state = runtime.state
        self.is_deterministic = runtime.config.deterministic
        self._began = 0.0  # the last forward, on the monotonic clock
        self.steps_in_backward = False
        """Hooks of the script step its optimizers, so that each backward ends a minibatch, as under plain FSDP."""
        self.in_block = False
        """Inside ``with session.minibatch()``, which ends it."""
        self.weak_data_of: Use = _weakly(self.data_of)
        """:meth:`data_of`, which keeps nothing alive."""

    def wait_until(self, is_there: Callable[[], bool], what: str, rank: int | None) -> bool:
        if not self._runtime.hears_of(rank):
            return False
        self._runtime.wait_until(is_there, what, rank)
        return True

    # What the session says

    def expect_others(self, unit: int) -> None:
        """This rank has pushed its first gradients, those of a unit. See [Note: Gradients that others will bring] in
        ``pending.py``."""
        for index, other in enumerate(self._units):
            if index != unit:  # of that one FSDP has the gradients at hand
                other.expect(self.weak_data_of, old=True)

    def expect_next(self, *, none: bool = False) -> None:
        """Old gradients become pending where minibatches are ended by hand; ``none``: and what is None. (Behind a step,
        that was not used, and is None to who looks.)"""
        for unit in self._units:
            unit.expect(self.weak_data_of, none=none, old=self.gradients.is_by_hand)

    def data_of(self, pending: Pending, *, is_zeroed: bool = False) -> torch.Tensor:
        """The data of a gradient that may not be there yet, for who needs it: final, if that is what is meant.

        ``is_zeroed``: it is about to be, and is nothing so far. Then it is as it should be, wherever the others are.
        """
        if self._in_forward or self.is_in_backward:  # hooks see what FSDP has at that moment
            return pending.now()
        frame, owned = script_frame(), self._publisher.all_trainable
        place = place_of(frame)
        who, is_old = (place, pending.key), pending.base is not None and not self._runtime.state.pushed
        asker = Asker.DATA if is_old else Asker.NAME
        if is_zeroed or (is_old and not self.gradients.means_coming(asker, who, owned, place)):
            self.gradients.give(who, place)
            return torch.empty(0, device=pending.like[2]) if is_zeroed else pending.now()
        what = f"using .grad ({os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno})"
        unfrozen = [unit.name for unit in self._units if unit.is_unfrozen()]
        if unfrozen and self._runtime.state.phase is not Phase.OPEN:  # to be patched anew now would be too late
            raise UnsupportedError(
                f"{what} on a rank without a microbatch, where parameters of unit {unfrozen[0]!r} are trained that "
                "were frozen before: call odc.session_of(model).finish() on every rank before gradients are used"
            )
        self._end_for(asker, what, owned, who, place)
        return pending.now() if pending.final is None else pending.final

    def ended(self, ends: Sequence[End]) -> None:
        """The minibatch is over, as each rank of the mesh says in ``ends``; its gradients are about to be installed.

        Raises:
            ProtocolError: the ranks are not at the same place of the script.
        """
        said = [(Notes(*end.notes), end.has_pushed) for end in ends]
        self.gradients.check(said, self._ending[0])
        self.gradients.end(said)

    def installed(self, has_gradients: bool) -> None:
        """The gradients of the minibatch are in ``.grad``, or were used. ``has_gradients``: any rank had some."""
        if self.gradients.are_used(self._publisher.all_trainable) and self._publisher.gradients_are_cleared():
            self._publisher.publish_all()
            self.expect_next(none=True)
        self.gradients.install(has_gradients)
        if self.gradients.is_by_hand and (self.gradients.was_empty or not self.gradients.ever_stepped):
            self.expect_next()  # no step will tell that they are used

    def notes(self) -> Notes:
        """What the other ranks are told of the end of a minibatch."""
        num_shards = sum(len(unit.gradient_shards()) for unit in self._units)
        expected = [one for unit in self._units for one in unit.expected.values()]
        said = Said.EXPECTED if len(expected) == num_shards and all(one.is_there for one in expected) else Said(0)
        return self.gradients.notes(*self._ending, said)

    def end_if_cleared(self) -> None:
        """Throw the minibatch away if the script has cleared all that this rank has sent, in place of a step.

        Raises:
            MisuseError: it has cleared a part.
        """
        if not self._runtime.state.pushed:
            return
        sent = [one for unit in self._units for one in unit.expected.values() if one.pending.is_sent]
        num_gone = sum(one.is_cleared for one in sent)
        if num_gone == len(sent) > 0:
            self._live_session().discard()
        elif num_gone:
            self._refuse_clearing("setting .grad to None", num_gone, len(sent))

    def _refuse_clearing(self, what: str, num_cleared: int, num_sent: int) -> None:
        raise self._runtime.refusal(
            f"{what} between backward and step: gradients of {num_sent} parameters have gone to the other ranks, which "
            f"have added them up, and {num_cleared} of them are cleared. Clear gradients after the step, or before the "
            "first backward; or all of them, on every rank, to throw the minibatch away (microbatches left over at the "
            "end of an epoch, a loss that is not finite): as odc.session_of(model).discard() does"
        )

    def begin_forward(self, *, is_method: bool) -> None:
        """A forward, or a method that is one, has begun before this object was told of such."""
        self._in_forward = not is_method
        self._state.enter_forward(keeps_graph=True)

    def watch_forwards(self, model: nn.Module) -> Callable[[], None]:
        """Note when ``model`` computes, and whether it keeps a graph: FSDP gathers without one. Returns the undo."""

        def begin(*, is_method: bool) -> None:
            # A look at one of each unit: who clears all has cleared it, and clears a part is found at the end.
            if any(next(iter(unit.expected.values())).is_cleared for unit in self._units if unit.expected):
                self.end_if_cleared()
            if not self.is_in_backward:
                self._live_session().publish_changed(is_evaluation=not torch.is_grad_enabled())
            self._in_forward, self._began = not is_method, time.monotonic()
            self._state.enter_forward(keeps_graph=torch.is_grad_enabled())
            if self._state.in_forward:
                self._live_session().before_training(is_method=is_method)

        def end(module: nn.Module, args: object, output: object) -> None:
            self._in_forward = False
            self._state.leave_forward()
            error = sys.exc_info()[1]
            if not torch.is_grad_enabled() and error is None:
                for unit in self._units:
                    unit.end_evaluation(self.gradients.is_by_hand)
            if isinstance(error, RuntimeError):  # of compiled code, say, whose waits nobody sees
                # No hook can replace it.
                cause = self.explain(error, "a collective of a forward", time.monotonic() - self._began)
                error.args = error.args if cause is None else (f"{type(cause).__name__}: {cause}",)

        # A method that raises has no end, so `_in_forward`, which silences readers, must not depend on one.
        def begin_method() -> None:
            if not self._in_forward:
                begin(is_method=True)

        def end_method() -> None:
            if not self._in_forward:
                self._state.leave_forward()

        hooks = [
            model.register_forward_pre_hook(lambda module, args: begin(is_method=False), prepend=True),
            model.register_forward_hook(end, always_call=True),
        ]
        undo_methods = watch_forward_methods(model, begin_method, end_method)

        def undo() -> None:
            for hook in hooks:
                hook.remove()
            undo_methods()

        return undo

    # What torch and the script do

    @property
    def is_computing(self) -> bool:
        """In a forward or a backward, or in a method that is a forward that keeps a graph."""
        return self._in_forward or self._state.in_forward or self.is_in_backward

    @property
    def is_in_backward(self) -> bool:
        """Whether autograd is at work in this thread."""
        return torch._C._current_graph_task_id() != -1

    def sharded(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See [Note: Full parameters]."""
        return self._publisher.sharded(tensor)

    def owns(self, tensors: Sequence[torch.Tensor]) -> bool:
        return bool(self._publisher.owned(tensors))

    def before_reading(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        self._end_for(Asker.STEP if what == STEP else Asker.NAME, what, self._publisher.owned(tensors))

    def _end_for(self, asker: Asker, what: str, owned: set[int], who: Hashable = None, place: int = 0) -> None:
        """End the minibatch for who asks for the gradients of ``owned``, unless he means those that are final."""
        if not owned:
            return
        if (turn := self._publisher.turn) is not None:
            if what == STEP and not turn.is_step_by_unit:
                self._check_step_in_hook(turn.unit, owned)
            return
        self._refuse_in_block(what)
        who = who or (what, frozenset(owned))
        if self.gradients.means_coming(asker, who, owned, place):
            self.finish(what, place)
        self.gradients.give(who)

    def finish(self, what: str, place: int = 0, step: UnitStep | None = None) -> None:
        """End the minibatch for ``what``, and tell the others so."""
        self._ending = (what, place)
        try:
            self._live_session().finish(step)
        finally:
            self._ending = ("", 0)

    def _refuse_in_block(self, what: str) -> None:
        if self.in_block:
            raise self._runtime.refusal(
                f"{what} inside the minibatch: gradients are final only after it. Move it behind the `with "
                "session.minibatch():` block, or call session.finish() before it."
            )

    def _check_step_in_hook(self, unit: int | None, owned: set[int]) -> None:
        if unit is None or not self._units[unit].steps_in_backward:
            raise UnsupportedError(
                "optimizer.step in a hook of register_post_accumulate_grad_hook (optimizer in backward), which does "
                "not show that it steps: it has no optimizer in its closure, arguments, object or global names. Let "
                "it have one, or call odc.step_by_unit(model, optimizers) behind the last backward in its place"
            )
        if not owned <= self._publisher.trainable[unit]:
            raise UnsupportedError(
                f"optimizer.step in a hook of register_post_accumulate_grad_hook (optimizer in backward) of unit "
                f"{self._units[unit].name!r}: the optimizer has parameters of other units, whose gradients are not "
                "there. Make an optimizer for each parameter, or call odc.step_by_unit(model, optimizer) behind the "
                "last backward in place of the hook"
            )

    def check_by_unit(self, what: str) -> None:
        """Refuse to step by unit where gradients are final, or not to be asked for.

        Raises:
            MisuseError: the minibatch has ended, or this is inside ``with session.minibatch()``.
        """
        self._refuse_in_block(what)
        if self._units and not self.gradients.means_coming(Asker.STEP, what, self._publisher.all_trainable):
            raise self._runtime.refusal(
                f"{what} behind the end of minibatch {self._runtime.minibatch}: all its gradients are in .grad already "
                "(something has clipped, unscaled or used them, or session.finish() was called). Let it clip "
                "(max_norm=...), and call it in place of what asks for gradients; or call optimizer.step()"
            )

    def before_clearing(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        if self._publisher.turn is not None:
            return
        owned = self._publisher.owned(tensors)
        sent = {p for unit in self._runtime.state.pushed for p in self._publisher.trainable[unit]}
        if sent and sent <= owned:
            self._live_session().discard()
        elif not sent.isdisjoint(owned):
            self._refuse_clearing(what, len(sent & owned), len(sent))

    def before_initialising(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._publisher.owned(tensors) and not self._runtime.state.pushed:
            for unit in self._units:
                unit.withdraw()
                unit.settle()

    def before_moving(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._publisher.owned(tensors):
            self._addresses = self._publisher.addresses()
            for unit in self._units:
                unit.withdraw()
                unit.take_over_data()

    def after_moving(self, tensors: Sequence[torch.Tensor]) -> None:
        addresses, self._addresses = self._addresses, []
        if addresses:
            for unit in self._units:
                unit.take_over_place()
                unit.expect_again()
            self._publisher.after_moving(addresses)

    def after_clearing(self, tensors: Sequence[torch.Tensor]) -> None:
        owned = self._publisher.owned(tensors)
        if not owned:
            return
        for tensor in tensors:
            if (parameter := self._publisher.sharded(tensor)) is not None:
                parameter.grad = None
        if self._publisher.turn is not None:
            self.gradients.clear(owned)
            return
        if self._runtime.state.phase is Phase.FINISHED:
            self._publisher.after_clearing(owned)
        if self._runtime.state.phase is not Phase.FINISHED or self._publisher.gradients_are_cleared():
            self.expect_next(none=True)

    def after_scaled_step(self, tensors: Sequence[torch.Tensor]) -> None:
        owned = self._publisher.owned(tensors)
        is_final = self._runtime.state.phase is Phase.FINISHED
        if owned and is_final and self.gradients.stepped.isdisjoint(owned):
            self._used(owned)  # skipped for good: these parameters stay as they are

    def after_step(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        owned = self._publisher.owned(tensors)
        self.gradients.num_steps += bool(owned)
        if (turn := self._publisher.turn) is not None:
            turn.stepped |= owned & (self._publisher.trainable[turn.unit] if turn.unit is not None else set())
            return
        if owned and self._runtime.state.phase is Phase.FINISHED:
            self._used(owned)

    def _used(self, owned: set[int]) -> None:
        self._publisher.after_step(owned)
        if self._runtime.state.phase is Phase.PUBLISHED:
            self.expect_next()

    def enters_collective(self, what: str, tensors: Sequence[torch.Tensor] | None) -> None:
        is_first = next(one for one in listening() if isinstance(one, GradientUse)) is self
        if tensors is None and is_first and not (self.is_computing or _is_any_publishing()):
            # Others may wait for it in their forward, and come to this collective behind that.
            self._live_session().publish_changed(may_leave=True)  # of all sessions
        is_due = tensors is not None and self.owns(tensors)
        self._runtime.enters_collective(what, is_due=is_due)

    def leaves_collective(self) -> None:
        self._runtime.leaves_collective()

    def enters_backward(self) -> None:
        self._state.enter_backward()

    def leaves_backward(self) -> None:
        self._state.leave_backward()

    def after_backward(self) -> None:
        is_due = self.steps_in_backward and not (self.is_in_backward or self.in_block)
        if is_due and self._runtime.state.pushed:
            self.finish(STEP)

    def explain(self, error: RuntimeError, what: str, waited_s: float) -> RuntimeError | None:
        return self._runtime.explain(error, what, waited_s)

    def _live_session(self) -> Owner:
        session = self.session()
        assert session is not None, "whoever is told is alive: the session keeps it"
        return session


def _is_any_publishing() -> bool:
    """Whether the collective is one of what is being published."""
    return any(one._publisher.is_publishing for one in listening() if isinstance(one, GradientUse))


def _weakly(use: Use) -> Use:
    """A method that serves as long as its object lives."""
    method = weakref.WeakMethod(use)

    def data_of(pending: Pending, **how: bool) -> torch.Tensor:
        use = method()
        return pending.now() if use is None else use(pending, **how)

    return data_of
