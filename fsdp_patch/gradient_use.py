"""What a script does with the gradients of one session, and what that means for its minibatch."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from odc.errors import MisuseError, ProtocolError, UnsupportedError
from odc.fsdp_patch.fsdp2 import watch_forward_methods
from odc.fsdp_patch.gradient_events import Listener, Reader
from odc.fsdp_patch.interception import CLIPPING_BY_NORM, STEP
from odc.fsdp_patch.publishing import Publisher
from odc.protocol import End, State
from odc.runtime import Runtime


class Owner(Protocol):
    """The session, which keeps its :class:`GradientUse` and is not kept by it."""

    def finish_by(self, reader: Reader | None) -> None:
        """End the minibatch for ``reader``, who asks for gradients by hand (None: nobody does)."""
        ...

    def end_evaluation(self) -> None:
        """A forward of the model without a graph has returned."""
        ...


class GradientUse(Listener):
    """Ends the minibatch of a session where the script asks for gradients, and refuses what comes too late.

    Gradients that are final are *used up* by a step, by clearing them, or by a step that ``GradScaler`` has skipped.

    [Note: The same place of the script] Whether a use of gradients ends a minibatch must not depend on whether this rank
    had a microbatch: ranks run the same script, and only forward and backward are missing where one is idle. So what a
    script does with gradients decides alone: whoever asks again for gradients that he has asked for (the same clipping
    of the same parameters), with no step and no clearing in between, asks for those of the next minibatch. If nobody
    has added anything, they are the same. What cannot be told apart in this way (one minibatch ended by
    ``session.finish()`` only, and kept, the next one by a step only) shows in the number of steps that each rank has
    taken, which it sends with ``done``.

    [Note: Readers on an idle rank] On a rank that has sent gradients, reading a ``.grad`` by hand asks for them. On one
    that had no microbatch it may be the same line of the script, which will scale them and must find them; or a look at
    the old ones (a log after the step), which has to wait for nobody. Ranks run the same script, so they tell each
    other with ``done`` at which line they have asked. An idle rank asks too where an earlier minibatch has ended at the
    same line, come to by the same calls. Where it has only looked, and it turns out that this was where others asked,
    its script did without gradients that it should have had, or is a minibatch behind: that ends the job by name.
    """

    def __init__(self, session: Owner, publisher: Publisher, runtime: Runtime) -> None:
        self.session = weakref.ref(session)
        self._publisher = publisher
        self._runtime = runtime
        self._sent: set[int] = set()  # units of which this rank has pushed gradients in this minibatch
        self._num_steps = 0  # of optimizers
        self._uses: set[tuple[str, frozenset[int]]] = set()  # who has asked for the gradients that are final, for which
        self._was_idle = False  # in the last minibatch
        self._cleared: set[int] = set()  # ids of parameters, since the minibatch ended
        self._ending = ""  # what is about to make them final
        self._ended_by = ""
        self._is_only_read = False  # by hand, which has ended the minibatch
        # (place, path) of readers: of those that have ended minibatches; of those, with a text, that have only looked
        # since; of who has ended the last one, and what it read there (instruction and parameters).
        self._asked_at: set[tuple[int, int]] = set()
        self._looked_at: dict[tuple[int, int], str] = {}
        self._ended_at = (0, 0)
        self._read_there: set[tuple[int, frozenset[int]]] = set()
        self._in_forward = False
        self._in_training_forward = False
        self.in_block = False
        """Inside ``with session.minibatch()``, which ends it."""
        self.has_gradients = False
        """The last minibatch left any gradient."""
        self._has_own_gradients = False  # and on this rank: under FSDP1 it may hold nothing but padding

    # What the session says

    def pushed(self, unit: int) -> None:
        """This rank has sent its gradients of a unit."""
        self._sent.add(unit)

    def ended(self, ends: Sequence[End], own: End) -> None:
        """The minibatch is over, as each rank of the mesh says in ``ends``; its gradients are about to be installed.

        Raises:
            ProtocolError: another rank has asked for gradients where this one, which has ended it as ``own``, had none.
        """
        self._check_steps(ends)
        asked_at = {end.notes[:2] for end in ends if end.has_pushed and end.notes[0]}
        self._check_readers({place for place, _ in asked_at}, ends, own.notes[0])
        self._asked_at |= asked_at
        self._looked_at.clear()
        self._uses.clear()
        self._read_there.clear()
        self._ended_at = (0, 0)
        self._publisher.forget_steps()
        self._was_idle = not self._sent
        self._sent.clear()
        self._cleared.clear()
        self._ended_by = "session.finish()"
        self._is_only_read = False
        self.has_gradients = self._has_own_gradients = False

    def installed(self) -> None:
        """The gradients of the minibatch are in ``.grad``."""
        self._has_own_gradients = self.has_gradients and not self._publisher.gradients_are_cleared()

    def numbers_of(self, reader: Reader | None) -> tuple[int, int, int, int, int]:
        """What the other ranks are told of the end of a minibatch: of who asks for gradients by hand the place, path,
        and whether the script had only looked there before; how many steps this rank has taken, and which it is."""
        me = self._runtime.topology.me
        if reader is None:
            return 0, 0, 0, self._num_steps, me
        has_looked = (reader.place, reader.path) in self._looked_at
        return reader.place, reader.path, int(has_looked), self._num_steps, me

    def _check_steps(self, ends: Sequence[End]) -> None:
        """Ranks that are at the same place of their script have taken the same steps before a minibatch ends. Else one
        has taken a step on gradients that another has kept, to add to them in this minibatch.

        Raises:
            ProtocolError: naming one of each.
        """
        steps = {end.notes[4]: end.notes[3] for end in ends}
        (first, fewest), (last, most) = (choose(steps.items(), key=lambda item: item[1]) for choose in (min, max))
        if fewest != most:
            raise ProtocolError(
                f"the ranks have not taken the same steps before the end of minibatch {self._runtime.minibatch}: rank "
                f"{first} {fewest}, rank {last} {most}. A rank without a microbatch cannot know that the others keep "
                "their gradients and add to them: call odc.session_of(model).finish() on every rank wherever their "
                "gradients are final, before they are used"
            )

    def _check_readers(self, asked_at: set[int], ends: Sequence[End], own: int) -> None:
        """See [Note: Readers on an idle rank].

        Args:
            asked_at: places where ranks that have sent gradients have asked for them by hand.
            own: where this rank has; 0: it has not.
        """
        rank = self._runtime.topology.me
        places = [end.notes[0] for end in ends]
        looked_at = {place: text for (place, _), text in self._looked_at.items()}
        missed = next((text for place, text in looked_at.items() if place in asked_at and not own), None)
        have_looked = {end.notes[2] for end in ends if end.notes[0] in asked_at}
        if len(have_looked) > 1:
            missed = missed or looked_at.get(own, self._ending)
        if missed is not None:
            raise ProtocolError(
                f"a rank without a microbatch went on without gradients (this rank, {rank}, at {missed}), where others "
                f"have waited for theirs in minibatch {self._runtime.minibatch} to work on them by hand. Call "
                "odc.session_of(model).finish() on every rank before that line: it ends the minibatch on ranks without "
                "microbatches too. After a step by hand call session.publish()"
            )
        strays = {place for place in places if place} - asked_at
        if strays and len(set(places)) > 1:
            raise ProtocolError(
                f"the ranks have ended minibatch {self._runtime.minibatch} at different places of the script, one of "
                f"them before it had sent any gradient (this rank by {self._ending if own else 'no reading by hand'}). "
                "Call odc.session_of(model).finish() on every rank where its gradients are to be final, before reading "
                "them"
            )

    def looked_before(self, readers: Mapping[tuple[int, int], str]) -> None:
        """Where the script had read gradients, (place, path) -> text, when this rank patched the model."""
        self._looked_at.update(readers)

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
        if self._is_only_read and (not self.has_gradients or publisher.is_any_changed()):
            return True
        return self._in_training_forward and not self._is_only_read

    def watch_forwards(self, model: nn.Module) -> Callable[[], None]:
        """Note when ``model`` computes, and whether it keeps a graph: FSDP gathers without one. Returns the undo."""

        def begin(module: nn.Module, args: object) -> None:
            self._in_forward = True
            self._in_training_forward = torch.is_grad_enabled()
            self.check_used_up("the model")  # here, before FSDP has begun anything

        def end(module: nn.Module, args: object, output: object) -> None:
            self._in_forward = self._in_training_forward = False
            if not torch.is_grad_enabled() and sys.exc_info()[0] is None:
                self._live_session().end_evaluation()

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

    def check_used_up(self, what: str) -> None:
        """Refuse to compute with ``what`` while gradients are final and unused.

        Raises:
            MisuseError: naming what has made them final, and what to do.
        """
        if self._runtime.state is not State.FINISHED or self.is_used_up():
            return
        advice = "Step or clear them first. Evaluate inside the minibatch, or after optimizer.step()."
        if self._is_only_read:
            advice = (
                "Read gradients behind the last microbatch of a step only, then step or clear them; or evaluate after "
                "the step."
            )
        raise MisuseError(
            f"{what} is needed between {self._ended_by}, which made the gradients final, and the step that uses them: "
            f"the other ranks may have stepped already. {advice}"
        )

    # What torch and the script do

    @property
    def waits_for_readers(self) -> bool:
        return bool(self._sent) and self._runtime.state is State.OPEN and not self._is_computing

    @property
    def remembers_readers(self) -> bool:
        return not self._sent and not self.in_block and not self._is_computing

    @property
    def is_training(self) -> bool:
        """In a forward that keeps a graph, or in backward: gradients will be pushed, unless something goes wrong."""
        return self._in_training_forward or torch._C._current_graph_task_id() != -1

    @property
    def _is_computing(self) -> bool:
        """Hooks in backward see what FSDP has at that moment."""
        return self._in_forward or torch._C._current_graph_task_id() != -1

    def sharded(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Only from the end of a minibatch without a microbatch to its step: else there has been a backward, as under
        plain FSDP, and full parameters that a script holds have no gradients there either."""
        is_asked_for = self._was_idle and self._runtime.state is State.FINISHED and not self._publisher.has_stepped
        return self._publisher.sharded(tensor) if is_asked_for else None

    def owns(self, tensors: Sequence[torch.Tensor]) -> bool:
        return bool(self._publisher.owned(tensors))

    def before_reading(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        self._end_for(what, None, self._publisher.owned(tensors))

    def _end_for(self, what: str, reader: Reader | None, owned: set[int]) -> None:
        """End the minibatch for who asks for the gradients of ``owned``, unless they are final."""
        if not owned:
            return
        if self.in_block:
            raise MisuseError(
                f"{what} inside the minibatch: gradients are final only after it. Move it behind the `with "
                "session.minibatch():` block, or call session.finish() before it."
            )
        use = (what, frozenset(owned))
        if (
            self._runtime.state is State.FINISHED
            and not self._is_next_minibatch(owned, what)
            and (what == STEP or use not in self._uses)
        ):
            self._uses.add(use)
            return
        if what == CLIPPING_BY_NORM:
            raise UnsupportedError(
                f"{what} before the minibatch has ended: this rank has no gradients yet, so the norm cannot be theirs. "
                "Use clip_grad_norm_, which computes it, or call session.finish() before computing the norm "
                "(odc.session_of(model) finds the session)."
            )
        self._ending = what
        self._live_session().finish_by(reader)
        self._ended_by = what
        self._uses.add(use)

    def before_reading_by_hand(self, reader: Reader, tensors: Sequence[torch.Tensor]) -> None:
        """See [Note: Readers on an idle rank]."""
        owned = self._publisher.owned(tensors)
        if not owned:
            return
        if not self.waits_for_readers:
            if not self.remembers_readers:
                return
            if not self._is_between_minibatches(reader, owned):
                self._remember_look(reader, owned)
                return
            if (reader.place, reader.path) not in self._asked_at:
                self._looked_at[reader.place, reader.path] = str(reader)
                return
        self._end_for(str(reader), reader, owned | self._publisher.unstepped())
        self._is_only_read = True
        self._ended_at = (reader.place, reader.path)
        self._remember_look(reader, owned)

    def _remember_look(self, reader: Reader, owned: set[int]) -> None:
        """The gradients that were made final are read again, as far as can be seen."""
        if self._looks_again(reader, owned):
            self._looked_at[self._ended_at] = str(reader)
        elif reader.place == self._ended_at[0]:
            self._read_there.add((reader.frame.f_lasti, frozenset(owned)))

    def _looks_again(self, reader: Reader, owned: set[int]) -> bool:
        """Whether the same instruction reads the same gradient as before, where the minibatch was ended: the script may
        have come around its loop, without a microbatch or a step that could be seen."""
        return reader.place == self._ended_at[0] and (reader.frame.f_lasti, frozenset(owned)) in self._read_there

    def _is_between_minibatches(self, reader: Reader, owned: set[int]) -> bool:
        """Whether the last gradients were used and no new ones were sent."""
        if self._runtime.state is not State.FINISHED:
            return self._runtime.state is State.PUBLISHED
        if self._publisher.already_stepped(owned):
            return True
        # Under FSDP1 this rank may have no part of the parameter itself, which then never changes here.
        return self._looks_again(reader, owned) and self._is_next_minibatch(owned | self._publisher.unstepped())

    def _is_next_minibatch(self, owned: set[int], what: str = "") -> bool:
        """Gradients are about to be read, and the last minibatch is final: is it the next one, in which this rank had
        no microbatch, or are the same gradients read a second time?

        It is the next one if they have been used up.
        """
        used = self._publisher.already_stepped(owned) or not self._cleared.isdisjoint(owned)
        is_cleared = self._has_own_gradients and self._publisher.gradients_are_cleared()
        # Weights may be decayed by hand before the first step of an optimizer.
        return used or is_cleared or (what != STEP and self._publisher.stepped_by_hand(owned))

    def before_clearing(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        if self._runtime.state is not State.OPEN:
            return
        sent = self._publisher.units_of(tensors) & self._sent
        if sent:
            first = self._runtime.units[min(sent)].name
            raise MisuseError(
                f"{what} between backward and step: gradients of {len(sent)} units (the first is {first!r}) have gone "
                "to the other ranks, which have added them up. Clear gradients after the step, or before the first "
                "backward. To throw a minibatch away (microbatches left over at the end of an epoch, a loss that is "
                "not finite), call odc.session_of(model).discard() on every rank instead."
            )

    def after_clearing(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._runtime.state is State.FINISHED:
            self._cleared |= self._publisher.owned(tensors)
            self._publisher.after_clearing(self._cleared)

    def after_scaled_step(self, tensors: Sequence[torch.Tensor]) -> None:
        owned = self._publisher.owned(tensors)
        if owned and self._runtime.state is State.FINISHED and not self._publisher.already_stepped(owned):
            self._publisher.after_step(owned)  # skipped for good: these parameters stay as they are

    def after_step(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        owned = self._publisher.owned(tensors)
        self._num_steps += bool(owned)
        if owned and self._runtime.state is State.FINISHED:
            self._publisher.after_step(owned)

    def enters_collective(self, what: str, tensors: Sequence[torch.Tensor] | None) -> None:
        outside = self._runtime.outside
        outside.since, outside.is_due = time.monotonic(), tensors is not None and self.owns(tensors)
        outside.what = what

    def leaves_collective(self) -> None:
        self._runtime.outside.what = ""
        if self._runtime.outside.is_due:
            self._runtime.outside.is_due = False
            self._runtime.made_progress()

    def explain(self, error: RuntimeError, what: str) -> RuntimeError | None:
        return self._runtime.explain(error, what, time.monotonic() - self._runtime.outside.since)

    def _live_session(self) -> Owner:
        session = self.session()
        assert session is not None, "whoever is told is alive: the session keeps it"
        return session
