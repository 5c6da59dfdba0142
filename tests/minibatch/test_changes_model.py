"""Layer 1: a model. Parameters that change between steps: every interleaving of two and three ranks, exhaustively.

What ``Session.publish_changed`` and ``pass_fences`` do, for a model that is trained and a frozen one beside it:

- who is about to use a model that it has changed begins a fence of it, waits until all have, and publishes it anew;
- so does, for all models, who is about to wait for others: at the end of a minibatch, and before a collective of the
  script, where it goes on without if all others wait as well;
- who waits for several completes whichever can be;
- what others read is a copy of the parameters, which the script does not write to;
- ranks that have ended a minibatch in different ways fail, and so does who waits in a fence while all others wait.

Ranks run one program. Where they do, everybody reads what its owners had at the same place of it, and nobody waits for
good. Where one leaves out a change, whoever has read something else fails, and so do all. That each rule is needed is
shown by taking it away.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

TRAINED, FROZEN = 0, 1
USE_TRAINED, USE_FROZEN, LEARN, TRAIN, CHANGE_TRAINED, CHANGE_FROZEN, COLLECTIVE, END = range(8)
"""``LEARN``: what a microbatch needs of the frozen model; ``TRAIN``: its forward and backward."""
STEP_END, FENCE = "step", "fence"
RULES = frozenset({"before a use", "before an end", "before a collective", "all", "any", "kinds", "stuck", "a copy"})


class Model(NamedTuple):
    """What one rank has of one model."""

    number: int = 1  # of the minibatch that is published
    is_open: bool = False
    own: int = 0  # how often its parameters were changed
    published: int = 0  # as of which of these it is published
    ends: tuple[str, ...] = ()  # how it has ended each minibatch

    @property
    def is_fenced(self) -> bool:
        return len(self.ends) >= self.number

    @property
    def is_due(self) -> bool:
        return self.is_fenced or (self.own != self.published and not self.is_open)


class Rank(NamedTuple):
    """Where one rank is."""

    models: tuple[Model, Model] = (Model(), Model())
    at: int = 0  # operation of the program
    fences: tuple[int, ...] | None = None  # models whose fences it waits in; None: it has not looked yet
    is_inside: bool = False  # a collective, or the end of a minibatch: its part is done
    has_misread: bool = False


State = tuple[Rank, ...]


class Failed(Exception):
    """A rank raises, and with it all."""


def with_model(rank: Rank, index: int, model: Model) -> Rank:
    return rank._replace(models=(model, rank.models[1]) if index == TRAINED else (rank.models[0], model))


class Search:
    """All interleavings of ``program`` on some ranks.

    Args:
        idle: this rank has no microbatch.
        quiet: this rank leaves out the change at this place of the program.
        rules: those in force.
        order: in which it waits for several fences.
    """

    def __init__(
        self,
        program: Sequence[int],
        num_ranks: int,
        idle: int,
        quiet: tuple[int, int] | None = None,
        rules: frozenset[str] = RULES,
        order: tuple[int, ...] = (TRAINED, FROZEN),
    ) -> None:
        self.program, self.num_ranks, self.idle, self.quiet = program, num_ranks, idle, quiet
        self.rules, self.order = rules, order

    def changes(self, number: int, at: int) -> int:
        return int((number, at) != self.quiet)

    def run(self) -> set[str]:
        """How it can end: "right"; "wrong", with something read that its owner did not have there, and no error;
        "failed"; "stuck"."""
        start: State = tuple(Rank() for _ in range(self.num_ranks))
        seen, todo, found = {start}, [start], set[str]()
        while todo:
            state = todo.pop()
            if all(rank.at == len(self.program) for rank in state):
                found.add("wrong" if any(rank.has_misread for rank in state) else "right")
                continue
            ways = [self.steps(state, number) for number in range(self.num_ranks)]
            followers = [follower for way in ways for follower in way if follower is not None]
            if any(None in way for way in ways):
                found.add("failed")
            if not followers and not any(None in way for way in ways):
                followers = self.when_all_wait(state, found)
            for follower in followers:
                if follower not in seen:
                    seen.add(follower)
                    todo.append(follower)
        return found

    def when_all_wait(self, state: State, found: set[str]) -> list[State]:
        """Who waits in a fence before a collective goes on; else who waits in a fence fails."""
        left = [
            replaced(state, number, rank._replace(fences=()))
            for number, rank in enumerate(state)
            if rank.fences and self.program[rank.at] == COLLECTIVE
        ]
        if not left:
            can_fail = "stuck" in self.rules and any(rank.fences for rank in state)
            found.add("failed" if can_fail else "stuck")
        return left

    def steps(self, state: State, number: int) -> list[State | None]:
        """What one rank may do next; None: it fails."""
        rank = state[number]
        if rank.at == len(self.program):
            return []
        operation = self.program[rank.at]
        if operation in (LEARN, TRAIN) and number == self.idle:
            return [replaced(state, number, rank._replace(at=rank.at + 1))]
        if operation in (CHANGE_TRAINED, CHANGE_FROZEN):
            index = operation - CHANGE_TRAINED
            model = rank.models[index]
            changed = model._replace(own=model.own + self.changes(number, rank.at))
            return [replaced(state, number, with_model(rank, index, changed)._replace(at=rank.at + 1))]
        if rank.fences is None:
            return [replaced(state, number, self.begin_fences(rank, operation))]
        if rank.fences:
            return self.end_fences(state, number)
        try:
            follower = self.operate(state, number, operation)
        except Failed:
            return [None]
        return [follower] if follower is not None else []

    def begin_fences(self, rank: Rank, operation: int) -> Rank:
        kind = {END: "before an end", COLLECTIVE: "before a collective"}.get(operation, "before a use")
        looked_at = self.order if "all" in self.rules else needed_for(operation)
        due = [i for i in looked_at if rank.models[i].is_due] if kind in self.rules else []
        for index in due:
            model = rank.models[index]
            if not model.is_fenced:
                rank = with_model(rank, index, model._replace(ends=(*model.ends, FENCE)))
        return rank._replace(fences=tuple(due))

    def end_fences(self, state: State, number: int) -> list[State | None]:
        rank = state[number]
        assert rank.fences
        for index in rank.fences if "any" in self.rules else rank.fences[:1]:
            model = rank.models[index]
            if all(len(other.models[index].ends) >= model.number for other in state):
                if not self.have_ended_alike(state, index, model.number):
                    return [None]
                anew = with_model(rank, index, model._replace(number=model.number + 1, published=model.own))
                left = tuple(other for other in rank.fences if other != index)
                return [replaced(state, number, anew._replace(fences=left))]
        return []

    def have_ended_alike(self, state: State, index: int, number: int) -> bool:
        return "kinds" not in self.rules or len({rank.models[index].ends[number - 1] for rank in state}) == 1

    def operate(self, state: State, number: int, operation: int) -> State | None:
        """Behind the fences; None: it has to wait."""
        rank = state[number]
        if operation == COLLECTIVE:
            entered = rank._replace(is_inside=True)
            if not rank.is_inside:
                return replaced(state, number, entered)
            have_come = all(other.at > rank.at or (other.at == rank.at and other.is_inside) for other in state)
            return replaced(state, number, gone_on(rank)) if have_come else None
        if operation == END:
            return self.end(state, number)
        index = FROZEN if operation in (USE_FROZEN, LEARN) else TRAINED
        model = rank.models[index]
        if model.is_fenced:  # left before a collective, and no rule that goes on with it
            return None
        if any(other.models[index].number < model.number for other in state):
            return None  # a gather waits for its owners
        expected = [
            sum(self.changes(owner, at) for at in range(rank.at) if self.program[at] == CHANGE_TRAINED + index)
            + (self.program[: rank.at].count(END) if index == TRAINED else 0)
            for owner in range(self.num_ranks)
        ]
        others = [other.models[index] for other in state]
        read = [other.published if "a copy" in self.rules else other.own for other in others]
        after = with_model(rank, index, model._replace(is_open=model.is_open or operation == TRAIN))
        return replaced(state, number, gone_on(after)._replace(has_misread=rank.has_misread or read != expected))

    def end(self, state: State, number: int) -> State | None:
        rank = state[number]
        model = rank.models[TRAINED]
        if not rank.is_inside:
            if model.is_fenced:
                return None
            ended = model._replace(is_open=True, ends=(*model.ends, STEP_END))
            return replaced(state, number, with_model(rank, TRAINED, ended)._replace(is_inside=True))
        if any(len(other.models[TRAINED].ends) < model.number for other in state):
            return None
        if not self.have_ended_alike(state, TRAINED, model.number):
            raise Failed
        stepped = model._replace(number=model.number + 1, is_open=False, own=model.own + 1, published=model.own + 1)
        return replaced(state, number, gone_on(with_model(rank, TRAINED, stepped)))


def needed_for(operation: int) -> tuple[int, ...]:
    if operation in (END, COLLECTIVE):
        return (TRAINED, FROZEN)
    return (FROZEN,) if operation in (USE_FROZEN, LEARN) else (TRAINED,)


def gone_on(rank: Rank) -> Rank:
    return rank._replace(at=rank.at + 1, fences=None, is_inside=False)


def replaced(state: State, number: int, rank: Rank) -> State:
    return (*state[:number], rank, *state[number + 1 :])


def programs(length: int) -> Iterator[tuple[int, ...]]:
    """Every one of so many operations and a last step. Within one minibatch a rank without microbatches cannot tell
    what comes before those of others, and what behind them. So, of the programs, those in which it need not:

    - nothing is changed between microbatches, of which ranks have different numbers;
    - the trained model is not changed behind them, before the step;
    - the frozen one is not changed both before and behind them.
    """
    for middle in itertools.product(range(8), repeat=length):
        program, has_begun, changed = (*middle, LEARN, TRAIN, END), False, set[tuple[int, bool]]()
        for operation in program:
            if operation == END:
                has_begun, changed = False, set()
            elif operation in (CHANGE_TRAINED, CHANGE_FROZEN):
                changed.add((operation, has_begun))
            elif operation in (LEARN, TRAIN):
                has_begun = True
                if any(is_behind for _, is_behind in changed):
                    break
            if (CHANGE_TRAINED, True) in changed or {(CHANGE_FROZEN, False), (CHANGE_FROZEN, True)} <= changed:
                break
        else:
            yield program


def all_of(length: int, num_ranks: int) -> Iterator[Search]:
    """One rank without microbatches, which may be any: ranks differ in nothing else."""
    for program in programs(length):
        yield Search(program, num_ranks, idle=0)
        yield Search(program, num_ranks, idle=0, order=(FROZEN, TRAINED))


def with_a_quiet_rank(length: int, num_ranks: int) -> Iterator[Search]:
    for program in programs(length):
        for at, operation in enumerate(program):
            if operation in (CHANGE_TRAINED, CHANGE_FROZEN):
                yield from (Search(program, num_ranks, 0, (quiet, at)) for quiet in (0, num_ranks - 1))


# One rank has changed a model three times since the last step, another one twice. A use behind the first change and a
# collective before the last hide it: each publishes twice, and when it comes to the second time of the former, the
# latter does not wait in the collective. Of five operations there is no other way.
UNSEEN = [
    ((change, use, change, COLLECTIVE, change), 0)
    for change, use in ((CHANGE_TRAINED, USE_TRAINED), (CHANGE_FROZEN, USE_FROZEN))
]

SIZES = [(3, 2), (2, 3), pytest.param(5, 2, marks=pytest.mark.extended), pytest.param(4, 3, marks=pytest.mark.extended)]


@pytest.mark.parametrize(("length", "num_ranks"), SIZES)
def test_ranks_that_run_one_program_read_what_it_says_and_never_wait_for_good(length: int, num_ranks: int) -> None:
    for search in all_of(length, num_ranks):
        assert search.run() == {"right"}, search.program


@pytest.mark.parametrize(("length", "num_ranks"), SIZES)
def test_a_rank_that_leaves_out_a_change_misleads_nobody(length: int, num_ranks: int) -> None:
    outcomes = set[str]()
    for search in with_a_quiet_rank(length, num_ranks):
        ways = search.run()
        if (search.program[:5], search.quiet[1] if search.quiet else None) in UNSEEN:
            assert ways == {"wrong"}
            continue
        assert ways <= {"right", "failed"}, (search.program, search.quiet, ways)
        outcomes |= ways
    assert outcomes == {"right", "failed"}


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=pytest.mark.extended if rule in ("all", "any") else ()) for rule in sorted(RULES)]
)
def test_each_rule_is_needed(rule: str) -> None:
    few = ((search, {"right", "failed"}) for search in with_a_quiet_rank(2, 2))
    many = ((search, {"right"}) for search in all_of(4, 2))
    for search, rights in itertools.chain(few, many):
        search.rules = RULES - {rule}
        if not search.run() <= rights:
            return
    pytest.fail(f"nothing goes wrong without {rule!r}")
