"""Layer 1: no processes. What a script means by the gradients that it asks for: the tables of docs/ends.md, and every
loop of a few lines with a rank that has no microbatch."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import one_rank
import pytest
import torch
from one_rank import Sums
from torch import nn
from torch.nn.utils import clip_grad_norm_

from odc.errors import OdcError, ProtocolError
from odc.fsdp_patch import session
from odc.fsdp_patch.gradient_state import Asker, GradientState, Notes, Said
from odc.fsdp_patch.pending import PendingGradient
from odc.minibatch.protocol import End
from odc.minibatch.state import MinibatchState

PAGE = Path(__file__).parents[2] / "docs" / "ends.md"
ONE, OTHER = frozenset([1]), frozenset([2])
END, ELSEWHERE = 77, 78
ASKERS = {
    "a step": (Asker.STEP, 0),
    "clipping": (Asker.NAME, 0),
    "old data, at an end": (Asker.DATA, END),
    "old data, elsewhere": (Asker.DATA, ELSEWHERE),
}


class Told(NamedTuple):
    """A state, and what it is told of ``.grad`` and of parameters."""

    state: GradientState
    minibatch: MinibatchState
    facts: dict[str, bool]

    def end(self, *, has_pushed: bool = True, ender: int = 0) -> None:
        self.minibatch.begin()
        self.minibatch.finish()
        self.state.end([(Notes(0, 0, ender, Said.BY_HAND if ender else Said(0)), has_pushed)])
        self.state.install(has_pushed)

    def publish(self) -> None:
        self.minibatch.publish(0, is_changed=True)


def told() -> Told:
    """Behind the end of a minibatch that has left gradients, and in which somebody has used data."""
    facts, minibatch = {"is_empty": False, "is_changed": False}, MinibatchState(["a unit"])
    state = GradientState(minibatch, 0, lambda: facts["is_empty"], lambda parameters: facts["is_changed"])
    found = Told(state, minibatch, facts)
    found.publish()
    found.end(ender=END)
    return found


def rows(heading: str) -> Iterator[list[str]]:
    """The cells of a table of the page, the first row being its head."""
    lines = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0].splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return iter([table[0], *table[2:]])


def test_who_means_which_gradients() -> None:
    table = rows("Who means which gradients")
    head, seen = next(table)[1:], []
    assert set(head) == set(ASKERS)
    for since, *cells in table:
        seen.append(since)
        for (asker, place), cell in zip((ASKERS[name] for name in head), cells, strict=True):
            one = told()
            if "asked" in since:
                one.state.give("who")
            one.facts["is_changed"] = "changed" in since
            if "used" in since:
                one.state.step(ONE)
            if since == "published":
                one.publish()
            assert one.state.means_coming(asker, "who", ONE, place) == (cell == "coming"), (since, asker, cell)
    assert seen == ["nothing", "asked", "changed", "changed, asked", "used", "used, asked", "published"]


@pytest.mark.parametrize("way", ["step", "clear"])
def test_what_is_used_is_so_for_these_parameters_until_the_next_end(way: str) -> None:
    one = told()
    getattr(one.state, way)(ONE)
    assert one.state.means_coming(Asker.STEP, "who", ONE | OTHER)
    assert not one.state.means_coming(Asker.STEP, "who", OTHER)
    one.publish()
    one.end()
    assert not one.state.means_coming(Asker.STEP, "who", ONE)


def test_gradients_that_are_gone_were_used_but_not_if_there_were_none() -> None:
    one = told()
    one.facts["is_empty"] = True
    assert one.state.means_coming(Asker.STEP, "who", ONE)
    one.publish()
    one.end()
    assert not one.state.means_coming(Asker.STEP, "who", ONE)


def test_another_caller_and_other_parameters_were_not_asked_for() -> None:
    one = told()
    one.state.give(("clip", ONE))
    assert one.state.means_coming(Asker.NAME, ("clip", ONE), ONE)
    assert not one.state.means_coming(Asker.NAME, ("clip", OTHER), OTHER)
    assert not one.state.means_coming(Asker.NAME, ("scale", ONE), ONE)
    one.publish()
    one.end()
    assert not one.state.means_coming(Asker.NAME, ("clip", ONE), ONE)


def test_what_was_used_stays_so_over_an_end_without_gradients() -> None:
    one = told()
    one.state.step(ONE)
    for _ in range(2):
        assert one.state.means_coming(Asker.NAME, "who", ONE)
        one.state.leave(ONE | OTHER)
        one.publish()
        one.end(has_pushed=False)
    assert one.state.means_coming(Asker.STEP, "who", ONE)
    assert not one.state.means_coming(Asker.STEP, "who", OTHER)
    one.publish()
    one.end()
    assert not one.state.means_coming(Asker.STEP, "who", ONE)


def test_a_place_is_an_end_only_where_a_rank_with_gradients_has_ended() -> None:
    one = told()
    one.publish()
    one.end(has_pushed=False, ender=ELSEWHERE)
    one.state.step(ONE)
    assert not one.state.means_coming(Asker.DATA, "who", ONE, ELSEWHERE)


# What stands in .grad


def is_pending(when: str, is_none: bool, by_hand: bool) -> bool:
    """What stands in ``.grad`` of a parameter, where it was None, or an old gradient was; ``by_hand``: the script ends
    minibatches by a use of data, else by clipping."""
    model = Model()
    parameter, optimizer = model.b, torch.optim.SGD(model.parameters(), lr=0.1)
    if when == "the model is patched":
        parameter.grad = None if is_none else torch.ones(1)
    ours, _ = one_rank.session_of(model, None)
    if when != "the model is patched":
        one_rank.microbatch(ours, [torch.ones(2), torch.ones(1)])
        names = {"__name__": "script", "clip": lambda: clip_grad_norm_(model.parameters(), 1.0), "p": parameter}
        exec("p.grad.sum()" if by_hand else "clip()", names)
        if is_none and when != "`zero_grad`":
            parameter.grad = None
        if when != "a minibatch has ended":
            optimizer.step()
        if when == "`zero_grad`":
            optimizer.zero_grad(set_to_none=is_none)
        elif when == "the first push of a minibatch":
            one_rank.gather(ours, keeps_graph=True)
            ours.scatter_accumulate(0, torch.ones(2), [True])
    found = isinstance(parameter.grad, PendingGradient)
    with warnings.catch_warnings(action="ignore"):  # of a gradient that is dropped
        ours.close()
    return found


def test_what_stands_in_grad() -> None:
    table = rows("What stands in `.grad`")
    assert next(table) == ["when", "where it was None", "where an old one was"]
    cells = {
        (when, is_none, by_hand): cell.startswith("pending") if "if" not in cell else by_hand
        for when, *both in table
        for is_none, cell in zip((True, False), both, strict=True)
        for by_hand in (False, True)
    }
    assert len(cells) == 20
    assert {case: is_pending(*case) for case in cells} == cells


# Every loop

LINES = {
    "clip": "clip_grad_norm_(parameters, 0.3)",
    "scale": "for p in parameters:\n        if p.grad is not None:\n            p.grad.mul_(0.5)",
    "look": "for p in parameters:\n        if p.grad is not None:\n            seen.append(float(p.grad.sum()))",
    "evaluate": "evaluate()",
    "finish": "finish()",
    "step": "optimizer.step()",
    "step at times": "if number % 2:\n        optimizer.step()",
    "step by hand": "for p in parameters:\n        if p.grad is not None:\n            p.data.sub_(0.1 * p.grad)",
    "zero_grad": "owner.zero_grad()",
    "zero_grad in place": "owner.zero_grad(set_to_none=False)",
    "zero": "for p in parameters:\n        if p.grad is not None:\n            p.grad.zero_()",
    "None": "for p in parameters:\n        p.grad = None",
}
STEPS, CLEARINGS = ("step", "step at times", "step by hand"), ("zero_grad", "zero_grad in place", "zero", "None")
NUM_ROUNDS = 4
IDLE = [(0,), (1,), (2, 3)]
"""Rounds in which one rank has no microbatch."""


def loops(longest: int) -> Iterator[tuple[str, ...]]:
    """Bodies of loops, behind their microbatches, that step in one way, and clear nothing before that: a rank without a
    microbatch would have to say that it throws the minibatch away."""
    for length in range(1, longest + 1):
        for body in itertools.product(LINES, repeat=length):
            ways = [name for name in STEPS if name in body]
            if len(ways) == 1 and not set(CLEARINGS) & set(body[: body.index(ways[0])]):
                yield body


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([0.5, 1.0]))
        self.b = nn.Parameter(torch.tensor([-1.0]))


class Outcome(NamedTuple):
    error: OdcError | None
    parameters: list[torch.Tensor]
    """Of all rounds."""
    told: Sequence[tuple[End, Sums]]


def run(body: Sequence[str], idle: Sequence[int], others: Sequence[tuple[End, Sums]] | None, patched: bool) -> Outcome:
    """A rank in a loop. ``others``: how another rank has ended its minibatches; without, this one has all of the
    microbatches; and if it is not ``patched``, it finds the sums in ``.grad`` at once."""
    model = Model()
    parameters, found = list(model.parameters()), list[torch.Tensor]()
    optimizer = None if "step by hand" in body else torch.optim.SGD(parameters, lr=0.1)
    ours, runtime = one_rank.session_of(model, others) if patched else (None, None)

    def microbatch(number: int) -> None:
        found.extend(p.detach().clone() for p in parameters)
        gradients = [torch.tensor([1.0 + number, -2.0]), torch.tensor([0.5 * number + 0.25])]
        if ours is None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        elif number not in idle:
            one_rank.microbatch(ours, gradients)

    names: dict[str, Any] = {
        "__name__": "script",
        "parameters": parameters,
        "optimizer": optimizer,
        "owner": optimizer or model,
        "clip_grad_norm_": clip_grad_norm_,
        "seen": [],
        "microbatch": microbatch,
        "evaluate": lambda: None if ours is None else one_rank.gather(ours, keeps_graph=False),
        "finish": lambda: None if ours is None else ours.finish(),
    }
    text = f"for number in range({NUM_ROUNDS}):\n    microbatch(number)\n"
    error = None
    try:
        exec(text + "".join(f"    {LINES[name]}\n" for name in body), names)
    except OdcError as raised:
        error = raised
    found.extend(p.detach().clone() for p in parameters)
    if ours is not None:
        with warnings.catch_warnings(action="ignore"):  # of gradients that are dropped: some loops use none at last
            ours.close()
    return Outcome(error, found, [] if runtime is None else runtime.told)


def verdict(outcome: Outcome, plain: Outcome) -> str:
    if outcome.error is not None:
        return "refused" if isinstance(outcome.error, ProtocolError) else f"refused: {outcome.error}"
    return "same" if all(map(torch.allclose, outcome.parameters, plain.parameters)) else "different"


def verdicts(body: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Of a rank with all microbatches, and of one that has none in some rounds, beside plain gradients."""
    outcomes: list[Outcome] = []
    for number in range(2 + len(IDLE)):  # from one line, as places of the script are known by the calls that lead there
        idle, others = (IDLE[number - 2], outcomes[1].told) if number > 1 else ((), None)
        outcomes.append(run(body, idle, others, patched=number > 0))
    plain, busy, *late = outcomes
    for one in late:
        is_behind = one.error is None and len(one.told) < len(busy.told)  # the other waits for it, until its limit
        yield verdict(busy, plain), "left behind" if is_behind else verdict(one, plain)


TOLD = {"same", "refused", "left behind"}


def expected(body: Sequence[str]) -> tuple[set[str], set[str]]:
    """What may become of a loop, on both ranks: never another result without a word.

    An evaluation between an end and a step by hand is refused, on all ranks. A rank without a microbatch cannot know
    that others keep their gradients and add to them, if no clipping says so first; it does not see that the script sets
    None, and misses a use behind ``zero_grad``. With ``finish()`` before any of these it need not know.
    """
    way = next(name for name in STEPS if name in body)
    last = max(number for number, name in enumerate(body) if name == way)
    busy = {"same", "refused"} if way == "step by hand" and "evaluate" in body[:last] else {"same"}
    first = next(name for name in body if name in ("clip", "scale", "look", "finish", way))
    is_kept = way == "step at times" and first != "clip"
    if first == "finish":
        return busy, busy
    return busy, TOLD if is_kept or "None" in body or "zero_grad" in body[:-1] else busy


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without other ranks; and with few objects to search for optimizers."""
    monkeypatch.setattr(session, "pass_fences", one_rank.pass_fences)
    list(verdicts(("clip", "step")))
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("longest", [3, pytest.param(4, marks=pytest.mark.extended)])
def test_every_loop_with_an_idle_rank(alone: None, longest: int) -> None:
    wrong = [
        (body, of_ranks)
        for body in loops(longest)
        for of_ranks in verdicts(body)
        if any(one not in may for one, may in zip(of_ranks, expected(body), strict=True))
    ]
    assert not wrong
