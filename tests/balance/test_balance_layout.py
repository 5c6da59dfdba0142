"""Layer 1: no processes. Microbatches in arrays: the same as in lists, what they hold and cost written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc.balance import Plan
from odc.balance.layout import FlatMicrobatches, Layout, by_rank, microbatch_costs, microbatch_tokens
from odc.balance.rearrange.rearrangement import batches, owners

Ranks = list[list[list[int]]]


@st.composite
def microbatches(draw: st.DrawFn) -> Ranks:
    """Samples from 0 on, each once, in any order; ranks without microbatches, microbatches without samples."""
    sizes = draw(st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=5))
    left = iter(draw(st.permutations(range(sum(map(sum, sizes))))))
    return [[[next(left) for _ in range(size)] for size in mine] for mine in sizes]


def cost_of(part: list[int], costs: np.ndarray, lengths: np.ndarray, layout: Layout, attention: np.ndarray) -> float:
    """Written out as the layouts are described."""
    if layout == "packed" or not part:
        return float(sum(costs[part]))
    longest = max(part, key=lambda sample: (lengths[sample], part.index(sample)))
    if layout == "padded":
        return float(len(part) * costs[longest])
    return float(sum(costs[part] - attention[part]) + len(part) * attention[longest])


@settings(max_examples=80, deadline=None)
@given(microbatches(), st.integers(0, 1000))
def test_arrays_hold_what_lists_do(given_lists: Ranks, seed: int) -> None:
    flat, number = FlatMicrobatches.of(given_lists), sum(len(part) for mine in given_lists for part in mine)
    assert list(flat) == given_lists
    assert flat == given_lists
    assert flat[-1] == given_lists[-1]
    assert flat[:2] == given_lists[:2]
    with pytest.raises(IndexError):
        flat[len(given_lists)]
    assert FlatMicrobatches.of(flat) is flat
    assert [mine.tolist() for mine in by_rank(given_lists)] == [
        [each for part in mine for each in part] for mine in given_lists
    ]
    ranks, numbers = flat.places()
    assert [given_lists[r][m] for r, m in zip(ranks, numbers, strict=True)] == [
        part for mine in given_lists for part in mine
    ]
    values = np.arange(1, number + 1)
    most = flat.largest(values)
    assert most.tolist() == [max((sample + 1 for sample in part), default=0) for mine in given_lists for part in mine]
    assert flat.table(most).tolist() == [
        [max((sample + 1 for sample in part), default=0) for part in mine] + [0] * (width - len(mine))
        for width in [max(map(len, given_lists))]
        for mine in given_lists
    ]
    backwards = np.lexsort((-numbers, ranks))
    assert flat.reordered(backwards) == [mine[::-1] for mine in given_lists]
    # Few different lengths: of several longest samples the last one counts.
    rng = np.random.default_rng(seed)
    lengths, costs = rng.integers(1, 4, number), rng.random(number)
    attention = costs * rng.random(number)
    layouts: tuple[Layout, ...] = ("packed", "padded", "padded-attention")
    for layout in layouts:
        found = microbatch_costs(flat, costs, lengths, layout, attention)
        assert found.shape == (len(given_lists), max(map(len, given_lists)))
        for rank, row in enumerate(found.tolist()):
            wanted = [cost_of(part, costs, lengths, layout, attention) for part in given_lists[rank]]
            assert row == pytest.approx(wanted + [0.0] * (len(row) - len(wanted)))
    plans = [Plan(each, lengths, costs, 100, "by-hand") for each in (flat, given_lists)]
    assert plans[0] == plans[1]
    assert plans[0].num_microbatches == plans[1].num_microbatches == tuple(map(len, given_lists))


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([0, 1, 1], r"missing: \[2\], repeated: \[1\], unknown: \[\]"),
        ([0, 1, 3], r"missing: \[2\], repeated: \[\], unknown: \[3\]"),
        ([0, 1, -1], r"missing: \[2\], repeated: \[\], unknown: \[-1\]"),
        ([0, 1], r"missing: \[2\], repeated: \[\], unknown: \[\]"),
        ([0, 1, 2], "microbatch 0 of rank 1 has 7 tokens: expected at most max_tokens=6"),
    ],
)
def test_plans_of_arrays_are_checked(samples: list[int], message: str) -> None:
    flat = FlatMicrobatches.one_each([np.array(samples[:1]), np.array(samples[1:])], keep_empty=False)
    with pytest.raises(ValueError, match=message):
        Plan(flat, np.array([1, 2, 5]), np.ones(3), 6, "by-hand")


def test_one_microbatch_for_each_batch() -> None:
    none = np.zeros(0, dtype=np.int64)
    some = [np.array([2, 0]), none, np.array([1])]
    assert FlatMicrobatches.one_each(some, keep_empty=False) == [[[2, 0]], [], [[1]]]
    assert FlatMicrobatches.one_each(some, keep_empty=True) == [[[2, 0]], [[]], [[1]]]
    assert (
        repr(FlatMicrobatches.one_each(some, keep_empty=False))
        == "FlatMicrobatches([[[2, 0]], [], [[1]]], num_ranks=3)"
    )
    many = FlatMicrobatches.one_each([np.arange(100)] * 1000, keep_empty=False)
    assert repr(many).endswith("[[0, 1, 2, 3, 4, 5, ...]], ...], num_ranks=1000)")
    # Where there is nothing, nobody waits for a microbatch.
    assert FlatMicrobatches.one_each([none, none], keep_empty=True) == [[], []]
    assert microbatch_tokens([[], []], none, "padded").shape == (2, 0)


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(0, 3))
def test_batches_of_owners(owner: list[int], num_idle: int) -> None:
    num_ranks = 5 + num_idle
    found = batches(np.array(owner, dtype=np.int64), num_ranks)
    assert [mine.tolist() for mine in found] == [
        [item for item, each in enumerate(owner) if each == rank] for rank in range(num_ranks)
    ]
    assert owners(found).tolist() == owner
