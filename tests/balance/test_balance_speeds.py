"""Layer 1: no processes. Device speeds and the cost of a microbatch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import (
    COST,
    LENGTHS,
    LIMIT,
    LONG_TAILED_COST,
    NAMES,
    make,
    samples_of,
    with_microbatch_cost,
)

from odc.balance import (
    MinibatchSampler,
    Plan,
    QuadraticCost,
    get_policy,
    sample_lengths,
)


@pytest.mark.parametrize("name", ["lb-mini", "lb-mini-equal", "lb-micro", "verl-optimized", "verl-native"])
def test_a_slow_device_gets_less(name: str) -> None:
    lengths = sample_lengths("longalign", 256)
    speeds = [1.0, 1.0, 0.5, 1.0]
    plan = get_policy(name).plan(lengths, world_size=4, max_tokens=65536, cost=LONG_TAILED_COST, speeds=speeds)
    assert plan.speeds == tuple(speeds)
    loads = np.array([plan.costs[mine].sum() for mine in samples_of(plan)])
    assert loads[2] < 0.75 * loads[[0, 1, 3]].min()
    unaware = get_policy(name).plan(lengths, world_size=4, max_tokens=65536, cost=LONG_TAILED_COST)
    unaware = Plan(unaware.microbatches, unaware.lengths, unaware.costs, 65536, name, speeds=tuple(speeds))
    assert plan.makespan("odc") < 0.75 * unaware.makespan("odc")


@pytest.mark.parametrize("name", ["lb-mini", "lb-mini-equal"])
def test_many_samples_reach_the_bound_of_all_costs_over_all_speeds(name: str) -> None:
    speeds = [1.0, 0.8, 0.5, 1.0]
    plan = get_policy(name).plan(
        sample_lengths("longalign", 256), world_size=4, max_tokens=65536, cost=LONG_TAILED_COST, speeds=speeds
    )
    bound = plan.costs.sum() / sum(speeds)
    assert bound <= plan.makespan("odc") * (1 + 1e-12)
    assert plan.makespan("odc") < 1.001 * bound


@pytest.mark.parametrize("name", ["lb-mini", "lb-mini-equal"])
@settings(deadline=None, max_examples=16)
@given(lengths=LENGTHS, speeds=st.permutations([0.5, 1.0, 1.0, 1.7]), microbatch_cost=st.sampled_from([0.0, 100.0]))
def test_relabelling_speeds_with_ranks_changes_nothing(
    name: str, lengths: list[int], speeds: list[float], microbatch_cost: float
) -> None:
    plan, relabelled = (
        get_policy(name).plan(
            lengths, world_size=4, max_tokens=LIMIT, cost=COST, speeds=given, microbatch_cost=microbatch_cost
        )
        for given in (sorted(speeds), speeds)
    )
    assert relabelled.makespan("odc") == pytest.approx(plan.makespan("odc"), rel=1e-12)
    by_speed = [sorted(zip(p.speeds or (), samples_of(p), strict=True)) for p in (plan, relabelled)]
    assert by_speed[0] == by_speed[1]


@pytest.mark.parametrize("name", ["lb-mini-equal", "lb-micro"])
@pytest.mark.parametrize("speeds", [(0.5, 1.0, 1.0, 1.7), (1.7, 1.0, 1.0, 0.5), (1.0, 1.7, 0.5, 1.0)])
def test_leftover_samples_mind_the_speeds(name: str, speeds: tuple[float, ...]) -> None:
    """Nine samples on four ranks: three go to one of the ranks, which must not be the slow one."""
    lengths = [539, 657, 443, 149, 931, 692, 41, 814, 732]
    plan = get_policy(name).plan(lengths, world_size=4, max_tokens=LIMIT, cost=COST, speeds=speeds)
    assert plan.makespan("odc") < 1.3 * plan.costs.sum() / sum(speeds)


@pytest.mark.parametrize("name", ["none", "local-sort"])
def test_policies_that_make_no_use_of_speeds(name: str) -> None:
    plan = get_policy(name).plan([5, 900, 20, 1], world_size=2, max_tokens=LIMIT, cost=COST, speeds=[1.0, 4.0])
    assert plan.microbatches == make(name, [5, 900, 20, 1], 2).microbatches
    np.testing.assert_allclose(plan.microbatch_times()[1], make(name, [5, 900, 20, 1], 2).microbatch_times()[1] / 4)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"speeds": (1.0,)}, "speeds has 1 entries: expected one for each of the 2 devices"),
        ({"speeds": (1.0,) * 3}, "speeds has 3 entries"),
        ({"speeds": (1.0, 0.0)}, r"speeds\[1\] is 0: expected more than 0"),
        ({"speeds": (-1.0, 1.0)}, r"speeds\[0\] is -1.0"),
        ({"speeds": (float("inf"), 1.0)}, r"speeds\[0\] is inf"),
        *(
            ({"microbatch_cost": bad}, "microbatch_cost=.*: expected a finite number of at least 0")
            for bad in (-1.0, float("nan"), float("inf"), True, "1")
        ),
    ],
)
def test_bad_speeds_and_microbatch_costs(option: dict[str, Any], message: str) -> None:
    for name in NAMES:
        with pytest.raises(ValueError, match=message):
            get_policy(name).plan([1, 2], world_size=2, max_tokens=LIMIT, cost=COST, **option)
    with pytest.raises(ValueError, match=message):
        MinibatchSampler([1, 2], minibatch_size=1, world_size=2, policy="lb-mini", cost=COST, **option)
    with pytest.raises(ValueError, match=message):
        Plan([[[0]], [[1]]], np.array([1, 2]), np.ones(2), LIMIT, "by-hand", **option)


def test_microbatch_cost_and_speeds_by_hand() -> None:
    microbatches: list[list[list[int]]] = [[[0], [1]], [[2, 3], []], [[4]]]
    lengths, costs = np.ones(5, dtype=int), np.array([4.0, 1.0, 2.0, 3.0, 6.0])
    plan = Plan(microbatches, lengths, costs, 10, "by-hand", 0.5, (1.0, 0.5, 2.0))
    np.testing.assert_allclose(plan.microbatch_times(), [[4.5, 1.5], [5.5 / 0.5, 0.5 / 0.5], [6.5 / 2, 0.0]])
    assert plan.makespan("odc") == pytest.approx(12.0)
    assert plan.makespan("collective") == pytest.approx(11.0 + 1.5)
    work = 6.0 + 12.0 + 3.25
    assert plan.bubble_rate("odc") == pytest.approx(1 - work / (3 * 12.0))
    assert plan.bubble_rate("collective") == pytest.approx(1 - work / (3 * 12.5))
    free = Plan(microbatches, lengths, costs, 10, "by-hand", 0.0, (1.0, 0.5, 2.0))
    assert free.makespan("odc") == pytest.approx(10.0)
    assert plan != free
    assert plan == with_microbatch_cost(free, 0.5)
    assert plan != Plan(microbatches, lengths, costs, 10, "by-hand", 0.5)
    assert "rank 1: 2 samples in 2 microbatches (1 empty), 2 tokens, 169% of the mean time" in plan.explain()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("speeds", [None, [1.0, 2.0]])
def test_a_cost_per_microbatch_of_no_samples(name: str, speeds: list[float] | None) -> None:
    plan = get_policy(name).plan([], world_size=2, max_tokens=LIMIT, cost=COST, microbatch_cost=2.0, speeds=speeds)
    assert plan.microbatch_times().dtype == np.float64
    assert plan.makespan("odc") == plan.makespan("collective") == plan.bubble_rate() == 0.0


def test_only_empty_microbatches() -> None:
    plan = Plan([[[]], [[], []]], np.zeros(0, dtype=int), np.zeros(0), LIMIT, "by-hand", microbatch_cost=2.0)
    np.testing.assert_array_equal(plan.microbatch_times(), [[2.0, 0.0], [2.0, 2.0]])
    assert plan.bubble_rate("odc") == pytest.approx(0.25)


def test_peak_tokens() -> None:
    plan = Plan([[[0], [1]], [[2, 3], []]], np.array([5, 7, 4, 4]), np.ones(4), 10, "by-hand")
    assert plan.peak_tokens == 8
    assert make("lb-mini", [], 2).peak_tokens == 0
    assert make("none", [3, 900, 40], 2).peak_tokens == 900


@pytest.mark.parametrize("name", ["lb-mini", "lb-mini-equal"])
@settings(deadline=None, max_examples=16)
@given(
    lengths=LENGTHS,
    world_size=st.integers(1, 5),
    microbatch_cost=st.floats(0.1, 5000.0),
    speeds=st.none() | st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=5, max_size=5),
)
def test_knowing_the_cost_of_a_microbatch_is_never_worse(
    name: str, lengths: list[int], world_size: int, microbatch_cost: float, speeds: list[float] | None
) -> None:
    ignoring, knowing = (
        get_policy(name).plan(
            lengths,
            world_size=world_size,
            max_tokens=LIMIT,
            cost=COST,
            speeds=None if speeds is None else speeds[:world_size],
            microbatch_cost=cost,
        )
        for cost in (0.0, microbatch_cost)
    )
    assert knowing.microbatch_cost == microbatch_cost
    assert knowing.makespan("odc") <= with_microbatch_cost(ignoring, microbatch_cost).makespan("odc") * (1 + 1e-12)


def test_knowing_the_cost_of_a_microbatch_helps() -> None:
    """Many short samples cost as much as few long ones, but need fewer tokens per unit of cost."""
    lengths = [1000] * 2 + [100] * 130
    cost = QuadraticCost(1.0, 0.0)
    plans = [
        get_policy("lb-mini").plan(lengths, world_size=2, max_tokens=LIMIT, cost=cost, microbatch_cost=microbatch_cost)
        for microbatch_cost in (0.0, 1e6)
    ]
    ignoring = with_microbatch_cost(plans[0], 1e6)
    assert plans[1].makespan("odc") <= ignoring.makespan("odc")
    rng = np.random.default_rng(0)
    gains = []
    for _ in range(8):
        row = np.clip(rng.lognormal(4.5, 1.2, 64), 1, LIMIT).astype(int)
        ignoring, knowing = (
            get_policy("lb-mini").plan(row, world_size=4, max_tokens=LIMIT, cost=cost, microbatch_cost=fixed)
            for fixed in (0.0, 5e5)
        )
        gains.append(with_microbatch_cost(ignoring, 5e5).makespan("odc") / knowing.makespan("odc"))
    assert min(gains) >= 1 - 1e-12
    assert np.mean(gains) > 1.02
