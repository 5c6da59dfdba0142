"""Layer 1: no processes. Batches that are cut into minibatches: the two-level policies, epochs, and resuming."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import some_of
from planning import (
    COST,
    EQUAL_NUMBERS,
    LENGTHS,
    LIMIT,
    LONG_TAILED_COST,
    NAMES,
    same_microbatches,
    samples_of,
)

from odc.balance import (
    LinearCost,
    MinibatchSampler,
    bubble_rate,
    get_policy,
    sample_lengths,
)
from odc.balance.policies import micro
from odc.balance.policies.base import Job


@settings(deadline=None, max_examples=20)
@given(
    lengths=LENGTHS,
    speeds=st.none() | st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=3, max_size=3),
    microbatch_cost=st.sampled_from([0.0, 10.0]),
)
def test_verl_policies_plan_one_minibatch_like_lb_micro(
    lengths: list[int], speeds: list[float] | None, microbatch_cost: float
) -> None:
    plans = [
        get_policy(name).plan(
            lengths, world_size=3, max_tokens=LIMIT, cost=COST, speeds=speeds, microbatch_cost=microbatch_cost
        )
        for name in ("lb-micro", "verl-optimized", "verl-native")
    ]
    for plan in plans[1:]:
        assert plan.microbatches == plans[0].microbatches
        assert (plan.microbatch_cost, plan.speeds) == (plans[0].microbatch_cost, plans[0].speeds)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=20)
@given(
    lengths=st.lists(st.integers(1, LIMIT), min_size=1, max_size=40),
    world_size=st.integers(1, 4),
    minibatch_size=st.integers(1, 4),
    per_batch=st.none() | st.integers(1, 3),
    speeds=st.none() | st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=4, max_size=4),
    shuffle=st.booleans(),
    epoch=st.integers(0, 2),
)
def test_an_epoch_has_every_sample_once(
    name: str,
    lengths: list[int],
    world_size: int,
    minibatch_size: int,
    per_batch: int | None,
    speeds: list[float] | None,
    shuffle: bool,
    epoch: int,
) -> None:
    sampler = MinibatchSampler(
        lengths,
        minibatch_size=minibatch_size,
        world_size=world_size,
        policy=name,
        cost=COST,
        max_tokens=LIMIT,
        batch_size=None if per_batch is None else per_batch * minibatch_size,
        speeds=None if speeds is None else speeds[:world_size],
        shuffle=shuffle,
        drop_last=False,
    )
    sampler.set_epoch(epoch)
    minibatches = list(sampler)
    assert len(minibatches) == len(sampler)
    assert sorted(s for minibatch in minibatches for s in minibatch.samples.tolist()) == list(range(len(lengths)))
    for minibatch in minibatches:
        plan = minibatch.plan
        np.testing.assert_array_equal(plan.lengths, np.array(lengths)[minibatch.samples])
        np.testing.assert_allclose(plan.costs, COST(plan.lengths))
        by_rank = [minibatch.of_rank(rank) for rank in range(world_size)]
        assert sorted(s for mine in by_rank for part in mine for s in part) == sorted(minibatch.samples.tolist())
        assert all(sum(lengths[s] for s in part) <= LIMIT for mine in by_rank for part in mine)
        num_samples = [len(mine) for mine in samples_of(plan)]
        if name in EQUAL_NUMBERS:
            assert max(num_samples) <= minibatch_size
        if get_policy(name).equal_counts:
            assert len(set(plan.num_microbatches)) == 1
    assert {m.plan.num_samples for m in minibatches[:-1]} <= {sampler.global_size}
    if not get_policy(name).two_level and not shuffle:
        assert [s for m in minibatches for s in m.samples.tolist()] == list(range(len(lengths)))


WORLD_SIZE, MINIBATCH_SIZE, BATCH_SIZE = 4, 4, 64


def stream(policy: str, num_samples: int = 2 * WORLD_SIZE * BATCH_SIZE, **options: object) -> MinibatchSampler:
    arguments: dict[str, object] = {"batch_size": BATCH_SIZE, "max_tokens": 65536, **options}
    return MinibatchSampler(
        sample_lengths("longalign", num_samples),
        minibatch_size=MINIBATCH_SIZE,
        world_size=WORLD_SIZE,
        policy=policy,
        cost=LONG_TAILED_COST,
        **arguments,  # type: ignore[arg-type]
    )


def as_lists(minibatches: object) -> list[tuple[list[int], list[list[list[int]]]]]:
    return [(m.samples.tolist(), m.plan.microbatches) for m in minibatches]  # type: ignore[attr-defined]


def test_verl_native_balances_the_batch_and_cuts_it_per_rank() -> None:
    minibatches = list(stream("verl-native"))
    per_batch = BATCH_SIZE // MINIBATCH_SIZE
    assert len(minibatches) == 2 * per_batch
    order = [m.samples.tolist() for m in stream("none")]  # what is in which batch has nothing to do with the policy
    for start in (0, per_batch):
        batch = minibatches[start : start + per_batch]
        samples = list(itertools.chain(*(m.samples.tolist() for m in batch)))
        assert sorted(samples) == sorted(itertools.chain(*order[start : start + per_batch]))
        totals = np.zeros(WORLD_SIZE)
        within = []
        for minibatch in batch:
            assert [len(mine) for mine in samples_of(minibatch.plan)] == [MINIBATCH_SIZE] * WORLD_SIZE
            assert len(set(minibatch.plan.num_microbatches)) == 1
            loads = minibatch.plan.microbatch_times().sum(axis=1)
            totals += loads
            within.append(loads.max() / loads.mean())
        assert totals.max() / totals.mean() < 1.001
        assert np.mean(within) > 1.1  # but the ranks' shares of a minibatch are not balanced


def test_verl_native_minds_the_speeds() -> None:
    """Each rank's share of the batch is for its own speed."""
    speeds = np.array([1.0, 0.8, 0.6, 1.0])
    minibatches = list(stream("verl-native", WORLD_SIZE * BATCH_SIZE, speeds=speeds))
    totals = np.sum([[m.plan.costs[mine].sum() for mine in samples_of(m.plan)] for m in minibatches], axis=0)
    np.testing.assert_allclose(totals, totals.sum() * speeds / speeds.sum(), rtol=0.005)


def test_verl_native_lets_every_rank_shuffle_its_share() -> None:
    """Differently in each batch, and differently for each seed: else every rank would start with its longest."""
    policy, lengths = get_policy("verl-native"), np.arange(1, 65)
    job = Job.create(lengths, world_size=2, max_tokens=1000, cost=LinearCost())

    def cut(seed: int) -> list[list[list[int]]]:
        planned = list(policy.plan_batch(job, 4, seed))
        return [[sorted(itertools.chain(*m.of_rank(rank))) for m in planned] for rank in range(2)]

    assert cut(0) == cut(0)
    assert cut(0) != cut(1)
    shares = [[sorted(itertools.chain(*mine)) for mine in cut(seed)] for seed in (0, 1)]
    assert shares[0] == shares[1]  # the balance over the ranks is not random
    for mine in cut(0):
        in_order = list(itertools.chain(*mine))
        assert in_order != sorted(in_order)
        assert abs(np.corrcoef(np.arange(len(in_order)), in_order)[0, 1]) < 0.6


def test_a_batch_of_one_minibatch_is_balanced_like_lb_micro() -> None:
    native = list(stream("verl-native", 256, batch_size=MINIBATCH_SIZE))
    micro = list(stream("lb-micro", 256))
    assert len(native) == len(micro)
    for a, b in zip(native, micro, strict=True):
        ours, theirs = ([sorted(itertools.chain(*m.of_rank(rank))) for rank in range(WORLD_SIZE)] for m in (a, b))
        if a.plan.num_samples % WORLD_SIZE == 0:
            assert sorted(ours) == sorted(theirs)
        for comm in ("odc", "collective"):
            assert a.plan.makespan(comm) == pytest.approx(b.plan.makespan(comm), rel=1e-9)  # type: ignore[arg-type]


@pytest.mark.parametrize(("drop_last", "name"), some_of([True, False], ["verl-native", "lb-micro", "none"]))
def test_a_resumed_stream_is_the_tail_of_the_whole_one(name: str, drop_last: bool) -> None:
    num_samples = 2 * WORLD_SIZE * BATCH_SIZE + 3 * WORLD_SIZE * MINIBATCH_SIZE + 5
    sampler = stream(name, num_samples, drop_last=drop_last)
    sampler.set_epoch(1)
    whole = as_lists(sampler)
    per_batch = BATCH_SIZE // MINIBATCH_SIZE
    assert len(whole) == 2 * per_batch + 3 + (not drop_last)
    for first in (0, 1, per_batch - 1, per_batch, per_batch + 7, 2 * per_batch + 1, len(whole) - 1, len(whole)):
        assert as_lists(sampler.starting_at(first)) == whole[first:]


@pytest.mark.parametrize("name", ["verl-native", "lb-micro"])
def test_minibatches_are_packed_when_they_are_due(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    pack_together = micro.pack_together

    def count(lengths: Sequence[np.ndarray], costs: Sequence[np.ndarray], max_tokens: int) -> object:
        packed.append(sum(mine.size for mine in lengths))
        return pack_together(lengths, costs, max_tokens)

    monkeypatch.setattr(micro, "pack_together", count)
    sampler = stream(name, batch_size=None)
    minibatches = sampler.starting_at(0)
    assert not packed
    next(minibatches)
    assert packed == [WORLD_SIZE * MINIBATCH_SIZE]
    packed.clear()
    assert len(list(sampler.starting_at(len(sampler) - 2))) == 2
    assert packed == [WORLD_SIZE * MINIBATCH_SIZE] * 2


@pytest.mark.parametrize("name", ["verl-native", "lb-mini"])
def test_a_batch_from_a_later_minibatch_on(name: str) -> None:
    policy, lengths = get_policy(name), np.arange(1, 60)
    job = Job.create(lengths, world_size=2, max_tokens=1000, cost=LinearCost())
    whole = [(m.samples.tolist(), m.plan.microbatches) for m in policy.plan_batch(job, 4, 7)]
    assert len(whole) == 8
    for first in range(10):
        tail = [(m.samples.tolist(), m.plan.microbatches) for m in policy.plan_batch(job, 4, 7, first=first)]
        assert tail == whole[first:]


def test_verl_native_idles_more_than_verl_optimized() -> None:
    """Table 4 of the paper."""
    plans = {name: [m.plan for m in stream(name)] for name in ("verl-native", "verl-optimized")}
    for comm in ("odc", "collective"):
        native, optimized = (bubble_rate(plans[name], comm) for name in ("verl-native", "verl-optimized"))  # type: ignore[arg-type]
        assert optimized + 0.05 < native
    micro = [m.plan for m in stream("lb-micro")]
    assert all(same_microbatches(a, b) for a, b in zip(plans["verl-optimized"], micro, strict=True))


@pytest.mark.parametrize("name", ["verl-native", "lb-mini"])
@pytest.mark.parametrize(
    ("batch_size", "expected"), [(6, "a multiple of minibatch_size=4"), (0, "an integer of at least 1")]
)
def test_a_batch_that_is_no_multiple_of_the_minibatch(name: str, batch_size: int, expected: str) -> None:
    with pytest.raises(ValueError, match=f"batch_size={batch_size}: expected {expected}"):
        stream(name, batch_size=batch_size)


def test_only_two_level_policies_look_at_the_batch() -> None:
    assert [name for name in NAMES if get_policy(name).two_level] == ["verl-native"]
    assert as_lists(stream("lb-micro")) == as_lists(stream("lb-micro", batch_size=MINIBATCH_SIZE))
    whole_epoch = as_lists(stream("verl-native", batch_size=None))
    assert whole_epoch == as_lists(stream("verl-native", batch_size=2 * BATCH_SIZE))
    assert whole_epoch != as_lists(stream("verl-native"))
