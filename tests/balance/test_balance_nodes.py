"""Layer 1: no processes. place_on_nodes: against exhaustive search, on rearrangements of samples, its errors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc.balance import QuadraticCost, place_on_nodes, post_balance, sample_lengths
from odc.balance.rearrange import nodes as nodes_module
from odc.balance.rearrange.nodes import place_items


def sent_to_other_nodes(volume: np.ndarray, placed: list[int], ranks_per_node: int) -> np.ndarray:
    """Equation 5, written out: of each rank."""
    sent = [sum(row[j] for j, to in enumerate(placed) if to // ranks_per_node != i // ranks_per_node) for i, row in
            enumerate(volume.tolist())]  # fmt: skip
    return np.array(sent)


def divisions(batches: frozenset[int], ranks_per_node: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to give the batches to nodes."""
    if not batches:
        yield ()
        return
    for first in itertools.combinations(sorted(batches), ranks_per_node):
        for others in divisions(batches - set(first), ranks_per_node):
            yield (first, *others)


def optimum(volume: np.ndarray, ranks_per_node: int) -> tuple[float, float]:
    """The smallest maximum over ranks of what they send to other nodes, and of these the least sum over ranks."""
    best = (float("inf"), float("inf"))
    for division in divisions(frozenset(range(len(volume))), ranks_per_node):
        placed = np.zeros(len(volume), dtype=int)
        for node, batches in enumerate(division):
            placed[list(batches)] = node
        elsewhere = placed != (np.arange(len(volume)) // ranks_per_node)[:, None]
        sent = (volume * elsewhere).sum(axis=1)
        best = min(best, (float(sent.max()), float(sent.sum())))
    return best


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node"), [(2, 1), (4, 2), (5, 1), (6, 2), (6, 3), (8, 2), (8, 4), (9, 3), (5, 5)]
)
def test_optimal_up_to_9_ranks(num_ranks: int, ranks_per_node: int) -> None:
    rng = np.random.default_rng(num_ranks * ranks_per_node)
    for repetition in range(6 if num_ranks < 8 else 2):
        # Few different volumes, so that many placements have the smallest maximum.
        volume = rng.integers(0, 12 if repetition % 2 else 1000, (num_ranks, num_ranks))
        placed = place_on_nodes(volume, ranks_per_node)
        assert sorted(placed) == list(range(num_ranks))
        sent = sent_to_other_nodes(volume, placed, ranks_per_node)
        assert (sent.max(), sent.sum()) == optimum(volume, ranks_per_node)
        for node in range(num_ranks // ranks_per_node):
            batches = [j for j, rank in enumerate(placed) if rank // ranks_per_node == node]
            ranks = range(node * ranks_per_node, (node + 1) * ranks_per_node)
            most = max(sum(volume[i, j] for i, j in zip(ranks, order, strict=True)) for order in
                       itertools.permutations(batches))  # fmt: skip
            assert sum(volume[placed[j], j] for j in batches) == most


def test_optimal_with_12_ranks_and_for_floats() -> None:
    rng = np.random.default_rng(5)
    volume = rng.random((12, 12)) * 1e-30
    for ranks_per_node in (6, 4):
        placed = place_on_nodes(volume, ranks_per_node)
        found = sent_to_other_nodes(volume, placed, ranks_per_node).max()
        assert found == pytest.approx(optimum(volume, ranks_per_node)[0], rel=1e-9)


def rearranged(law: str, num_ranks: int, seed: int) -> np.ndarray:
    """Tokens of 60 samples per rank that each rank has of each batch of :func:`post_balance`."""
    lengths = sample_lengths(law, 60 * num_ranks, seed)
    cost = QuadraticCost(1e-4, 1.0)
    volume = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    for j, part in enumerate(post_balance(lengths, num_ranks, cost=cost, layout="packed")):
        np.add.at(volume[:, j], np.array(part) // 60, lengths[part])
    return volume


@pytest.mark.parametrize(("law", "share"), [("sharegpt4o", 0.8), ("longalign", 0.82), ("llava", 0.89)])
def test_128_ranks_send_less_to_other_nodes(law: str, share: float) -> None:
    # Samples of llava are of similar lengths: there not even fractions of batches get below 0.85.
    for seed in (0, 1):
        volume = rearranged(law, 128, seed)
        placed = place_on_nodes(volume, 8)
        assert sorted(placed) == list(range(128))
        unplaced = sent_to_other_nodes(volume, list(range(128)), 8).max()
        assert sent_to_other_nodes(volume, placed, 8).max() <= share * unplaced


def test_the_same_whatever_the_unit_and_the_type() -> None:
    volume = rearranged("llava", 24, 0)
    placed = place_on_nodes(volume, 4)
    assert all(type(rank) is int for rank in placed)
    assert place_on_nodes(volume.astype(np.float64), 4) == placed
    assert place_on_nodes((volume * 8).tolist(), 4) == placed
    # More than 2**53 in all, and less than 1: in units of the largest.
    scaled = place_on_nodes(volume * 2.0**300, 4)
    assert place_on_nodes(volume * 2.0**-300, 4) == scaled
    assert sent_to_other_nodes(volume, scaled, 4).max() == sent_to_other_nodes(volume, placed, 4).max()


def test_search_comes_close_to_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    cases = [(rng.integers(0, 100, (12, 12)), c) for c in (2, 3, 4, 6) for _ in range(5)]
    best = [sent_to_other_nodes(v, place_on_nodes(v, c), c).max() for v, c in cases]
    monkeypatch.setattr(nodes_module, "_MAX_SETS", 0)
    found = [sent_to_other_nodes(v, place_on_nodes(v, c), c).max() for v, c in cases]
    excess = np.array(found) / np.array(best) - 1
    assert excess.min() >= 0
    assert excess.mean() <= 0.01


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_never_worse_than_unplaced(data: st.DataObject) -> None:
    num_nodes, ranks_per_node = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    num_ranks = num_nodes * ranks_per_node
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    volume = rng.integers(0, 50, (num_ranks, num_ranks)) * (rng.random((num_ranks, num_ranks)) < 0.3)
    volume += np.diag(rng.integers(0, 200, num_ranks))
    placed = place_on_nodes(volume, ranks_per_node)
    assert sorted(placed) == list(range(num_ranks))
    unplaced = sent_to_other_nodes(volume, list(range(num_ranks)), ranks_per_node)
    sent = sent_to_other_nodes(volume, placed, ranks_per_node)
    assert (sent.max(), sent.sum()) <= (unplaced.max(), unplaced.sum())


def test_batches_go_home() -> None:
    # Batch j holds only samples of one rank: each goes there.
    owners = np.random.default_rng(0).permutation(32)
    volume = np.zeros((32, 32), dtype=np.int64)
    volume[owners, np.arange(32)] = np.arange(1, 33)
    for ranks_per_node in (1, 4, 16, 32):
        assert place_on_nodes(volume, ranks_per_node) == owners.tolist()


def test_given_in_parts() -> None:
    rng = np.random.default_rng(5)
    ranks, batches, amounts = rng.integers(0, 24, 300), rng.integers(0, 24, 300), rng.random(300)
    volume = np.zeros((24, 24))
    np.add.at(volume, (ranks, batches), amounts)
    assert place_items(ranks, batches, amounts, 24, 4) == place_on_nodes(volume, 4)


def test_nothing_to_send() -> None:
    assert sorted(place_on_nodes(np.zeros((20, 20)), 5)) == list(range(20))
    assert place_on_nodes([[7.5]], 1) == [0]


def test_large_nodes_are_filled_greedily(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_module, "_MAX_EXACT_NODE", 3)
    placed = place_on_nodes(np.diag(np.arange(1, 9))[::-1], 4)
    assert placed == [7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("volume", "ranks_per_node", "message"),
    [
        (np.zeros((2, 3)), 1, r"volume has shape \(2, 3\): expected \(num_ranks, num_ranks\)"),
        (np.zeros((0, 0)), 1, r"volume has shape \(0, 0\)"),
        (np.ones((2, 2), dtype=bool), 1, "volume has dtype bool: expected numbers"),
        *(
            ([[0.0, 1.0], [bad, 0.0]], 1, rf"volume\[1, 0\] is {bad}: expected a finite number of at least 0")
            for bad in (-1.0, np.nan, np.inf)
        ),
        (np.zeros((2, 2)), 0, "ranks_per_node=0: expected an integer of at least 1"),
        *((np.zeros((6, 6)), n, f"ranks_per_node={n} with 6 ranks: expected a divisor") for n in (4, 12)),
    ],
)
def test_bad_arguments(volume: Any, ranks_per_node: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place_on_nodes(volume, ranks_per_node)


def test_what_the_search_gives_up_is_little(monkeypatch: pytest.MonkeyPatch) -> None:
    patience = []
    for steps in (0, nodes_module._PATIENCE, nodes_module._NUM_STEPS):
        monkeypatch.setattr(nodes_module, "_PATIENCE", steps)
        volumes = [rearranged(law, 64, seed) for law in ("sharegpt4o", "longalign") for seed in (0, 1)]
        patience.append([sent_to_other_nodes(v, place_on_nodes(v, 8), 8).max() for v in volumes])
    none, as_is, all_steps = np.array(patience)
    assert (as_is / all_steps).max() <= 1.01
    assert (none / all_steps).max() > 1.01
