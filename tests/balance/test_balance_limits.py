"""Layer 1: no processes. How large and small numbers may be, and of which types: refused clearly, or it works."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from planning import COST, NAMES

from odc.balance import (
    LinearCost,
    Machine,
    MinibatchSampler,
    Plan,
    QuadraticCost,
    Scenario,
    TransformerCost,
    even_lengths,
    get_policy,
    karmarkar_karp,
    preset,
    sample_lengths,
)
from odc.balance.checks import as_cost, as_costs, as_count, as_lengths, as_speeds
from odc.balance.partition.exact import exact_partition
from odc.balance.simulate.studies import FACTORS, Setting, run_setting, study


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def plan(lengths: Any, name: str = "lb-mini", **options: Any) -> Plan:
    arguments: dict[str, Any] = {"world_size": 2, "max_tokens": 1000, "cost": LinearCost(), **options}
    return get_policy(name).plan(lengths, **arguments)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: plan([2**62, 2**62, 2**61], "lb-micro-global", max_tokens=2**62), "expected at most 2\\*\\*53 in all"),
        (lambda: plan(np.array([2**63, 2**63], dtype=np.uint64)), f"lengths add up to {2**64} tokens"),
        (lambda: plan([2**70]), "dtype object: expected integers .* at most 2"),
        (lambda: plan([1, 2], max_tokens=10**30), f"max_tokens={10**30}: expected an integer of at most {2**53}"),
        (lambda: plan([1, 2], max_tokens=2**53 + 1), "max_tokens="),
        (lambda: plan([1, 2], world_size=10**30), "world_size=.* at most 1048576"),
        (lambda: plan([1, 2], cost=QuadraticCost(1e308, 1.0)), "costs|lengths"),
        (lambda: plan([1, 2**50], max_tokens=2**50, cost=LinearCost(1e300)), "is inf: expected a finite number"),
        (lambda: plan([1, 2], cost=LinearCost(1e-310)), "expected 0 or at least 1e-140; use another unit"),
        (lambda: plan([1, 2], microbatch_cost=1e300), "microbatch_cost=1e\\+300: expected at most 1e\\+140"),
        (lambda: plan([1, 2], microbatch_cost=10**400), "microbatch_cost="),
        (lambda: plan([1, 2], speeds=[1e-310, 1.0]), "speeds.0. is 1e-310: expected more than 0, from 1e-09 to 1e"),
        (lambda: exact_partition([1e308] * 5, 2), "costs add up to more than 1e\\+140"),
        (lambda: exact_partition([1e-310] * 5, 2), r"costs\[0\] is 1e-310"),
        (lambda: exact_partition([1.0], 10**12), "k=1000000000000: expected an integer of at most"),
        (lambda: karmarkar_karp([1e308] * 6, 2), "costs add up to more than 1e\\+140"),
        (lambda: karmarkar_karp([1e200] * 6, 2), "costs add up to more than 1e\\+140"),
        (lambda: karmarkar_karp([10**400, 1], 2), "costs cannot be read"),
        (lambda: karmarkar_karp([1, 2], 10**30), "k=1"),
        (lambda: karmarkar_karp([3, 2, 5, 6, 8, 9], 2, equal_size=True, speeds=[1e-310, 1]), "speeds.0. is 1e-310"),
        (lambda: karmarkar_karp([3, 2], 2, speeds=[1.0, 1e10]), r"speeds\[1\] is 1e\+10"),
        (lambda: karmarkar_karp([3, 2], 2, speeds=[1e-5, 1e5]), "from 1e-05 to 100000: .* at most 1e.09 times"),
        (lambda: MinibatchSampler([2**53, 1], **SAMPLER), "lengths add up to 9007199254740993 tokens"),
        (lambda: Plan([[[0]]], np.array([1]), np.array([1e200]), 4, "by-hand"), "costs add up to more than"),
        (lambda: Machine(noise=1e200), "noise=1e\\+200: expected at most"),
        (lambda: study(SCENARIO, "packing_ratio", [float("inf")]), "packing_ratio=inf: expected at most"),
        (lambda: study(SCENARIO, "devices", [float("nan")]), "devices=nan: expected an integer"),
        (lambda: study(SCENARIO, "devices", [float("inf")]), "devices=inf: expected an integer"),
        (lambda: as_lengths([2**53, 1]), "9007199254740993"),
        (lambda: as_lengths(np.full(2048, 2**53)), "add up to"),  # the sum of int64 is 0
        (lambda: as_costs([0.6e140, 0.6e140]), "add up to"),
        (lambda: study(SCENARIO, "slowdown", [1e100]), "speeds.7. is 1e-100"),
    ],
)
def test_out_of_range(action: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        action()


SAMPLER: dict[str, Any] = {"minibatch_size": 1, "world_size": 2, "policy": "lb-mini", "cost": LinearCost()}
SCENARIO = Scenario(np.arange(1, 200), COST, 2, 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("speeds", [None, [1e-9, 1.0], [1.0, 1e9]])
@pytest.mark.parametrize("scale", [1e-138, 1.0, 1e100])
def test_plans_at_the_limits(name: str, speeds: list[float] | None, scale: float) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.multinomial(2**53, rng.dirichlet(np.ones(12)))
    cost = QuadraticCost(scale * 1e-9, scale)
    made = plan(lengths, name, max_tokens=2**53, cost=cost, speeds=speeds, microbatch_cost=scale)
    for comm in ("odc", "collective"):
        assert 0 < made.makespan(comm) < np.inf  # type: ignore[arg-type]
        assert 0 <= made.bubble_rate(comm) < 1  # type: ignore[arg-type]
    assert "of the mean time" in made.explain()


@pytest.mark.parametrize("speeds", [None, [1e-9, 1.0, 0.5], [1.0, 1e9, 2.0]])
@pytest.mark.parametrize("scale", [1e-139, 1.0, 1e138])
@pytest.mark.parametrize("equal_size", [False, True])
def test_partitions_do_not_depend_on_the_unit(scale: float, speeds: list[float] | None, equal_size: bool) -> None:
    """The scales are rounded to powers of two, which change no digit."""
    costs = np.random.default_rng(1).integers(1, 9, 12) / 1.0
    unit = 2.0 ** np.ceil(np.log2(scale))
    expected = karmarkar_karp(costs, 3, equal_size=equal_size, speeds=speeds)
    assert karmarkar_karp(costs * unit, 3, equal_size=equal_size, speeds=speeds) == expected
    best = exact_partition(costs, 3, equal_size=equal_size, speeds=speeds)
    scaled = exact_partition(costs * unit, 3, equal_size=equal_size, speeds=speeds)
    assert scaled.optimal
    assert scaled.makespan / unit == pytest.approx(best.makespan, rel=2e-6)


def test_the_limits_themselves() -> None:
    assert as_lengths([2**53 - 1, 1]).sum() == 2**53
    assert as_count(2**53, "n") == 2**53
    assert as_count(10**30, "seed", maximum=None) == 10**30
    assert as_costs([1e-140, 0.0, 0.9e140]).size == 3
    assert as_cost(1e140, "c") == 1e140
    assert as_speeds([1e-9, 1.0], 2).size == as_speeds([1.0, 1e9], 2).size == 2


def test_seeds_may_be_of_any_size() -> None:
    sampler = MinibatchSampler([1, 2, 3], **SAMPLER, seed=2**64)
    sampler.set_epoch(2**64)
    assert len(list(sampler)) == 1
    assert Machine(noise=0.1, seed=2**64).noise_factors(2).size == 2


@pytest.mark.parametrize("value", [np.int64(1), np.float32(1), np.float64(1), np.uint8(1), 1])
def test_numbers_of_any_real_type(value: Any) -> None:
    made = plan([1, 2, 3], microbatch_cost=value)
    assert made == plan([1, 2, 3], microbatch_cost=1.0)
    assert type(made.microbatch_cost) is float
    by_hand = Plan([[[0]]], np.array([1]), np.ones(1), np.int64(4), "by-hand", value)  # type: ignore[arg-type]
    assert (type(by_hand.microbatch_cost), type(by_hand.max_tokens)) == (float, int)


@pytest.mark.parametrize("value", [True, np.True_, "1", None, np.float32("nan"), np.float64("inf"), 1j, np.ones(1)])
def test_what_is_no_cost(value: Any) -> None:
    with pytest.raises(ValueError, match="expected a finite number of at least 0"):
        plan([1, 2], microbatch_cost=value)


@pytest.mark.parametrize("factor", ["devices", "minibatch_size"])
def test_a_study_replaces_what_belongs_to_the_scenario_alone(factor: str) -> None:
    lengths = np.arange(1, 100)
    plain = Scenario(lengths, COST, 2, 2, microbatch_cost=5.0, seed=3)
    special = Scenario(lengths, COST, 3, 6, 10_000, 12, 5.0, (1.0, 0.5, 2.0), 3)
    values = FACTORS[factor][:2]
    found, expected = study(special, factor, values), study(plain, factor, values)
    assert [point.speedup for point in found] == [point.speedup for point in expected]
    setting = Setting(minibatch_size=5, devices=4)
    assert run_setting(special, setting, 0).baseline.total == run_setting(plain, setting, 0).baseline.total


WRONG = [3, None, [], {}, b"lb-mini", 3.5, np.array([1, 2]), "x" * 500_000, ["lb-mini"], True, 10**5000, object()]


@pytest.mark.parametrize("value", WRONG, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    ("take", "expected"),
    [
        (get_policy, "is not known: expected one of none, local-sort"),
        (lambda value: MinibatchSampler([1, 2], **{**SAMPLER, "policy": value}), "is not known: expected one of none"),
        (lambda value: Scenario([1] * 9, COST, 2, 2).sampler(value), "is not known: expected one of none"),
        (lambda value: even_lengths(value, 9), "expected one of longalign, swesmith, aime"),
        (lambda value: sample_lengths(value, 9), "expected one of longalign, swesmith, aime"),
        (preset, "no model is called"),
        (lambda value: plan([1, 2], cost=value), "expected a cost model, a function of lengths"),
    ],
    ids=["policy", "sampler", "scenario", "even_lengths", "sample_lengths", "preset", "cost"],
)
def test_arguments_of_another_type_are_named(take: Callable[[Any], object], expected: str, value: Any) -> None:
    with pytest.raises(ValueError, match=expected) as refused:
        take(value)
    assert len(str(refused.value)) < 1000
    assert "500,000" not in str(refused.value)


@pytest.mark.parametrize(
    "take",
    [
        lambda text: plan([1, 2], world_size=text),
        lambda text: plan([1, 2], max_tokens=text),
        lambda text: plan([1, 2], microbatch_cost=text),
        lambda text: plan([1, 2], speeds=text),
        lambda text: karmarkar_karp(text, 2),
        lambda text: TransformerCost.from_config(text),
        lambda text: TransformerCost.from_config(text + ".json"),
        lambda text: TransformerCost.from_config({**preset("qwen2.5-7b"), "hidden_size": text}),
    ],
)
def test_quoted_arguments_are_shortened(take: Callable[[str], object]) -> None:
    with pytest.raises(ValueError, match=r"xxx\.\.\.xxx|characters left out") as refused:
        take("x" * 500_000)
    assert len(str(refused.value)) < 1000
