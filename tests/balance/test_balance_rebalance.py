"""Layer 1: no processes. Loads evened out by moving little: against exhaustive search, and against sharing out anew."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc.balance import Rearrangement, karmarkar_karp, rebalance
from odc.balance.rearrange.levelling import Loads


def span(costs: np.ndarray, parts: list[list[int]], loads: np.ndarray | float = 0.0) -> float:
    return float((np.array([costs[part].sum() for part in parts]) + loads).max())


def drawn(rng: np.random.Generator, num_items: int, num_ranks: int) -> list[list[int]]:
    owners = rng.integers(num_ranks, size=num_items)
    return [np.flatnonzero(owners == rank).tolist() for rank in range(num_ranks)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 14), st.integers(1, 6), st.booleans(), st.integers(0, 10**6))
def test_every_item_has_one_rank_and_nothing_gets_worse(n: int, k: int, has_loads: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = rng.choice([rng.lognormal(0, 1, n), np.ones(n), np.zeros(n)])
    home = drawn(rng, n, k)
    loads = rng.lognormal(0, 1, k) * rng.integers(0, 2, k) if has_loads else np.zeros(k)
    found = rebalance(costs, home, loads=loads)
    assert sorted(item for part in found for item in part) == list(range(n))
    assert len(found) == k
    assert span(costs, found, loads) <= span(costs, home, loads) * (1 + 1e-12)
    assert found == rebalance(costs, home, loads=loads)


@pytest.mark.parametrize(
    ("n", "k", "has_loads"), [(9, 2, False), (8, 3, False), (7, 4, False), (8, 2, True), (7, 3, True)]
)
def test_close_to_exhaustive_search(n: int, k: int, has_loads: bool) -> None:
    rng = np.random.default_rng(n * k)
    owners = np.array(list(itertools.product(range(k), repeat=n)))
    held = np.stack([(owners == rank).astype(float) for rank in range(k)])
    excess = []
    for _ in range(40):
        costs, loads = rng.lognormal(0, 0.8, n), rng.lognormal(0, 0.8, k) if has_loads else np.zeros(k)
        best = float(((held @ costs) + loads[:, None]).max(axis=0).min())
        excess.append(span(costs, rebalance(costs, drawn(rng, n, k), loads=loads), loads) / best - 1)
    assert min(excess) > -1e-12
    assert np.mean(excess) < (0.02 if has_loads else 0.01)


@pytest.mark.parametrize(("num_ranks", "samples"), [(8, 60), (64, 25)])
def test_a_fraction_moves_of_what_sharing_out_anew_would(num_ranks: int, samples: int) -> None:
    rng = np.random.default_rng(1)
    costs = rng.lognormal(0, 1, num_ranks * samples)
    home = [list(range(rank * samples, (rank + 1) * samples)) for rank in range(num_ranks)]
    mean = max(costs.sum() / num_ranks, costs.max())  # one item may be more than a share

    def moved(parts: list[list[int]]) -> float:
        volume = Rearrangement.between(home, parts).volume(costs)
        return float(1 - np.trace(volume) / volume.sum())

    found, anew = rebalance(costs, home), karmarkar_karp(costs, num_ranks)
    assert span(costs, home) > 1.1 * mean
    assert span(costs, found) < 1.002 * mean
    assert moved(found) < 0.35 < 0.8 < moved(anew)


def test_little_moves_between_nodes() -> None:
    rng = np.random.default_rng(2)
    costs, num_ranks, samples = rng.lognormal(0, 1, 64 * 30), 64, 30
    home = [list(range(rank * samples, (rank + 1) * samples)) for rank in range(num_ranks)]
    node = np.arange(num_ranks) // 8

    def between(ranks_per_node: int | None) -> float:
        volume = Rearrangement.between(home, rebalance(costs, home, ranks_per_node=ranks_per_node)).volume(costs)
        return float(volume[node[:, None] != node].sum())

    assert between(8) < 0.6 * between(None)
    assert span(costs, rebalance(costs, home, ranks_per_node=8)) < 1.002 * costs.sum() / num_ranks


@pytest.mark.parametrize(("num_ranks", "samples"), [(16, 80), (64, 30)])
def test_hardly_more_moves_than_ranks_and_nodes_have_too_much(num_ranks: int, samples: int) -> None:
    """What is above the mean has to move in any way."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        costs = rng.lognormal(0, 0.7, num_ranks * samples)
        home = [list(range(rank * samples, (rank + 1) * samples)) for rank in range(num_ranks)]
        volume = Rearrangement.between(home, rebalance(costs, home, ranks_per_node=8)).volume(costs)
        node = np.arange(num_ranks) // 8
        for of in (np.arange(num_ranks), node):
            loads = np.bincount(of, volume.sum(axis=1))
            too_much = np.maximum(loads - loads.mean(), 0).sum()
            moved = volume[of[:, None] != of].sum()
            assert too_much * 0.99 - 1e-3 * loads.sum() <= moved <= 2.2 * too_much + 1e-2 * loads.sum()


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 10**6))
def test_an_exchange_is_the_one_that_moves_least_of_those_that_suit(m: int, n: int, seed: int) -> None:
    """Against all moves of one item and all swaps of two; where none suits, what comes closest."""
    rng = np.random.default_rng(seed)
    costs = rng.lognormal(0, 1, m + n)
    home = [np.arange(m), np.arange(m, m + n)]
    beside = np.array([max(0.0, costs[m:].sum() - costs[:m].sum()) + 1.0, 0.0])
    loads = Loads(costs, home, beside, 1.0, 1e-3)
    start = list(loads.loads)
    least, most = np.sort(rng.uniform(0.01, 1.5, 2)).tolist()
    options = [(given, 0.0) for given in costs[:m]] + list(itertools.product(costs[:m], costs[m:]))
    allowed = [(a, b) for a, b in options if 1e-6 <= a - b < start[0] - start[1] - 1e-6]
    given = loads._exchange(0, 1, least, most)
    assert loads.loads[0] == pytest.approx(start[0] - given)
    assert loads.loads[1] == pytest.approx(start[1] + given)
    parts = loads.parts()
    assert sorted(item for part in parts for item in part) == list(range(m + n))
    assert loads.loads == pytest.approx([costs[parts[0]].sum() + beside[0], costs[parts[1]].sum()])
    if not allowed:
        assert given == 0.0
        return
    suiting = [a + b for a, b in allowed if least <= a - b <= most]
    if suiting:
        assert least - 1e-12 <= given <= most + 1e-12
        left = sum(costs[item] for item in range(m) if item not in parts[0])
        came = sum(costs[item] for item in range(m, m + n) if item not in parts[1])
        assert left + came == pytest.approx(min(suiting))
    else:
        most = min(most, start[0] - start[1])  # more would only turn them round
        off = min(max(least - (a - b), a - b - most) for a, b in allowed)
        assert max(least - given, given - most) == pytest.approx(off, abs=1e-5)


def test_few_large_items_in_bad_places_are_shared_out_anew() -> None:
    costs = np.array([7.0, 6.0, 5.0, 5.0, 4.0, 4.0])  # 16, 15: no move and no swap of one item leads there from here
    home = [[0, 1, 3], [2, 4, 5]]
    found = rebalance(costs, home)
    assert span(costs, found) == span(costs, karmarkar_karp(costs, 2)) == 16.0


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (([1.0, 2.0], [[0], [0]]), {}, "no permutation"),
        (([1.0], [[0], [1]]), {}, "1 costs for 2 items"),
        (([-1.0, 1.0], [[0], [1]]), {}, r"costs\[0\] is -1.0"),
        (([1.0, 1.0], [[0], [1]]), {"loads": [1.0]}, "loads has 1 entries: expected one for each of 2 ranks"),
        (([1.0, 1.0], [[0], [1]]), {"ranks_per_node": 3}, "expected full nodes"),
        (([], []), {}, "home has 0 ranks: expected 1 to"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rebalance(*arguments, **options)
