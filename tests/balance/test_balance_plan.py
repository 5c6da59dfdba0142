"""Layer 1: no processes. Plan: equation (1), validation, the text for people."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from odc.balance import LinearCost, Machine, Plan, QuadraticCost, TransformerCost, bubble_rate, preset
from odc.balance.costs import attention_costs
from odc.balance.plan import PackedOnDemand, PlannedMinibatch
from odc.balance.simulate.machine import Stopwatch


def make(microbatches: list[list[list[int]]], costs: list[float], max_tokens: int = 10) -> Plan:
    lengths = np.arange(1, len(costs) + 1)
    return Plan(microbatches, lengths, np.array(costs), max_tokens, "by-hand")


def test_equation_1_by_hand() -> None:
    plan = make([[[0], [1]], [[2], [3]]], [4.0, 1.0, 2.0, 5.0])
    assert (plan.makespan("collective"), plan.makespan("odc"), plan.makespan()) == (4.0 + 5.0, 2.0 + 5.0, 2.0 + 5.0)
    rates = plan.bubble_rate("collective"), plan.bubble_rate("odc")
    assert rates == pytest.approx((1 - 12 / (2 * 9), 1 - 12 / (2 * 7)))


def test_cost_of_a_microbatch_is_the_sum_of_its_samples() -> None:
    plan = make([[[0, 1]], [[2], [3]]], [4.0, 1.0, 2.0, 5.0])
    np.testing.assert_array_equal(plan.microbatch_times(), [[5.0, 0.0], [2.0, 5.0]])
    assert (plan.num_microbatches, plan.world_size, plan.num_samples) == ((1, 2), 2, 4)
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
    with pytest.raises(ValueError, match="layout='ragged': expected one of 'packed', 'padded', 'padded-attention'"):
        Plan(microbatches, lengths, costs, 8, "by-hand", layout="ragged")  # type: ignore[arg-type]
    assert Plan([[], []], lengths[:0], costs[:0], 8, "by-hand", layout="padded").padding_fraction == 0.0


def with_padded_attention(microbatches: list[list[list[int]]], lengths: list[int], cost: QuadraticCost) -> Plan:
    tokens = np.array(lengths)
    return Plan(
        microbatches,
        tokens,
        cost(tokens),
        100,
        "by-hand",
        layout="padded-attention",
        attention_costs=attention_costs(cost, tokens),
    )


def test_where_attention_is_padded_it_costs_what_that_of_the_longest_sample_does_times_their_number() -> None:
    microbatches, lengths, cost = [[[0, 3], []], [[2], [1]]], [2, 5, 1, 4], QuadraticCost(0.5, 3.0)
    plan = with_padded_attention(microbatches, lengths, cost)
    times = [[3.0 * (2 + 4) + 0.5 * 2 * 4**2, 0], [3.0 * 1 + 0.5, 3.0 * 5 + 0.5 * 25]]
    np.testing.assert_allclose(plan.microbatch_times(), times)
    assert plan.makespan() == pytest.approx(34.0)
    # Tokens are as in a packed microbatch.
    np.testing.assert_array_equal(plan.microbatch_tokens(), [[6, 0], [1, 5]])
    assert (plan.padding_fraction, plan.peak_tokens) == (0.0, 6)
    padding = 0.5 * (2 * 4**2 - 2**2 - 4**2)
    assert f"at most 100 tokens a microbatch, {padding / np.sum(times):.1%} of the cost is padding in attention" in (
        plan.explain()
    )
    empty = with_padded_attention([[], []], [], cost)
    assert (empty.makespan(), empty.padding_fraction) == (0.0, 0.0)
    assert "0.0% of the cost is padding in attention" in empty.explain()
    with pytest.raises(ValueError, match="microbatch 0 of rank 0 has 6 tokens: expected at most max_tokens=5"):
        Plan(microbatches, plan.lengths, plan.costs, 5, "x", layout="padded-attention", attention_costs=plan.costs)


def test_plans_whose_attention_differs_are_not_equal() -> None:
    plan = with_padded_attention([[[0, 1]]], [2, 5], QuadraticCost(0.5, 3.0))
    assert plan == with_padded_attention([[[0, 1]]], [2, 5], QuadraticCost(0.5, 3.0))
    others = ([[0.0, 0.0], "padded-attention"], [None, "packed"])
    for attention, layout in others:
        other = Plan([[[0, 1]]], plan.lengths, plan.costs, 100, "by-hand", layout=layout, attention_costs=attention)  # type: ignore[arg-type]
        assert plan != other
    assert plan.attention_costs is not None
    with pytest.raises(ValueError, match="read-only"):
        plan.attention_costs[0] = 5


@pytest.mark.parametrize(
    ("layout", "attention", "message"),
    [
        ("padded-attention", None, "no attention_costs with layout='padded-attention': expected them with"),
        ("packed", [1.0, 1.0], "attention_costs with layout='packed': expected them with 'padded-att"),
        ("padded", [1.0, 1.0], "attention_costs with layout='padded': expected them with 'padded-att"),
        ("padded-attention", [1.0], "1 attention_costs for 2 lengths: expected one per sample"),
        ("padded-attention", [1.0, -1.0], r"attention_costs\[1\] is -1.0: expected a finite number"),
        ("padded-attention", [1.0, 2.5], r"attention_costs\[1\] is 2.5, costs\[1\] only 2.0: expected attention to be"),
    ],
)
def test_attention_costs_and_layout_go_together(layout: str, attention: list[float] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of_two_samples(layout, attention)
    assert of_two_samples("padded-attention", [1.0, 2.0]).makespan() == 4.0


def of_two_samples(layout: str, attention: list[float] | None) -> Plan:
    return Plan([[[0, 1]]], [2, 5], [1.0, 2.0], 100, "x", layout=layout, attention_costs=attention)  # type: ignore[arg-type]


def test_a_simulation_pads_attention_too_where_the_cost_model_tells_its_part() -> None:
    cost, lengths = QuadraticCost(0.5, 3.0), np.array([2, 5, 1, 4])
    plan = with_padded_attention([[[0, 3]], [[2, 1]]], lengths.tolist(), cost)
    samples = np.arange(4)
    assert Stopwatch(cost, lengths, Machine()).time(plan, samples, "odc").makespan == pytest.approx(plan.makespan())
    twice = QuadraticCost(1.0, 6.0)
    assert Stopwatch(twice, lengths, Machine()).time(plan, samples, "odc").makespan == pytest.approx(
        2 * plan.makespan()
    )
    no_attention = Stopwatch(LinearCost(3.0), lengths, Machine()).time(plan, samples, "odc")
    assert no_attention.makespan == pytest.approx(3.0 * 6)
    with pytest.raises(
        ValueError, match="layout 'padded-attention' needs the part that is attention's, which is known"
    ):
        Stopwatch(TransformerCost.from_config(preset("qwen2.5-1.5b")), lengths, Machine()).time(plan, samples, "odc")


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


@pytest.mark.parametrize(
    ("sample", "length", "costs", "max_tokens", "error", "message"),
    [
        (0, 1, [1.0, 1.0], 4, ValueError, "2 costs for 1 lengths"),
        (0, 0, [1.0], 4, ValueError, r"lengths\[0\] is 0"),
        (0, 1.5, [1.0], 4, ValueError, "dtype float64"),
        (0, 1, [1.0], 0, ValueError, "max_tokens=0"),
        (0.5, 1, [1.0], 4, TypeError, ""),
    ],
)
def test_bad_arrays(
    sample: Any, length: Any, costs: list[float], max_tokens: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Plan([[[sample]]], np.array([length]), np.array(costs), max_tokens, "by-hand")


def pairs(samples: list[int]) -> list[list[int]]:
    return [samples[i : i + 2] for i in range(0, len(samples), 2)]


def test_a_rank_is_packed_when_it_is_looked_at() -> None:
    asked: list[list[int]] = []

    def pack(samples: list[int]) -> list[list[int]]:
        asked.append(samples)
        return pairs(samples)

    ranks = [[0, 3, 4], [1], [], [2, 5]]
    plan = make(PackedOnDemand(ranks, pack), [1.0] * 6)  # type: ignore[arg-type]
    assert (plan.world_size, plan.num_samples, asked) == (4, 6, [])
    assert repr(plan.microbatches) == "PackedOnDemand([[0, 3, 4], [1], [], [2, 5]], num_ranks=4, num_packed=0)"
    assert asked == []
    for _ in range(2):
        assert plan.microbatches[0] == [[0, 3], [4]]
        assert PlannedMinibatch(np.arange(10, 16), plan).of_rank(1) == [[11]]
        assert asked == [[0, 3, 4], [1]]
    assert plan.microbatches[-1] == [[2, 5]]
    assert plan.num_microbatches == (2, 1, 0, 1)
    assert asked == [[0, 3, 4], [1], [2, 5], []]
    packed = make([pairs(mine) for mine in ranks], [1.0] * 6)
    assert plan == packed == plan
    assert plan.microbatches == packed.microbatches
    assert plan.microbatches[1:3] == [[[1]], []]
    assert plan.explain() == packed.explain()
    again = pickle.loads(pickle.dumps(make(PackedOnDemand(ranks, pairs), [1.0] * 6)))  # type: ignore[arg-type]
    assert again == packed


def test_what_is_packed_on_demand_is_checked() -> None:
    with pytest.raises(ValueError, match=r"missing: \[1\], repeated: \[0\]"):
        make(PackedOnDemand([[0], [0]], pairs), [1.0, 1.0])  # type: ignore[arg-type]
    plan = make(PackedOnDemand([[0], [1, 2]], pairs), [1.0] * 3, max_tokens=4)  # type: ignore[arg-type]
    assert plan.microbatches[0] == [[0]]
    for _ in range(2):
        with pytest.raises(ValueError, match="microbatch 0 of rank 1 has 5 tokens: expected at most max_tokens=4"):
            plan.microbatches[1]
    lost = make(PackedOnDemand([[0], [1, 2]], lambda samples: [samples[:1]]), [1.0] * 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rank 1 has samples \[1, 2\], packed into \[\[1\]\]: expected the same"):
        lost.explain()


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
