"""Layer 1: no processes. What an orchestrator plans, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from toy_modalities import make_sample, orchestrator, split

from odc.balance import ItemLengths, LinearCost, Orchestrator, Phase, QuadraticCost, SampleLengths
from odc.balance.multimodal import Items, MinibatchLengths, RankLengths, step_times


def minibatch(num_ranks: int, num_samples: int, seed: int) -> list[list[SampleLengths]]:
    rng = np.random.default_rng(seed)
    ranks: list[list[SampleLengths]] = [[] for _ in range(num_ranks)]
    for number in range(num_samples):
        ranks[int(rng.integers(num_ranks))].append(split(make_sample(number, seed)).lengths)
    return ranks


@settings(max_examples=24, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(0, 14),
    st.integers(0, 10**6),
    st.sampled_from([None, "local", "joint", "whole", "lb-mini", "lb-micro-global"]),
    st.booleans(),
    st.sampled_from(["odc", "collective"]),
)
@example(1, 13, 0, None, False, "odc")  # more than 200 tokens in a microbatch as loaded
def test_everything_is_planned_once_and_arrives_where_it_is_needed(
    num_ranks: int, num_samples: int, seed: int, policy: str | None, balance: bool, comm: Any
) -> None:
    if policy == "joint" or (policy == "lb-mini" and comm == "collective"):
        comm = "odc"
    balance = balance and policy != "whole"
    samples = minibatch(num_ranks, num_samples, seed)
    plan = orchestrator(num_ranks, policy=policy, balance_encoders=balance, comm=comm)
    schedule = plan.plan(samples)
    assert schedule.as_vector().tolist() == plan.plan(samples).as_vector().tolist()
    assert schedule.language.num_samples == num_samples  # the plan itself checks that each is there once
    for name, encoder in schedule.encoders.items():
        items = schedule.lengths.items[name]
        assert encoder.num_samples == items.number == sum(len(s.items.get(name, ())) for mine in samples for s in mine)
        for rank in range(num_ranks):
            needed = [
                item
                for microbatch in range(schedule.language.num_microbatches[rank])
                for item in schedule.items_of(name, rank, microbatch)
            ]
            assert schedule.outputs[name].target[rank].tolist() == needed
            made = [item for microbatch in encoder.microbatches[rank] for item in microbatch]
            assert schedule.outputs[name].source[rank].tolist() == schedule.inputs[name].target[rank].tolist() == made
            has = schedule.inputs[name].source[rank].tolist()
            assert [int(items.sample[item]) for item in has] == sorted(int(items.sample[item]) for item in has)
        if not balance:  # encoded where it is needed
            assert schedule.outputs[name].is_at_rest
        if comm == "collective":
            assert len(set(encoder.num_microbatches)) == 1
    if policy in (None, "local"):
        assert schedule.samples.is_at_rest
    times = {how: step_times(schedule, how) for how in ("odc", "collective")}  # type: ignore[arg-type]
    assert times["odc"].makespan * num_ranks >= times["odc"].work * (1 - 1e-9)
    if comm == "collective":
        assert times["odc"].makespan <= times["collective"].makespan * (1 + 1e-9)


def few_clips(num_ranks: int) -> list[list[SampleLengths]]:
    """Long clips on some ranks only, and text for all."""
    clips = [SampleLengths(60, {"audio": [ItemLengths(400, 50)]}) for _ in range(num_ranks // 2 + 1)]
    texts = [SampleLengths(40 - number % 7) for number in range(40 * num_ranks)]
    return [(clips + texts)[rank::num_ranks] for rank in range(num_ranks)]


def test_the_language_model_makes_up_for_what_encoders_compute_unevenly() -> None:
    """5 clips on 8 ranks cannot be even; the sum of all phases can, which ranks in step have nothing of."""
    audio, text = Phase("audio", LinearCost(1.0)), Phase("text", LinearCost(1.0), max_tokens=400)
    rates = {}
    for policy in ("lb-mini", "joint"):
        schedule = Orchestrator([audio], text, 8, policy=policy).plan(few_clips(8))
        rates[policy] = step_times(schedule, "odc").bubble_rate
    assert rates["joint"] < 0.01 < 0.07 < rates["lb-mini"]
    with pytest.raises(ValueError, match="policy='joint' with comm='collective'"):
        Orchestrator([audio], text, 8, policy="joint", comm="collective")


def test_whole_samples_are_even_where_no_output_moves() -> None:
    rng = np.random.default_rng(1)
    ranks = [
        [SampleLengths(500, {"image": [ItemLengths(int(n), int(n) // 4)]}) for n in rng.lognormal(5, 0.7, 40)]
        for _ in range(8)
    ]
    image, text = Phase("image", LinearCost(3.0)), Phase("text", LinearCost(), max_tokens=4000)
    rates = {}
    for policy in ("local", "whole"):
        schedule = Orchestrator([image], text, 8, policy=policy, balance_encoders=False).plan(ranks)
        assert schedule.outputs["image"].is_at_rest
        rates[policy] = step_times(schedule, "odc").bubble_rate
    assert rates["whole"] < 0.01 < 0.05 < rates["local"]


def test_batches_stay_on_their_node_where_they_can() -> None:
    rng = np.random.default_rng(0)
    ranks = [
        [SampleLengths(300, {"image": [ItemLengths(int(n), int(n) // 4)]}) for n in rng.integers(4, 200, 12)]
        for _ in range(8)
    ]
    image, text = Phase("image", LinearCost()), Phase("text", LinearCost(), max_tokens=4000)

    def most(ranks_per_node: int | None) -> float:
        """Of what moves between nodes of 4, in and out, the largest part of one rank."""
        schedule = Orchestrator([image], text, 8, ranks_per_node=ranks_per_node).plan(ranks)
        sizes = schedule.lengths.items["image"].encoder
        volume = schedule.inputs["image"].volume(sizes) + schedule.outputs["image"].inverse().volume(sizes)
        node = np.arange(8) // 4
        return float((volume * (node[:, None] != node[None, :])).sum(axis=1).max())

    assert most(4) < 0.95 * most(None)


def lengths_of(*items: Any, name: str = "vision", length: Any = 50) -> list[list[SampleLengths]]:
    return [[SampleLengths(10)], [SampleLengths(20), SampleLengths(length, {name: list(items)})]]


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (lengths_of(ItemLengths(4, 1), name="smell"), "sample 1 of this rank's minibatch has items of 'smell'"),
        (lengths_of(ItemLengths(4, 1), ItemLengths(0, 1)), "phase 'vision': item 1 has encoder length 0"),
        (lengths_of(ItemLengths(4, -1)), "phase 'vision': item 0 has output length -1"),
        (lengths_of(None), "phase 'vision': item 0 has lengths None: expected ItemLengths"),
        (lengths_of(ItemLengths(400, 51)), r"has 50 tokens, and its items put 51 into it"),
        (lengths_of(length=0), "has length 0: expected its tokens"),
        (lengths_of(length="9"), "has length '9'"),
        (
            lengths_of(ItemLengths(61, 1)),
            r"phase 'vision', vision item 0 of sample 2 of the minibatch \(read by rank 1",
        ),
        (lengths_of(length=201), r"phase 'language', sample 2 of the minibatch \(read by rank 1\).*max_tokens=200"),
        ([[], [], []], "lengths of 3 ranks: expected num_ranks=2"),
    ],
)
def test_bad_lengths_are_refused_by_sample_and_phase(samples: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        orchestrator(2, policy="lb-mini").plan(samples)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Phase("", LinearCost()), "a phase is called ''"),
        (lambda: Phase("a", 3), "phase 'a': cost=3"),  # type: ignore[arg-type]
        (lambda: Phase("a", LinearCost(), layout="loose"), "layout='loose'"),  # type: ignore[arg-type]
        (lambda: Phase("a", LinearCost(), max_tokens=0), "max_tokens of phase 'a'"),
        (lambda: Orchestrator([Phase("a", LinearCost())], Phase("a", LinearCost()), 2), "names that are all different"),
        (lambda: Orchestrator([Phase("a", abs, "padded")], Phase("b", LinearCost()), 2), "expected a QuadraticCost"),  # type: ignore[arg-type]
        (lambda: Orchestrator([], Phase("b", QuadraticCost(1, 1), "padded"), 2), "expected 'packed'"),
        (lambda: Orchestrator([], Phase("b", LinearCost()), 2, policy="lb-mini"), "needs max_tokens of phase 'b'"),
        (lambda: Orchestrator([], Phase("b", LinearCost(), max_tokens=9), 2, policy="best"), "best"),
        (lambda: Orchestrator([], Phase("b", LinearCost(), max_tokens=9), 2, policy="whole"), "balance_encoders=False"),
        (lambda: Orchestrator([], Phase("b", LinearCost()), 6, ranks_per_node=4), "expected full nodes"),
        (lambda: Orchestrator([], Phase("b", LinearCost()), 2, comm="mpi"), "comm='mpi'"),  # type: ignore[arg-type]
        (lambda: Orchestrator([], Phase("b", LinearCost()), 0), "num_ranks=0"),
    ],
)
def test_bad_arguments_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_lengths_travel_as_numbers() -> None:
    names = ("vision", "audio")
    for seed in range(5):
        rows = minibatch(3, 10, seed)
        for mine in rows:
            given = RankLengths.of_samples([mine[:2], mine[2:]], names)
            back = RankLengths.of_vector(np.append(given.as_vector(), [7.0, 7.0]), names)
            assert back.as_vector().tolist() == given.as_vector().tolist()
        whole = MinibatchLengths.of_samples(rows, names)
        assert whole.num_samples == 10
        assert [whole.rank_of(sample) for rank in range(3) for sample in whole.samples_of(rank)] == [
            rank for rank in range(3) for _ in whole.samples_of(rank)
        ]


def test_items_of_ranks_sample_by_sample() -> None:
    rng = np.random.default_rng(3)
    for num_samples in (0, 1, 40):
        sample = np.sort(rng.integers(0, max(num_samples, 1), 60 if num_samples else 0))
        items = Items(sample, sample, sample, sample)
        ranks = np.split(rng.permutation(num_samples), np.sort(rng.integers(0, num_samples + 1, 4)))
        expected = [[int(item) for s in mine for item in np.flatnonzero(sample == s)] for mine in ranks]
        assert [mine.tolist() for mine in items.of_ranks(ranks)] == expected
        assert [items.of_samples(mine.tolist()) for mine in ranks] == expected


def test_the_first_difference_of_two_schedules_is_named() -> None:
    samples = minibatch(3, 12, 1)
    mine = orchestrator(3, policy="lb-mini").plan(samples)
    other = orchestrator(3, policy="lb-mini", balance_encoders=False).plan(samples)
    found = mine.difference(other.as_vector())
    assert found.startswith("phase 'vision': vision item ")
    assert mine.fingerprint() != other.fingerprint()


def test_cost_models_are_told_apart_by_their_costs() -> None:
    """Not by what their objects are called, which is another thing in each process."""

    class Steps:
        def __init__(self, size: int) -> None:
            self.size = size

        def __call__(self, lengths: Any) -> Any:
            return -(np.asarray(lengths, dtype=np.float64) // -self.size)

    def identity(size: int, limit: int = 9) -> dict[str, str]:
        return Orchestrator([Phase("vision", Steps(size), max_tokens=limit)], Phase("language", Steps(3)), 2).identity()

    assert identity(4) == identity(4)
    changed = [identity(5), identity(4, limit=10)]
    assert all({k for k, v in found.items() if v != identity(4)[k]} == {"encoders"} for found in changed)
