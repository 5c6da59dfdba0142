"""Layer 1: no processes. The balancing policies: what each promises, and how they compare."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc.balance import (
    LinearCost,
    MinibatchSampler,
    Plan,
    PlannedMinibatch,
    QuadraticCost,
    bubble_rate,
    get_policy,
    policy_names,
    sample_lengths,
)
from odc.balance.policies.base import Job

LIMIT = 1000
COST = QuadraticCost(1e-3, 1.0)
NAMES = policy_names()
EQUAL_COUNTS = [name for name in NAMES if get_policy(name).equal_counts]
LENGTHS = st.lists(st.integers(1, LIMIT), max_size=30)
LONG_TAILED_COST = QuadraticCost(1.982122 / 32000**2, 2.611821 / 32000)


def make(name: str, lengths: list[int], world_size: int) -> Plan:
    return get_policy(name).plan(lengths, world_size=world_size, max_tokens=LIMIT, cost=COST)


def test_the_paper_policies_are_there() -> None:
    assert {"local-sort", "lb-micro", "lb-mini"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, world_size=st.integers(1, 6))
def test_plans_are_complete_and_within_limits(name: str, lengths: list[int], world_size: int) -> None:
    plan = make(name, lengths, world_size)
    assert plan.policy == name
    assert plan.world_size == world_size
    samples = sorted(s for mine in plan.microbatches for part in mine for s in part)
    assert samples == list(range(len(lengths)))
    assert all(sum(lengths[s] for s in part) <= LIMIT for mine in plan.microbatches for part in mine)
    assert plan == make(name, lengths, world_size)


@pytest.mark.parametrize("name", EQUAL_COUNTS)
@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, world_size=st.integers(1, 6))
def test_collectives_get_equal_counts(name: str, lengths: list[int], world_size: int) -> None:
    plan = make(name, lengths, world_size)
    assert len(set(plan.num_microbatches)) == 1
    for mine in plan.microbatches:
        empty = [not part for part in mine]
        assert empty == sorted(empty)  # empty ones last


@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, world_size=st.integers(1, 6))
def test_lb_micro_has_no_avoidable_empty_microbatch(lengths: list[int], world_size: int) -> None:
    plan = make("lb-micro", lengths, world_size)
    num_samples = [sum(map(len, mine)) for mine in plan.microbatches]
    assert max(num_samples) - min(num_samples) <= 1
    for mine, num in zip(plan.microbatches, num_samples, strict=True):
        assert sum(not part for part in mine) == max(0, len(mine) - num)


@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, world_size=st.integers(1, 6))
def test_lb_mini_never_has_an_empty_microbatch(lengths: list[int], world_size: int) -> None:
    plan = make("lb-mini", lengths, world_size)
    assert all(part for mine in plan.microbatches for part in mine)
    assert sum(not mine for mine in plan.microbatches) == max(0, world_size - len(lengths))


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=30)
@given(lengths=LENGTHS, order=st.permutations(range(4)))
def test_ranks_have_no_say(name: str, lengths: list[int], order: list[int]) -> None:
    plan = make(name, lengths, 4)
    relabelled = Plan([plan.microbatches[r] for r in order], plan.lengths, plan.costs, LIMIT, name)
    assert relabelled.makespan("odc") == plan.makespan("odc")
    assert relabelled.makespan("collective") == plan.makespan("collective")


@pytest.mark.parametrize("name", ["lb-micro", "lb-micro-global"])
@settings(deadline=None, max_examples=30)
@given(lengths=LENGTHS, data=st.data())
def test_no_other_order_of_microbatches_is_better(name: str, lengths: list[int], data: st.DataObject) -> None:
    plan = make(name, lengths, 3)
    shuffled = [data.draw(st.permutations(mine)) for mine in plan.microbatches]
    other = Plan(shuffled, plan.lengths, plan.costs, LIMIT, name)
    assert plan.makespan("collective") <= other.makespan("collective") * (1 + 1e-12)


def test_local_sort_by_hand() -> None:
    plan = make("local-sort", [10, 400, 30, 20, 999, 60, 5], 2)
    assert plan.microbatches == [[[4], [2], [0], [6]], [[1], [5], [3], []]]


def test_lb_mini_lets_the_rank_with_the_giant_do_nothing_else() -> None:
    plan = make("lb-mini", [1000, 300, 300, 300, 300, 300, 300], 2)
    giant = next(mine for mine in plan.microbatches if [0] in mine)
    other = next(mine for mine in plan.microbatches if [0] not in mine)
    assert len(giant) == 1
    assert len(other) == 2
    equal = make("lb-micro", [1000, 300, 300, 300, 300, 300, 300, 300], 2)
    assert equal.num_microbatches == (2, 2)


def test_lb_mini_with_fewer_samples_than_ranks() -> None:
    assert make("lb-mini", [7, 5], 4).num_microbatches == (1, 1, 0, 0)
    assert make("lb-mini", [], 2).microbatches == [[], []]


def test_lb_micro_global_runs_long_samples_together() -> None:
    """Two long samples that each fill a microbatch: at the same time, on different ranks."""
    lengths = [1000, 1000, 500, 500, 500, 500]
    assert make("lb-micro-global", lengths, 2).bubble_rate("collective") == 0.0


def test_lb_micro_global_evens_out_the_ranks() -> None:
    """No two of these share a microbatch; the rank with the costliest gets the cheapest."""
    policy = get_policy("lb-micro-global")
    plan = policy.plan([1000, 900, 800, 700], world_size=2, max_tokens=LIMIT, cost=LinearCost())
    assert plan.microbatches == [[[0], [3]], [[1], [2]]]


def test_order_of_the_policies_on_long_tailed_lengths() -> None:
    """As in Table 6 of the paper: packing beats sorting, LB-Mini beats LB-Micro."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(9.3, 0.7, 32 * 20), 500, 65536).astype(int).reshape(20, 32)
    plans = {
        name: [get_policy(name).plan(row, world_size=8, max_tokens=65536, cost=LONG_TAILED_COST) for row in lengths]
        for name in NAMES
    }
    rate = {(name, comm): bubble_rate(plans[name], comm) for name in NAMES for comm in ("odc", "collective")}
    gap = 0.02
    assert rate["lb-micro", "collective"] + gap < rate["local-sort", "collective"]
    assert rate["lb-micro-global", "collective"] + gap < rate["lb-micro", "collective"]
    assert rate["lb-mini", "odc"] + gap < rate["lb-micro", "odc"]
    assert rate["lb-mini", "odc"] + gap < min(rate[name, "collective"] for name in NAMES)
    for name in NAMES:
        assert rate[name, "odc"] <= rate[name, "collective"]


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match=r"policy 'lb-nano' is not known: expected one of none, local-sort, "):
        get_policy("lb-nano")


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_longer_than_the_limit(name: str) -> None:
    with pytest.raises(ValueError, match=r"1 of 3 samples .* max_tokens=1000 .* sample 1 with 1001 tokens"):
        make(name, [5, 1001, 7], 2)


@pytest.mark.parametrize("change", [{"world_size": 0}, {"max_tokens": 0}])
def test_bad_arguments(change: dict[str, int]) -> None:
    arguments = {"world_size": 2, "max_tokens": LIMIT, **change}
    (name,) = change
    with pytest.raises(ValueError, match=f"{name}=0"):
        get_policy("lb-mini").plan([1, 2], cost=COST, **arguments)


@pytest.mark.parametrize("lengths", [[0, 1], [-3], [1.5], [[1]]])
def test_bad_lengths(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="lengths"):
        make("lb-mini", lengths, 2)


def test_a_cost_model_that_misbehaves() -> None:
    def scalar(lengths: object, /) -> np.ndarray:
        return np.ones(1)

    def negative(lengths: object, /) -> np.ndarray:
        return -np.ones(2)

    for cost, message in ((scalar, "1 costs for 2 lengths"), (negative, "at least 0")):
        with pytest.raises(ValueError, match=message):
            get_policy("lb-mini").plan([1, 2], world_size=1, max_tokens=5, cost=cost)


def test_the_cost_model_decides() -> None:
    lengths = [100, 50, 50]
    linear = get_policy("lb-mini").plan(lengths, world_size=2, max_tokens=200, cost=LinearCost())
    assert linear.makespan() == 100.0


def samples_of(plan: Plan) -> list[list[int]]:
    """The samples of each rank, ascending."""
    return [sorted(sample for part in mine for sample in part) for mine in plan.microbatches]


def same_microbatches(a: Plan, b: Plan) -> bool:
    return [{frozenset(part) for part in mine} for mine in a.microbatches] == [
        {frozenset(part) for part in mine} for mine in b.microbatches
    ]


def with_microbatch_cost(plan: Plan, microbatch_cost: float) -> Plan:
    """The same microbatches where each of them costs something."""
    return Plan(plan.microbatches, plan.lengths, plan.costs, plan.max_tokens, plan.policy, microbatch_cost, plan.speeds)


def test_none_by_hand() -> None:
    plan = make("none", [10, 400, 30, 20, 999, 60, 5], 2)
    assert plan.microbatches == [[[0], [2], [4], [6]], [[1], [3], [5], []]]
    assert make("none", [3, 2], 3).microbatches == [[[0]], [[1]], [[]]]
    assert make("none", [], 2).microbatches == [[], []]


@settings(deadline=None, max_examples=100)
@given(lengths=LENGTHS, world_size=st.integers(1, 6), microbatch_cost=st.sampled_from([0.0, 1.0, 500.0]))
def test_lb_mini_equal_idles_no_more_than_lb_micro(lengths: list[int], world_size: int, microbatch_cost: float) -> None:
    """Equally many samples, like LB-Micro, but each rank packs for itself, like LB-Mini."""
    plan, micro = (
        get_policy(name).plan(
            lengths, world_size=world_size, max_tokens=LIMIT, cost=COST, microbatch_cost=microbatch_cost
        )
        for name in ("lb-mini-equal", "lb-micro")
    )
    num_samples = [len(mine) for mine in samples_of(plan)]
    assert max(num_samples) - min(num_samples) <= 1
    assert plan.makespan("odc") <= micro.makespan("odc") * (1 + 1e-12)
    if microbatch_cost == 0:
        assert plan.bubble_rate("odc") <= micro.bubble_rate("odc") + 1e-9
    assert all(part for mine in plan.microbatches for part in mine)
    assert sum(not mine for mine in plan.microbatches) == max(0, world_size - len(lengths))
    for mine in plan.microbatches:
        costs = [float(plan.costs[part].sum()) for part in mine]
        assert costs == sorted(costs, reverse=True)


def test_lb_mini_equal_packs_each_rank_by_itself() -> None:
    """The rank with the two giants needs two microbatches, the other one."""
    lengths = [1000, 1000, 10, 10]
    plan = get_policy("lb-mini-equal").plan(
        lengths, world_size=2, max_tokens=LIMIT, cost=LinearCost(), speeds=[100.0, 1.0]
    )
    assert samples_of(plan) == [[0, 1], [2, 3]]
    assert plan.num_microbatches == (2, 1)
    assert not get_policy("lb-mini-equal").equal_counts


@settings(deadline=None, max_examples=40)
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
@settings(deadline=None, max_examples=40)
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
        if name != "lb-mini" and name != "lb-micro-global":
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
        planned = policy.plan_batch(job, 4, seed)
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


@pytest.mark.parametrize("name", ["verl-native", "lb-micro", "none"])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_resumed_stream_is_the_tail_of_the_whole_one(name: str, drop_last: bool) -> None:
    num_samples = 2 * WORLD_SIZE * BATCH_SIZE + 3 * WORLD_SIZE * MINIBATCH_SIZE + 5
    sampler = stream(name, num_samples, drop_last=drop_last)
    sampler.set_epoch(1)
    whole = as_lists(sampler)
    per_batch = BATCH_SIZE // MINIBATCH_SIZE
    assert len(whole) == 2 * per_batch + 3 + (not drop_last)
    for first in (0, 1, per_batch - 1, per_batch, per_batch + 7, 2 * per_batch + 1, len(whole) - 1, len(whole)):
        assert as_lists(sampler.starting_at(first)) == whole[first:]


def test_verl_native_idles_more_than_verl_optimized() -> None:
    """Table 4 of the paper."""
    plans = {name: [m.plan for m in stream(name)] for name in ("verl-native", "verl-optimized")}
    for comm in ("odc", "collective"):
        native, optimized = (bubble_rate(plans[name], comm) for name in ("verl-native", "verl-optimized"))  # type: ignore[arg-type]
        assert optimized + 0.05 < native
    micro = [m.plan for m in stream("lb-micro")]
    assert all(same_microbatches(a, b) for a, b in zip(plans["verl-optimized"], micro, strict=True))


@pytest.mark.parametrize("name", ["verl-native", "lb-mini"])
def test_a_batch_that_is_no_multiple_of_the_minibatch(name: str) -> None:
    with pytest.raises(ValueError, match="batch_size=6: expected a multiple of minibatch_size=4"):
        stream(name, batch_size=6)
    with pytest.raises(ValueError, match="batch_size=0: expected an integer of at least 1"):
        stream(name, batch_size=0)


def test_only_two_level_policies_look_at_the_batch() -> None:
    assert [name for name in NAMES if get_policy(name).two_level] == ["verl-native"]
    assert as_lists(stream("lb-micro")) == as_lists(stream("lb-micro", batch_size=MINIBATCH_SIZE))
    whole_epoch = as_lists(stream("verl-native", batch_size=None))
    assert whole_epoch == as_lists(stream("verl-native", batch_size=2 * BATCH_SIZE))
    assert whole_epoch != as_lists(stream("verl-native"))


@pytest.mark.parametrize("name", ["lb-mini", "lb-mini-equal", "lb-micro", "verl-optimized", "verl-native"])
def test_a_slow_device_gets_less(name: str) -> None:
    lengths = sample_lengths("longalign", 256)
    speeds = [1.0, 1.0, 0.5, 1.0]
    plan = get_policy(name).plan(lengths, world_size=4, max_tokens=65536, cost=LONG_TAILED_COST, speeds=speeds)
    assert plan.speeds == tuple(speeds)
    loads = np.array([plan.costs[mine].sum() for mine in samples_of(plan)])
    assert loads[2] < 0.75 * loads[[0, 1, 3]].min()
    unaware = get_policy(name).plan(lengths, world_size=4, max_tokens=65536, cost=LONG_TAILED_COST)
    unaware = Plan(unaware.microbatches, unaware.lengths, unaware.costs, 65536, name, speeds=tuple(speeds))
    assert plan.makespan("odc") < 0.75 * unaware.makespan("odc")


@pytest.mark.parametrize("name", ["lb-mini", "lb-mini-equal"])
def test_many_samples_reach_the_bound_of_all_costs_over_all_speeds(name: str) -> None:
    speeds = [1.0, 0.8, 0.5, 1.0]
    plan = get_policy(name).plan(
        sample_lengths("longalign", 256), world_size=4, max_tokens=65536, cost=LONG_TAILED_COST, speeds=speeds
    )
    bound = plan.costs.sum() / sum(speeds)
    assert bound <= plan.makespan("odc") * (1 + 1e-12)
    assert plan.makespan("odc") < 1.001 * bound


@pytest.mark.parametrize("name", ["lb-mini", "lb-mini-equal"])
@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, speeds=st.permutations([0.5, 1.0, 1.0, 1.7]), microbatch_cost=st.sampled_from([0.0, 100.0]))
def test_relabelling_speeds_with_ranks_changes_nothing(
    name: str, lengths: list[int], speeds: list[float], microbatch_cost: float
) -> None:
    plan, relabelled = (
        get_policy(name).plan(
            lengths, world_size=4, max_tokens=LIMIT, cost=COST, speeds=given, microbatch_cost=microbatch_cost
        )
        for given in (sorted(speeds), speeds)
    )
    assert relabelled.makespan("odc") == pytest.approx(plan.makespan("odc"), rel=1e-12)
    by_speed = [sorted(zip(p.speeds or (), samples_of(p), strict=True)) for p in (plan, relabelled)]
    assert by_speed[0] == by_speed[1]


@pytest.mark.parametrize("name", ["lb-mini-equal", "lb-micro"])
@pytest.mark.parametrize("speeds", [(0.5, 1.0, 1.0, 1.7), (1.7, 1.0, 1.0, 0.5), (1.0, 1.7, 0.5, 1.0)])
def test_leftover_samples_mind_the_speeds(name: str, speeds: tuple[float, ...]) -> None:
    """Nine samples on four ranks: three go to one of the ranks, which must not be the slow one."""
    lengths = [539, 657, 443, 149, 931, 692, 41, 814, 732]
    plan = get_policy(name).plan(lengths, world_size=4, max_tokens=LIMIT, cost=COST, speeds=speeds)
    assert plan.makespan("odc") < 1.3 * plan.costs.sum() / sum(speeds)


@pytest.mark.parametrize("name", ["none", "local-sort"])
def test_policies_that_make_no_use_of_speeds(name: str) -> None:
    plan = get_policy(name).plan([5, 900, 20, 1], world_size=2, max_tokens=LIMIT, cost=COST, speeds=[1.0, 4.0])
    assert plan.microbatches == make(name, [5, 900, 20, 1], 2).microbatches
    np.testing.assert_allclose(plan.microbatch_times()[1], make(name, [5, 900, 20, 1], 2).microbatch_times()[1] / 4)


BAD_SPEEDS = [
    ([1.0], "speeds has 1 entries: expected one for each of the 2 devices"),
    ([1.0] * 3, "speeds has 3 entries"),
    ([1.0, 0.0], r"speeds\[1\] is 0: expected more than 0"),
    ([-1.0, 1.0], r"speeds\[0\] is -1.0"),
    ([float("inf"), 1.0], r"speeds\[0\] is inf"),
]
BAD_COSTS = [-1.0, float("nan"), float("inf"), True, "1"]


@pytest.mark.parametrize(("speeds", "message"), BAD_SPEEDS)
def test_bad_speeds(speeds: list[float], message: str) -> None:
    for name in NAMES:
        with pytest.raises(ValueError, match=message):
            get_policy(name).plan([1, 2], world_size=2, max_tokens=LIMIT, cost=COST, speeds=speeds)
    with pytest.raises(ValueError, match=message):
        MinibatchSampler([1, 2], minibatch_size=1, world_size=2, policy="lb-mini", cost=COST, speeds=speeds)
    with pytest.raises(ValueError, match=message):
        Plan([[[0]], [[1]]], np.array([1, 2]), np.ones(2), LIMIT, "by-hand", speeds=tuple(speeds))


@pytest.mark.parametrize("bad", BAD_COSTS)
def test_bad_microbatch_cost(bad: float) -> None:
    for name in NAMES:
        with pytest.raises(ValueError, match="microbatch_cost=.*: expected a finite number of at least 0"):
            get_policy(name).plan([1, 2], world_size=2, max_tokens=LIMIT, cost=COST, microbatch_cost=bad)
    with pytest.raises(ValueError, match="microbatch_cost="):
        MinibatchSampler([1, 2], minibatch_size=1, world_size=2, policy="none", cost=COST, microbatch_cost=bad)
    with pytest.raises(ValueError, match="microbatch_cost="):
        Plan([[[0]], [[1]]], np.array([1, 2]), np.ones(2), LIMIT, "by-hand", microbatch_cost=bad)


def test_microbatch_cost_and_speeds_by_hand() -> None:
    microbatches: list[list[list[int]]] = [[[0], [1]], [[2, 3], []], [[4]]]
    lengths, costs = np.ones(5, dtype=int), np.array([4.0, 1.0, 2.0, 3.0, 6.0])
    plan = Plan(microbatches, lengths, costs, 10, "by-hand", 0.5, (1.0, 0.5, 2.0))
    np.testing.assert_allclose(plan.microbatch_times(), [[4.5, 1.5], [5.5 / 0.5, 0.5 / 0.5], [6.5 / 2, 0.0]])
    assert plan.makespan("odc") == pytest.approx(12.0)
    assert plan.makespan("collective") == pytest.approx(11.0 + 1.5)
    work = 6.0 + 12.0 + 3.25
    assert plan.bubble_rate("odc") == pytest.approx(1 - work / (3 * 12.0))
    assert plan.bubble_rate("collective") == pytest.approx(1 - work / (3 * 12.5))
    free = Plan(microbatches, lengths, costs, 10, "by-hand", 0.0, (1.0, 0.5, 2.0))
    assert free.makespan("odc") == pytest.approx(10.0)
    assert plan != free
    assert plan == with_microbatch_cost(free, 0.5)
    assert plan != Plan(microbatches, lengths, costs, 10, "by-hand", 0.5)
    assert "rank 1: 2 samples in 2 microbatches (1 empty), 2 tokens, 169% of the mean time" in plan.explain()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("speeds", [None, [1.0, 2.0]])
def test_a_cost_per_microbatch_of_no_samples(name: str, speeds: list[float] | None) -> None:
    plan = get_policy(name).plan([], world_size=2, max_tokens=LIMIT, cost=COST, microbatch_cost=2.0, speeds=speeds)
    assert plan.microbatch_times().dtype == np.float64
    assert plan.makespan("odc") == plan.makespan("collective") == plan.bubble_rate() == 0.0


def test_only_empty_microbatches() -> None:
    plan = Plan([[[]], [[], []]], np.zeros(0, dtype=int), np.zeros(0), LIMIT, "by-hand", microbatch_cost=2.0)
    np.testing.assert_array_equal(plan.microbatch_times(), [[2.0, 0.0], [2.0, 2.0]])
    assert plan.bubble_rate("odc") == pytest.approx(0.25)


def test_peak_tokens() -> None:
    plan = Plan([[[0], [1]], [[2, 3], []]], np.array([5, 7, 4, 4]), np.ones(4), 10, "by-hand")
    assert plan.peak_tokens == 8
    assert make("lb-mini", [], 2).peak_tokens == 0
    assert make("none", [3, 900, 40], 2).peak_tokens == 900


@pytest.mark.parametrize("name", ["lb-mini", "lb-mini-equal"])
@settings(deadline=None, max_examples=80)
@given(
    lengths=LENGTHS,
    world_size=st.integers(1, 5),
    microbatch_cost=st.floats(0.1, 5000.0),
    speeds=st.none() | st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=5, max_size=5),
)
def test_knowing_the_cost_of_a_microbatch_is_never_worse(
    name: str, lengths: list[int], world_size: int, microbatch_cost: float, speeds: list[float] | None
) -> None:
    ignoring, knowing = (
        get_policy(name).plan(
            lengths,
            world_size=world_size,
            max_tokens=LIMIT,
            cost=COST,
            speeds=None if speeds is None else speeds[:world_size],
            microbatch_cost=cost,
        )
        for cost in (0.0, microbatch_cost)
    )
    assert knowing.microbatch_cost == microbatch_cost
    assert knowing.makespan("odc") <= with_microbatch_cost(ignoring, microbatch_cost).makespan("odc") * (1 + 1e-12)


def test_knowing_the_cost_of_a_microbatch_helps() -> None:
    """Many short samples cost as much as few long ones, but need fewer tokens per unit of cost."""
    lengths = [1000] * 2 + [100] * 130
    cost = QuadraticCost(1.0, 0.0)
    plans = [
        get_policy("lb-mini").plan(lengths, world_size=2, max_tokens=LIMIT, cost=cost, microbatch_cost=microbatch_cost)
        for microbatch_cost in (0.0, 1e6)
    ]
    ignoring = with_microbatch_cost(plans[0], 1e6)
    assert plans[1].makespan("odc") <= ignoring.makespan("odc")
    rng = np.random.default_rng(0)
    gains = []
    for _ in range(20):
        row = np.clip(rng.lognormal(4.5, 1.2, 64), 1, LIMIT).astype(int)
        ignoring, knowing = (
            get_policy("lb-mini").plan(row, world_size=4, max_tokens=LIMIT, cost=cost, microbatch_cost=fixed)
            for fixed in (0.0, 5e5)
        )
        gains.append(with_microbatch_cost(ignoring, 5e5).makespan("odc") / knowing.makespan("odc"))
    assert min(gains) >= 1 - 1e-12
    assert np.mean(gains) > 1.02


def test_a_planned_minibatch_names_samples_of_the_dataset() -> None:
    plan = Plan([[[1], [0]], [[2], []]], np.array([5, 6, 7]), np.ones(3), 10, "by-hand")
    minibatch = PlannedMinibatch(np.array([40, 10, 30]), plan)
    assert minibatch.of_rank(0) == [[10], [40]]
    assert minibatch.of_rank(1) == [[30], []]
