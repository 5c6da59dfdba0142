"""Layer 1: no processes. exact_partition: exhaustive search, bounds, what is too much for it."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from odc.balance import karmarkar_karp
from odc.balance.partition import cover, exact, instance
from odc.balance.partition.exact import ExactPartition, exact_partition
from odc.balance.partition.instance import TOLERANCE


def optimum(costs: np.ndarray, k: int, *, equal_size: bool = False, speeds: np.ndarray | None = None) -> float:
    """The smallest makespan of all k ** n assignments."""
    owners = np.array(list(itertools.product(range(k), repeat=costs.size)))
    if equal_size:
        sizes = np.stack([(owners == part).sum(axis=1) for part in range(k)])
        owners = owners[(sizes == costs.size // k).all(axis=0)]
    times = [(owners == part) @ costs / (1.0 if speeds is None else speeds[part]) for part in range(k)]
    return float(np.max(times, axis=0).min())


def makespan(costs: np.ndarray, parts: list[list[int]], speeds: np.ndarray | None = None) -> float:
    speeds = np.ones(len(parts)) if speeds is None else speeds
    return max(float(costs[part].sum() / speed) for part, speed in zip(parts, speeds, strict=True))


def check(result: ExactPartition, costs: np.ndarray, k: int, speeds: np.ndarray | None = None) -> None:
    """What holds for every result."""
    assert len(result.parts) == k
    assert sorted(itertools.chain(*result.parts)) == list(range(costs.size))
    assert all(part == sorted(part) for part in result.parts)
    assert result.makespan == pytest.approx(makespan(costs, result.parts, speeds), rel=1e-12)
    assert 0 <= result.lower_bound <= result.makespan
    assert (result.gap == 0) == result.optimal
    assert result.seconds >= 0
    if speeds is None:
        assert result.parts == sorted(result.parts, key=lambda part: (not part, part))
        assert sum(not part for part in result.parts) == max(0, k - costs.size)


def hard() -> np.ndarray:
    """63 costs that can be split perfectly into 9 parts, which is hard to find: equal sums, cut at random."""
    return np.random.default_rng(1).dirichlet(np.ones(7), 9).ravel()


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing counts as optimal by being close to the bound, so large instances do not end early."""
    for module in (exact, instance):
        monkeypatch.setattr(module, "TOLERANCE", 1e-13)


COST = st.just(0.0) | st.floats(1e-140, 1e6) | st.integers(0, 12).map(float) | st.floats(0.2, 1.0)
INSTANCE = st.tuples(st.lists(COST, max_size=7), st.integers(1, 4))
SPEEDS = st.lists(st.sampled_from([0.25, 1.0, 1.0, 3.0]) | st.floats(0.1, 10), min_size=4, max_size=4)
QUICK = settings(deadline=None, max_examples=24, suppress_health_check=[HealthCheck.function_scoped_fixture])
FEW = settings(QUICK, max_examples=20)


def compare(costs: list[float], k: int, equal_size: bool, speeds: list[float] | None) -> None:
    array = np.array(costs[: len(costs) // k * k] if equal_size else costs)
    speed = None if speeds is None else np.array(speeds[:k])
    result = exact_partition(array, k, equal_size=equal_size, speeds=speed, time_limit_s=20)
    check(result, array, k, speed)
    if equal_size:
        assert {len(part) for part in result.parts} == {array.size // k}
    best = optimum(array, k, equal_size=equal_size, speeds=speed)
    assert result.optimal
    assert best * (1 - 1e-12) <= result.makespan <= best * (1 + TOLERANCE)
    assert result.lower_bound <= best * (1 + 1e-12)


@pytest.fixture(params=[True, False], ids=["heuristic", "no heuristic"])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the start is good, or whatever comes first, so that the solvers find all of the way."""
    if not request.param:
        monkeypatch.setattr(exact, "split_by_cost", chunks)


def chunks(costs: np.ndarray, k: int, *, equal_size: bool, speeds: np.ndarray | None = None) -> list[list[int]]:
    return [list(range(part * costs.size // k, (part + 1) * costs.size // k)) for part in range(k)]


@QUICK
@given(INSTANCE, st.booleans(), st.none() | SPEEDS)
def test_search_against_exhaustive_search(
    start: None, instance: tuple[list[float], int], equal_size: bool, speeds: list[float] | None
) -> None:
    compare(*instance, equal_size, speeds)


@pytest.mark.parametrize("speeds", [None, [0.5, 1.0, 0.5, 1.0]])
def test_from_nothing(monkeypatch: pytest.MonkeyPatch, speeds: list[float] | None) -> None:
    monkeypatch.setattr(exact, "split_by_cost", chunks)
    rng = np.random.default_rng(3)
    for n, k, equal_size in [(9, 3, True), (9, 3, False), (8, 4, True), (8, 4, False)] * 2:
        compare(rng.lognormal(0.0, 0.7, n).tolist(), k, equal_size, speeds)


def test_minibatches_of_the_size_in_the_paper_are_proved() -> None:
    rng = np.random.default_rng(0)
    for n, k, equal_size in itertools.product((16, 32), (4, 8), (False, True)):
        lengths = rng.uniform(0.2, 1.0, n)
        costs = 0.2 * lengths**2 + lengths
        result = exact_partition(costs, k, equal_size=equal_size, time_limit_s=20)
        check(result, costs, k)
        assert result.optimal
        assert result.makespan <= makespan(costs, karmarkar_karp(costs, k, equal_size=equal_size)) * (1 + 1e-12)


def test_more_parts_than_items_with_speeds() -> None:
    speeds = np.array([0.1] * 50 + [1.0, 2.0])
    result = exact_partition([3.0, 2.0, 2.0], 52, speeds=speeds)
    assert result.makespan == 2.5  # two items at speed 2, while the third ends at 2
    assert result.optimal
    assert [len(part) for part in result.parts] == [0] * 50 + [1, 2]


def test_a_bound_that_is_met_starts_no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "search_covers", None)
    assert exact_partition([4.0, 3.0, 3.0, 2.0], 2).makespan == 6.0
    # 5 integers of 3 in 2 parts: a mean of 7.5, and no part of 8 is needed to see that 9 is best.
    assert exact_partition([3.0] * 5, 2).lower_bound == pytest.approx(9.0)
    with pytest.raises(TypeError):
        exact_partition([7.1, 5.3, 4.2, 3.9, 1.7], 2)


def test_sums_of_integers_are_multiples_of_their_divisor() -> None:
    result = exact_partition(np.arange(1.0, 51.0) * 3, 8, time_limit_s=1)
    assert result.lower_bound == 480.0  # the mean is 478.125
    assert exact_partition(np.arange(1.0, 51.0) * 3 + 2**-10, 8, time_limit_s=1).lower_bound < 479


@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("speeds", [None, [1.0, 2.0, 1.0]])
def test_no_cost(n: int, speeds: list[float] | None) -> None:
    result = exact_partition([0.0] * n, 3, speeds=speeds)
    assert sorted(itertools.chain(*result.parts)) == list(range(n))
    assert (result.makespan, result.lower_bound, result.gap, result.optimal) == (0.0, 0.0, 0.0, True)
    assert "proved optimal" in result.explain()


@pytest.mark.usefixtures("strict")
def test_more_items_than_are_searched_have_a_gap() -> None:
    costs = hard()
    best = costs.sum() / 9
    result = exact_partition(costs, 9)
    check(result, costs, 9)
    assert result.seconds < 30  # a search would take hours
    assert not result.optimal
    assert result.lower_bound <= best * (1 + 1e-12)
    assert result.gap == pytest.approx(result.makespan / result.lower_bound - 1)
    assert "above the optimum" in result.explain()


def test_empty_parts_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "split_by_cost", lambda *_, **__: [[0, 1, 2, 3], [], []])
    costs = np.array([4.0, 0.0, 0.0, 0.0])
    check(exact_partition(costs, 3), costs, 3)


@pytest.mark.usefixtures("strict")
def test_search_stops_on_time_and_when_memory_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = np.random.default_rng(0).lognormal(0.0, 1.0, 24)
    full = exact_partition(costs, 6)
    for name, value in [("MAX_STATES", 2), ("MAX_COLUMNS", 3)]:
        with monkeypatch.context() as patch:
            patch.setattr(cover, name, value)
            result = exact_partition(costs, 6)
        check(result, costs, 6)
        assert not result.optimal
        assert result.lower_bound <= full.makespan
    result = exact_partition(costs, 6, time_limit_s=1e-6)
    check(result, costs, 6)
    assert result.lower_bound <= full.makespan


def test_never_worse_than_the_start() -> None:
    costs, k = hard(), 9
    perfect = [list(range(7 * p, 7 * p + 7)) for p in range(k)]
    result = exact_partition(costs, k, start=perfect)
    assert result.optimal
    assert result.parts == perfect  # which no heuristic finds
    assert makespan(costs, karmarkar_karp(costs, k)) > result.makespan * (1 + 1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k=0: expected an integer"),
        ({"costs": [1.0, -1.0]}, r"costs\[1\] is -1.0"),
        ({"k": 2, "equal_size": True}, "3 items cannot be split into k=2 parts of equal size"),
        ({"time_limit_s": 0.0}, "time_limit_s=0.0: expected"),
        ({"time_limit_s": math.nan}, "time_limit_s=nan: expected"),
        ({"time_limit_s": math.inf}, "time_limit_s=inf: expected"),
        ({"speeds": [1.0]}, "speeds has 1 entries"),
        ({"speeds": [1.0, 0.0, 1.0]}, r"speeds\[1\] is 0"),
        ({"start": [[0], [1, 2]]}, "start has 3 indices in 2 lists: expected k=3"),
        ({"start": [[0], [1], [1]]}, "each of 0 .. 2 once"),
        ({"start": [[0], [1], [2.0]]}, "an index in start=2.0"),
        ({"start": [0, 1, 2]}, "expected k=3 lists of indices"),
        ({"start": [[0, 1], [2], []], "equal_size": True}, r"parts of \[2, 1, 0\] items: equal_size needs 1"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    given_arguments: dict[str, object] = {"costs": [1.0, 2.0, 3.0], "k": 3, **arguments}
    with pytest.raises(ValueError, match=message):
        exact_partition(**given_arguments)  # type: ignore[arg-type]


def test_results_are_frozen_and_arguments_left_alone() -> None:
    costs, start = np.array([1.0, 3.0, 2.0]), [[2, 1], [0]]
    result = exact_partition(costs, 2, start=start)
    np.testing.assert_array_equal(costs, [1.0, 3.0, 2.0])
    assert start == [[2, 1], [0]]
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.makespan = 0.0  # type: ignore[misc]
