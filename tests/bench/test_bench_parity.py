"""Layer 3: ranks as processes. A seeded choice of generated scripts, under ODC and under plain FSDP.

`odc bench parity` runs hundreds. The choice and the comparison are tested without ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
import torch

from odc.bench.proof.parity.cases import FACTORS, Case, all_pairs, generate, impossible, pairs
from odc.bench.proof.parity.comparison import compare
from odc.bench.proof.parity.jobs import _judge, kind_of, run_cases
from odc.bench.proof.parity.training import Run, largest_terms
from odc.fsdp_patch.publishing import Turns
from odc.minibatch.protocol import End
from odc.minibatch.runtime import Runtime

NUMBERS = (1, 3, 4)
"""Cases of seed 0: both FSDPs, FSDP2 in place and staged, shm and tcp, replicas, 2 to 4 ranks."""
PLAIN = Case(**{name: next(iter(values)) for name, values in FACTORS.items()})


@functools.cache
def cases_of_seed_0() -> list[Case]:
    return list(itertools.islice(generate(0), 300))


def test_generated_scripts_train_as_under_plain_fsdp() -> None:
    cases = cases_of_seed_0()
    for outcome in run_cases({number: cases[number] for number in NUMBERS}):
        assert outcome.status in ("equal", "refused"), (outcome.number, outcome.case.describe(), outcome.reason)


def test_kept_gradients_beside_microbatches_without_synchronization() -> None:
    """FSDP1 shows unsharded gradients in the tensors that it finds in ``.grad``, those of earlier minibatches too."""
    kept = replace(PLAIN, fsdp="fsdp1-orig", staging="none", sync="last", gradients="scaled", clearing="zeros")
    outcomes = run_cases({0: replace(kept, counts="uneven"), 1: replace(kept, counts="idle-later")})
    assert [(outcome.status, outcome.reason) for outcome in outcomes] == [("equal", "")] * 2


def double_gradients(rank: int) -> None:
    final_sum = Turns._sum

    def doubled(self: Turns, *args: Any) -> Any:
        result = final_sum(self, *args)
        return result and result._replace(total=result.total.mul_(2))

    Turns._sum = doubled  # type: ignore[method-assign]


def raise_in_third_minibatch(rank: int) -> None:
    finish = Runtime.finish

    def failing(self: Runtime, how: End | None = None) -> None:
        if self.minibatch == 3 and rank == 1 and len(self.units) == 1:
            raise ValueError("broken on purpose")
        finish(self, how)

    Runtime.finish = failing  # type: ignore[method-assign]


def test_a_wrong_gradient_is_found() -> None:
    (outcome,) = run_cases({0: PLAIN}, prepare=double_gradients)
    assert outcome.status == "different"
    assert "gradients (0, " in outcome.reason


@pytest.mark.extended  # outcomes are judged without ranks below
def test_an_error_fails_its_case_only() -> None:
    outcomes = run_cases({3: PLAIN, 5: replace(PLAIN, units="2")}, prepare=raise_in_third_minibatch)
    assert [(o.number, o.status) for o in outcomes] == [(3, "crash"), (5, "equal")]
    assert "rank 1: ValueError: broken on purpose" in outcomes[0].reason


# Without ranks.


def test_the_same_seed_gives_the_same_cases_and_all_pairs_meet() -> None:
    cases = cases_of_seed_0()
    assert cases == list(itertools.islice(generate(0), 300))
    assert cases[:50] != list(itertools.islice(generate(1), 50))
    assert all(impossible(asdict(case)) is None for case in cases)
    met = {pair for case in cases for pair in pairs(asdict(case))}
    for pair in set(all_pairs()) - met:
        assert not any(impossible(values) is None for values in completions(dict(pair))), pair


def test_fsdp2_meets_everything_in_place_and_staged() -> None:
    """Not only beside FSDP1, which has no such choice: what is met is not met by name alone."""
    cases = cases_of_seed_0()
    for name, values in FACTORS.items():
        for way, value in itertools.product(("in-place", "staged"), values):
            is_possible = name not in ("fsdp", "staging") or value in ("fsdp2", way)
            met = sum(case.staging == way and getattr(case, name) == value and case.fsdp == "fsdp2" for case in cases)
            assert (met >= 5) == is_possible, (way, name, value, met)


def completions(fixed: dict[str, str]) -> Iterator[dict[str, str]]:
    """Cases with these two values in which everything else is plain, or one or two further factors are not."""
    names = [name for name in FACTORS if name not in fixed]
    for one, other in itertools.combinations(names, 2):
        for value, other_value in itertools.product(FACTORS[one], FACTORS[other]):
            yield {**asdict(PLAIN), **fixed, one: value, other: other_value}


def test_every_step_has_a_microbatch_on_some_rank() -> None:
    for counts in FACTORS["counts"]:
        for ranks in FACTORS["ranks"]:
            case = replace(PLAIN, counts=counts, ranks=ranks)
            numbers = [[case.num_microbatches(step, r) for r in range(case.world_size)] for step in range(4)]
            assert all(max(row) > 0 for row in numbers)
            assert any(0 in row for row in numbers) == counts.startswith("idle")


def run_of(**changes: Any) -> Run:
    run = Run(
        losses={"loss 0.0": torch.tensor(2.0)},
        gradients={(0, "embed.weight"): torch.full((3,), 1e-3), (1, "embed.weight"): torch.full((3,), 1e-3)},
        clipped_to={0: 1.0, 1: 0.5},
        parameters={"embed.weight": torch.ones(3)},
        description="2 units over 2 ranks, transport shm, in place",
    )
    assert set(changes) <= {field.name for field in fields(Run)}
    return replace(run, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"losses": {"loss 0.0": torch.tensor(2.0 + 2e-5)}}, "losses loss 0.0"),
        ({"losses": {"loss 0.0": torch.tensor(math.nan)}}, "losses loss 0.0"),
        ({"losses": {}}, "under plain FSDP only"),
        ({"losses": {"loss 0.0": torch.tensor(2.0), "loss 0.1": torch.tensor(2.0)}}, "with ODC only"),
        ({"parameters": {"embed.weight": torch.full((3,), 1 + 1e-5)}}, "parameters embed.weight"),
        ({"seen": {(0, "embed.weight"): torch.ones(3)}}, "seen (0, 'embed.weight')"),
        ({"description": "2 units over 2 ranks, transport tcp, in place"}, "without 'shm'"),
        ({"description": "2 units over 2 ranks, transport shm, staged (ODC_STAGING=on)"}, "without 'in place'"),
    ],
)
def test_differences_are_told(changes: dict[str, Any], words: str | None) -> None:
    _, wrong = compare(PLAIN, run_of(), run_of(**changes), {"embed.weight": 0.0})
    assert len(wrong) == (words is not None)
    assert words is None or words in wrong[0]


@pytest.mark.parametrize(
    ("gradients", "size", "num_wrong"),
    [("logged", 0.0, 0), ("logged", 1e-9, 1), ("logged-after", 0.0, 1), ("kept", 0.0, 1)],
)
def test_zeros_may_be_seen_where_no_rank_brings_a_gradient(gradients: str, size: float, num_wrong: int) -> None:
    found = run_of(seen={(0, "embed.weight"): torch.full((3,), size)})
    assert len(compare(replace(PLAIN, gradients=gradients), run_of(), found, {"embed.weight": 0.0})[1]) == num_wrong


@pytest.mark.parametrize(
    ("step", "term", "is_equal"), [(0, 0.0, False), (0, 1.0, True), (1, 1.0, True), (1, 0.05, False)]
)
def test_an_error_of_a_gradient_is_relative_to_the_largest_term(step: int, term: float, is_equal: bool) -> None:
    """Terms may cancel; where the script has made gradients smaller, so are the terms."""
    found = run_of()
    found.gradients = {**found.gradients, (step, "embed.weight"): torch.full((3,), 1e-3 + 1e-7)}
    assert (not compare(PLAIN, run_of(), found, {"embed.weight": term})[1]) == is_equal


def test_the_largest_terms_of_all_parameters_are_known() -> None:
    case = replace(PLAIN, units="3", unused="always", shapes="odd")
    terms = largest_terms(case)
    assert {name for name, size in terms.items() if size == 0.0} == {n for n in terms if n.startswith("blocks.1.")}


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([{"errors": {"losses": 0.0}, "wrong": []}] * 2, "equal"),
        ([{"errors": {"losses": 0.0}, "wrong": []}, {"errors": {"losses": 1.0}, "wrong": ["losses"]}], "different"),
        ([{"error": "UnsupportedError", "text": "no"}, {"error": "AbortedError", "text": "rank 0: no"}], "refused"),
        ([{"error": "PeerSilentError", "text": ""}, {"error": "AbortedError", "text": ""}], "hang"),
        ([None, {"errors": {}, "wrong": []}], "hang"),
        ([None, {"error": "ValueError", "text": ""}], "crash"),
        ([{"error": "PlainFails", "text": "", "plain": True}] * 2, "not plain"),
    ],
)
def test_outcomes(messages: list[Any], status: str) -> None:
    assert _judge(0, PLAIN, messages).status == status


def test_refusals_are_counted_by_kind() -> None:
    one, other = "unit 'blocks.1' of 3 ranks cannot. Use 2.", "unit 'blocks.0' of 4 ranks cannot. Use 3."
    assert kind_of(one) == kind_of(other)
