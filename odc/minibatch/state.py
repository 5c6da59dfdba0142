"""The state machine of one rank's minibatches, used by the protocol and by the session.

This module neither waits nor communicates; ``protocol.py`` does. PROTOCOL.md states the rules.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from odc.errors import MisuseError


class Phase(enum.Enum):
    """Of minibatch ``k`` (:attr:`MinibatchState.minibatch`)."""

    PUBLISHED = "published"  # shards of k are out, this rank has pushed nothing of k yet
    OPEN = "open"  # in minibatch k
    FENCED = "fenced"  # k is empty, this rank is done with it, and others have yet to be
    FINISHED = "finished"  # gradients of k are final, shards of k + 1 not (all) published yet


class _Computing(ABC):
    """In which microbatch a rank is."""

    def __init__(self) -> None:
        self.in_forward = False
        """In a forward that keeps a graph: gradients will be pushed, unless something goes wrong."""
        self.microbatch = 0
        """The one in whose forward or backward this rank is, from 1; 0: in none, as far as is known."""
        self._has_graph = False  # of a forward, for a backward
        self.on_border: Callable[[bool], object] = lambda is_entered: None
        """Called before a forward or backward of a microbatch (true), and behind it."""

    @property
    @abstractmethod
    def num_pushed(self) -> int:
        """How many microbatches it has pushed gradients of."""

    def enter_forward(self, *, keeps_graph: bool) -> None:
        self.in_forward = keeps_graph
        if keeps_graph:
            self.on_border(True)
        self.microbatch = self.num_pushed + 1 if keeps_graph else 0

    def leave_forward(self) -> None:
        self._has_graph = self._has_graph or self.in_forward
        self.in_forward = False
        self._leave_microbatch()

    def enter_backward(self) -> None:
        """Perhaps of another model, if this one had no forward before."""
        if self._has_graph:
            self.on_border(True)
            self._has_graph, self.microbatch = False, self.num_pushed + 1

    def leave_backward(self) -> None:
        self._leave_microbatch()

    def _leave_microbatch(self) -> None:
        if self.microbatch:
            self.on_border(False)
        self.microbatch = 0

    def leave_minibatch(self) -> None:
        """Whatever has ended a forward, and whether a backward came or not."""
        self.in_forward = self._has_graph = False
        self.microbatch = 0


class MinibatchState(_Computing):
    """The phase and the counters of one rank. Each method is one step; what is not its turn is refused and changes
    nothing.

    ``FINISHED(k)`` -> publish of all units -> ``PUBLISHED(k + 1)`` -> begin -> ``OPEN(k + 1)`` -> finish ->
    ``FINISHED(k + 1)``; or from ``PUBLISHED`` by a fence to ``FENCED``, and from there to ``FINISHED``.

    Args:
        names: of the units.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = names
        self.phase = Phase.FINISHED
        self.minibatch = 0
        """The one that ``phase`` is of, from 1; 0: before the first publication."""
        self.published = [0] * len(names)
        """By unit: the minibatch for which this rank's shard is out."""
        self.changed = [0] * len(names)
        """The last of these for which it was another one than before."""
        self.opened = [0] * len(names)
        """The minibatch for which this rank's own sum is open, or was last."""
        self.pushes = [0] * len(names)
        """How often this rank has pushed its gradients in the open minibatch."""

    @property
    def coming(self) -> int:
        """The minibatch that is published, or is about to be."""
        return self.minibatch + 1 if self.phase is Phase.FINISHED else self.minibatch

    @property
    def is_ready(self) -> bool:
        """Whether all shards are out, and the minibatch has not begun: at most an empty one, for a fence."""
        return self.phase is Phase.PUBLISHED or self.phase is Phase.FENCED

    @property
    def num_pushed(self) -> int:
        return max(self.pushes, default=0)

    @property
    def pushed(self) -> list[int]:
        """The units of which this rank has pushed gradients in the open minibatch."""
        return [unit for unit, number in enumerate(self.pushes) if number]

    def is_published(self, unit: int) -> bool:
        """Whether this rank's shard for the coming (or running) minibatch is out."""
        return self.published[unit] == self.coming

    def is_open(self, unit: int) -> bool:
        """Whether this rank's sum for the coming (or running) minibatch may be added to."""
        return self.opened[unit] == self.coming

    def open(self, unit: int) -> bool:
        """The sum of a unit may be added to from now on. Whether that can be said of all units now."""
        self.opened[unit] = self.coming
        return all(opened == self.coming for opened in self.opened)

    def check_publish(self, unit: int) -> None:
        if self.phase is not Phase.FINISHED or self.is_published(unit):
            raise self._refusal(
                f"unit {self._names[unit]!r} cannot be published now",
                ": a shard is published once, after finish() and before the next minibatch",
            )

    def publish(self, unit: int, is_changed: bool) -> None:
        """This rank's shard of a unit is out; with the last one the next minibatch is there."""
        self.check_publish(unit)
        self.published[unit] = self.coming
        if is_changed:
            self.changed[unit] = self.coming
        self._advance()

    def _advance(self) -> None:
        if self.phase is Phase.FINISHED and all(version == self.coming for version in self.published):
            self.minibatch, self.phase = self.coming, Phase.PUBLISHED

    def begin(self) -> None:
        self._advance()  # a runtime without units has nothing to publish
        if self.phase is not Phase.PUBLISHED:
            hint = " (publish every unit first)" if self.phase is Phase.FINISHED else ""
            raise MisuseError(f"a minibatch cannot begin now: minibatch {self.minibatch} is {self.phase.value}{hint}")
        self.phase = Phase.OPEN

    def check_gather(self, unit: int) -> None:
        if self.phase is Phase.FINISHED or self.phase is Phase.FENCED:
            raise MisuseError(
                f"gather of unit {self._names[unit]!r} after minibatch {self.minibatch} was finished and before "
                "this rank published its next parameters: the other ranks may have replaced theirs already. "
                "Evaluate inside the minibatch, or after optimizer.step()."
            )

    def push(self, unit: int) -> bool:
        """This rank pushes its gradients of a unit. Whether that is its first push of the minibatch."""
        if self.phase is not Phase.OPEN:
            raise self._refusal(
                f"push of unit {self._names[unit]!r} outside a minibatch", ": run backward inside session.minibatch()"
            )
        is_first = not any(self.pushes)
        self.pushes[unit] += 1
        return is_first

    def check_finish(self) -> None:
        if self.phase is not Phase.OPEN:
            hint = ": call it once, after the last backward of a minibatch"
            raise self._refusal("finish() without an open minibatch", hint)

    def fence(self) -> None:
        """An empty minibatch, with which this rank is done."""
        self.begin()
        self.phase = Phase.FENCED

    def finish(self) -> None:
        """All ranks are done with the minibatch."""
        if self.phase is not Phase.FENCED:
            self.check_finish()
        self.phase = Phase.FINISHED
        self.pushes = [0] * len(self.pushes)

    def check_gradient(self, unit: int) -> None:
        if self.phase is not Phase.FINISHED or self.is_open(unit):
            raise MisuseError(
                f"the sum of unit {self._names[unit]!r} is not final, but open to the other ranks for minibatch "
                f"{self.coming}: take gradients after finish(), before open_sums() and before publishing the unit"
            )

    def _refusal(self, what: str, hint: str) -> MisuseError:
        return MisuseError(f"{what} (minibatch {self.minibatch} is {self.phase.value}){hint}")


class JointState(_Computing):
    """Where one rank is that has units on several meshes, and a state for each.

    It goes through the phases on all of them together, but for publications, which are made unit by unit: until all are
    out, it is ``FINISHED``. Units are numbered mesh by mesh.
    """

    def __init__(self, states: Sequence[MinibatchState]) -> None:
        super().__init__()
        self._states = states
        self._places = [(state, unit) for state in states for unit in range(len(state.pushes))]

    @property
    def _last(self) -> MinibatchState:
        return next((state for state in self._states if state.phase is Phase.FINISHED), self._states[0])

    @property
    def phase(self) -> Phase:
        return self._last.phase

    @property
    def minibatch(self) -> int:
        return self._last.minibatch

    @property
    def is_ready(self) -> bool:
        return self._last.is_ready

    @property
    def pushes(self) -> list[int]:
        return [number for state in self._states for number in state.pushes]

    @property
    def num_pushed(self) -> int:
        return max(state.num_pushed for state in self._states)

    @property
    def pushed(self) -> list[int]:
        return [unit for unit, number in enumerate(self.pushes) if number]

    def is_published(self, unit: int) -> bool:
        state, number = self._places[unit]
        return state.is_published(number)

    def check_finish(self) -> None:
        self._last.check_finish()
