"""Decides which gradients a script asks for: those of the last minibatch, or those of the current one.

There is one state per session, as :mod:`odc.minibatch.state` is the state of the protocol. This module neither waits
nor reads tensors. docs/ends.md has the table.

[Note: The same place of the script] Whether a use of gradients ends a minibatch must not depend on whether this rank
had a microbatch: ranks run the same script, and only forward and backward are missing where one is idle. So what a
script does with gradients decides alone: whoever asks again for gradients that he has asked for (the same clipping of
the same parameters), with no step and no clearing in between, asks for those of the next minibatch. If nobody has added
anything, they are the same. What cannot be told apart in this way (one minibatch ended by ``session.finish()`` only,
and kept, the next one by a step only) shows in the number of steps that each rank has taken, which it sends with
``done``.

[Note: Old gradients on an idle rank] Where gradients stay over the step (cleared in place, or never), a rank that had
no microbatch finds the old ones. To use them may be to ask for the coming ones, or a look at the old ones (a log after
the step), which has to wait for nobody. These are different places of the script. So ranks tell each other with
``done`` where they have ended a minibatch by hand, and on an idle rank the use of an old gradient there, come to by the
same calls, ends it too. A rank that was idle before it could know that place, or has passed it with other gradients,
has done without those that others have worked on: that ends the job by name.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Sequence, Set
from typing import NamedTuple

from odc.errors import ProtocolError
from odc.fsdp_patch.gradient_events import number_of
from odc.minibatch.state import JointState, MinibatchState, Phase


class Asker(enum.Enum):
    """Who asks for gradients."""

    STEP = "a step"
    NAME = "clipping and the like"
    DATA = "a use of old data"
    """By a rank that has pushed nothing. The use of other data asks for the coming ones: it has none yet."""


class Since(enum.Flag):
    """What has happened since the last minibatch ended, as it concerns who asks now."""

    NOTHING = 0
    ASKED = enum.auto()
    """He has asked for these already."""
    CHANGED = enum.auto()
    """The script has changed parameters by hand, and no optimizer updates them."""
    USED = enum.auto()
    """A step has used some of these, or skipped them for good, or something has cleared them."""


_MEANS_COMING: dict[Asker, Sequence[Since]] = {
    Asker.STEP: [Since.USED],
    Asker.NAME: [Since.USED, Since.CHANGED, Since.ASKED],
    Asker.DATA: [Since.USED, Since.CHANGED | Since.ASKED],
}
"""Any of these, with all of its flags, turns who asks from the last gradients to the coming ones."""


class Said(enum.IntFlag):
    """What a rank says of itself at the end of a minibatch."""

    EXPECTED = 1
    """Gradients were pending wherever it had none: whoever had used one by hand would have ended the minibatch."""
    KEPT = 2
    """It has begun the minibatch with parameters of the one before, and waited for nobody to publish them anew."""
    CHANGED = 4
    """It has changed some of them by hand before that."""
    BETWEEN = 8
    """It has used the model while gradients were final, and no step had used them."""
    BY_HAND = 16
    """It has ended the minibatch by using a gradient's data."""


class Notes(NamedTuple):
    """What a rank sends along with the end of a minibatch (:attr:`odc.minibatch.protocol.End.notes`)."""

    rank: int
    """Of the job."""
    num_steps: int
    """How many steps its optimizers have taken before."""
    ender: int
    """What has asked for gradients, as a number, or where that was by hand; 0: ``session.finish()``."""
    said: int
    """:class:`Said`."""
    compute_ns: int = 0
    """Nanoseconds outside of ODC's operations since its last minibatch ended."""


class GradientState:
    """Of the gradients of one session, since its last minibatch ended. Parameters are known by id.

    Args:
        minibatch: where this rank is.
        rank: its number in the job.
        is_empty: whether no parameter has a ``.grad``.
        is_changed: whether the script has changed any of these parameters by hand since they were published, and no
            optimizer updates them.
    """

    def __init__(
        self,
        minibatch: MinibatchState | JointState,
        rank: int,
        is_empty: Callable[[], bool],
        is_changed: Callable[[Set[int]], bool],
    ) -> None:
        self._minibatch = minibatch
        self._rank = rank
        self._is_empty = is_empty
        self._is_changed = is_changed
        self._ended_at: Set[int] = frozenset()  # places of the script where minibatches were ended by hand
        self.ever_stepped: Set[int] = frozenset()
        """Parameters that an optimizer has updated in any minibatch."""
        self.num_steps = 0
        """Of optimizers, in all minibatches."""
        self.was_empty = False
        """No rank had gradients of the last minibatch."""
        self._asked: set[Hashable] = set()  # these three since the last minibatch that was not empty
        self._passed: set[int] = set()  # places where data was used, or zeroed, and it was not the coming one
        self._used_before: Set[int] = frozenset()
        self._begin_anew()

    def _begin_anew(self) -> None:
        """So that nothing of it outlives the next end."""
        self._has_gradients = False
        self.stepped: Set[int] = frozenset()
        """Parameters that an optimizer has updated, or skipped for good."""
        self.cleared: Set[int] = frozenset()
        """Parameters whose gradients were cleared."""
        self.said = Said(0)
        """What this rank will say of itself at the next end."""

    @property
    def is_by_hand(self) -> bool:
        """Whether the script has ended a minibatch by using gradients by hand."""
        return bool(self._ended_at)

    # What happens

    def end(self, said: Sequence[tuple[Notes, bool]]) -> None:
        """A minibatch has ended, as each rank says; true: it has pushed gradients. They are about to be installed."""
        self._ended_at |= {notes.ender for notes, has_pushed in said if has_pushed and notes.said & Said.BY_HAND}
        self.was_empty = not any(has_pushed for _, has_pushed in said)
        if not self.was_empty:
            self._asked, self._passed, self._used_before = set(), set(), frozenset()
        self._begin_anew()

    def install(self, has_gradients: bool) -> None:
        """They are in ``.grad``, or were used. ``has_gradients``: any rank had some (under FSDP1, padding)."""
        self._has_gradients = has_gradients and not self._is_empty()

    def step(self, parameters: Set[int]) -> None:
        """An optimizer has updated these parameters, or skipped them for good."""
        self.stepped |= parameters
        self.ever_stepped |= parameters

    def clear(self, parameters: Set[int]) -> None:
        """Their gradients were cleared."""
        self.cleared |= parameters

    # What it means

    def since(self, who: Hashable, parameters: Set[int]) -> Since:
        """What concerns who asks for the gradients of these parameters."""
        found = Since.ASKED if who in self._asked else Since.NOTHING
        if self._are_all_used or self.are_used(parameters) or not self._used_before.isdisjoint(parameters):
            found |= Since.USED
        elif self._is_changed(parameters):  # before the first step of an optimizer they may be decayed, too
            found |= Since.CHANGED
        return found

    @property
    def _are_all_used(self) -> bool:
        return self._minibatch.phase is not Phase.FINISHED or (self._has_gradients and self._is_empty())

    def are_used(self, parameters: Set[int]) -> bool:
        """Whether a step or a clearing has used any of their gradients."""
        return not (self.stepped.isdisjoint(parameters) and self.cleared.isdisjoint(parameters))

    def means_coming(self, asker: Asker, who: Hashable, parameters: Set[int], place: int = 0) -> bool:
        """Whether who asks for the gradients of these parameters means the coming ones, or those of the last minibatch.

        Args:
            who: equal if he asks again.
            place: of the script, where data is used.
        """
        if asker is Asker.DATA and place not in self._ended_at:
            return False
        if self._minibatch.phase is Phase.OPEN:
            return True
        since = self.since(who, parameters)
        return any(since & one == one for one in _MEANS_COMING[asker])

    def leave(self, parameters: Set[int]) -> None:
        """A minibatch is about to end, whoever asks. If it brings no gradients, the last ones of all ``parameters``
        that are used by now stay so."""
        is_all = self._are_all_used or self._is_changed(parameters)
        self._used_before |= parameters if is_all else self.stepped | self.cleared

    def give(self, who: Hashable, place: int = 0) -> None:
        """Who has asked is given final gradients; ``place``: of the script, where he uses their data."""
        self._asked.add(who)
        self._passed |= {place} if place else set()  # 0 is session.finish(), which nobody passes

    # What ranks tell each other

    def notes(self, what: str, place: int, said: Said) -> Notes:
        """What the others are told of the end of a minibatch, for which ``what`` has asked at ``place``, if it was by
        hand, and ``said`` beside what is known here."""
        ender = place or (number_of(what) if what else 0)
        if self.was_empty:  # and what was None then, was None to who has used gradients behind it
            said &= ~Said.EXPECTED
        return Notes(self._rank, self.num_steps, ender, self.said | said | (Said.BY_HAND if place else Said(0)))

    def check(self, said: Sequence[tuple[Notes, bool]], what: str) -> None:
        """Before a minibatch ends, for which ``what`` has asked here; true: the rank has pushed gradients.

        Raises:
            ProtocolError: the ranks are not at the same place of the script.
        """
        notes = [one for one, _ in said]
        self._check_steps(notes)
        self._check_enders(said, what)
        self.check_kept(notes)

    def _check_steps(self, said: Sequence[Notes]) -> None:
        """Ranks that are at the same place of their script have taken the same steps before a minibatch ends. Else one
        has taken a step on gradients that another has kept, to add to them in this minibatch."""
        minibatch = self._minibatch.minibatch
        least, most = (choose(said, key=lambda notes: notes.num_steps) for choose in (min, max))
        if least.num_steps != most.num_steps and least.said & ~most.said & Said.BETWEEN:
            raise ProtocolError(
                f"rank {least.rank} has used the model (an evaluation, a checkpoint) between the end of minibatch "
                f"{minibatch - 1} and the step, and rank {most.rank} has not: what it has computed there is not valid, "
                "for others had stepped already. On one rank alone evaluate inside the minibatch, or after "
                "optimizer.step()"
            )
        if least.num_steps != most.num_steps:
            raise ProtocolError(
                f"the ranks have not taken the same steps before the end of minibatch {minibatch}: rank {least.rank} "
                f"{least.num_steps}, rank {most.rank} {most.num_steps}. Every rank must ask for gradients "
                "at the same places of the loop (by clipping, using a .grad, a step). A rank without a microbatch "
                "cannot know that the others keep their gradients and add to them: call "
                "odc.session_of(model).finish() on every rank wherever their gradients are final, before they are used"
            )

    def _check_enders(self, said: Sequence[tuple[Notes, bool]], what: str) -> None:
        """See [Note: Old gradients on an idle rank]. A rank that had gradients to use has ended the minibatch where the
        others did, or somewhere that does not concern it."""
        pushed = [notes for notes, has_pushed in said if has_pushed]
        for notes, has_pushed in said:
            if has_pushed or not notes.ender:
                continue
            passed = self._passed if notes.rank == self._rank else set()
            others = [one for one in pushed if not notes.said & Said.EXPECTED or one.ender in passed]
            other = next((one for one in others if one.ender != notes.ender), None)
            if other is not None:
                raise ProtocolError(
                    f"rank {notes.rank}, which had no microbatch, went on without gradients where rank {other.rank} "
                    f"has used those of minibatch {self._minibatch.minibatch} (this rank, {self._rank}: "
                    f"{what or 'session.finish()'}). Call odc.session_of(model).finish() on every rank "
                    "before that line: it ends the minibatch on ranks without microbatches too. After a step by hand "
                    "call session.publish()"
                )

    def check_kept(self, said: Sequence[Notes]) -> None:
        """Who finds its parameters unchanged reads those that others had before, and nobody's may have changed.

        Raises:
            ProtocolError: somebody's has.
        """
        changed = next((notes for notes in said if notes.said & Said.CHANGED), None)
        kept = next((notes for notes in said if notes.said & Said.KEPT), None)
        if changed is not None and kept is not None:
            raise ProtocolError(
                f"rank {changed.rank} has changed parameters by hand before minibatch {self._minibatch.minibatch}, "
                f"rank {kept.rank} has not, and may have computed with the former ones of rank {changed.rank}. After "
                "changing parameters by hand call odc.session_of(model).publish() on every rank"
            )
