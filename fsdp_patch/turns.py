"""The final gradients of a minibatch, made unit by unit.

[Note: Turns] A unit's turn is: make its gradient, call the hooks that wait for it, let a step use it and free it,
publish the unit; then comes the next one. So who frees gradients there never has more than those of one unit. In their
turns ranks wait for nobody but, in the same order, for replicas, and for whom a norm, a hook or an optimizer waits:
each has ended the minibatch, and comes to the same turns. A rank whose turns are over may wait for those of others, in
its next gather or push, and never the other way round. What fails in a turn ends the job: some units have stepped, and
others have not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from odc.fsdp_patch.publishing import Publisher, Turn
from odc.fsdp_patch.unit import FinalSum, Unit
from odc.minibatch.runtime import Runtime


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
                    self._publisher.since.cleared |= self._publisher.trainable[index]
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
        own, spec, config = self._runtime.gradient(index), self._runtime.units[index], self._runtime.config
        if own is not None and self._units[index].replicas is not None and config.deterministic:
            own = own[0].clone(), own[1]  # it lies where the next one will
        return self._units[index].final_sum(own, spec, config.accumulate_dtype)
