"""Layer 1: no processes. The simulator: against devices stepped event by event, noise, speeds, its errors."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import some_of

from odc.balance import (
    LinearCost,
    Machine,
    MinibatchSampler,
    Plan,
    QuadraticCost,
    Scenario,
    Simulation,
    TransformerCost,
    bubble_rate,
    even_lengths,
    get_policy,
    policy_names,
    preset,
    sample_lengths,
)
from odc.balance.costs import LayerGroup
from odc.balance.plan import Comm
from odc.balance.policies.packing import best_fit_decreasing
from odc.balance.simulate.machine import Stopwatch
from odc.balance.simulate.simulator import BestFitRows

COMMS: tuple[Comm, ...] = ("odc", "collective")
COST_1_5B = QuadraticCost(1.982122 / 32000**2, 2.611821 / 32000)
# Layers of three kinds: with a window, without one, and the head.
WINDOWED = TransformerCost.from_config(
    {
        **preset("qwen3-0.6b"),
        "num_hidden_layers": 5,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")],
        "use_sliding_window": True,
        "sliding_window": 64,
    }
)


@dataclass
class Stage:
    """A forward or a backward of one layer for one microbatch, on one device."""

    compute: float
    communication: float

    def time(self, overlap: float) -> float:
        """The hidden part runs beside the compute, the rest after it."""
        beside, after = max(self.compute, self.communication), self.compute + self.communication
        return overlap * beside + (1 - overlap) * after


def stages(plan: Plan, rank: int, layers: list[np.ndarray], machine: Machine, comm: Comm) -> list[Stage]:
    """What a rank does, in order: each microbatch runs all layers forward, then backward, the last one first."""
    speed = (machine.speeds or plan.speeds or (1.0,) * plan.world_size)[rank]
    mine = plan.microbatches[rank]
    done = []
    for m in range(max(plan.num_microbatches) if comm == "collective" else len(mine)):
        # Without a microbatch of its own, a rank still joins the collectives of the others.
        fixed = plan.microbatch_cost / len(layers) if m < len(mine) else 0.0
        samples = mine[m] if m < len(mine) else []
        compute = [(sum(float(layer[s]) for s in samples) + fixed) / speed for layer in layers]
        done += [Stage(machine.forward_share * time, machine.gather) for time in compute]
        done += [
            Stage((1 - machine.forward_share) * time, machine.gather + machine.scatter) for time in reversed(compute)
        ]
    return done


def step(ranks: list[list[Stage]], overlap: float, *, barriers: bool) -> tuple[float, float]:
    """Run the devices event by event: (time of the last event, time of all devices in which they worked)."""
    position = [0] * len(ranks)
    waiting: list[int] = []
    now = busy = 0.0
    events = [(0.0, rank) for rank in range(len(ranks))]  # a device is free
    while events:
        now, rank = heapq.heappop(events)
        if position[rank] == len(ranks[rank]):
            continue
        waiting.append(rank)
        if barriers and len(waiting) < len(ranks):
            continue
        for starting in waiting:
            took = ranks[starting][position[starting]].time(overlap)
            position[starting] += 1
            busy += took
            heapq.heappush(events, (now + took, starting))
        waiting = []
    assert not waiting
    assert position == [len(mine) for mine in ranks]
    return now, busy


def layers_of(cost: object, lengths: np.ndarray, machine: Machine) -> list[np.ndarray]:
    """Cost of each sample in each layer, in the order of the model."""
    factors = machine.noise_factors(lengths.size)
    if not isinstance(cost, TransformerCost):
        assert isinstance(cost, QuadraticCost)
        total = cost.a * lengths.astype(float) ** 2 + cost.b * lengths
        return [total * factors / machine.num_layers] * machine.num_layers
    layers = []
    for group in cost.groups:
        pairs = np.array(
            [s * s / 2 if (w := group.window) is None or s <= w else w * s - w * w / 2 for s in lengths.tolist()]
        )
        layers += [(group.flops_per_token * lengths + group.flops_per_pair * pairs) * factors] * group.num_layers
    order = np.random.default_rng(len(layers)).permutation(len(layers))
    return [layers[layer] for layer in order]


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, np.ndarray, np.ndarray]:
    """Any plan, also one that no policy would make; samples of a dataset, and its lengths."""
    world_size = draw(st.integers(1, 4))
    microbatches: list[list[list[int]]] = [[[] for _ in range(draw(st.integers(0, 3)))] for _ in range(world_size)]
    places = [part for mine in microbatches for part in mine]
    num_samples = draw(st.integers(0, 8)) if places else 0
    for sample in range(num_samples):
        draw(st.sampled_from(places)).append(sample)
    dataset = np.array(draw(st.lists(st.integers(1, 300), min_size=num_samples + 3, max_size=num_samples + 3)))
    samples = np.array(draw(st.permutations(range(dataset.size)))[:num_samples], dtype=np.int64)
    speeds = draw(st.none() | st.lists(st.floats(0.3, 3.0), min_size=world_size, max_size=world_size).map(tuple))
    # A mean sample costs about 1 in the unit of the tests.
    fixed = draw(st.sampled_from([0.0, 0.25]))
    own = dataset[samples]
    plan = Plan(microbatches, own, np.ones(num_samples), 10_000, "any", fixed, speeds)
    return plan, samples, dataset


def scaled(cost: TransformerCost) -> TransformerCost:
    """In units in which a sample of 150 tokens costs 1."""
    unit = float(cost(np.array([150]))[0])
    return TransformerCost(
        tuple(
            LayerGroup(g.num_layers, g.flops_per_token / unit, g.flops_per_pair / unit, g.window) for g in cost.groups
        )
    )


MODELS = {"quadratic": QuadraticCost(1 / 45000, 1 / 300), "windowed": scaled(WINDOWED)}


@pytest.mark.parametrize(("comm", "model", "overlap"), some_of(COMMS, MODELS, [0.0, 0.5, 1.0]))
@settings(deadline=None, max_examples=20)
@given(
    planned=plans(),
    gather=st.sampled_from([0.0, 0.01, 0.3]),
    scatter=st.sampled_from([0.0, 0.02, 0.4]),
    noise=st.sampled_from([0.0, 0.5]),
    forward_share=st.sampled_from([1 / 3, 0.25, 0.0, 1.0]),
    num_layers=st.integers(1, 4),
    known=st.booleans(),
)
def test_the_same_as_devices_stepped_event_by_event(
    comm: Comm,
    model: str,
    overlap: float,
    planned: tuple[Plan, np.ndarray, np.ndarray],
    gather: float,
    scatter: float,
    noise: float,
    forward_share: float,
    num_layers: int,
    known: bool,
) -> None:
    plan, samples, dataset = planned
    true_speeds = None if known else tuple(np.linspace(0.5, 1.5, plan.world_size).tolist())
    machine = Machine(noise, true_speeds, gather, scatter, overlap, num_layers, forward_share, seed=3)
    cost: Any = MODELS[model]
    elapsed = Stopwatch(cost, dataset, machine).time(plan, samples, comm)
    layers = [layer[samples] for layer in layers_of(cost, dataset, machine)]
    ranks = [stages(plan, rank, layers, machine, comm) for rank in range(plan.world_size)]
    makespan, busy = step(ranks, overlap, barriers=comm == "collective")
    assert elapsed.makespan == pytest.approx(makespan, rel=1e-9, abs=1e-12)
    assert elapsed.busy == pytest.approx(busy, rel=1e-9, abs=1e-12)


def test_a_minibatch_by_hand() -> None:
    """Two devices, two microbatches, a layer; forward 1/4; gather 1, push 2, half of which compute can hide."""
    plan = Plan([[[0], [1]], [[2]]], np.array([8, 4, 16]), np.ones(3), 99, "by-hand")
    machine = Machine(gather=1.0, scatter=2.0, overlap=0.5, forward_share=0.25)
    stopwatch = Stopwatch(LinearCost(), plan.lengths, machine)
    # Forward: 2 + 1 - 0.5, 1 + 1 - 0.5, 4 + 1 - 0.5. Backward: 6 + 3 - 1.5, 3 + 3 - 1.5, 12 + 3 - 1.5.
    odc = stopwatch.time(plan, np.arange(3), "odc")
    assert (odc.makespan, odc.busy) == pytest.approx((18.0, (2.5 + 7.5 + 1.5 + 4.5) + (4.5 + 13.5)))
    collective = stopwatch.time(plan, np.arange(3), "collective")
    # In the second microbatch the other device has nothing to compute, but it communicates: 1 and 3.
    assert (collective.makespan, collective.busy) == pytest.approx((4.5 + 13.5 + 1.5 + 4.5, 34.0 + 1.0 + 3.0))


@pytest.mark.parametrize("comm", COMMS)
@settings(deadline=None, max_examples=24)
@given(planned=plans())
def test_without_options_it_is_what_the_plan_says(comm: Comm, planned: tuple[Plan, np.ndarray, np.ndarray]) -> None:
    plan, samples, dataset = planned
    cost = QuadraticCost(1 / 45000, 1 / 300)
    own = cost(dataset[samples])
    plan = Plan(plan.microbatches, plan.lengths, own, 10_000, "any", plan.microbatch_cost, plan.speeds)
    elapsed = Stopwatch(cost, dataset, Machine()).time(plan, samples, comm)
    times = elapsed.makespan * plan.world_size
    assert (1 - elapsed.busy / times if times else 0.0) == pytest.approx(plan.bubble_rate(comm), abs=1e-9)
    if plan.num_samples:
        assert elapsed.makespan == pytest.approx(plan.makespan(comm), rel=1e-12)


@pytest.mark.parametrize(("speeds", "name"), some_of([None, (1.0, 0.5, 2.0)], policy_names()))
def test_an_epoch_without_options_is_what_the_plans_say(name: str, speeds: tuple[float, ...] | None) -> None:
    lengths = np.random.default_rng(1).integers(1, 5000, 100)
    scenario = Scenario(lengths, COST_1_5B, 3, 4, max_tokens=6000, microbatch_cost=0.05, speeds=speeds, seed=2)
    epoch = scenario.plan(name)
    made = [minibatch.plan for minibatch in epoch.minibatches]
    assert len(made) == 100 // 12
    for comm in COMMS:
        run = epoch.run(comm)
        assert run.bubble_rate == pytest.approx(bubble_rate(made, comm), abs=1e-9)
        np.testing.assert_allclose(run.makespans, [plan.makespan(comm) for plan in made], rtol=1e-12)
        assert run.total == pytest.approx(sum(plan.makespan(comm) for plan in made))
        assert (run.policy, run.comm, run.world_size) == (name, comm, 3)
        assert run.num_samples == 96
        assert run.num_tokens == sum(int(plan.lengths.sum()) for plan in made)
        assert run.peak_tokens == max(plan.peak_tokens for plan in made) <= 6000
        assert run.samples_per_time == pytest.approx(96 / run.total)
        assert run.planning_s == pytest.approx(epoch.planning_s / len(made))
        np.testing.assert_array_equal(epoch.run(comm, Machine()).makespans, run.makespans)


@pytest.mark.parametrize("noise", [0.05, 0.2, 0.5])
def test_noise_has_mean_1_and_the_deviation_asked_for(noise: float) -> None:
    factors = Machine(noise=noise, seed=5).noise_factors(200_000)
    assert (factors > 0).all()
    assert factors.mean() == pytest.approx(1.0, abs=5 * noise / 200_000**0.5)
    assert factors.std() == pytest.approx(noise, rel=0.02)
    logarithms = np.log(factors)
    assert np.mean((logarithms - logarithms.mean()) ** 3) / logarithms.std() ** 3 == pytest.approx(0.0, abs=0.03)


def test_noise_is_that_of_its_seed() -> None:
    # At noise 0.2 the logarithm has variance ln 1.04; the normal numbers are those of the seed.
    np.testing.assert_array_equal(Machine(noise=0.2).noise_factors(50), Machine(noise=0.2).noise_factors(50))
    deviation = np.log(1.04) ** 0.5
    normal = {seed: (np.log(Machine(noise=0.2, seed=seed).noise_factors(50)) / deviation) for seed in (0, 1)}
    assert np.abs(normal[0] - normal[1]).min() > 0
    double = np.log(Machine(noise=0.4).noise_factors(50)) + np.log(1.16) / 2
    np.testing.assert_allclose(double / np.log(1.16) ** 0.5, normal[0] + deviation / 2, rtol=1e-9)
    np.testing.assert_array_equal(Machine().noise_factors(3), np.ones(3))


def test_noise_belongs_to_the_sample_wherever_it_runs() -> None:
    lengths = np.array([10, 20, 30, 40])
    machine = Machine(noise=0.3, seed=1)
    stopwatch = Stopwatch(LinearCost(), lengths, machine)
    true = lengths * machine.noise_factors(4)
    plan = Plan([[[0]], [[1]]], lengths[[3, 1]], np.ones(2), 99, "by-hand")
    elapsed = stopwatch.time(plan, np.array([3, 1]), "odc")
    assert elapsed.busy == pytest.approx(true[3] + true[1])
    assert elapsed.makespan == pytest.approx(max(true[3], true[1]))


def longalign(**options: Any) -> Scenario:
    return Scenario(sample_lengths("longalign", 64 * 40), COST_1_5B, 8, 8, **options)


def test_noise_makes_lb_mini_idle() -> None:
    """A rank of about 8 samples deviates by some 9 percent; the slowest of 8 by about 1.4 times that."""
    epoch = longalign().plan("lb-mini")
    exact = epoch.run("odc")
    assert exact.bubble_rate < 0.01
    rates = [epoch.run("odc", Machine(noise=0.2, seed=seed)).bubble_rate for seed in range(3)]
    assert min(rates) > 0.08
    assert max(rates) < 0.16
    assert epoch.run("odc", Machine(noise=0.1)).bubble_rate < min(rates)


def test_a_slow_device_that_the_planner_does_not_know() -> None:
    """Seven wait for the eighth: of 8 / 0.85 device times, 7 + 1 / 0.85 are work."""
    true = (0.85,) + (1.0,) * 7
    epoch = longalign().plan("lb-mini")
    unaware = epoch.run("odc", Machine(speeds=true))
    expected = 1 - (7 + 1 / 0.85) / (8 / 0.85)
    assert expected == pytest.approx(0.131, abs=0.001)
    assert unaware.bubble_rate == pytest.approx(expected, abs=0.01)
    knowing = longalign(speeds=true).plan("lb-mini")
    aware = knowing.run("odc")
    assert aware.bubble_rate < 0.01
    assert knowing.run("odc", Machine(speeds=true)).bubble_rate == aware.bubble_rate
    assert aware.speedup(unaware) == pytest.approx(7.85 / (8 * 0.85), abs=0.01)
    # And speeds that are not true do harm.
    assert knowing.run("odc", Machine(speeds=(1.0,) * 8)).bubble_rate > 0.01


@pytest.mark.parametrize("overlap", [0.0, 1.0])
@settings(deadline=None, max_examples=20)
@given(planned=plans(), gather=st.sampled_from([0.0, 0.1]))
def test_waiting_at_every_layer_takes_no_less(
    overlap: float, planned: tuple[Plan, np.ndarray, np.ndarray], gather: float
) -> None:
    """Equation (1) per layer, against microbatches that wait for each other only when they are done."""
    plan, samples, dataset = planned
    model = scaled(WINDOWED)
    plan = Plan(
        plan.microbatches, plan.lengths, model(dataset[samples]), 10_000, "any", plan.microbatch_cost, plan.speeds
    )
    free = Stopwatch(model, dataset, Machine(overlap=overlap)).time(plan, samples, "collective")
    if plan.num_samples:
        assert free.makespan >= plan.makespan("collective") * (1 - 1e-12)
        assert free.busy == pytest.approx(plan.microbatch_times().sum(), rel=1e-12)
    dear = Stopwatch(model, dataset, Machine(gather=gather, overlap=overlap)).time(plan, samples, "collective")
    assert dear.makespan >= free.makespan * (1 - 1e-12)


def test_waiting_at_every_layer_by_hand() -> None:
    """One long sample and ten short ones cost the same together, but not in each layer."""
    layers = (LayerGroup(1, 0.0, 2.0), LayerGroup(3, 1.0, 0.0))  # s**2 in one layer, s in three
    model = TransformerCost(layers)
    lengths = np.array([10, 9, 2, 2])
    plan = Plan([[[0]], [[1, 2, 3]]], lengths, model(lengths), 99, "by-hand")
    by_layer = [(100.0, 10.0), (81.0 + 4.0 + 4.0, 13.0)]
    np.testing.assert_allclose(plan.microbatch_times().ravel(), [s + 3 * t for s, t in by_layer])
    stopwatch = Stopwatch(model, lengths, Machine())
    assert plan.makespan("collective") == pytest.approx(130.0)
    assert stopwatch.time(plan, np.arange(4), "collective").makespan == pytest.approx(100.0 + 3 * 13.0)
    assert stopwatch.time(plan, np.arange(4), "odc").makespan == pytest.approx(130.0)


def test_layers_of_a_model_count_not_those_of_the_machine() -> None:
    lengths = np.array([100, 200])
    plan = Plan([[[0]], [[1]]], lengths, np.ones(2), 999, "by-hand")

    def total(cost: Any, num_layers: int) -> float:
        machine = Machine(gather=1.0, scatter=0.5, overlap=0.0, num_layers=num_layers)
        return Stopwatch(cost, lengths, machine).time(plan, np.arange(2), "odc").makespan

    num_layers = sum(MODELS["windowed"].counts)  # type: ignore[attr-defined]
    assert num_layers == 6  # five and the head
    without = {name: float(cost(lengths).max()) for name, cost in MODELS.items()}
    for given_layers in (1, 7):
        assert total(MODELS["windowed"], given_layers) == pytest.approx(without["windowed"] + 6 * 2.5)
        assert total(MODELS["quadratic"], given_layers) == pytest.approx(without["quadratic"] + given_layers * 2.5)


def test_communication_hurts_collectives_with_many_small_microbatches_more() -> None:
    """A rank that has fewer microbatches still joins the collectives of the others, but no transfer of ODC."""
    lengths = np.full(5, 10)
    plan = Plan([[[0], [1], [2], [3]], [[4]]], lengths, np.ones(5), 10, "by-hand")
    machine = Machine(gather=1.0, scatter=1.0, overlap=0.0)
    stopwatch = Stopwatch(LinearCost(), lengths, machine)
    each = 10.0 + 3.0
    odc, collective = (stopwatch.time(plan, np.arange(5), comm) for comm in COMMS)
    assert (odc.makespan, odc.busy) == pytest.approx((4 * each, 5 * each))
    assert (collective.makespan, collective.busy) == pytest.approx((4 * each, 5 * each + 3 * 3.0))


def make_simulation(num_samples: int, makespans: list[float], busy: float = 1.0) -> Simulation:
    return Simulation("any", "odc", 2, num_samples, 1, 1, np.array(makespans), busy, 0.0)


def test_simulation_by_hand() -> None:
    fast, slow = make_simulation(12, [1.0, 2.0], busy=4.5), make_simulation(6, [4.0])
    assert (fast.total, fast.bubble_rate, fast.samples_per_time) == pytest.approx((3.0, 1 - 4.5 / 6.0, 4.0))
    speedups = fast.speedup(slow), slow.speedup(fast), fast.speedup(fast)
    assert speedups == pytest.approx((4.0 / 1.5, 1.5 / 4.0, 1.0))
    nothing = make_simulation(0, [0.0], busy=0.0)
    assert (nothing.bubble_rate, nothing.samples_per_time) == (0.0, 0.0)


def test_progress_is_told_once_per_minibatch() -> None:
    calls: list[int] = []
    epoch = Scenario(np.arange(1, 20), LinearCost(), 2, 2).plan("lb-mini", lambda: calls.append(1))
    assert len(calls) == len(epoch.minibatches) == 4
    assert epoch.planning_s > 0
    assert epoch.policy.name == "lb-mini"
    given_policy = Scenario(np.arange(1, 20), LinearCost(), 2, 2).plan(get_policy("none"))
    assert given_policy.run("odc").policy == "none"


@pytest.mark.parametrize(("num_samples", "minibatch_size", "size"), [(999, 4, 200), (90, 4, 20), (5, 4, 4)])
def test_lengths_are_grouped_as_by_transformers(num_samples: int, minibatch_size: int, size: int) -> None:
    """Of each megabatch the longest first; which samples are in it is decided by the shuffle."""
    lengths = even_lengths("aime", num_samples)
    options: dict[str, Any] = {
        "minibatch_size": minibatch_size,
        "world_size": 1,
        "policy": "none",
        "cost": LinearCost(),
    }
    plain, grouped = (MinibatchSampler(lengths, **options, group_by_length=on, drop_last=False) for on in (False, True))
    order, found = (np.concatenate([each.samples for each in sampler]) for sampler in (plain, grouped))
    for start in range(0, num_samples, size):
        mine, its = order[start : start + size], found[start : start + size]
        assert set(mine) == set(its)
        assert (np.diff(lengths[its]) <= 0).all()
    assert plain.identity() != grouped.identity()
    grouped.set_epoch(1)
    assert not np.array_equal(found, np.concatenate([each.samples for each in grouped]))


@pytest.mark.parametrize("world_size", [1, 3, 16])
def test_rows_are_packed_once_and_drawn(world_size: int) -> None:
    lengths = even_lengths("aime", 1500)
    scenario = Scenario(lengths, LinearCost(), world_size, 8, max_tokens=24_000)
    steps = scenario.plan(BestFitRows()).minibatches
    every = np.concatenate([step.samples for step in steps])
    assert np.unique(every).size == every.size  # each once; but for the rows of a last step that is not full
    rows = [set(step.samples[part]) for step in steps for rank in step.plan.microbatches for part in rank]
    order = np.concatenate([step.samples for step in scenario.plan("none").minibatches])
    chunks = (order[:1000], order[1000:])
    packed = {frozenset(part[row]) for part in chunks for row in best_fit_decreasing(lengths[part], 24_000)}
    assert set(map(frozenset, rows)) <= packed
    for step in steps:
        assert len(set(step.plan.num_microbatches)) == 1
        assert step.plan.peak_tokens <= 24_000
    assert np.mean([step.samples.size for step in steps]) == pytest.approx(8 * world_size, rel=0.3)


def test_few_rows_make_a_step_that_is_not_full() -> None:
    (step,) = Scenario([10] * 39 + [1000], LinearCost(), 4, 1).plan(BestFitRows()).minibatches
    assert sorted(step.samples) == list(range(40))
    assert step.plan.num_microbatches == (1, 1, 1, 1)


def test_a_scenario_hands_everything_to_its_sampler() -> None:
    scenario = Scenario(
        np.arange(1, 50),
        COST_1_5B,
        2,
        3,
        max_tokens=70,
        batch_size=6,
        microbatch_cost=0.5,
        speeds=(1.0, 2.0),
        seed=4,
        group_by_length=True,
    )
    sampler = scenario.sampler("verl-native")
    assert (sampler.world_size, sampler.minibatch_size, sampler.batch_size) == (2, 3, 6)
    assert (sampler.max_tokens, sampler.seed, sampler.drop_last, sampler.group_by_length) == (70, 4, True, True)
    plan = next(iter(sampler)).plan
    assert (plan.max_tokens, plan.microbatch_cost, plan.speeds) == (70, 0.5, (1.0, 2.0))
    other = Scenario(np.arange(1, 50), COST_1_5B, 2, 3, seed=5).sampler("none")
    assert [m.samples.tolist() for m in other] != [m.samples.tolist() for m in sampler]


SMALL = partial(Scenario, np.arange(1, 20), LinearCost())


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: Scenario(np.arange(1, 4), LinearCost(), 2, 2).plan("none"), "3 samples make no minibatch"),
        (lambda: SMALL(0, 2).plan("none"), "world_size=0"),
        (lambda: SMALL(2, 0).plan("none"), "minibatch_size=0"),
        (lambda: SMALL(2, 2, max_tokens=7).plan("none"), "12 of 19 samples are longer than max_tokens=7"),
        (lambda: SMALL(2, 2, batch_size=3).plan("none"), "batch_size=3: expected a multiple of minibatch_size=2"),
        (lambda: SMALL(2, 2, microbatch_cost=-1.0).plan("none"), "microbatch_cost=-1.0"),
        (lambda: SMALL(2, 2, speeds=(1.0,)).plan("none"), "speeds has 1 entries: expected one for each of the 2"),
        (lambda: SMALL(2, 2, seed=-1).plan("none"), "seed=-1"),
        (lambda: SMALL(2, 2).plan("lb-nano"), "policy 'lb-nano' is not known"),
        (lambda: Scenario([1.5, 2.5], LinearCost(), 1, 1).plan("none"), "lengths has dtype float64"),
        (lambda: SMALL(2, 2).plan("none").run("nccl"), "comm='nccl': expected 'odc' or 'collective'"),  # type: ignore[arg-type]
        (lambda: SMALL(2, 2).plan("none").run("odc", Machine(speeds=(1.0,))), "speeds has 1 entries"),
        (lambda: SMALL(2, 2).plan("none").run("odc", Machine(speeds=(1.0, 0.0))), r"speeds\[1\] is 0"),
    ],
)
def test_bad_scenarios(action: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        action()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": -0.1}, "noise=-0.1: expected a finite number of at least 0"),
        ({"noise": float("nan")}, "noise=nan"),
        ({"gather": -1.0}, "gather=-1.0"),
        ({"scatter": float("inf")}, "scatter=inf"),
        ({"overlap": 1.5}, "overlap=1.5: expected a number from 0 to 1"),
        ({"overlap": -0.5}, "overlap=-0.5"),
        ({"forward_share": 1.01}, "forward_share=1.01: expected a number from 0 to 1"),
        ({"num_layers": 0}, "num_layers=0: expected an integer of at least 1"),
        ({"seed": -1}, "seed=-1: expected an integer of at least 0"),
        ({"speeds": ()}, "speeds has 0 entries: expected one for each of the 1 devices"),
        ({"speeds": [[1.0, 2.0]]}, r"speeds has shape \(1, 2\)"),
        ({"speeds": (1.0, -1.0)}, r"speeds\[1\] is -1.0"),
    ],
)
def test_bad_machines(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Machine(**options)


def test_machines_take_numbers_of_any_kind() -> None:
    plain = Machine(noise=0.5, speeds=(1.0, 0.5), gather=2.0, num_layers=3)
    machine = Machine(
        noise=np.float32(0.5),  # type: ignore[arg-type]
        speeds=np.array([1, 0.5]),  # type: ignore[arg-type]
        gather=np.int64(2),  # type: ignore[arg-type]
        num_layers=np.int32(3),  # type: ignore[arg-type]
    )
    assert (machine, hash(machine)) == (plain, hash(plain))
    assert machine.speeds == (1.0, 0.5)
    assert {type(speed) for speed in machine.speeds} == {float}
