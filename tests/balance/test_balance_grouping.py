"""Layer 1: no processes. Groups of a pool of samples, against the published algorithms written out step by step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc.balance import (
    LengthSketch,
    align_groups,
    best_fit_batches,
    pool_sort,
    sample_lengths,
    sketch_lengths,
    token_budget_groups,
)
from odc.balance.grouping.methods import Grouping
from odc.balance.grouping.rounds import AlignedRounds, Entry, FreeRounds, Rounds, Step

POOLS = st.lists(st.integers(1, 60), max_size=40)
LIMITS = st.integers(1, 100)


def longest(lengths: Sequence[int], group: Sequence[int]) -> int:
    return max(lengths[i] for i in group)


# Token budget (ODB)


def groups_by_hand(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Section 2.2 and appendix D of the paper, a sample at a time."""
    ascending = sorted(range(len(lengths)), key=lambda i: lengths[i])
    groups: list[list[int]] = []
    group: list[int] = []
    threshold = 1
    for sample in reversed(ascending):
        group.insert(0, sample)
        if len(group) >= threshold:
            groups.insert(0, group)
            threshold, group = max(max_tokens // lengths[sample], 1), []
    return [group, *groups] if group else groups


def test_the_example_of_the_paper() -> None:
    assert token_budget_groups([100, 200, 500, 800], 1000) == [[0, 1], [2], [3]]
    assert token_budget_groups([800, 100, 500, 200], 1000) == [[1, 3], [2], [0]]


@settings(deadline=None)
@given(lengths=POOLS, max_tokens=LIMITS)
def test_groups_are_those_of_the_paper(lengths: list[int], max_tokens: int) -> None:
    groups = token_budget_groups(lengths, max_tokens)
    assert groups == groups_by_hand(lengths, max_tokens)
    assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * longest(lengths, group) <= max_tokens
        assert [(lengths[i], i) for i in group] == sorted((lengths[i], i) for i in group)


# Alignment (ODB's algorithm 1)


THREE, ONE = [[0, 1], [2], [3]], [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("groups", "capacities", "aligned", "returned"),
    [
        ([THREE, ONE, []], [0, 0, 0], [THREE, [[0, 1], [2], [3]], []], [[], [], []]),
        # Two at most: the larger groups stay, of equal ones the earlier.
        ([THREE, ONE], [2, 0], [[[0, 1], [2]], [[0, 1, 2], [3]]], [[3], []]),
        # A rank with two samples can have two groups.
        ([THREE, [[7, 5]]], [0, 9], [[[0, 1], [2]], [[7], [5]]], [[3], []]),
        # The last group that can be split is, each time; what was split off stands behind it.
        (
            [[[0], [1], [2], [3]], [[0, 1, 2], [3], [4]]],
            [0, 0],
            [[[0], [1], [2], [3]], [[0, 1], [2], [3], [4]]],
            [[], []],
        ),
        ([[], []], [0, 0], [[], []], [[], []]),
    ],
)
def test_alignment_by_hand(
    groups: list[list[list[int]]],
    capacities: list[int],
    aligned: list[list[list[int]]],
    returned: list[list[int]],
) -> None:
    assert align_groups(groups, capacities) == (aligned, returned)


RANKS = st.lists(
    st.tuples(st.lists(st.integers(1, 5), max_size=6), st.integers(0, 8)),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=120)
@given(ranks=RANKS)
def test_alignment_keeps_every_sample_and_gives_each_rank_as_many(ranks: list[tuple[list[int], int]]) -> None:
    groups: list[list[list[int]]] = []
    for sizes, _ in ranks:
        samples = itertools.count()
        groups.append([[next(samples) for _ in range(size)] for size in sizes])
    capacities = [capacity for _, capacity in ranks]
    before = [[list(group) for group in mine] for mine in groups]
    aligned, returned = align_groups(groups, capacities)
    assert groups == before
    active = [rank for rank, mine in enumerate(groups) if mine]
    bounds = [capacities[rank] for rank in active if capacities[rank]]
    bounds += [sum(map(len, groups[rank])) for rank in active]
    target = min([max((len(groups[rank]) for rank in active), default=0), *bounds])
    for rank, mine in enumerate(aligned):
        assert len(mine) == (target if rank in active else 0)
        assert all(mine)
        given_ = sorted(itertools.chain(*groups[rank]))
        assert sorted([*itertools.chain(*mine), *returned[rank]]) == given_
        if len(groups[rank]) > target:
            sizes = sorted((len(group) for group in groups[rank]), reverse=True)
            assert sorted(map(len, mine), reverse=True) == sizes[:target]
            assert [group for group in groups[rank] if group in mine] == mine
        else:
            assert list(itertools.chain(*mine)) == list(itertools.chain(*groups[rank]))  # split, not moved
            assert not returned[rank]


# Best fit from a pool (cosmos)


def best_fit_by_hand(lengths: Sequence[int], max_tokens: int, pool_size: int, strategy: str) -> list[list[int]]:
    """A candidate at a time, as the description says."""
    stream, pool, batches = list(range(len(lengths))), [], []
    while stream or pool:
        while stream and len(pool) < pool_size:
            pool.append(stream.pop(0))
        batch = [pool.pop(0)]
        while True:
            best, score = None, (0, 0)
            for sample in pool:
                if strategy == "pack":
                    if sum(lengths[i] for i in (*batch, sample)) <= max_tokens:
                        best = sample
                        break
                    continue
                area = (len(batch) + 1) * longest(lengths, [*batch, sample])
                distance = abs(lengths[sample] - longest(lengths, batch)) if strategy == "prefer-closest" else 0
                if area <= max_tokens and (best is None or (area, distance) < score):
                    best, score = sample, (area, distance)
            if best is None:
                break
            pool.remove(best)
            batch.append(best)
        batches.append(batch)
    return batches


@pytest.mark.parametrize("strategy", ["prefer-closest", "prefer-first", "pack"])
@settings(deadline=None)
@given(lengths=POOLS, max_tokens=LIMITS, pool_size=st.integers(1, 12))
def test_best_fit_is_that_of_the_description(
    strategy: str, lengths: list[int], max_tokens: int, pool_size: int
) -> None:
    batches = best_fit_batches(lengths, max_tokens, pool_size, strategy)  # type: ignore[arg-type]
    assert batches == best_fit_by_hand(lengths, max_tokens, pool_size, strategy)
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    waiting = set(range(len(lengths)))
    for batch in batches:
        assert batch[0] == min(waiting)  # the oldest
        waiting -= set(batch)


def test_strategies_differ_where_they_should() -> None:
    lengths = [10, 3, 3, 9, 4, 12, 1]
    assert best_fit_batches(lengths, 20, 4) == [[0, 3], [1, 2, 4], [5], [6]]
    assert best_fit_batches(lengths, 20, 4, "prefer-first") == [[0, 1], [2, 4], [3, 6], [5]]
    assert best_fit_batches(lengths, 20, 4, "pack") == [[0, 1, 2], [3, 4, 6], [5]]


# Pool sort


@settings(deadline=None)
@given(lengths=POOLS, pool_size=st.integers(1, 12))
def test_pool_sort_is_that_of_the_published_loop(lengths: list[int], pool_size: int) -> None:
    expected: list[int] = []
    pool: list[int] = []
    for index in range(len(lengths)):
        pool.append(index)
        if len(pool) >= pool_size or index == len(lengths) - 1:
            pool.sort(key=lambda i: lengths[i])
            random.Random(42 + index).shuffle(pool)
            expected += pool
            pool.clear()
    assert pool_sort(lengths, pool_size) == expected


@settings(deadline=None)
@given(lengths=POOLS, pool_size=st.integers(1, 12), batch_size=st.integers(1, 5))
def test_batches_of_a_sorted_pool_stay_together(lengths: list[int], pool_size: int, batch_size: int) -> None:
    order = pool_sort(lengths, pool_size, batch_size)
    for start in range(0, len(lengths), pool_size):
        mine = order[start : start + pool_size]
        ascending = sorted(range(start, min(start + pool_size, len(lengths))), key=lambda i: lengths[i])
        assert sorted(mine) == sorted(ascending)
        whole = len(ascending) // batch_size * batch_size
        blocks = [mine[at : at + batch_size] for at in range(0, whole, batch_size)]
        assert sorted(blocks) == sorted(ascending[at : at + batch_size] for at in range(0, whole, batch_size))
        assert mine[whole:] == ascending[whole:]
    assert pool_sort(lengths, pool_size, batch_size, shuffle=False)[:pool_size] == sorted(
        range(min(pool_size, len(lengths))), key=lambda i: lengths[i]
    )


def test_ranks_have_samples_of_one_length_at_one_time() -> None:
    """What it is for: the i-th samples of 8 ranks differ by little, and without sorting by much."""
    rng = np.random.default_rng(0)
    ranks = [rng.lognormal(7, 0.8, 1000).astype(int) + 1 for _ in range(8)]
    at_once = np.array([lengths[pool_sort(lengths, 1000)] for lengths in ranks])
    bubble, plain = (1 - table.mean(axis=0).sum() / table.max(axis=0).sum() for table in (at_once, np.array(ranks)))
    assert bubble < 0.12 < 0.4 < plain


# Is it worth it? (ODB, section 4 and appendix K)


def test_the_features_of_the_papers_data_sets() -> None:
    """Table 10 and the captions: CV 0.48, 0.29 and 1.00; the two anchors of equation (5)."""
    cvs = {law: sketch_lengths(sample_lengths(law, 4000), 12288).cv for law in ("ultrachat", "llava", "sharegpt4o")}
    assert cvs == {
        "ultrachat": pytest.approx(0.48, abs=0.03),
        "llava": pytest.approx(0.29, abs=0.03),
        "sharegpt4o": pytest.approx(1.0, abs=0.05),
    }
    assert LengthSketch(1, 1.0, 1.00, 0.01).odb_speedup == pytest.approx(2.47, abs=0.01)
    assert LengthSketch(1, 1.0, 0.80, 0.37).odb_speedup == pytest.approx(4.43, abs=0.01)


def test_a_sketch_by_hand() -> None:
    found = sketch_lengths([1, 3], 8)
    assert (found.num_samples, found.mean, found.cv, found.short_fraction) == (2, 2.0, 0.5, 0.5)
    assert found.is_promising
    assert not sketch_lengths([3, 3], 8).is_promising


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: token_budget_groups([3, 0], 10), r"lengths\[1\] is 0: expected at least 1"),
        (lambda: best_fit_batches([3, 0], 10, 4), r"lengths\[1\] is 0: expected at least 1"),
        (lambda: token_budget_groups([3], 0), "max_tokens=0: expected an integer of at least 1"),
        (lambda: best_fit_batches([3], 0, 4), "max_tokens=0: expected an integer of at least 1"),
        (lambda: best_fit_batches([3], 20, 0), "pool_size=0"),
        (
            lambda: best_fit_batches([3], 20, 4, "closest"),  # type: ignore[arg-type]
            "strategy='closest': expected one of 'prefer-closest', 'prefer-first', 'pack'",
        ),
        (lambda: align_groups([[[0]]], []), "0 capacities for 1 ranks"),
        (lambda: align_groups([[[0]]], [-1]), r"capacities\[0\]=-1: expected an integer of at least 0"),
        (lambda: align_groups([[[0], []]], [0]), "group 1 of rank 0 has no sample"),
        (lambda: pool_sort([1], 0), "pool_size=0"),
        (lambda: pool_sort([1], 1, 0), "batch_size=0"),
        (lambda: sketch_lengths([], 8), "there are no lengths"),
        (lambda: sketch_lengths([1], 0), "max_tokens=0"),
    ],
)
def test_bad_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def rounds_of(kind: type[Rounds], world_size: int, shuffle: bool) -> list[list[list[Step]]]:
    """Of each rank the steps of each of three rounds, from pools of 512 samples."""
    lengths = sample_lengths("sharegpt4o", 3 * 512 * world_size)
    grouping = Grouping("token-budget", 16_384, pool_size=512, shuffle=shuffle)
    ranks = [kind(grouping, rank, world_size) for rank in range(world_size)]
    found: list[list[list[Step]]] = [[] for _ in ranks]
    left = [
        [Entry(i, int(lengths[i]), 1, 0.0) for i in range(rank, lengths.size, world_size)] for rank in range(world_size)
    ]
    for _ in range(3):
        for mine, entries in zip(ranks, left, strict=True):
            number = 512 - len(mine.pool)
            mine.add(entries[:number])
            del entries[:number]
        offers = np.stack([mine.offer(False) for mine in ranks])
        for steps, mine in zip(found, ranks, strict=True):
            steps.append(mine.plan(offers))
    return found


@pytest.mark.parametrize(("kind", "world_size"), [(AlignedRounds, 1), (AlignedRounds, 4), (FreeRounds, 1)])
def test_groups_of_a_round_do_not_come_from_short_to_long(kind: type[Rounds], world_size: int) -> None:
    """Unless asked to. All ranks have the same order, so each step is the one that it was."""
    as_odb, mixed = (rounds_of(kind, world_size, shuffle) for shuffle in (False, True))
    correlations = []
    for steps in itertools.chain.from_iterable(as_odb[:1]):
        means = [np.mean([entry.length for entry in step.microbatches[0]]) for step in steps]
        assert means == sorted(means)
    for steps in itertools.chain.from_iterable(mixed[:1]):
        means = [np.mean([entry.length for entry in step.microbatches[0]]) for step in steps]
        correlations.append(np.corrcoef(means, range(len(means)))[0, 1])
    assert abs(np.mean(correlations)) < 0.5
    # Step by step, what all ranks have: the same groups beside each other.
    places = [
        sorted(
            tuple(entry.place for steps in per_rank for entry in steps[0][at].microbatches[0])
            for at in range(len(per_rank[0][0]))
        )
        for per_rank in (as_odb, mixed)
    ]
    assert places[0] == places[1]
