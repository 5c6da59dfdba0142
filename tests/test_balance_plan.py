"""Layer 1: no processes. Plan: equation (1), validation, the text for people."""

from __future__ import annotations

import numpy as np
import pytest

from odc.balance import Plan, bubble_rate


def make(microbatches: list[list[list[int]]], costs: list[float], max_tokens: int = 10) -> Plan:
    lengths = np.arange(1, len(costs) + 1)
    return Plan(microbatches, lengths, np.array(costs), max_tokens, "by-hand")


def test_equation_1_by_hand() -> None:
    plan = make([[[0], [1]], [[2], [3]]], [4.0, 1.0, 2.0, 5.0])
    assert plan.makespan("collective") == 4.0 + 5.0
    assert plan.makespan("odc") == 2.0 + 5.0
    assert plan.makespan() == plan.makespan("odc")
    assert plan.bubble_rate("collective") == pytest.approx(1 - 12 / (2 * 9))
    assert plan.bubble_rate("odc") == pytest.approx(1 - 12 / (2 * 7))


def test_cost_of_a_microbatch_is_the_sum_of_its_samples() -> None:
    plan = make([[[0, 1]], [[2], [3]]], [4.0, 1.0, 2.0, 5.0])
    np.testing.assert_array_equal(plan.microbatch_times(), [[5.0, 0.0], [2.0, 5.0]])
    assert plan.num_microbatches == (1, 2)
    assert (plan.world_size, plan.num_samples) == (2, 4)
    assert (plan.tokens(0), plan.tokens(1)) == (1 + 2, 3 + 4)


def test_a_padded_microbatch_has_the_tokens_and_the_cost_of_its_longest_sample_times_their_number() -> None:
    microbatches, lengths, costs = [[[0, 3], []], [[2], [1]]], np.array([2, 5, 1, 4]), np.array([0.4, 3.0, 0.1, 1.5])
    plan = Plan(microbatches, lengths, costs, 8, "by-hand", layout="padded")
    np.testing.assert_array_equal(plan.microbatch_tokens(), [[2 * 4, 0], [1, 5]])
    np.testing.assert_allclose(plan.microbatch_times(), [[2 * 1.5, 0], [0.1, 3.0]])
    assert plan.peak_tokens == 8
    assert (plan.tokens(0), plan.tokens(1)) == (6, 6)  # without padding
    assert plan.padding_fraction == pytest.approx(1 - 12 / 14)
    assert "14.3% of all tokens are padding" in plan.explain()
    packed = Plan(microbatches, lengths, costs, 8, "by-hand")
    assert (packed.layout, packed.padding_fraction, packed.peak_tokens) == ("packed", 0.0, 6)
    assert plan != packed
    with pytest.raises(ValueError, match="microbatch 0 of rank 0 has 8 tokens with its padding: expected at most max"):
        Plan(microbatches, lengths, costs, 7, "by-hand", layout="padded")
    with pytest.raises(ValueError, match="layout='ragged': expected one of 'packed', 'padded'"):
        Plan(microbatches, lengths, costs, 8, "by-hand", layout="ragged")  # type: ignore[arg-type]
    assert Plan([[], []], lengths[:0], costs[:0], 8, "by-hand", layout="padded").padding_fraction == 0.0


def test_missing_microbatches_cost_nothing() -> None:
    plan = make([[[0], [1]], [[2]], []], [4.0, 3.0, 2.0])
    assert plan.makespan("collective") == 4.0 + 3.0
    assert plan.bubble_rate("collective") == pytest.approx(1 - 9 / 21)


def test_empty_plans() -> None:
    for microbatches in ([[], []], [[[]], [[]]]):
        plan = make(microbatches, [])
        assert plan.makespan("odc") == plan.makespan("collective") == 0.0
        assert plan.bubble_rate("odc") == plan.bubble_rate("collective") == 0.0
        assert "0 samples" in plan.explain()


def test_a_perfect_plan_has_no_bubble() -> None:
    plan = make([[[0, 1]], [[2]]], [0.1, 0.2, 0.3])
    assert 0.0 <= plan.bubble_rate() < 1e-12


def test_bubble_rate_of_several_plans_weighs_by_time() -> None:
    idle_half = make([[[0]], []], [9.0])
    busy = make([[[0]], [[1]]], [1.0, 1.0])
    assert bubble_rate([idle_half, busy], "odc") == pytest.approx(1 - 11 / 20)
    assert bubble_rate([], "odc") == 0.0


@pytest.mark.parametrize(
    ("microbatches", "message"),
    [
        ([[[0]], [[2]]], r"missing: \[1\]"),
        ([[[0, 1]], [[2, 1]]], r"repeated: \[1\]"),
        ([[[0, 1]], [[2, 3]]], r"unknown: \[3\]"),
        ([[[0, 1]], [[2, -1]]], r"unknown: \[-1\]"),
        ([], "no rank"),
        ([[[0], [1, 2]]], "microbatch 1 of rank 0 has 5 tokens: expected at most max_tokens=4"),
    ],
)
def test_bad_microbatches(microbatches: list[list[list[int]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(microbatches, [1.0, 1.0, 1.0], max_tokens=4)


def test_bad_arrays() -> None:
    with pytest.raises(ValueError, match="2 costs for 1 lengths"):
        Plan([[[0]]], np.array([1]), np.ones(2), 4, "by-hand")
    with pytest.raises(ValueError, match=r"lengths\[0\] is 0"):
        Plan([[[0]]], np.array([0]), np.ones(1), 4, "by-hand")
    with pytest.raises(ValueError, match="dtype float64"):
        Plan([[[0]]], np.array([1.5]), np.ones(1), 4, "by-hand")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_tokens=0"):
        Plan([[[0]]], np.array([1]), np.ones(1), 0, "by-hand")
    with pytest.raises(TypeError):
        Plan([[[0.5]]], np.array([1]), np.ones(1), 4, "by-hand")  # type: ignore[list-item]


def test_unknown_comm() -> None:
    with pytest.raises(ValueError, match="comm='nccl': expected 'odc' or 'collective'"):
        make([[[0]]], [1.0]).makespan("nccl")  # type: ignore[arg-type]


def test_a_plan_keeps_its_own_copies() -> None:
    microbatches, lengths, costs = [[[0], [1]]], np.array([1, 2]), np.ones(2)
    plan = Plan(microbatches, lengths, costs, 4, "by-hand")
    same = Plan([[[0], [1]]], lengths.copy(), costs.copy(), 4, "by-hand")
    microbatches[0][0].append(1)
    lengths[0] = costs[0] = 9
    assert plan == same
    assert plan != Plan([[[1], [0]]], np.array([1, 2]), np.ones(2), 4, "by-hand")
    assert plan != Plan([[[0], [1]]], np.array([1, 2]), np.array([1.0, 2.0]), 4, "by-hand")
    with pytest.raises(ValueError, match="read-only"):
        plan.lengths[0] = 5


def test_explain() -> None:
    text = make([[[0], [1]], [[2], []]], [4.0, 3.0, 1.0]).explain().splitlines()
    assert text == [
        "by-hand: 3 samples, 6 tokens on 2 ranks, at most 10 tokens a microbatch",
        "bubble rate 42.9% with ODC, 42.9% with collectives",
        "rank 0: 2 samples in 2 microbatches, 3 tokens, 175% of the mean time",
        "rank 1: 1 sample in 2 microbatches (1 empty), 3 tokens, 25% of the mean time",
    ]


def test_explain_one_of_each() -> None:
    text = Plan([[[0]]], np.array([1]), np.ones(1), 1, "by-hand").explain().splitlines()
    assert text[0] == "by-hand: 1 sample, 1 token on 1 rank, at most 1 token a microbatch"
    assert text[2] == "rank 0: 1 sample in 1 microbatch, 1 token, 100% of the mean time"
    assert "rank 0: 0 samples in 0 microbatches, 0 tokens" in make([[]], []).explain()
