"""Layer 1: no processes. post_balance: against exhaustive search, what holds of every division, its errors."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc.balance import LinearCost, QuadraticCost, karmarkar_karp, post_balance, sample_lengths
from odc.balance.layout import Layout
from odc.balance.rearrange import padded_batches
from odc.balance.rearrange.padded_batches import (
    Items,
    contiguous_batches,
    few_batches,
    filled_batches,
    least_cost_first,
)

LAYOUTS: tuple[Layout, ...] = ("packed", "padded", "padded-attention")


def batch_cost(lengths: list[int], cost: QuadraticCost, layout: Layout) -> float:
    """Equation 2 of the paper for one batch, written out."""
    if not lengths:
        return 0.0
    number, longest = len(lengths), max(lengths)
    if layout == "padded":
        return number * (cost.b * longest + cost.a * longest**2)
    squares = number * longest**2 if layout == "padded-attention" else sum(length**2 for length in lengths)
    return cost.b * sum(lengths) + cost.a * squares


def makespan(lengths: np.ndarray, parts: list[list[int]], cost: QuadraticCost, layout: Layout) -> float:
    return max(batch_cost(lengths[part].tolist(), cost, layout) for part in parts)


@functools.cache
def all_divisions(num_items: int, num_ranks: int) -> np.ndarray:
    """Which items each rank has, item 0 on the first: (num_ranks, num_divisions, num_items)."""
    owners = np.array([(0, *others) for others in itertools.product(range(num_ranks), repeat=num_items - 1)])
    return np.stack([owners == rank for rank in range(num_ranks)])


def optimum(lengths: np.ndarray, num_ranks: int, cost: QuadraticCost, layout: Layout) -> float:
    """The smallest makespan of all divisions."""
    held = all_divisions(lengths.size, num_ranks)
    longest = (held * lengths).max(axis=2).astype(np.float64)
    number, tokens = held.sum(axis=2), held @ lengths
    if layout == "padded":
        costs = number * (cost.b * longest + cost.a * longest**2)
    else:
        squares = number * longest**2 if layout == "padded-attention" else held @ lengths**2
        costs = cost.b * tokens + cost.a * squares
    return float(costs.max(axis=0).min())


def random_case(rng: np.random.Generator, number: int) -> tuple[np.ndarray, int, QuadraticCost]:
    """Few items, of even or of lognormal lengths, with attention from nearly nothing to most of the cost."""
    n, num_ranks = int(rng.integers(1, 10)), int(rng.integers(1, 5))
    n = min(n, 8) if num_ranks == 4 else n
    lengths = rng.integers(1, 100, n) if number % 2 else np.ceil(rng.lognormal(4, 1, n)).astype(np.int64)
    return lengths, num_ranks, QuadraticCost(10 ** rng.uniform(-3, 0.5) / float(lengths.mean()), 1.0)


@pytest.mark.parametrize(
    ("layout", "mean_excess", "largest_excess"),
    [("packed", 0.0005, 0.02), ("padded", 1e-12, 1e-12), ("padded-attention", 0.0005, 0.02)],
)
def test_close_to_exhaustive_search(layout: Layout, mean_excess: float, largest_excess: float) -> None:
    rng = np.random.default_rng(7)
    excess = []
    for number in range(250):
        lengths, num_ranks, cost = random_case(rng, number)
        parts = post_balance(lengths, num_ranks, cost=cost, layout=layout)
        best = optimum(lengths, num_ranks, cost, layout)
        excess.append(makespan(lengths, parts, cost, layout) / best - 1)
    assert min(excess) > -1e-12  # else the exhaustive search is wrong
    assert np.mean(excess) <= mean_excess
    assert max(excess) <= largest_excess


def test_nine_items_on_four_ranks() -> None:
    """The largest instances of exhaustive search, fewer of them: each has 65,536 divisions."""
    rng = np.random.default_rng(3)
    for layout in LAYOUTS:
        excess = []
        for _ in range(4):
            lengths, cost = np.ceil(rng.lognormal(4, 1, 9)).astype(np.int64), QuadraticCost(0.01, 1.0)
            parts = post_balance(lengths, 4, cost=cost, layout=layout)
            excess.append(makespan(lengths, parts, cost, layout) / optimum(lengths, 4, cost, layout) - 1)
        assert min(excess) > -1e-12
        assert np.mean(excess) <= (1e-12 if layout == "padded" else 0.002)


@settings(max_examples=24, deadline=None)
@given(
    lengths=st.one_of(
        st.lists(st.integers(1, 60), max_size=40),
        st.lists(st.integers(1, 2**40), max_size=12),
        st.tuples(st.integers(1, 9), st.integers(0, 30)).map(lambda same: [same[0]] * same[1]),
    ),
    num_ranks=st.integers(1, 9),
    a=st.sampled_from([0.0, 1e-6, 0.01, 1.0]),
    b=st.sampled_from([0.0, 0.1, 1.0]),
    layout=st.sampled_from(LAYOUTS),
)
def test_properties(lengths: list[int], num_ranks: int, a: float, b: float, layout: Layout) -> None:
    if a == b == 0:
        b = 3.0
    cost, items = QuadraticCost(a, b), np.array(lengths, dtype=np.int64)
    parts = post_balance(lengths, num_ranks, cost=cost, layout=layout)
    assert len(parts) == num_ranks
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(len(lengths)))
    assert all(part == sorted(part) and all(type(item) is int for item in part) for part in parts)
    assert sum(not part for part in parts) == max(0, num_ranks - len(lengths))
    filled = [part for part in parts if part]
    assert parts == sorted(filled) + [[]] * (num_ranks - len(filled))
    assert parts == post_balance(items, num_ranks, cost=cost, layout=layout)
    in_turn = [list(range(rank, len(lengths), num_ranks)) for rank in range(num_ranks)]
    assert makespan(items, parts, cost, layout) <= makespan(items, in_turn, cost, layout) * (1 + 1e-12)


def test_packed_is_the_partition_by_cost() -> None:
    lengths, cost = sample_lengths("llava", 300), QuadraticCost(1e-3, 1.0)
    parts = post_balance(lengths, 16, cost=cost, layout="packed")
    assert parts == karmarkar_karp(cost(lengths), 16)
    # Without attention, padding of attention costs nothing.
    linear = LinearCost(2.0)
    packed = post_balance(lengths, 16, cost=linear, layout="packed")
    assert post_balance(lengths, 16, cost=linear, layout="padded-attention") == packed


def test_padded_is_optimal_where_the_printed_algorithm_is_not() -> None:
    # Four of 10 and one of 1 on two ranks. Its search ends at l_min * (d / 2 + 1) = 2: less than one item takes.
    lengths, cost = [10, 10, 1, 10, 10], LinearCost(1.0)
    parts = post_balance(lengths, 2, cost=cost, layout="padded")
    assert sorted(map(len, parts)) == [2, 3]
    assert max(len(part) * max(lengths[item] for item in part) for part in parts) == 30
    # One long item by itself beside many short ones.
    assert post_balance([1, 1, 9, 1, 1], 2, cost=cost, layout="padded") == [[0, 1, 3, 4], [2]]


def test_padded_takes_any_cost_that_does_not_fall() -> None:
    def in_steps(lengths: Any) -> np.ndarray:
        return np.ceil(np.asarray(lengths) / 10.0) - 1  # nothing up to 10 tokens

    assert post_balance([5, 30, 7, 25, 9, 10], 2, cost=in_steps, layout="padded") == [[0, 2, 4, 5], [1, 3]]

    def falling(lengths: Any) -> np.ndarray:
        return 100.0 - np.asarray(lengths)

    with pytest.raises(ValueError, match=r"cost=.*: 70.0 for 30 tokens, 90.0 for 10: expected no less for more tokens"):
        post_balance([10, 30], 1, cost=falling, layout="padded")
    assert post_balance([10, 30], 1, cost=falling, layout="packed") == [[0, 1]]


def make_items(lengths: list[int], a: float, b: float, num_ranks: int) -> Items:
    ordered = np.sort(np.array(lengths))[::-1].copy()
    return Items(ordered, a * ordered.astype(np.float64) ** 2, b, num_ranks)


@settings(max_examples=24, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=9),
    num_ranks=st.integers(1, 4),
    a=st.sampled_from([1e-3, 0.1, 0.3]),
    b=st.sampled_from([0.0, 0.7]),
)
def test_runs_are_the_best_runs_to_the_last_bit(lengths: list[int], num_ranks: int, a: float, b: float) -> None:
    items = make_items(lengths, a, b, num_ranks)
    n = len(lengths)
    spans = []
    for num_cuts in range(min(num_ranks, n)):
        for cuts in itertools.combinations(range(1, n), num_cuts):
            bounds = itertools.pairwise([0, *cuts, n])
            spans.append(items.makespan([list(range(start, end)) for start, end in bounds]))
    runs = contiguous_batches(items)
    assert list(itertools.chain.from_iterable(runs)) == list(range(n))
    assert len(runs) <= num_ranks
    assert items.makespan(runs) == min(spans)
    assert items.makespan(few_batches(items)) <= min(spans)


@settings(max_examples=80, deadline=None)
@given(
    costs=st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.7, 1 / 3, 1e-30, 2.5]), min_size=1, max_size=40),
    num_ranks=st.integers(1, 8),
    of_items=st.integers(1, 12),
    share=st.sampled_from([1.0, 1 + 1e-15, 1.1, 3.0]),
)
def test_runs_of_costs_are_cut_as_one_item_after_the_other(
    costs: list[float], num_ranks: int, of_items: int, share: float
) -> None:
    ordered = np.sort(np.array(costs))[::-1].copy()
    items = Items(np.ones(len(costs), dtype=np.int64), ordered, 0.0, num_ranks)
    # Bounds that some run just meets, where products are rounded.
    bound = max(float(ordered[0]), of_items * float(ordered[len(costs) // 2])) * share
    assert padded_batches._GreedyOfLongest(items)(bound) == padded_batches._Greedy(items)(bound)


def test_each_start_and_its_bound() -> None:
    items = make_items([9, 8, 8, 3, 2, 2, 1, 1], 0.1, 1.0, 3)
    bound = 43.0
    filled = filled_batches(items, bound)
    assert filled is not None
    assert sorted(itertools.chain.from_iterable(filled)) == list(range(8))
    assert items.makespan(filled) <= bound
    assert filled[0] == [0, 1, 6]  # 17.1 + 16.1, and only the first 1 fits into what is left: it costs 9.1
    assert filled[1] == [2, 3, 4, 5]
    assert filled_batches(items, 20.0) is None
    assert filled_batches(items, 17.0) is None  # less than the longest item
    least = least_cost_first(items)
    assert sorted(itertools.chain.from_iterable(least)) == list(range(8))
    # A fourth item costs 3 + 6.4 beside an 8, and more beside the 9.
    assert [part[0] for part in least] == [0, 1, 2]
    assert 3 not in least[0]


def test_a_full_size_instance_is_close_to_what_no_division_beats() -> None:
    # Attention is a hundredth of the cost of a sample of mean length: short samples fill up what long ones leave.
    lengths = sample_lengths("sharegpt4o", 12_800)
    cost = QuadraticCost(0.01 / float(lengths.mean()), 1.0)
    bound = float(cost(lengths).sum()) / 256
    for layout, excess in (("packed", 0.001), ("padded-attention", 0.01), ("padded", 0.04)):
        parts = post_balance(lengths, 256, cost=cost, layout=layout)  # type: ignore[arg-type]
        assert makespan(lengths, parts, cost, layout) <= bound * (1 + excess)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "layout", "cost", "message"),
    [
        ([3, 0], 2, "packed", QuadraticCost(0.1, 1.0), r"lengths\[1\] is 0: expected at least 1"),
        ([3.0], 2, "packed", QuadraticCost(0.1, 1.0), "lengths has dtype float64: expected integers"),
        ([3], 0, "packed", QuadraticCost(0.1, 1.0), "num_ranks=0: expected an integer of at least 1"),
        (
            [3],
            1,
            "ragged",
            QuadraticCost(0.1, 1.0),
            "layout='ragged': expected one of 'packed', 'padded', 'padded-attention'",
        ),
        ([3], 1, "padded-attention", np.sqrt, "layout 'padded-attention' needs the part that is attention's"),
        *(([3], 1, layout, 1.0, "cost=1.0: expected a cost model") for layout in LAYOUTS),
    ],
)
def test_bad_arguments(lengths: list[Any], num_ranks: int, layout: Any, cost: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        post_balance(lengths, num_ranks, cost=cost, layout=layout)
