"""Layer 1: no processes. Late binding: ranks in virtual time, with a store in memory; each sample is computed once."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from late_ranks import BusyStore, Clock, keep_time, run_at_random, run_timed
from loaders import known_loader

from odc.balance import LinearCost, MinibatchLoader, MinibatchSampler, Plan, TransformerCost, even_lengths, get_policy
from odc.balance.checks import FloatArray
from odc.balance.data import iteration
from odc.balance.data import loader as loader_module
from odc.balance.data.microbatches import MicrobatchDataset
from odc.balance.data.place import Place, Together
from odc.balance.late_binding.estimates import Estimates, LearnedEstimates, Times
from odc.balance.late_binding.microbatches import LateMicrobatches
from odc.balance.late_binding.steal_policy import StealPolicy, WorkQueue, largest_first
from odc.balance.late_binding.work_queues import WorkQueues
from odc.balance.plan import PlannedMinibatch
from odc.errors import PeerSilentError

WORLD_SIZE = 4
COST = TransformerCost.from_config("qwen2.5-1.5b")


class Ranks:
    """A loader's ranks, each in a loop that takes as long for a microbatch as it is told."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, world_size: int = WORLD_SIZE, microbatch_cost: float = 0.0
    ) -> None:
        self.clock = Clock()
        keep_time(monkeypatch, self.clock)
        self.store = BusyStore()
        self.queues = [
            WorkQueues(Place(rank, world_size), "", self.store, microbatch_cost=microbatch_cost, learns_speeds=True)
            for rank in range(world_size)
        ]
        self.num_minibatches = 0

    def begin(
        self, plan: Plan, given: list[WorkQueues] | None = None, number: int | None = None
    ) -> list[Iterator[list[int]]]:
        """The microbatches of each rank, or of these, as positions of samples; of the next minibatch or another one."""
        if number is None:
            number, self.num_minibatches = self.num_minibatches, self.num_minibatches + 1
        planned = PlannedMinibatch(np.arange(plan.num_samples), largest_first(plan))
        dataset: MicrobatchDataset[int, list[int]] = MicrobatchDataset(
            range(plan.num_samples), list, None, plan.lengths, plan.max_tokens
        )
        key = f"0.{number}"
        return [iter(LateMicrobatches(queues, key, planned, None, dataset)) for queues in given or self.queues]

    def run(
        self, plan: Plan, seconds: FloatArray, speeds: FloatArray, fixed: float | None = None
    ) -> tuple[float, list[list[list[int]]]]:
        """A minibatch: how long until the last rank is through, and the microbatches of each.

        ``fixed``: what a microbatch takes beside its samples; None: what the plan says.
        """
        beside = plan.microbatch_cost if fixed is None else fixed
        return run_timed(
            self.begin(plan),
            self.clock,
            lambda rank, part: (float(seconds[part].sum()) + beside) / float(speeds[rank]),
        )


def counting_with(learned: Estimates, plan: Plan) -> Plan:
    """The minibatch of ``plan``, planned anew."""
    return get_policy("lb-mini").plan(
        plan.lengths,
        world_size=8,
        max_tokens=plan.max_tokens,
        cost=COST,
        microbatch_cost=learned.microbatch_cost,
        speeds=learned.speeds,
    )


def planned_time(plan: Plan, seconds: FloatArray, speeds: FloatArray) -> float:
    return max(
        sum(float(seconds[part].sum()) + plan.microbatch_cost for part in mine) / float(speed)
        for mine, speed in zip(plan.microbatches, speeds, strict=True)
    )


@settings(deadline=None, max_examples=24)
@given(
    lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    noise=st.floats(0.0, 0.8),
    microbatch_cost=st.sampled_from([0.0, 30.0, 1000.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_each_sample_is_computed_once_whoever_comes_between(
    lengths: list[int], noise: float, microbatch_cost: float, seed: int
) -> None:
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as monkeypatch:
        ranks = Ranks(monkeypatch)
        plan = get_policy("lb-mini").plan(
            lengths, world_size=WORLD_SIZE, max_tokens=1000, cost=LinearCost(), microbatch_cost=microbatch_cost
        )
        for _ in range(3):
            begun = run_at_random(ranks.begin(plan), ranks.clock, ranks.store, noise, rng)
            assert all(0 < int(plan.lengths[part].sum()) <= plan.max_tokens for part in begun)
            assert sorted(itertools.chain(*begun)) == list(range(len(lengths)))


def test_where_all_goes_as_planned_nothing_is_taken_or_split(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 8)
    for law in ("longalign", "swesmith", "aime"):
        for plan in plans_of(law, 3, microbatch_cost=0.0):
            took, done = ranks.run(plan, plan.costs, np.ones(8))
            assert done == [list(mine) for mine in largest_first(plan).microbatches]
            assert took == pytest.approx(plan.makespan("odc"), rel=1e-6)


def plans_of(law: str, num_minibatches: int, *, microbatch_cost: float, speeds: Any = None) -> list[Plan]:
    lengths = even_lengths(law, 8 * 8 * num_minibatches)
    sampler = MinibatchSampler(
        lengths,
        minibatch_size=8,
        world_size=8,
        policy="lb-mini",
        cost=COST,
        microbatch_cost=microbatch_cost,
        speeds=speeds,
    )
    return [planned.plan for planned in sampler]


@pytest.mark.parametrize(
    "microbatch_share", [0.05, *(pytest.param(share, marks=pytest.mark.extended) for share in (0.0, 0.25))]
)
@pytest.mark.parametrize(
    ("law", "least"),
    [
        ("swesmith", 1.13),
        *(pytest.param(*of, marks=pytest.mark.extended) for of in (("longalign", 1.1), ("aime", 1.09))),
    ],
)
def test_noise_and_a_slow_device_cost_less(
    law: str, least: float, microbatch_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    speeds = np.ones(8)
    speeds[3] = 0.85
    by_plan = bound_late = 0.0
    first = plans_of(law, 24, microbatch_cost=0.0)
    mean = sum(plan.costs.sum() for plan in first) / sum(sum(plan.num_microbatches) for plan in first)
    fixed = microbatch_share * mean
    ranks = Ranks(monkeypatch, 8, fixed)
    for number, plan in enumerate(plans_of(law, 24, microbatch_cost=fixed)):
        seconds = plan.costs * np.exp(rng.normal(0.0, 0.2, plan.num_samples))
        by_plan += planned_time(plan, seconds, speeds)
        for queues in ranks.queues:
            learned = queues.estimates.plan_with(0, number)
        plan = counting_with(learned, plan)
        took, done = ranks.run(plan, seconds, speeds, fixed)
        for queues in ranks.queues:
            queues.estimates.tell(queues.times)
        bound_late += took
        assert sorted(itertools.chain(*itertools.chain(*done))) == list(range(plan.num_samples))
        assert learned.speeds[3] == pytest.approx(0.85, abs=0.06) or number < 20
    assert by_plan / bound_late > least


def test_samples_join_a_microbatch_that_is_begun_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where microbatches cost much, a slow rank's last ones are not taken in more of them."""
    lengths = even_lengths("longalign", 8 * 8)
    plan = get_policy("lb-mini").plan(lengths, world_size=8, max_tokens=65_536, cost=COST)
    fixed = 0.5 * float(plan.costs.sum()) / sum(plan.num_microbatches)
    plan = get_policy("lb-mini").plan(lengths, world_size=8, max_tokens=65_536, cost=COST, microbatch_cost=fixed)
    ranks = Ranks(monkeypatch, 8, fixed)
    speeds = np.where(np.arange(8) == 3, 0.7, 1.0)
    ranks.run(plan, plan.costs, speeds)  # how fast they are is known now
    took, done = ranks.run(plan, plan.costs, speeds)
    assert sum(queues.num_taken for queues in ranks.queues) > 1
    assert sum(map(len, done)) <= sum(plan.num_microbatches)
    assert took < 0.9 * planned_time(plan, plan.costs, speeds)
    assert all(int(plan.lengths[part].sum()) <= plan.max_tokens for part in itertools.chain(*done))


@pytest.mark.parametrize(
    ("left", "since", "joined"),
    [
        ([4, 5], 0.0, [4]),  # through at 500 + 400 + 100 s, this one at 500 + 100: even with 200 moved
        ([5, 6], 0.0, [5]),  # there is no room for 6
        ([6], 100.0, []),
        ([4, 5], -600.0, []),  # little later
        ([4, 5], -100.0, [4]),  # 200 are more than makes both even, but the end is earlier
        ([4, 5], -250.0, []),  # here this one would be the later one
        ([], 0.0, []),
    ],
)
def test_what_joins_makes_both_end_early_and_has_room(left: list[int], since: float, joined: list[int]) -> None:
    lengths, costs = np.array([50, 50, 50, 50, 10, 10, 60]), np.array([500.0, 500, 500, 500, 200, 200, 200])
    plan = Plan([[[0, 1], [2]], [[3], [4, 5, 6]]], lengths, costs, 100, "by-hand", microbatch_cost=100.0)
    queue = WorkQueue([left] if left else [], running=500.0, since=since, rate=1.0, thieves=[])
    assert StealPolicy(plan, now=0.0, rate=1.0).join([2], queue) == joined


PAIRED = Plan(
    [[[0], [1, 2]], [[3], [4, 5]]],
    np.array([1000, 100, 100, 1000, 100, 100]),
    np.array([700.0, 100, 100, 700, 100, 100]),
    1000,
    "by-hand",
    microbatch_cost=100.0,
)


def test_who_was_not_fast_enough_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is late. Before rank 0 has what it wants, rank 2 takes some of it."""
    ranks = Ranks(monkeypatch, 3, PAIRED.microbatch_cost)
    ranks.queues[0].times._seen.append((700.0, 800.0))
    nothing: list[list[int]] = []
    loops = ranks.begin(replace(PAIRED, microbatches=[*PAIRED.microbatches, nothing]))
    assert next(loops[0]) == [0]
    assert not list(loops[2])  # of which no rate is known: it takes nothing by itself
    ranks.clock.now += 500.0
    assert next(loops[1]) == [3]
    ranks.clock.now += 300.0
    steal = ranks.queues[0].steal

    def beaten(rank: int, queue: WorkQueue, part: list[int]) -> bool:
        monkeypatch.setattr(ranks.queues[0], "steal", steal)
        assert ranks.queues[2].steal(rank, queue, [4])
        return steal(rank, queue, part)

    monkeypatch.setattr(ranks.queues[0], "steal", beaten)
    assert next(loops[0]) == [1, 2, 5]
    word = ranks.queues[1].of_others()[0]
    assert (word.microbatches, word.running) == ([], 400.0)
    assert not list(loops[1])


def test_of_two_ranks_that_take_the_same_samples_one_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have read the same queue and come to the same."""
    ranks = Ranks(monkeypatch, 3)
    for queues in ranks.queues:
        queues.open(queues.expect("0.0"), [[9], [3 * queues.rank, 3 * queues.rank + 1]])
        queues.begin(queues.mine(1).microbatches, 1.0)
    seen = ranks.queues[1].of_others()[0]
    assert ranks.queues[1].steal(0, seen, [1])
    assert not ranks.queues[2].steal(0, seen, [1])
    assert ranks.queues[2].of_others()[0].microbatches == [[0]]


# Devices that hosts are ahead of


class Event:
    """Of a device on which each thing that is submitted takes 10 ms, and which is through with nothing yet."""

    submitted_ms: float
    waited_for: list[float]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.ms = self.submitted_ms

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.waited_for.append(self.ms)

    def elapsed_time(self, end: Event) -> float:
        return end.ms - self.ms


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[Event]:
    found = type("OwnEvent", (Event,), {"submitted_ms": 0.0, "waited_for": []})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", found)
    return found


def test_a_device_has_begun_one_microbatch_before_the_next_is_bound(device: type[Event]) -> None:
    times = Times()
    for number in range(4):
        times.begin(30.0)
        device.submitted_ms += 10.0
        times.end()
        assert device.waited_for == [10.0 * done for done in range(1, number + 1)]
    assert times.rate == pytest.approx(3000.0)


def test_who_asks_first_is_not_the_first_to_be_through(device: type[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's second microbatch is bound while all devices compute the first, and nothing joins it."""
    ranks = Ranks(monkeypatch, 2, PAIRED.microbatch_cost)
    for queues in ranks.queues:
        queues.times._seen.append((700.0, 800.0))
    loops = ranks.begin(PAIRED)
    for mine in range(2):
        assert [next(loop) for loop in loops] == [PAIRED.microbatches[rank][mine] for rank in range(2)]
        device.submitted_ms += 10.0
    assert [list(loop) for loop in loops] == [[], []]


# Ranks that compute together


@pytest.mark.parametrize(("behind", "microbatch_share"), [(0, 0.0), (3, 0.5)])
def test_partners_run_what_their_leader_chooses(
    behind: int, microbatch_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a partner is still at a minibatch that its leader has left."""
    ranks = Ranks(monkeypatch, 3)
    places = [Together([10 * rank, 10 * rank + 1, 10 * rank + 2], 0, "") for rank in range(3)]
    leaders = [WorkQueues(Place(rank, 3), "together", ranks.store, together=places[rank]) for rank in range(3)]
    partners = [
        WorkQueues(Place(rank, 3), "together", ranks.store, together=replace(places[rank], index=index))
        for rank in range(3)
        for index in (1, 2)
    ]
    ranks.queues = leaders
    rng = random.Random(0)
    chosen: list[list[list[list[int]]]] = []

    def follow(number: int, plan: Plan) -> None:
        for queues in partners:
            (heard,) = ranks.begin(plan, [queues], number)
            assert list(heard) == chosen[number][queues.rank]

    plans = plans_of("swesmith", 12, microbatch_cost=0.0)
    plans = [
        get_policy("lb-mini").plan(
            plan.lengths[:24],
            world_size=3,
            max_tokens=plan.max_tokens,
            cost=COST,
            microbatch_cost=microbatch_share * float(plan.costs.sum()) / sum(plan.num_microbatches),
        )
        for plan in plans
    ]
    for number, plan in enumerate(plans):
        seconds = plan.costs * np.exp([rng.gauss(0.0, 0.4) for _ in plan.costs])
        chosen.append(ranks.run(plan, seconds, np.array([1.0, 1.0, 0.6]))[1])
        assert sorted(itertools.chain(*itertools.chain(*chosen[-1]))) == list(range(24))
        if number >= behind:
            follow(number - behind, plans[number - behind])
    assert leaders[0].num_taken + leaders[1].num_taken > 10
    if not behind:
        assert [queues.num_taken for queues in partners[::2]] == [queues.num_taken for queues in leaders]
    assert ranks.store.num_keys() < 45 + 30 * behind  # what all have heard is gone


def test_partners_hear_nothing_of_an_earlier_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that leads begins a minibatch again in one step, before the other one has heard all of the first time."""
    keep_time(monkeypatch, Clock())
    store = dist.HashStore()
    leader, partner = (WorkQueues(Place(0, 1), "", store, together=Together([4, 5], index, "")) for index in range(2))

    def begin(queues: WorkQueues) -> None:
        queues.begin_pass()
        queues.open(queues.expect("0.0"), [[0, 1]])

    def heard() -> list[list[int]]:
        return [partner.hear(partner._expected[0]) for _ in range(2)]

    begin(leader)
    begin(partner)
    leader.handed_out([0, 1])
    leader.handed_out([])
    begin(leader)
    assert heard() == [[0, 1], []]
    begin(partner)
    monkeypatch.setattr(iteration, "_LONGEST_WAIT_S", 0.05)
    with pytest.raises(PeerSilentError):
        heard()


def test_a_leader_that_says_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iteration, "_LONGEST_WAIT_S", 0.05)
    queues = WorkQueues(Place(0, 2), "", dist.HashStore(), together=Together([4, 5], 1, ""))
    queues.open(queues.expect("0.0"), [[0]])
    with pytest.raises(PeerSilentError, match=r"0.05 s have gone by in waiting for rank 4, which was to leave the ch"):
        queues.hear(1)


# Loaders


class Rows:
    def __getitem__(self, index: int) -> int:
        return index


def make_loaders(
    monkeypatch: pytest.MonkeyPatch, store: Any = None, **options: Any
) -> list[MinibatchLoader[int, list[int]]]:
    """Of two ranks, in this process."""
    store = store or dist.HashStore()
    monkeypatch.setattr(loader_module, "own_store", lambda: store)
    keep_time(monkeypatch, Clock())
    given: dict[str, Any] = {
        "minibatch_size": 4, "max_tokens": 12, "cost": LinearCost(), "late_binding": True, **options
    }  # fmt: skip
    return [known_loader(Rows(), LENGTHS, list, rank, 2, **given) for rank in range(2)]


def queues_of(loader: MinibatchLoader[int, list[int]]) -> WorkQueues:
    assert loader._queues is not None
    return loader._queues


LENGTHS = [12, 8, 6, 4, 9, 9, 2, 2, 3, 11, 1, 7, 5, 10, 4, 6]


@pytest.mark.parametrize(("num_workers", "microbatch_cost"), [(0, 0.0), (1, 0.0), (1, 4.0)])
def test_what_workers_have_read_ahead_is_used_or_dropped(
    num_workers: int, microbatch_cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 begins nothing before rank 0, of which a rate is known, has nothing left and has taken from it."""
    loaders = make_loaders(monkeypatch, num_workers=num_workers, microbatch_cost=microbatch_cost)
    for loader in loaders:
        queues_of(loader).times._seen.append((1.0, 1.0))
    taken = 0
    for pair in zip(*loaders, strict=True):
        loops = [iter(minibatch.microbatches) for minibatch in pair]
        computed = [*next(loops[1], []), *itertools.chain(*loops[0]), *itertools.chain(*loops[1])]
        assert pair[0].plan is not None
        assert (len(computed), len(set(computed))) == (8, 8)
        taken += loaders[0].num_taken
    assert taken > 0
    for loader in loaders:
        loader.close()


def test_learned_estimates_are_the_loaders_not_its_samplers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another loader of this sampler would plan with them from a moment on that differs between ranks."""
    loader, _ = make_loaders(monkeypatch)
    learned = Estimates(np.array([1.0, 4.0]), 7.0)
    monkeypatch.setattr(queues_of(loader).estimates, "plan_with", lambda epoch, minibatch: learned)
    assert [minibatch.plan.microbatch_cost for minibatch in loader if minibatch.plan] == [7.0, 7.0]
    assert loader.speeds == [1.0, 4.0]
    assert (loader.sampler.speeds, loader.sampler.microbatch_cost) == (None, 0.0)


def test_microbatches_are_bound_once_and_while_their_minibatch_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, other = make_loaders(monkeypatch)
    minibatches = iter(loader)
    begun = iter(next(minibatches).microbatches)
    next(begun)
    second = next(minibatches)
    with pytest.raises(RuntimeError, match="this minibatch is over"):
        next(begun)
    with pytest.raises(TypeError, match="nobody knows the number of microbatches"):
        len(second.microbatches)
    assert list(second.to("cpu").microbatches)
    with pytest.raises(RuntimeError, match="were iterated before"):
        list(second.microbatches)
    other.close()


@pytest.mark.parametrize("is_alike", [False, True])
def test_a_minibatch_that_one_rank_has_begun_twice_in_a_step_is_named(
    is_alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others have taken from it the first time would count twice; with another loader alike as well."""
    store = dist.HashStore()
    begins, other, alike, _ = [loader for _ in range(2) for loader in make_loaders(monkeypatch, store)]
    for loader in (begins, other, alike):
        queues_of(loader).times._seen.append((1.0, 1.0))
    next(iter(next(iter(begins)).microbatches))
    assert list(next(iter(other)).microbatches)
    assert other.num_taken
    with pytest.raises(RuntimeError, match="rank 0 has begun a minibatch twice in one step"):
        list(next(iter(alike if is_alike else begins)).microbatches)


def test_a_minibatch_may_be_begun_again_once_its_step_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    training = keep_time(monkeypatch, Clock())
    store, plan = BusyStore(), PAIRED
    ranks = [WorkQueues(Place(rank, 2), "", store) for rank in range(2)]
    for _ in range(2):
        for queues in ranks:
            queues.begin_pass()
            queues.open(queues.expect("0.0"), list(plan.microbatches[queues.rank]))
            queues.begin(queues.mine(queues._expected[0]).microbatches, 1.0)
        assert ranks[1].steal(0, ranks[1].of_others()[0], [1])
        training.minibatches += 1


def test_all_may_begin_a_minibatch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loaders = make_loaders(monkeypatch)
    for _ in range(3):
        for pair in zip(*loaders, strict=True):
            computed = [list(itertools.chain(*minibatch.microbatches)) for minibatch in pair]
            assert len(set(itertools.chain(*computed))) == len(list(itertools.chain(*computed))) == 8


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"policy": "lb-micro"}, ValueError, "late_binding=True with policy 'lb-micro': expected 'lb-mini'"),
        ({"policy": "lb-mini-equal"}, ValueError, "late_binding=True with policy 'lb-mini-equal': expected 'lb-mini'"),
        ({"comm": "collective"}, ValueError, "late_binding=True with comm='collective'"),
    ],
)
def test_what_it_does_not_go_with_is_refused(
    options: dict[str, Any], error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        make_loaders(monkeypatch, **options)


def test_two_processes_at_one_place_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    loaders = [loader for _ in range(2) for loader in make_loaders(monkeypatch, store)]
    queues_of(loaders[0])._loader = "1/another"
    list(next(iter(loaders[0])).microbatches)
    with pytest.raises(RuntimeError, match=r"the processes \d+ and 1 both have a loader at rank 0"):
        list(next(iter(loaders[2])).microbatches)


def test_it_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="late_binding=True without a process group"):
        known_loader(Rows(), LENGTHS, list, 0, 2, minibatch_size=4, cost=LinearCost(), late_binding=True)


# What plans count with


def measured(rate: float, microbatch_cost: float = 0.0, of_all: float = 100.0) -> Times:
    """Times that tell this."""
    times = Times()
    times.tell = lambda: [rate, microbatch_cost, of_all]  # type: ignore[method-assign]
    return times


def test_whoever_plans_first_decides_and_all_take_that() -> None:
    store = dist.HashStore()
    ranks = [LearnedEstimates(rank, 3, store, "", None) for rank in range(3)]
    for rank, learned in enumerate(ranks):
        learned.tell(measured([1.0, 0.5, 1.02][rank]))
    rng = random.Random(0)
    plans: list[list[list[float]]] = [[] for _ in ranks]
    while any(len(plan) < 40 for plan in plans):
        rank = rng.choice([rank for rank, plan in enumerate(plans) if len(plan) < 40])
        plans[rank].append(ranks[rank].plan_with(0, len(plans[rank])).speeds.tolist())
        if len(plans[0]) == 20:
            ranks[1].tell(measured(1.0))
    assert plans[0] == plans[1] == plans[2]
    assert plans[0][0] == [1.0, 1.0, 1.0]
    assert [1.0, 0.5, 1.0] in plans[0]  # 2 % are noise
    assert plans[0][-1] == [1.0, 1.0, 1.0]


def test_what_not_all_have_measured_stays() -> None:
    store = dist.HashStore()
    ranks = [LearnedEstimates(rank, 2, store, "", np.array([2.0, 1.0]), 7.0) for rank in range(2)]
    ranks[0].tell(measured(5.0, 30.0))
    ranks[1].tell(Times())
    for minibatch in range(20):
        for rank in ranks:
            found = rank.plan_with(0, minibatch)
            assert found.speeds.tolist() == pytest.approx([4 / 3, 2 / 3])
            assert found.microbatch_cost == 7.0


def test_learned_numbers_have_bounds() -> None:
    """Of a rank that looks a thousand times slower, or of least squares that find nothing but the microbatch."""
    store = dist.HashStore()
    ranks = [LearnedEstimates(rank, 3, store, "", None) for rank in range(3)]
    for rank, learned in enumerate(ranks):
        learned.tell(measured([1.0, 0.001, 500.0][rank], 1e9, 100.0))
    for minibatch in range(24):
        found = [rank.plan_with(0, minibatch) for rank in ranks]
    assert found[0].speeds.tolist() == found[2].speeds.tolist() == [1.0, 0.1, 10.0]
    assert found[0].microbatch_cost == 100.0


def test_a_long_run_leaves_no_more_words_than_a_short_one() -> None:
    store, keys = dist.HashStore(), list[int]()
    ranks = [LearnedEstimates(rank, 2, store, "", None) for rank in range(2)]
    for epoch in range(20):
        for minibatch in range(100):
            for learned in ranks:
                learned.tell(measured(1.0 + 0.5 * (epoch % 2) * learned._rank))
                learned.plan_with(epoch, minibatch)
        keys.append(store.num_keys())
    assert keys == [3] * 20
    assert len(store.get("/estimates")) < 4000


def test_what_is_learned_counts_from_the_eighth_minibatch_on() -> None:
    store = dist.HashStore()
    ranks = [LearnedEstimates(rank, 2, store, "", None) for rank in range(2)]
    found = []
    for minibatch in range(12):
        found.append([learned.plan_with(0, minibatch).speeds.tolist() for learned in ranks])
        for learned in ranks:
            learned.tell(measured([1.0, 0.5][learned._rank]))
    assert [both[0] == both[1] for both in found] == [True] * 12
    assert [both[0] != [1.0, 1.0] for both in found].index(True) == 8


def test_speeds_that_plans_cannot_count_with_are_not_learned() -> None:
    store = dist.HashStore()
    ranks = [LearnedEstimates(rank, 2, store, "", None, learns_speeds=False) for rank in range(2)]
    for rank, learned in enumerate(ranks):
        learned.tell(measured([1.0, 0.5][rank], 30.0))
    for minibatch in range(24):
        found = [rank.plan_with(0, minibatch) for rank in ranks]
    assert [(one.speeds.tolist(), one.microbatch_cost) for one in found] == [([1.0, 1.0], 30.0)] * 2


def test_what_a_microbatch_takes_is_learned_where_it_is_more_than_noise() -> None:
    said = list[str]()
    store = dist.HashStore()
    ranks = [LearnedEstimates(rank, 3, store, "", None, 20.0, said.append) for rank in range(3)]
    for rank, learned in enumerate(ranks):
        learned.tell(measured(1.0, [23.0, 24.0, 90.0][rank]))
    for minibatch in range(24):
        found = [rank.plan_with(0, minibatch) for rank in ranks]
        assert {one.microbatch_cost for one in found} == {20.0}  # 4 % of a microbatch less
    for learned in ranks:
        learned.tell(measured(1.0, 30.0))
    for minibatch in range(24, 48):
        found = [rank.plan_with(0, minibatch) for rank in ranks]
    assert [one.microbatch_cost for one in found] == [30.0] * 3
    assert len(said) == 3
    assert "speeds alike; a microbatch takes 30 beside the costs of its samples" in said[0]


@settings(deadline=None, max_examples=20)
@given(fixed=st.floats(0.0, 50.0), noise=st.floats(0.0, 0.2), seed=st.integers(0, 2**32 - 1))
def test_what_a_microbatch_takes_is_told_from_times_of_several_sizes(fixed: float, noise: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        keep_time(patch, clock)
        times = Times()
        for number in range(64):
            cost = float(rng.uniform(10.0, 190.0))
            times.begin(cost, 5.0)
            clock.now += (cost + fixed) / 40.0 * float(np.exp(rng.normal(0.0, noise)))
            times.end()
            if number == 10:
                assert times.tell()[1] == 5.0  # too few
        rate, found, of_all = times.tell()
    assert found == pytest.approx(fixed, abs=1e-3 + 200.0 * noise)
    assert of_all == pytest.approx(100.0 + fixed, abs=25.0 + 200.0 * noise)
    if not noise:
        assert rate == pytest.approx(40.0 * 105.0 / (100.0 + fixed), rel=0.3)


def test_nothing_is_told_of_what_a_microbatch_takes_by_equal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    keep_time(monkeypatch, clock)
    times = Times()
    for _ in range(64):
        times.begin(100.0, 5.0)
        clock.now += 3.0
        times.end()
    assert times.tell() == [35.0, 5.0, 105.0]


def test_a_cost_of_microbatches_that_nobody_told_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of an average microbatch, all ranks alike: plans that count with it have fewer and fuller ones."""
    ranks = Ranks(monkeypatch, 8)
    first = plans_of("swesmith", 16, microbatch_cost=0.0)
    mean = sum(plan.costs.sum() for plan in first) / sum(sum(plan.num_microbatches) for plan in first)
    for number, plan in enumerate(first):
        learned, *_ = [queues.estimates.plan_with(0, number) for queues in ranks.queues]
        plan = counting_with(learned, plan)
        ranks.run(plan, plan.costs, np.ones(8), 0.25 * mean)
        for queues in ranks.queues:
            queues.estimates.tell(queues.times)
    assert learned.microbatch_cost == pytest.approx(0.25 * mean, rel=0.05)
    assert learned.speeds.tolist() == [1.0] * 8
