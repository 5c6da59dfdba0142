"""Layer 2: ranks as threads, their loops in virtual time. Streams whose samples are bound late."""

from __future__ import annotations

import itertools
import random
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from late_ranks import BusyStore, Clock, keep_time, run_at_random, run_timed
from stream_ranks import run_streams
from test_balance_stream import COST, LENGTHS, Indices, Sequence, make_loader, samples_of, summary

from odc.balance import StreamLoader
from odc.balance.data import stream as stream_module

WORLD_SIZE = 3
OPTIONS: dict[str, Any] = {"align": "minibatch", "grouping": "pack", "comm": "odc"}

Loops = list[Iterator[list[int]]]
Drive = Callable[[Loops, Clock, BusyStore], list[list[list[int]]]]
"""Runs the loops of all ranks over one minibatch, and returns the microbatches of each."""


def late_streams(
    drive: Drive, states: list[dict[str, Any]] | None = None, num_minibatches: int = 10**6, **options: Any
) -> tuple[list[list[Any]], list[dict[str, Any]], int]:
    """Of each rank what ``summary`` tells, its state at the end, and how many samples all have taken from others."""
    clock, store = Clock(), BusyStore()
    meet = threading.Barrier(WORLD_SIZE)
    loops: Loops = [iter(())] * WORLD_SIZE
    computed: list[list[list[int]]] = []

    def use(loader: StreamLoader[int, list[int]]) -> tuple[list[Any], dict[str, Any], int]:
        if states is not None:
            loader.load_state_dict(states[loader.rank])
        found = []
        for minibatch in itertools.islice(loader, num_minibatches):
            assert minibatch.plan is not None
            loops[loader.rank] = iter(minibatch.microbatches)
            meet.wait(30)
            if loader.rank == 0:
                try:
                    computed[:] = drive(loops, clock, store)
                except Exception:
                    meet.abort()
                    raise
            meet.wait(30)
            mine = computed[loader.rank]
            assert all(0 < sum(LENGTHS[i] for i in batch) <= 120 for batch in mine)
            found.append((mine, minibatch.loss_scale, minibatch.num_loss_tokens, minibatch.num_samples))
        return found, loader.state_dict(), loader.num_taken

    with pytest.MonkeyPatch.context() as patch:
        keep_time(patch, clock)
        patch.setattr(stream_module, "own_store", lambda: store)
        ranks = run_streams(
            WORLD_SIZE,
            lambda rank: make_loader(rank, WORLD_SIZE, late_binding=True, **OPTIONS, **options),
            use,
        )
    found, ends, taken = zip(*ranks, strict=True)
    return list(found), list(ends), sum(taken)


def slow_rank(speed: float) -> Drive:
    """The last one. Microbatches take what their samples cost."""
    costs = COST(np.array(LENGTHS))

    def drive(loops: Loops, clock: Clock, store: BusyStore) -> list[list[list[int]]]:
        return run_timed(
            loops, clock, lambda rank, batch: float(costs[batch].sum()) / (speed if rank == WORLD_SIZE - 1 else 1.0)
        )[1]

    return drive


def at_random(seed: int) -> Drive:
    rng = random.Random(seed)

    def drive(loops: Loops, clock: Clock, store: BusyStore) -> list[list[list[int]]]:
        return [run_at_random(loops, clock, store, 0.5, rng), *([] for _ in loops[1:])]  # whoever began them

    return drive


def minibatches_of(ranks: list[list[Any]]) -> list[tuple[list[int], int, int]]:
    """The samples of each minibatch, its loss tokens, and how many samples it is said to have."""
    found = []
    for minibatch in zip(*ranks, strict=True):
        ((num_loss_tokens, num_samples),) = {(mine[2], mine[3]) for mine in minibatch}
        found.append((samples_of([[mine] for mine in minibatch]), num_loss_tokens, num_samples))
    return found


def early(**options: Any) -> list[list[Any]]:
    return run_streams(WORLD_SIZE, lambda rank: make_loader(rank, WORLD_SIZE, **OPTIONS, **options), summary)


def test_minibatches_are_those_of_a_stream_that_is_bound_early() -> None:
    found, _, taken = late_streams(slow_rank(0.5))
    assert minibatches_of(found) == minibatches_of(early())
    assert taken > 10
    costs = [[sum(float(COST(np.array([LENGTHS[i]]))[0]) for b in m[0] for i in b) for m in mine] for mine in found]
    slow, others = sum(costs[2]), (sum(costs[0]) + sum(costs[1])) / 2
    assert slow < 0.75 * others  # without late binding as much


def test_one_scale_on_all_ranks_also_where_one_has_chosen_nothing() -> None:
    """4 samples on 3 ranks, in two minibatches. Which rank has none may take one."""
    found, _, _ = late_streams(slow_rank(0.5), dataset=Indices(4), minibatch_size=1)
    minibatches = minibatches_of(found)
    assert [num_samples for *_, num_samples in minibatches] == [2, 2]
    for mine in found:
        assert [scale for _, scale, *_ in mine] == [WORLD_SIZE / tokens for _, tokens, _ in minibatches]


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_samples=st.integers(3, 60),
    infinite=st.booleans(),
    microbatch_cost=st.sampled_from([0.0, 5.0, 60.0]),
)
def test_each_sample_is_computed_once_whoever_comes_between(
    seed: int, num_samples: int, infinite: bool, microbatch_cost: float
) -> None:
    """Also where an epoch ends within a minibatch, which may have a sample twice then."""
    options = {"dataset": Indices(num_samples), "infinite": infinite}
    found, _, _ = late_streams(at_random(seed), num_minibatches=4, microbatch_cost=microbatch_cost, **options)
    expected = run_streams(
        WORLD_SIZE,
        lambda rank: make_loader(rank, WORLD_SIZE, **OPTIONS, **options),
        lambda loader: summary(itertools.islice(loader, 4)),
    )
    assert minibatches_of(found) == minibatches_of(expected)


@pytest.mark.parametrize("num_done", [1, 4])
def test_a_state_goes_on_bound_late_or_early(num_done: int) -> None:
    expected = minibatches_of(early())
    found, states, _ = late_streams(slow_rank(0.5), num_minibatches=num_done, num_workers=1)
    assert minibatches_of(found) == expected[:num_done]
    rest, _, taken = late_streams(slow_rank(0.5), states)
    assert taken > 0
    assert minibatches_of(rest) == expected[num_done:]

    def go_on(loader: StreamLoader[int, Any]) -> list[Any]:
        loader.load_state_dict(states[loader.rank])
        return summary(loader)

    early_rest = run_streams(WORLD_SIZE, lambda rank: make_loader(rank, WORLD_SIZE, **OPTIONS), go_on)
    assert minibatches_of(early_rest) == expected[num_done:]


def test_a_sample_that_is_another_one_where_it_is_taken_is_refused() -> None:
    rng = random.Random(0)
    with pytest.raises(ValueError, match=r"sample \d+ has \d+ tokens and \d+ loss tokens where rank \d reads it"):
        late_streams(slow_rank(0.5), length=lambda index: LENGTHS[index] + rng.randint(0, 1))


def test_one_rank_has_nobody_to_take_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "own_store", dist.HashStore)
    loader = make_loader(late_binding=True, **OPTIONS)
    for _ in range(2):
        found = [(list(minibatch.microbatches), minibatch.loss_scale) for minibatch in loader]
        assert samples_of([found]) == list(range(len(LENGTHS)))
    with pytest.raises(RuntimeError, match="this minibatch is over"):
        list(next(minibatch for minibatch in list(loader)).microbatches)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grouping": "token-budget"}, "late_binding=True with grouping='token-budget': expected 'pack'"),
        ({"loss_scaling": "approx"}, "late_binding=True with loss_scaling='approx': expected 'exact'"),
        ({"dataset": Sequence()}, "late_binding=True with an iterable dataset, whose samples no other rank can read"),
        ({"late_binding": False, "microbatch_cost": 1.0}, "microbatch_cost=1.0 without late_binding=True"),
    ],
)
def test_what_it_does_not_go_with_is_refused(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "own_store", dist.HashStore)
    with pytest.raises(ValueError, match=re.escape(words)):
        make_loader(0, 2, **{**OPTIONS, "late_binding": True, **options})


def test_it_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="late_binding=True without a process group"):
        make_loader(0, 1, late_binding=True, **OPTIONS)
