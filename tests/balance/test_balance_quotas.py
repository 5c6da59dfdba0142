"""Layer 1: no processes. What ranks take for a minibatch of a stream, so that all spend the same until its end."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc.balance import sample_lengths
from odc.balance.grouping.methods import Grouping
from odc.balance.grouping.quota import Offer, Quotas, even_out, fill_quota, plan_last
from odc.balance.grouping.rounds import QuotaRounds
from odc.bench.batching.streamed import stream_epoch
from odc.bench.planning.paper_costs import paper_cost

COSTS = st.lists(st.floats(0.01, 10.0), max_size=9)


@settings(deadline=None, max_examples=120)
@given(costs=COSTS, quota=st.floats(0.0, 30.0), usual=st.floats(0.0, 30.0))
def test_a_quota_is_kept_and_the_oldest_sample_goes(costs: list[float], quota: float, usual: float) -> None:
    chosen = fill_quota(costs, quota, usual)
    assert chosen == sorted(set(chosen))
    assert chosen[:1] == ([0] if costs else [])
    total = sum(costs[i] for i in chosen)
    assert total <= quota * (1 + 1e-12) or chosen == [0]
    if costs and total <= quota:  # nothing that is left would fit as well
        assert all(total + costs[i] > quota * (1 - 1e-12) for i in range(len(costs)) if i not in chosen)


@settings(deadline=None, max_examples=80)
@given(costs=st.lists(st.floats(0.1, 1.0), min_size=1, max_size=8), factor=st.floats(0.1, 2.4))
def test_small_quotas_are_filled_as_well_as_they_can_be(costs: list[float], factor: float) -> None:
    """Up to three samples besides the oldest: then the choice is the best of all."""
    quota = costs[0] + factor * float(np.mean(costs))
    best = max(
        sum(costs[i] for i in others)
        for count in range(4)
        for others in itertools.combinations(range(1, len(costs)), count)
        if sum(costs[i] for i in others) <= quota - costs[0]
    )
    assert sum(costs[i] for i in fill_quota(costs, quota)) >= costs[0] + best - 1e-9


@pytest.mark.parametrize("law", ["longalign", "sharegpt4o", "llava"])
def test_pools_fill_their_quotas_to_a_thousandth(law: str) -> None:
    """Pools of 256 and minibatches of about four samples."""
    missed = []
    for seed in range(30):
        lengths = sample_lengths(law, 256, seed).astype(float) / 32000
        costs = 1.982122 * lengths**2 + 2.611821 * lengths
        quota = max(4 * costs.mean(), costs[0])
        missed.append(1 - costs[fill_quota(costs, quota)].sum() / quota)
    assert np.mean(missed) < 1e-3
    assert max(missed) < 1e-2


def test_a_large_quota_goes_to_what_would_ask_for_one_later() -> None:
    costs = [1.0, 1.0, 1.0, 7.0, 1.0, 9.0, 8.0]
    for quota, usual, expected in (
        (10.0, 6.0, [1.0, 1.0, 1.0, 7.0]),
        (17.0, 6.0, [1.0, 7.0, 9.0]),
        (3.0, 6.0, [1.0] * 3),
    ):
        chosen = fill_quota(costs, quota, usual)  # the older of the dear ones first, as far as they fit
        assert sorted(costs[i] for i in chosen) == expected


@settings(deadline=None, max_examples=80)
@given(costs=COSTS, quota=st.floats(0.0, 30.0), usual=st.floats(0.0, 30.0), most=st.integers(0, 5))
def test_a_quota_may_be_of_few_samples(costs: list[float], quota: float, usual: float, most: int) -> None:
    chosen = fill_quota(costs, quota, usual, most)
    assert len(chosen) <= most
    assert chosen[:1] == ([0] if costs and most else [])
    assert sum(costs[i] for i in chosen) <= quota * (1 + 1e-12) or chosen == [0]
    if len(fill_quota(costs, quota, usual)) <= most - 3:
        assert chosen == fill_quota(costs, quota, usual)


def test_quotas_by_hand() -> None:
    quotas = Quotas(4)
    # 12 samples of cost 18 seen: four of them cost 6.
    offers = [Offer(1.0, 10.0, 6, 10.0, 6), Offer(2.0, 8.0, 6, 8.0, 6)]
    assert quotas.grant(offers) == (pytest.approx(6.0), pytest.approx(6.0), [6, 6], [0, 0])
    # The dearest of the oldest samples must go, and what the ranks spend more on average comes off the next minibatch,
    assert quotas.grant([Offer(8.0, 50.0, 30, 44.0, 26), Offer(2.0, 40.0, 30, 34.0, 26)]).quota == pytest.approx(8.0)
    assert quotas.grant([Offer(1.0, 50.0, 30, 36.0, 22), Offer(2.0, 40.0, 30, 26.0, 22)]).quota == pytest.approx(4.0)
    # half of the usual one at least.
    assert quotas.grant([Offer(1.0, 50.0, 30, 24.0, 18), Offer(2.0, 40.0, 30, 12.0, 18)]).quota == pytest.approx(3.0)
    assert quotas.num_granted == 4
    # Where it was left off.
    assert Quotas(4, None, 4).grant(offers) == quotas.grant(offers)
    # Nothing is left.
    empty = [Offer(0.0, 10.0, 6, 0.0, 0), Offer(0.0, 8.0, 6, 0.0, 0)]
    assert quotas.grant(empty) == (0.0, 0.0, [0, 0], [0, 0])
    assert quotas.num_granted == 5
    with pytest.raises(ValueError, match="minibatch_size=0"):
        Quotas(0)


def test_ranks_do_not_run_ahead_of_the_number_of_samples_in_a_minibatch() -> None:
    """A dear sample in front asks for more than eight minibatches' worth: then only what is due is taken."""
    for used, expected in ((0, 2 * 9), (16, 2 * 2), (20, 2), (40, 2)):
        offers = [Offer(99.0, 500.0, 500, 500.0 - used / 2, 500 - used // 2)] * 2
        quotas = Quotas(1, None, 1 if used else 0)
        quota, usual, most, _ = quotas.grant(offers)
        assert (quota, usual, sum(most)) == (99.0, 1.0, expected)
    # Towards the end of an epoch, one sample at least is kept for each minibatch that is still to come.
    offers = [Offer(1.0, 10.0, 10, 2.0, 2), Offer(1.0, 10.0, 10, 1.0, 1)]
    assert Quotas(2, 20, 3).grant(offers).most == [1, 1]
    assert Quotas(2, 20, 4).grant(offers).most == [2, 1]


@settings(deadline=None)
@given(
    pools=st.lists(st.lists(st.floats(0.1, 10.0), max_size=12), min_size=1, max_size=5),
    num_minibatches=st.integers(1, 9),
)
def test_last_minibatches_have_every_sample_once_and_none_is_empty(
    pools: list[list[float]], num_minibatches: int
) -> None:
    planned = plan_last(pools, num_minibatches)
    assert [len(mine) for mine in planned] == [num_minibatches] * len(pools)
    every = [(rank, position) for rank, mine in enumerate(pools) for position in range(len(mine))]
    assert sorted(itertools.chain(*itertools.chain(*planned))) == every
    sizes = [sum(map(len, minibatch)) for minibatch in zip(*planned, strict=True)]
    assert sum(size > 0 for size in sizes) == min(len(every), num_minibatches)
    numbers = [sum(map(len, mine)) for mine in planned]
    assert max(numbers) - min(numbers) <= max([1, *(len(part) for mine in planned for part in mine)])


@pytest.mark.parametrize("minibatch_size", [1, 2, 4, 8])
def test_last_minibatches_cost_all_ranks_the_same(minibatch_size: int) -> None:
    costs = paper_cost("1.5B")(sample_lengths("longalign", 1024, 0))
    planned = plan_last(costs.reshape(4, 256), 256 // minibatch_size)
    loads = np.array([[sum(costs.reshape(4, 256)[one] for one in part) for part in mine] for mine in planned])
    assert 1 - loads.sum() / (loads.max(axis=0).sum() * 4) < 0.02


@settings(deadline=None, max_examples=24)
@given(
    num_samples=st.integers(1, 120),
    world_size=st.integers(1, 4),
    minibatch_size=st.integers(1, 5),
    seed=st.integers(0, 5),
    order=st.sampled_from(["shuffled", "ascending", "descending"]),
    slack=st.sampled_from([0, 1, 30]),
)
def test_an_epoch_has_as_many_minibatches_as_fixed_ones_would_be(
    num_samples: int, world_size: int, minibatch_size: int, seed: int, order: str, slack: int
) -> None:
    lengths = sample_lengths("longalign", num_samples, seed)
    lengths = {"shuffled": lengths, "ascending": np.sort(lengths), "descending": np.sort(lengths)[::-1]}[order]
    grouping = Grouping("pack", int(lengths.max()), pool_size=4 * minibatch_size + slack)
    rounds = [
        QuotaRounds(
            grouping,
            rank,
            world_size,
            minibatch_size=minibatch_size,
            num_samples=num_samples,
        )
        for rank in range(world_size)
    ]
    epoch = stream_epoch(lengths, paper_cost("1.5B"), rounds)
    assert epoch.num_samples.sum() == num_samples
    assert epoch.num_samples.min() > 0
    assert epoch.updates == -(-num_samples // (world_size * minibatch_size))


@settings(deadline=None)
@given(pools=st.lists(st.lists(st.floats(0.1, 10.0), max_size=12), min_size=1, max_size=5))
def test_last_pools_are_dealt_out_evenly_and_nothing_is_lost(pools: list[list[float]]) -> None:
    most = max(map(len, pools))
    assert max(map(len, even_out(pools, most))) <= most
    dealt = even_out(pools, 1000)
    assert len(dealt) == len(pools)
    every = [(rank, position) for rank, mine in enumerate(pools) for position in range(len(mine))]
    assert sorted(itertools.chain(*dealt)) == every
    for mine in dealt:
        assert [position for _, position in mine] == sorted(position for _, position in mine)
    before, after = (
        max(sum(mine) for mine in loads)
        for loads in (pools, [[pools[rank][position] for rank, position in mine] for mine in dealt])
    )
    total, largest = sum(map(sum, pools)), max(itertools.chain((0.0,), *pools))
    assert after <= before + 1e-9 or after <= max(total / len(pools), largest) * 4 / 3


@pytest.mark.parametrize(
    ("costs", "quota", "message"), [([1.0, -1.0], 1.0, r"costs\[1\] is -1.0"), ([1.0], float("nan"), "quota=nan")]
)
def test_bad_costs_and_quotas_are_refused(costs: list[float], quota: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fill_quota(costs, quota)
