"""Layer 1: no processes. Packing under a token limit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc.balance import karmarkar_karp
from odc.balance.policies.packing import best_fit_decreasing, min_microbatches, pack, pack_together, smallest


def fewest(lengths: list[int], limit: int) -> int:
    """The smallest number of bins, by exhaustive search."""

    def place(i: int, bins: tuple[int, ...], best: int) -> int:
        if len(bins) >= best:
            return best
        if i == len(lengths):
            return len(bins)
        for j in range(len(bins)):
            if bins[j] + lengths[i] <= limit:
                best = place(i + 1, (*bins[:j], bins[j] + lengths[i], *bins[j + 1 :]), best)
        return place(i + 1, (*bins, lengths[i]), best)

    return place(0, (), len(lengths) + 1)


LENGTHS = st.lists(st.integers(1, 100), max_size=30)


def check_packing(lengths: np.ndarray, parts: list[list[int]], limit: int) -> None:
    assert sorted(itertools.chain(*parts)) == list(range(lengths.size))
    assert all(lengths[part].sum() <= limit for part in parts)


@settings(deadline=None, max_examples=40)
@given(LENGTHS, st.integers(100, 250))
def test_pack(values: list[int], limit: int) -> None:
    lengths = np.array(values, dtype=np.int64)
    parts = pack(lengths, lengths.astype(float) ** 2, limit)
    check_packing(lengths, parts, limit)
    assert all(parts)
    bins = best_fit_decreasing(lengths, limit)
    simple: list[list[int]] = []
    for sample in sorted(range(lengths.size), key=lambda sample: -lengths[sample]):
        fitting = (part for part in simple if lengths[part].sum() + lengths[sample] <= limit)
        if (part := max(fitting, key=lambda part: lengths[part].sum(), default=None)) is None:
            simple.append(part := [])
        part.append(sample)
    assert bins == simple
    assert min_microbatches(lengths, limit) <= len(parts) <= len(bins)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 50), max_size=7), st.integers(50, 120))
def test_lower_bound_is_one(values: list[int], limit: int) -> None:
    lengths = np.array(values, dtype=np.int64)
    bound = min_microbatches(lengths, limit)
    assert -(-sum(values) // limit) <= bound <= fewest(values, limit)


@pytest.mark.parametrize(
    ("lengths", "bound"),
    [([51] * 10, 10), ([60] * 4 + [45] * 4, 6), ([60] * 4 + [40] * 4, 4), ([], 0)],  # of the second the sum says 5
)
def test_lower_bound_sees_samples_that_cannot_share(lengths: list[int], bound: int) -> None:
    assert min_microbatches(np.array(lengths, dtype=np.int64), 100) == bound


def squares(lengths: np.ndarray) -> np.ndarray:
    return lengths.astype(float) ** 2


def test_costs_are_balanced() -> None:
    lengths = np.array([50, 50, 40, 40, 10, 10])
    parts = pack(lengths, squares(lengths), 100)
    assert [float(squares(lengths)[part].sum()) for part in parts] == [4200.0, 4200.0]


def test_even_tokens_where_even_costs_break_the_limit() -> None:
    """60 costs as much as all the others together, but these have 100 tokens."""
    lengths = np.array([60, 20, 20, 20, 20, 20])
    parts = pack(lengths, np.array([10.0, 2.0, 2.0, 2.0, 2.0, 2.0]), 80)
    check_packing(lengths, parts, 80)
    assert len(parts) == 2


def test_costs_are_balanced_as_far_as_the_limit_allows() -> None:
    """Even tokens (35 and 37) would cost 421 and 797; one swap that keeps the limit brings 757 and 461."""
    lengths = np.array([9, 12, 26, 14, 11])
    assert karmarkar_karp(lengths, 2) == [[0, 1, 3], [2, 4]]
    assert any(lengths[part].sum() > 37 for part in karmarkar_karp(squares(lengths), 2))
    assert pack(lengths, squares(lengths), 37) == [[0, 2], [1, 3, 4]]


def test_best_fit_where_even_tokens_break_the_limit() -> None:
    """Nearly full microbatches that neither kind of even split finds."""
    lengths = np.array([51, 9, 9, 40, 46, 51, 27, 49, 24, 7, 48])
    for costs in (squares(lengths), lengths.astype(float)):
        assert any(lengths[part].sum() > 121 for part in karmarkar_karp(costs, 3))
    parts = pack(lengths, squares(lengths), 121)
    check_packing(lengths, parts, 121)
    assert len(parts) == 3


@settings(deadline=None, max_examples=20)
@given(st.lists(LENGTHS, min_size=1, max_size=4), st.integers(100, 250))
def test_pack_together(ranks: list[list[int]], limit: int) -> None:
    lengths = [np.array(mine, dtype=np.int64) for mine in ranks]
    packed = pack_together(lengths, [mine.astype(float) for mine in lengths], limit)
    num_microbatches = len(packed[0])
    for mine, parts in zip(lengths, packed, strict=True):
        check_packing(mine, parts, limit)
        assert len(parts) == num_microbatches
        assert sum(not part for part in parts) == max(0, num_microbatches - mine.size)


@pytest.mark.parametrize("n", [1, 2, 17])
def test_no_two_samples_fit_together(n: int) -> None:
    assert pack(np.full(n, 9), np.ones(n), 10) == [[i] for i in range(n)]


def test_samples_just_over_a_third_of_the_limit_share_in_pairs() -> None:
    """Their tokens would fit into a third fewer microbatches; no more than two fit into one."""
    lengths = np.random.default_rng(0).integers(3340, 3400, 1000)
    assert min_microbatches(lengths, 10_000) == 500


@pytest.mark.parametrize(
    ("low", "first_found"), [(1, 1), (1, 3), (10, 400), (10, 999), (5, 5), (999, 999), (1000, 1000)]
)
def test_smallest_number_in_few_tries(low: int, first_found: int) -> None:
    tried = []

    def attempt(number: int) -> int | None:
        tried.append(number)
        return number if number >= first_found else None

    assert smallest(low, 1000, attempt) == first_found
    assert len(tried) <= 4 + 11
    assert min(tried) >= low
    assert max(tried) <= 1000
