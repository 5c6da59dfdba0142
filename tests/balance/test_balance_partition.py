"""Layer 1: no processes. karmarkar_karp: against exhaustive search, its guarantees, its errors."""

from __future__ import annotations

import functools
import itertools
import tracemalloc
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import odc.balance.partition.refine as refine_module
from odc.balance import karmarkar_karp
from odc.balance.partition import split_beside
from odc.balance.partition.bounds import lower_bound
from odc.balance.partition.differencing import largest_differencing
from odc.balance.partition.kway import fill_empty, longest_first
from odc.balance.partition.refine import Limit, refine


def makespan(costs: np.ndarray, parts: list[list[int]]) -> float:
    return max(float(costs[part].sum()) for part in parts)


@functools.cache
def all_partitions(num_items: int, k: int, *, equal_size: bool, named: bool) -> np.ndarray:
    """Which items each part holds, as numbers 0 and 1, (k, num_partitions, num_items): the same for many costs."""
    if named:
        owners = np.array(list(itertools.product(range(k), repeat=num_items)))
    else:
        owners = np.array(list(itertools.product(range(k), repeat=num_items - 1)))
        owners = np.hstack([np.zeros((len(owners), 1), dtype=int), owners])
    if equal_size:
        sizes = np.stack([(owners == part).sum(axis=1) for part in range(k)])
        owners = owners[(sizes == num_items // k).all(axis=0)]
    return np.stack([(owners == part).astype(np.float64) for part in range(k)])


def optimum(costs: np.ndarray, k: int, *, equal_size: bool, speeds: np.ndarray | None = None) -> float:
    """The smallest makespan of all partitions."""
    loads = all_partitions(costs.size, k, equal_size=equal_size, named=speeds is not None) @ costs
    times = loads if speeds is None else loads / speeds[:, None]
    return float(times.max(axis=0).min())


@pytest.mark.parametrize(
    ("n", "k", "equal_size"), [(9, 2, False), (10, 2, True), (8, 3, False), (9, 3, True), (9, 4, False), (8, 4, True)]
)
def test_close_to_exhaustive_search(n: int, k: int, equal_size: bool) -> None:
    rng = np.random.default_rng(n * k)
    excess = []
    for _ in range(40):
        costs = rng.lognormal(0.0, 0.8, n)
        best = optimum(costs, k, equal_size=equal_size)
        bound = lower_bound(costs, k, equal_size=equal_size)
        assert bound <= best * (1 + 1e-12)
        excess.append(makespan(costs, karmarkar_karp(costs, k, equal_size=equal_size)) / best - 1)
    assert min(excess) > -1e-12  # else the exhaustive search is wrong
    assert np.mean(excess) < 0.001


@pytest.mark.parametrize(("n", "k", "equal_size"), [(8, 2, False), (8, 2, True), (8, 3, False), (6, 3, True)])
def test_speeds_close_to_exhaustive_search(n: int, k: int, equal_size: bool) -> None:
    rng = np.random.default_rng(n * k + equal_size)
    excess = []
    for _ in range(40):
        costs, speeds = rng.lognormal(0.0, 0.8, n), rng.uniform(0.3, 2.0, k)
        best = optimum(costs, k, equal_size=equal_size, speeds=speeds)
        assert lower_bound(costs, k, equal_size=equal_size, speeds=speeds) <= best * (1 + 1e-12)
        parts = karmarkar_karp(costs, k, equal_size=equal_size, speeds=speeds)
        excess.append(max(float(costs[p].sum()) / v for p, v in zip(parts, speeds, strict=True)) / best - 1)
    assert min(excess) > -1e-12
    assert np.mean(excess) < 0.005


def textbook_loads(costs: np.ndarray, k: int) -> list[float]:
    """Loads of the largest differencing method, every tuple with all its k loads."""
    tuples = [np.sort(np.append(np.zeros(k - 1), cost)) for cost in costs]
    while len(tuples) > 1:
        tuples.sort(key=lambda loads: loads[-1] - loads[0])
        a, b = tuples.pop(), tuples.pop()
        tuples.append(np.sort(a + b[::-1]))
    return [float(load) for load in tuples[0]]


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(1, 12))
def test_differencing_method_is_that_of_the_textbook(seed: int, n: int, k: int) -> None:
    costs = np.random.default_rng(seed).lognormal(0.0, 1.0, n)  # without ties
    loads = sorted(float(costs[part].sum()) for part in largest_differencing(costs, k, equal_size=False))
    np.testing.assert_allclose(loads, textbook_loads(costs, k), rtol=1e-9)


def test_differencing_method_on_the_textbook_example() -> None:
    costs = np.array([8.0, 7.0, 6.0, 5.0, 4.0])
    plain = largest_differencing(costs, 2, equal_size=False)
    assert sorted(float(costs[part].sum()) for part in plain) == [14.0, 16.0]
    assert karmarkar_karp(costs, 2) == [[0, 1], [2, 3, 4]]  # the refinement finds the optimum, 15 and 15


def test_longest_first_on_a_small_example() -> None:
    costs = np.array([1.0, 5.0, 4.0, 3.0])
    assert longest_first(costs, 2, equal_size=False) == [[1, 0], [2, 3]]
    assert longest_first(np.array([9.0, 1.0, 1.0, 1.0]), 2, equal_size=True) == [[0, 3], [1, 2]]


def test_refinement_repairs_the_equal_size_method() -> None:
    """Plain equal-size differencing leaves percents that swaps remove."""
    costs = np.random.default_rng(0).lognormal(0.0, 1.0, 64)
    ideal = max(costs.sum() / 8, costs.max())
    plain = makespan(costs, largest_differencing(costs, 8, equal_size=True))
    assert plain / ideal > 1.02
    assert makespan(costs, karmarkar_karp(costs, 8, equal_size=True)) / ideal < 1.002


def test_the_start_that_ends_up_better_wins() -> None:
    """Here the differencing method starts better (by its plain makespan) and refines worse."""
    costs = np.array([8.0, 15.0, 10.0, 11.0, 17.0, 27.0, 19.0])
    plain = [method(costs, 3, equal_size=False) for method in (largest_differencing, longest_first)]
    assert makespan(costs, plain[0]) < makespan(costs, plain[1])
    refined = [makespan(costs, refine(costs, parts, equal_size=False)) for parts in plain]
    assert refined == [37.0, 36.0]
    assert makespan(costs, karmarkar_karp(costs, 3)) == 36.0


def test_refinement_moves_items() -> None:
    costs = np.ones(4)
    assert [len(part) for part in refine(costs, [[0, 1, 2, 3], []], equal_size=False)] == [2, 2]
    giant = np.array([5.0, 1.0, 1.0, 1.0])
    assert [len(part) for part in refine(giant, [[0, 1], [2, 3]], equal_size=False)] == [1, 3]
    assert [len(part) for part in refine(giant, [[0, 1], [2, 3]], equal_size=True)] == [2, 2]


def test_refinement_goes_on_below_the_makespan() -> None:
    """One giant fixes the makespan; the other parts must still come out even."""
    costs = np.array([1000.0] + [float(c) for c in range(1, 31)])
    start = [[0], list(range(1, 11)), list(range(11, 21)), list(range(21, 31))]
    loads = [float(costs[part].sum()) for part in refine(costs, start, equal_size=False)]
    assert loads == [1000.0, 155.0, 155.0, 155.0]


def test_refinement_returns_to_parts_that_were_stuck() -> None:
    """The heaviest part finds a partner only after two lighter ones made an exchange."""
    costs = np.array([30.0, 54.0, 1.0, 8.0, 24.0, 3.0, 46.0, 42.0])
    start = [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert makespan(costs, refine(costs, start, equal_size=False)) == 72.0


def test_no_part_is_empty_when_items_cost_nothing() -> None:
    for costs in ([0.0] * 4, [1.0, 0.0, 0.0, 0.0], [0.0] * 5):
        assert all(karmarkar_karp(costs, 3))
    parts = [[0, 1, 2], [], [3], []]
    fill_empty(np.array([5.0, 2.0, 3.0, 9.0]), parts)
    assert parts == [[0], [1], [3], [2]]


def test_large_instance() -> None:
    costs = np.random.default_rng(1).lognormal(0.0, 1.0, 1024)
    for equal_size in (False, True):
        parts = karmarkar_karp(costs, 32, equal_size=equal_size)
        assert makespan(costs, parts) < 1.001 * max(costs.sum() / 32, costs.max())


def test_refinement_keeps_a_second_limit() -> None:
    costs = np.array([6.0, 5.0, 1.0, 1.0])
    weights = np.array([1, 1, 3, 3])
    start = [[0, 1], [2, 3]]
    free = refine(costs, start, equal_size=False)
    assert makespan(costs, free) == 7.0
    limited = refine(costs, start, equal_size=False, limit=Limit(weights, 6))
    assert makespan(costs, limited) < 11.0
    assert all(weights[part].sum() <= 6 for part in limited)
    stuck = refine(costs, start, equal_size=False, limit=Limit(np.array([6, 6, 6, 6]), 12))
    assert makespan(costs, stuck) == 7.0  # swaps remain possible
    assert [len(part) for part in stuck] == [2, 2]


def test_one_part_of_many_tiny_items_needs_little_memory() -> None:
    """A table with a column for each of its items, in each row, would hold 9 million cells."""
    rng = np.random.default_rng(0)
    costs = np.concatenate([rng.uniform(900, 1000, 1000), rng.uniform(1e-4, 2e-4, 9000)])
    tracemalloc.start()
    parts = karmarkar_karp(costs, 1001)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6
    assert sorted(itertools.chain(*parts)) == list(range(10000))
    assert all(parts)


def test_refinement_counts_what_its_table_leaves_out() -> None:
    """Of 300 000 items of one part some columns take part in exchanges; all of them weigh."""
    costs = np.concatenate([np.ones(300_000), [500.0, 400.0, 300.0]])
    start = [[*range(300_000)], [300_000, 300_001, 300_002]]
    parts = refine(costs, start, equal_size=False, limit=Limit(np.ones(costs.size, dtype=np.int64), 300_001))
    assert sum(map(len, parts)) == costs.size
    assert max(map(len, parts)) <= 300_001
    assert makespan(costs, parts) < makespan(costs, start)


# 0, or what a float64 keeps its digits for.
ANY_COST = st.floats(0, 1e6).map(lambda cost: cost if cost > 1e-100 else 0.0)
COSTS = st.lists(ANY_COST | st.integers(0, 20).map(float), max_size=40)


@settings(deadline=None, max_examples=60)
@given(COSTS, st.integers(1, 9))
def test_every_index_once_and_never_worse_than_plain(costs: list[float], k: int) -> None:
    array = np.array(costs)
    parts = karmarkar_karp(costs, k)
    assert len(parts) == k
    assert sorted(itertools.chain(*parts)) == list(range(len(costs)))
    assert sum(not part for part in parts) == max(0, k - len(costs))
    assert parts == sorted(parts, key=lambda part: (not part, part))
    if costs:
        for method in (largest_differencing, longest_first):
            plain = makespan(array, method(array, k, equal_size=False))
            assert makespan(array, parts) <= plain * (1 + 1e-12)


@settings(deadline=None, max_examples=40)
@given(st.data(), st.integers(1, 7), st.integers(0, 6))
def test_equal_sizes(data: st.DataObject, k: int, size: int) -> None:
    costs = data.draw(st.lists(ANY_COST, min_size=k * size, max_size=k * size))
    parts = karmarkar_karp(costs, k, equal_size=True)
    assert [len(part) for part in parts] == [size] * k
    assert sorted(itertools.chain(*parts)) == list(range(k * size))
    if costs:
        array = np.array(costs)
        plain = makespan(array, largest_differencing(array, k, equal_size=True))
        assert makespan(array, parts) <= plain * (1 + 1e-12)


@settings(deadline=None, max_examples=40)
@given(COSTS, st.integers(1, 9))
def test_one_more_device_never_raises_the_bound(costs: list[float], k: int) -> None:
    array = np.array(costs)
    assert lower_bound(array, k + 1) <= lower_bound(array, k)
    if costs:
        assert lower_bound(array, k) <= makespan(array, karmarkar_karp(costs, k)) * (1 + 1e-12)


@settings(deadline=None, max_examples=40)
@given(COSTS.filter(bool), st.lists(st.sampled_from([0.5, 1.0, 1.7, 2.0]), min_size=1, max_size=6), st.randoms())
def test_relabelling_devices_changes_nothing(costs: list[float], speeds: list[float], random: Random) -> None:
    array = np.array(costs)
    parts = karmarkar_karp(costs, len(speeds), speeds=speeds)
    order = random.sample(range(len(speeds)), len(speeds))
    relabelled = karmarkar_karp(costs, len(speeds), speeds=[speeds[device] for device in order])

    def jobs(parts: list[list[int]], speeds: list[float]) -> list[tuple[float, list[int]]]:
        return sorted(zip(speeds, parts, strict=True))

    assert jobs(relabelled, [speeds[device] for device in order]) == jobs(parts, speeds)
    assert sorted(itertools.chain(*parts)) == list(range(len(costs)))
    times = [float(array[part].sum()) / speed for part, speed in zip(parts, speeds, strict=True)]
    assert lower_bound(array, len(speeds), speeds=np.array(speeds)) <= max(times) * (1 + 1e-12)


def test_equal_speeds_are_no_speeds() -> None:
    costs = np.random.default_rng(0).lognormal(size=20)
    assert karmarkar_karp(costs, 4, speeds=[3.0] * 4) == karmarkar_karp(costs, 4)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(2, 5))
def test_scaling_costs_by_a_power_of_two_changes_nothing(costs: list[int], k: int) -> None:
    assert karmarkar_karp(costs, k) == karmarkar_karp([c * 2.0**40 for c in costs], k)


def test_fewer_items_than_parts() -> None:
    assert karmarkar_karp([], 3) == [[], [], []]
    assert karmarkar_karp([], 3, equal_size=True) == [[], [], []]
    assert karmarkar_karp([5.0, 1.0], 4) == [[0], [1], [], []]


def test_the_argument_is_left_alone() -> None:
    costs = np.array([3.0, 1.0, 2.0, 2.0])
    karmarkar_karp(costs, 2)
    np.testing.assert_array_equal(costs, [3.0, 1.0, 2.0, 2.0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speeds": [1.0]}, "speeds has 1 entries: expected one for each of the 2 devices"),
        ({"speeds": [1.0, 0.0]}, r"speeds\[1\] is 0: expected more than 0"),
        ({"speeds": [1.0, -1.0]}, r"speeds\[1\] is -1.0"),
        ({"speeds": [1.0, float("nan")]}, r"speeds\[1\] is nan"),
        *(
            ({"costs": [1.0, bad]}, r"costs\[1\] is .*: expected a finite number of at least 0")
            for bad in (float("nan"), float("inf"), -1.0)
        ),
        *(({"k": bad}, f"k={bad}: expected an integer of at least 1") for bad in (0, -3, 2.0, True)),
        ({"costs": [[1.0, 2.0]], "k": 1}, "one dimension"),
        ({"costs": ["much"], "k": 1}, "cannot be read"),
        ({"costs": [1.0] * 5, "equal_size": True}, r"5 items .* k=2 .* multiple of 2; drop 1 items, add 1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        karmarkar_karp(**{"costs": [1.0, 2.0], "k": 2, **arguments})


@pytest.mark.parametrize(("n", "k"), [(8, 2), (7, 3), (6, 4)])
def test_beside_loads_close_to_exhaustive_search(n: int, k: int) -> None:
    rng = np.random.default_rng(n * k)
    excess = []
    for _ in range(40):
        costs, loads = rng.lognormal(0.0, 0.8, n), rng.lognormal(0.0, 1.0, k) * rng.integers(0, 2, k)
        parts = split_beside(costs, loads)
        assert sorted(item for part in parts for item in part) == list(range(n))
        found = max(load + costs[part].sum() for load, part in zip(loads, parts, strict=True))
        others = all_partitions(n, k, equal_size=False, named=True) @ costs + loads[:, None]
        excess.append(found / others.max(axis=0).min() - 1)
    assert min(excess) > -1e-12
    assert np.mean(excess) < 0.02


@pytest.mark.parametrize("width", [12, 60])
def test_pairs_compared_in_blocks_are_improved_alike(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Dense comparisons, and those with the nearest counterparts."""
    rng = np.random.default_rng(width)
    costs = rng.lognormal(0, 1, 40 * width)
    start = [list(range(part * width, (part + 1) * width)) for part in range(40)]
    found = [refine_module.refine(costs, start, equal_size=equal_size) for equal_size in (False, True)]
    for block in (1, 3000, 2**30):
        monkeypatch.setattr(refine_module, "_BLOCK", block)
        assert [refine_module.refine(costs, start, equal_size=equal_size) for equal_size in (False, True)] == found
