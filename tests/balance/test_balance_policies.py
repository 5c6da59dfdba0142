"""Layer 1: no processes. The balancing policies: what each promises, and how they compare."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import (
    COST,
    EQUAL_COUNTS,
    LENGTHS,
    LIMIT,
    LONG_TAILED_COST,
    NAMES,
    make,
    samples_of,
)

from odc.balance import (
    LinearCost,
    Plan,
    PlannedMinibatch,
    bubble_rate,
    get_policy,
)


def test_the_paper_policies_are_there() -> None:
    assert {"local-sort", "lb-micro", "lb-mini"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=24)
@given(lengths=LENGTHS, world_size=st.integers(1, 6))
def test_plans_are_complete_and_within_limits(name: str, lengths: list[int], world_size: int) -> None:
    plan = make(name, lengths, world_size)
    assert (plan.policy, plan.world_size) == (name, world_size)
    samples = sorted(s for mine in plan.microbatches for part in mine for s in part)
    assert samples == list(range(len(lengths)))
    assert all(sum(lengths[s] for s in part) <= LIMIT for mine in plan.microbatches for part in mine)
    assert plan == make(name, lengths, world_size)


@pytest.mark.parametrize("name", EQUAL_COUNTS)
@settings(deadline=None, max_examples=24)
@given(lengths=LENGTHS, world_size=st.integers(1, 6))
def test_collectives_get_equal_counts(name: str, lengths: list[int], world_size: int) -> None:
    plan = make(name, lengths, world_size)
    assert len(set(plan.num_microbatches)) == 1
    for mine in plan.microbatches:
        empty = [not part for part in mine]
        assert empty == sorted(empty)  # empty ones last


@settings(deadline=None, max_examples=24)
@given(lengths=LENGTHS, world_size=st.integers(1, 6))
def test_lb_micro_has_no_avoidable_empty_microbatch(lengths: list[int], world_size: int) -> None:
    plan = make("lb-micro", lengths, world_size)
    num_samples = [sum(map(len, mine)) for mine in plan.microbatches]
    assert max(num_samples) - min(num_samples) <= 1
    for mine, num in zip(plan.microbatches, num_samples, strict=True):
        assert sum(not part for part in mine) == max(0, len(mine) - num)


@settings(deadline=None, max_examples=24)
@given(lengths=LENGTHS, world_size=st.integers(1, 6))
def test_lb_mini_never_has_an_empty_microbatch(lengths: list[int], world_size: int) -> None:
    plan = make("lb-mini", lengths, world_size)
    assert all(part for mine in plan.microbatches for part in mine)
    assert sum(not mine for mine in plan.microbatches) == max(0, world_size - len(lengths))


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=20)
@given(lengths=LENGTHS, order=st.permutations(range(4)))
def test_ranks_have_no_say(name: str, lengths: list[int], order: list[int]) -> None:
    plan = make(name, lengths, 4)
    relabelled = Plan([plan.microbatches[r] for r in order], plan.lengths, plan.costs, LIMIT, name)
    assert relabelled.makespan("odc") == plan.makespan("odc")
    assert relabelled.makespan("collective") == plan.makespan("collective")


@pytest.mark.parametrize("name", ["lb-micro", "lb-micro-global"])
@settings(deadline=None, max_examples=20)
@given(lengths=LENGTHS, data=st.data())
def test_no_other_order_of_microbatches_is_better(name: str, lengths: list[int], data: st.DataObject) -> None:
    plan = make(name, lengths, 3)
    shuffled = [data.draw(st.permutations(mine)) for mine in plan.microbatches]
    other = Plan(shuffled, plan.lengths, plan.costs, LIMIT, name)
    assert plan.makespan("collective") <= other.makespan("collective") * (1 + 1e-12)


def test_local_sort_by_hand() -> None:
    plan = make("local-sort", [10, 400, 30, 20, 999, 60, 5], 2)
    assert plan.microbatches == [[[4], [2], [0], [6]], [[1], [5], [3], []]]


def test_lb_mini_lets_the_rank_with_the_giant_do_nothing_else() -> None:
    plan = make("lb-mini", [1000, 300, 300, 300, 300, 300, 300], 2)
    giant = next(mine for mine in plan.microbatches if [0] in mine)
    other = next(mine for mine in plan.microbatches if [0] not in mine)
    assert (len(giant), len(other)) == (1, 2)
    equal = make("lb-micro", [1000, 300, 300, 300, 300, 300, 300, 300], 2)
    assert equal.num_microbatches == (2, 2)


def test_lb_mini_with_fewer_samples_than_ranks() -> None:
    assert make("lb-mini", [7, 5], 4).num_microbatches == (1, 1, 0, 0)
    assert make("lb-mini", [], 2).microbatches == [[], []]


def test_lb_micro_global_runs_long_samples_together() -> None:
    """Two long samples that each fill a microbatch: at the same time, on different ranks."""
    lengths = [1000, 1000, 500, 500, 500, 500]
    assert make("lb-micro-global", lengths, 2).bubble_rate("collective") == 0.0


def test_lb_micro_global_evens_out_the_ranks() -> None:
    """No two of these share a microbatch; the rank with the costliest gets the cheapest."""
    policy = get_policy("lb-micro-global")
    plan = policy.plan([1000, 900, 800, 700], world_size=2, max_tokens=LIMIT, cost=LinearCost())
    assert plan.microbatches == [[[0], [3]], [[1], [2]]]


def test_order_of_the_policies_on_long_tailed_lengths() -> None:
    """As in Table 6 of the paper: packing beats sorting, LB-Mini beats LB-Micro."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(9.3, 0.7, 32 * 20), 500, 65536).astype(int).reshape(20, 32)
    plans = {
        name: [get_policy(name).plan(row, world_size=8, max_tokens=65536, cost=LONG_TAILED_COST) for row in lengths]
        for name in NAMES
    }
    rate = {(name, comm): bubble_rate(plans[name], comm) for name in NAMES for comm in ("odc", "collective")}
    gap = 0.02
    assert rate["lb-micro", "collective"] + gap < rate["local-sort", "collective"]
    assert rate["lb-micro-global", "collective"] + gap < rate["lb-micro", "collective"]
    assert rate["lb-mini", "odc"] + gap < rate["lb-micro", "odc"]
    assert rate["lb-mini", "odc"] + gap < min(rate[name, "collective"] for name in NAMES)
    for name in NAMES:
        assert rate[name, "odc"] <= rate[name, "collective"]


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match=r"policy 'lb-nano' is not known: expected one of none, local-sort, "):
        get_policy("lb-nano")


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_longer_than_the_limit(name: str) -> None:
    with pytest.raises(ValueError, match=r"1 of 3 samples .* max_tokens=1000 .* sample 1 with 1001 tokens"):
        make(name, [5, 1001, 7], 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 0}, "world_size=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        *(({"lengths": lengths}, "lengths") for lengths in ([0, 1], [-3], [1.5], [[1]])),
        ({"cost": lambda lengths: np.ones(1)}, "1 costs for 2 lengths"),
        ({"cost": lambda lengths: -np.ones(2)}, "at least 0"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    arguments = {"lengths": [1, 2], "world_size": 2, "max_tokens": LIMIT, "cost": COST, **change}
    with pytest.raises(ValueError, match=message):
        get_policy("lb-mini").plan(**arguments)


def test_the_cost_model_decides() -> None:
    lengths = [100, 50, 50]
    linear = get_policy("lb-mini").plan(lengths, world_size=2, max_tokens=200, cost=LinearCost())
    assert linear.makespan() == 100.0


def test_none_by_hand() -> None:
    plan = make("none", [10, 400, 30, 20, 999, 60, 5], 2)
    assert plan.microbatches == [[[0], [2], [4], [6]], [[1], [3], [5], []]]
    assert make("none", [3, 2], 3).microbatches == [[[0]], [[1]], [[]]]
    assert make("none", [], 2).microbatches == [[], []]


@settings(deadline=None, max_examples=40)
@given(lengths=LENGTHS, world_size=st.integers(1, 6), microbatch_cost=st.sampled_from([0.0, 1.0, 500.0]))
def test_lb_mini_equal_idles_no_more_than_lb_micro(lengths: list[int], world_size: int, microbatch_cost: float) -> None:
    """Equally many samples, like LB-Micro, but each rank packs for itself, like LB-Mini."""
    plan, micro = (
        get_policy(name).plan(
            lengths, world_size=world_size, max_tokens=LIMIT, cost=COST, microbatch_cost=microbatch_cost
        )
        for name in ("lb-mini-equal", "lb-micro")
    )
    num_samples = [len(mine) for mine in samples_of(plan)]
    assert max(num_samples) - min(num_samples) <= 1
    assert plan.makespan("odc") <= micro.makespan("odc") * (1 + 1e-12)
    if microbatch_cost == 0:
        assert plan.bubble_rate("odc") <= micro.bubble_rate("odc") + 1e-9
    assert all(part for mine in plan.microbatches for part in mine)
    assert sum(not mine for mine in plan.microbatches) == max(0, world_size - len(lengths))
    for mine in plan.microbatches:
        costs = [float(plan.costs[part].sum()) for part in mine]
        assert costs == sorted(costs, reverse=True)


def test_lb_mini_equal_packs_each_rank_by_itself() -> None:
    """The rank with the two giants needs two microbatches, the other one."""
    lengths = [1000, 1000, 10, 10]
    plan = get_policy("lb-mini-equal").plan(
        lengths, world_size=2, max_tokens=LIMIT, cost=LinearCost(), speeds=[100.0, 1.0]
    )
    assert samples_of(plan) == [[0, 1], [2, 3]]
    assert plan.num_microbatches == (2, 1)
    assert not get_policy("lb-mini-equal").equal_counts


def test_a_planned_minibatch_names_samples_of_the_dataset() -> None:
    plan = Plan([[[1], [0]], [[2], []]], np.array([5, 6, 7]), np.ones(3), 10, "by-hand")
    minibatch = PlannedMinibatch(np.array([40, 10, 30]), plan)
    assert [minibatch.of_rank(rank) for rank in (0, 1)] == [[[10], [40]], [[30], []]]
