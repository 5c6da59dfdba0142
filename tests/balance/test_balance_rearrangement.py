"""Layer 1: which item goes where. Composition and inverse against a plain dictionary of places."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc.balance import Rearrangement


def distribution(rng: random.Random, num_ranks: int, num_items: int) -> list[list[int]]:
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for item in rng.sample(range(num_items), num_items):
        rng.choice(ranks).append(item)
    return ranks


def places(ranks: object) -> dict[int, tuple[int, int]]:
    return {int(item): (r, at) for r, items in enumerate(ranks) for at, item in enumerate(items)}  # type: ignore[arg-type, call-overload]


@given(st.integers(1, 5), st.integers(0, 12), st.integers(0, 10**6))
def test_inverse_and_composition_lead_where_the_steps_do(num_ranks: int, num_items: int, seed: int) -> None:
    rng = random.Random(seed)
    a, b, c = (distribution(rng, num_ranks, num_items) for _ in range(3))
    there, on = Rearrangement.between(a, b), Rearrangement.between(b, c)
    assert there.then(on) == Rearrangement.between(a, c)
    assert there.inverse() == Rearrangement.between(b, a)
    assert there.inverse().then(there.then(on)) == on  # composed with the way back: one move in place of two
    assert there.then(there.inverse()).is_at_rest
    assert (there == on) is (there.digest() == on.digest())
    sizes = [rng.randrange(100) for _ in range(num_items)]
    expected = np.zeros((num_ranks, num_ranks))
    for item, (rank, _) in places(a).items():
        expected[rank, places(b)[item][0]] += sizes[item]
    assert (there.volume(sizes) == expected).all()
    assert (there.inverse().volume(sizes) == expected.T).all()
    assert there.is_at_rest is (places(a).keys() == {i for i in places(a) if places(a)[i][0] == places(b)[i][0]})
    for i in range(num_ranks):
        for j in range(num_ranks):
            assert there.sends(i, j) == [item for item in b[j] if item in a[i]]


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ([[0, 1]], [[0], [1]], "source has 1 ranks, target 2: expected as many"),
        ([], [], "source has 0 ranks"),
        ([[0], [0]], [[0], [1]], r"source is no permutation.*missing: \[1\], repeated: \[0\]"),
        ([[0], [1]], [[0], [2]], r"target is no permutation.*missing: \[1\].*unknown: \[2\]"),
        ([[0, 1], []], [[0], []], r"target is no permutation.*missing: \[1\]"),
        ([[0, -1]], [[0, 1]], r"source\[0\] holds -1"),
        ([[0, 1.5]], [[0, 1]], r"source\[0\] holds 1.5: expected item numbers"),
        ([["a"]], [["a"]], r"source\[0\] holds 'a'"),
        ([[True]], [[0]], r"source\[0\] holds True"),
    ],
)
def test_what_is_no_rearrangement_is_refused(source: list[list[int]], target: list[list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Rearrangement.between(source, target)


def test_what_does_not_follow_is_refused() -> None:
    one = Rearrangement.between([[0, 1], [2]], [[2], [0, 1]])
    with pytest.raises(ValueError, match=r"items \[1, 0\] on rank 1, where the first one ends with \[0, 1\]"):
        one.then(Rearrangement.between([[2], [1, 0]], [[0, 1, 2], []]))
    with pytest.raises(ValueError, match="1 ranks cannot follow 2"):
        one.then(Rearrangement.between([[0, 1, 2]], [[0, 1, 2]]))
    for sizes, words in ([[1.0, 2.0], "shape"], [[1.0, -2.0, 0.0], r"sizes\[1\] is -2.0"]):
        with pytest.raises(ValueError, match=words):  # type: ignore[call-overload]
            one.volume(sizes)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (([[0, 1], [2]], [[2, 1], [0]]), "item 1 goes to rank 1 against rank 0"),
        (([[0], [2, 1]], [[2], [0, 1]]), "item 1 goes from rank 0 against rank 1"),
        (([[1, 0], [2]], [[2], [0, 1]]), "source[0] is [0, 1] against [1, 0]"),
        (([[0, 1], [2, 3]], [[2], [0, 1, 3]]), "3 items on 2 ranks against 4 items on 2 ranks"),
        (([[0, 1], [2]], [[2], [0, 1]]), "none"),
    ],
)
def test_the_first_difference_is_named(other: tuple[list[list[int]], list[list[int]]], words: str) -> None:
    one = Rearrangement.between([[0, 1], [2]], [[2], [0, 1]])
    assert words in one.difference(Rearrangement.between(*other))
