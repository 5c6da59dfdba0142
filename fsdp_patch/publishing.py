"""Publishing: a unit's new shard is published as soon as nothing can change it any more. The final gradients of a
minibatch are made unit by unit, and each unit is published after its turn.

[Note: Turns] In a unit's turn its gradient is made, hooks that wait for it are called, a step uses and frees it, and
the unit is published; then comes the next unit. So a script that frees gradients in turns never holds those of more
than one unit. During turns, ranks wait only for replicas and for ranks that a norm, a hook or an optimizer needs, all
in the same order: each of these has ended the minibatch and reaches the same turns. A rank that has finished its turns
may wait for other ranks' turns in its next gather or push, never the reverse. A failure in a turn ends the job, because
some units have stepped and others have not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from odc.errors import UnsupportedError
from odc.fsdp_patch.gradient_state import GradientState, Said
from odc.fsdp_patch.guard import Guard
from odc.fsdp_patch.pending import settled
from odc.fsdp_patch.unit import FinalSum, Unit
from odc.minibatch.runtime import Runtime
from odc.minibatch.state import Phase

FIRST_MINIBATCHES = 16
"""In which a script shows what it does between steps."""


@dataclass
class Turn:
    """The gradient of one unit is final, and those of the others are not there, see [Note: Turns]."""

    is_step_by_unit: bool
    """An optimizer of several units may step: it finds the gradients of this one only."""
    unit: int | None = None
    """None: before the first unit, or behind the last one."""
    stepped: set[int] = field(default_factory=set)
    """Parameters of this unit that an optimizer has updated, by id."""


class Publisher:
    """Publishes the units of one session, and knows what of them an optimizer has updated."""

    def __init__(self, units: Sequence[Unit], runtime: Runtime, guard: Guard) -> None:
        self._units = units
        self._runtime = runtime
        self._guard = guard
        self._parameters: list[list[nn.Parameter]] = []  # kept: the id of one that is gone may be given to another
        self.trainable: list[set[int]] = []
        """The trainable parameters of each unit, by id."""
        self.all_trainable: set[int] = set()
        self.gradients = GradientState(
            runtime.state, runtime.topology.me, self.gradients_are_cleared, self.stepped_by_hand
        )
        self._full: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}  # by id of the full parameter
        self._without_full: set[int] = set()  # units that had no full parameters yet when last looked at
        self._look_up_parameters()
        self._in_optimizers: set[int] | None = None  # ids of parameters that any optimizer holds, once known
        self._by_hand: set[int] = set()  # ids of parameters that were changed though no optimizer updates them
        self._through_data = False  # they are changed by hand in a way that versions do not tell
        self._has_evaluated = False  # since the last step
        self._has_changed_quietly = False  # such that torch had counted nothing
        self.is_publishing = False
        self.turn: Turn | None = None
        self.all_changed = False
        """The published parameters were changed, whether anything on this rank tells of it or not."""

    def _look_up_parameters(self) -> None:
        self._parameters = [unit.trainable_parameters() for unit in self._units]
        self.trainable = [{id(p) for p in parameters} for parameters in self._parameters]
        self.all_trainable = set().union(*self.trainable)
        self._full, self._without_full = {}, {i for i, trainable in enumerate(self.trainable) if trainable}
        self._in_optimizers = None

    def forget(self) -> None:
        """The session is closed: no parameter is ours any more."""
        self._parameters, self.trainable, self.all_trainable = [], [], set()
        self._full, self._without_full = {}, set()

    def owned(self, tensors: Sequence[torch.Tensor]) -> set[int]:
        """Which of ``tensors`` are trainable parameters of these units, sharded or full; ids of the sharded ones."""
        found = {id(t) for t in tensors}
        owned = found & self.all_trainable
        if len(owned) < len(found):
            owned |= {id(sharded) for t in tensors if (sharded := self.sharded(t)) is not None}
        return owned

    def sharded(self, tensor: torch.Tensor) -> nn.Parameter | None:
        """The sharded parameter of which ``tensor`` is the full one, which FSDP puts in its place for a while."""
        if not isinstance(tensor, nn.Parameter) or id(tensor) in self.all_trainable:
            return None
        for index in list(self._without_full):
            pairs = self._units[index].full_parameters()
            self._full.update({id(full): (full, sharded) for full, sharded in pairs or []})
            if pairs or pairs is None:
                self._without_full.discard(index)
        pair = self._full.get(id(tensor))
        return pair[1] if pair is not None else None

    def frozen_since(self) -> list[nn.Parameter]:
        """Parameters that were trainable when the model was patched, and are not now."""
        return [p for parameters in self._parameters for p in parameters if not p.requires_grad]

    def after_step(self, owned: set[int], only: int | None = None) -> None:
        """Publish at once every unit whose trainable parameters have all been updated, or will not be.

        At once, not at the next gather: else a fast rank would wait for a slow one's first forward; and for good, if
        that one has no microbatch and itself waits for the fast one in a collective of the script. A unit that is split
        between optimizers waits for the last of them. Parameters in no optimizer are not waited for, unless they are
        changed by hand.

        Args:
            only: this unit; the others have yet to have their turns.
        """
        self.gradients.step(owned)
        due = [
            index
            for index, trainable in enumerate(self.trainable)
            if only in (None, index)
            and not self._runtime.state.is_published(index)
            and (trainable <= self.gradients.stepped or self._awaited(trainable) <= self.gradients.stepped)
        ]
        # What is shared and frozen does not cross hosts for nothing. If it was changed in a way that torch does not
        # count, it is published anew at its next use.
        kept = [
            index
            for index in due
            if self._units[index].sharing is not None
            and not (self.trainable[index] or self._guard.is_any_written([index]))
        ]
        self._begin_filling([index for index in due if index not in kept])
        for index in due:
            self._publish(index, is_changed=index not in kept, lockstep=True)

    def _awaited(self, trainable: set[int]) -> set[int]:
        """Of the trainable parameters of a unit, those that somebody may yet update; if nobody will, those of all
        units, for the end of the step."""
        changing = self._held() | self._by_hand
        return trainable & changing or changing

    def _held(self) -> set[int]:
        """Trainable parameters that any optimizer holds, by id."""
        if self._in_optimizers is None:
            optimizers = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
            held = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
            self._in_optimizers = held & self.all_trainable
        return self._in_optimizers | self.gradients.ever_stepped

    def after_clearing(self, owned: set[int]) -> None:
        """Publish everything if the step is over, or was skipped: gradients that were cleared and those that a step has
        used are all there are. At once, for another rank may wait for it where this one goes next."""
        self.gradients.clear(owned)
        if self.gradients.cleared >= self.all_trainable - self.gradients.stepped:
            self.publish_all(lockstep=True)

    def _changed_by_hand(self, index: int) -> set[int]:
        """Parameters of a unit that have changed since they were published although no optimizer updates them. Changes
        through ``param.data``, on a device, are seen once the script is known to make such."""
        unowned = self.trainable[index] - self.gradients.ever_stepped
        touched = {id(parameter) for parameter in self._guard.touched(index)} & unowned if unowned else set()
        is_quiet = not touched and self._through_data and bool(unowned)
        return unowned if is_quiet and self._guard.is_any_changed([index]) else touched

    def stepped_by_hand(self, owned: Set[int]) -> bool:
        """Whether the script has changed any of these parameters by hand since they were published, having no optimizer
        for them."""
        if not owned.isdisjoint(self.gradients.ever_stepped):
            return False
        return any(not owned.isdisjoint(self._changed_by_hand(index)) for index in range(len(self._units)))

    def is_any_changed(self, *, is_evaluation: bool, is_in_minibatch: bool) -> bool:
        """Whether the script has changed any unit, or may have, since it was published.

        Waits for a device to compare all elements where the script is likely to have changed some in a way that torch
        does not count (``.data``): before an evaluation, behind one, in the first minibatches, and if it ever has; but
        not within the minibatch of another model, whose teacher it may be.
        """
        self._has_evaluated |= is_evaluation
        is_early = self._runtime.minibatch <= FIRST_MINIBATCHES
        is_likely = self._has_evaluated or self._has_changed_quietly or is_early
        return bool(self._changed(waits=is_likely and not is_in_minibatch))

    def _changed(self, *, waits: bool) -> Collection[int]:
        everything = range(len(self._units))
        for index in everything:
            self._units[index].take_over_data()
        if self.all_changed:
            return everything
        found = self._guard.changed(everything, waits=waits)
        self._has_changed_quietly |= bool(found) and not self._guard.is_any_written(found)
        return found

    def is_changed(self, index: int) -> bool:
        """Whether a unit is, as far as can be told at once."""
        return self.all_changed or bool(self._guard.changed([index], waits=False))

    def publish_anew(self) -> None:
        """Publish all units behind a fence. What was not changed is what it was on this rank; on others it may not be,
        so that it is waited for."""
        changed = self._changed(waits=True)
        self.all_changed = False
        # See [Note: Collectives in a publication] in `fsdp2_extension.py`.
        due = [i for i, u in enumerate(self._units) if i in changed or u.communicates or u.sharing is not None]
        self._begin_filling(due)
        for index, unit in enumerate(self._units):
            self._write(index, unit.fill_published if index in due else _leave_as_it_is)
            self._record(index)

    def publish_stepped_by_hand(self) -> None:
        """Publish all if the minibatch has ended, and the script, which has no optimizer, has changed parameters. What
        it changes yet is published anew."""
        if self.turn is not None or self._runtime.state.phase is not Phase.FINISHED:
            return
        if not self.all_trainable.isdisjoint(self._held()):
            return  # an optimizer may be in the middle of its step, with collectives of its own
        if self.stepped_by_hand(self.all_trainable):
            self.publish_all()

    @property
    def communicates(self) -> bool:
        """Whether to publish any unit is collective."""
        return any(unit.communicates for unit in self._units)

    def publish_all(self, *, lockstep: bool = False, is_said: bool = False) -> None:
        """Publish what is not published yet, if this is the time for it.

        What no optimizer has updated, and nobody has changed by hand, is what it was, so that no rank needs to wait for
        another one that has yet to say so, see :meth:`odc.minibatch.protocol.MinibatchProtocol.publish`.

        Args:
            lockstep: every rank comes here at the same place of the script, and publishes the same, unless a part of
                them has changed parameters by hand.
            is_said: and if.
        """
        if self._runtime.state.phase is not Phase.FINISHED:
            return
        rest = [index for index in range(len(self._units)) if not self._runtime.state.is_published(index)]
        kept: list[int] = []
        if self._runtime.minibatch:
            # Not what no optimizer holds: scripts that step by hand may change it where nothing shows on this rank.
            unstepped = [index for index in rest if self.trainable[index].isdisjoint(self.gradients.stepped)]
            held = self._held() if unstepped else set()
            kept = [index for index in unstepped if self.trainable[index] <= held]
            if len(kept) < len(unstepped) and not self._through_data:
                self._is_any_changed(unstepped)  # learn how such a script changes parameters
            if self._is_any_changed(kept):
                self.gradients.said, kept = self.gradients.said | Said.CHANGED, []
        if kept:
            self.gradients.said |= Said.KEPT
        self._begin_filling([index for index in rest if index not in kept])
        for index in rest:
            is_together = is_said or (lockstep and Said.CHANGED not in self.gradients.said)
            self._publish(index, is_changed=index not in kept, lockstep=is_together)

    def _publish(self, index: int, *, is_changed: bool = True, lockstep: bool) -> None:
        unit = self._units[index]
        if is_changed and unit.communicates and not lockstep:
            raise self._runtime.refusal(
                f"unit {unit.name!r} would be published where this rank first uses the model or waits for others, and "
                "fsdp_pre_all_gather of its parameters communicates: all ranks have to come to that at the same place. "
                "Update all of them in each optimizer.step, or call odc.session_of(model).publish() on every rank "
                "behind the update",
                UnsupportedError,
            )
        self._by_hand |= self._changed_by_hand(index)
        self._has_evaluated = False
        self._write(index, unit.fill_published if is_changed else None)
        if is_changed or self._units[index].sharing is None:
            self._record(index)

    def _begin_filling(self, units: Sequence[int]) -> None:
        """Let what these units have of other hosts arrive without a pause between them. Before each is published."""
        shared = [i for i in units if self._units[i].sharing is not None and not self._units[i].communicates]
        shared = [index for index in shared if self._units[index].device.type == "cpu"]  # a stream's come so anyway
        for replicas in filter(None, dict.fromkeys(self._units[index].replicas for index in shared)):
            replicas.meet_to_publish()
        for index in shared:
            self._units[index].begin_filling(self._runtime.published_shard(index))

    def _write(self, index: int, fill: Callable[[torch.Tensor], object] | None) -> None:
        self.is_publishing = True
        try:
            self._runtime.publish(index, fill)
        finally:
            self.is_publishing = False

    def _record(self, index: int) -> None:
        self._guard.record(index)

    def _is_any_changed(self, units: Sequence[int]) -> bool:
        """Whether any parameter of these units differs from what was published, or was written since: another rank,
        that has done the same, may find that it differs. May wait for the device."""
        if self._guard.is_any_written(units):
            return True
        for index in units:
            self._units[index].take_over_data()
        through_data = self._guard.is_any_changed(units)
        self._through_data |= through_data
        return through_data

    def gradients_are_cleared(self) -> bool:
        """Whether no trainable parameter has a ``.grad``."""
        return all(settled(p.grad) is None for unit in self._units for p in unit.trainable_parameters())

    def addresses(self) -> list[tuple[int, int]]:
        """Where each parameter lies, and a number that grows with each write there."""
        return [(one.memory.data_ptr(), one.memory._version) for unit in self._units for one in unit.watched()]

    def after_moving(self, before: list[tuple[int, int]]) -> None:
        """The script has moved parameters, or what looks like it; ``before``: their :meth:`addresses`."""
        units = range(len(self._units))
        if before != self.addresses() and self._guard.is_any_changed(units):
            if self._runtime.state.pushed:
                raise self._runtime.refusal(
                    "parameters were changed by Module._apply between backward and step: the other ranks have added up "
                    "gradients of those that were there before. Change them after the step"
                )
            self.all_changed |= any(self._runtime.state.is_published(index) for index in units)
            return
        for index in units:
            self._guard.record(index)

    def after_load(self) -> bool:
        """A checkpoint was loaded. What is not published yet will be published as it is now. Whether trainable
        parameters are other ones since."""
        before = self.all_trainable
        self._look_up_parameters()
        self.all_changed |= any(self._runtime.state.is_published(index) for index in range(len(self._units)))
        return before != self.all_trainable


def _leave_as_it_is(shard: torch.Tensor) -> None:
    """What is published of a unit that this rank has not changed."""


# The final gradients


class UnitStep(Protocol):
    """A step that uses the gradients of one unit at a time."""

    def begin(self, turns: Turns) -> None:
        """The sums are final, and nothing is in ``.grad``."""
        ...

    def use(self, index: int) -> None:
        """The turn of a unit: its gradient is in ``.grad``, until this returns."""
        ...

    def end(self) -> None:
        """All units have had their turns."""
        ...


class Turns:
    """Those of the units of one session, at the end of a minibatch."""

    def __init__(self, units: Sequence[Unit], runtime: Runtime, publisher: Publisher) -> None:
        self._units = units
        self._runtime = runtime
        self._publisher = publisher
        self._kept: dict[int, FinalSum | None] = {}  # that replicas have summed, and will not sum again
        self._begun: dict[int, Callable[[], FinalSum | None]] = {}

    def take(self, step: UnitStep | None) -> list[Unit]:
        """Returns the units of which no rank has sent gradients."""
        turn = self._publisher.turn = Turn(is_step_by_unit=step is not None)
        without = []
        try:
            if step is not None:
                step.begin(self)
            for index, unit in enumerate(self._units):
                turn.unit = index
                if not self.make(index):
                    without.append(unit)
                unit.settle()
                unit.call_hooks()
                if step is not None:
                    step.use(index)
                    unit.clear_gradients()
                    self._publisher.gradients.clear(self._publisher.trainable[index])
                if turn.stepped:
                    self._publisher.after_step(turn.stepped, only=index)
                    turn.stepped = set()
            turn.unit = None
            if step is not None:
                step.end()
        except BaseException as error:  # also what else would be a refusal, which changes nothing
            self._runtime.abort(error)
            raise
        finally:
            self._publisher.turn = None
            self._kept.clear()
            self._begun.clear()
        return without

    def make(self, index: int, *, will_be_made_again: bool = False) -> bool:
        """Put the gradient of a unit into ``.grad``; returns whether any rank has sent one."""
        unit = self._units[index]
        found = self._kept.pop(index) if index in self._kept else self._sum(index)
        if will_be_made_again and unit.replicas is not None:
            self._kept[index] = found
        if found is None:
            return False
        unit.install(torch.div(found.total, unit.agreed_factor), found.touched)  # memory of its own
        return True

    def _sum(self, index: int) -> FinalSum | None:
        for coming in range(index, min(index + 2, len(self._units))):  # the next one travels beside this one
            if coming not in self._begun and (coming == index or self._units[coming].replicas is not None):
                self._begun[coming] = self._begin_sum(coming)
        return self._begun.pop(index)()

    def _begin_sum(self, index: int) -> Callable[[], FinalSum | None]:
        own, spec, config = self._runtime.gradient(index), self._runtime.units[index], self._runtime.config
        if own is not None and self._units[index].replicas is not None and config.deterministic:
            own = own[0].clone(), own[1]  # it lies where the next one will
        return self._units[index].begin_sum(own, spec, config.accumulate_dtype)
