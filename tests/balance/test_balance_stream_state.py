"""Layer 2: ranks as threads. Stopped after any minibatch, a stream goes on in new loaders as if it had not."""

from __future__ import annotations

import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import some_of
from stream_ranks import run_streams
from test_balance_stream import KINDS, Indices, InTurns, Sequence, kind_id, make_loader, summary

from odc.balance import LinearCost, StreamLoader


def with_states(loader: StreamLoader[int, Any]) -> tuple[list[Any], list[str]]:
    """What it gives, and its states as JSON: before the first minibatch and after each."""
    states = [json.dumps(loader.state_dict())]
    found = []
    for minibatch in loader:
        found += summary([minibatch])
        states.append(json.dumps(loader.state_dict()))
    return found, [*states, json.dumps(loader.state_dict())]


@pytest.mark.parametrize(("dataset", "kind"), some_of([Indices, Sequence], KINDS), ids=kind_id)
def test_it_goes_on_after_any_minibatch(dataset: Any, kind: tuple[str, str]) -> None:
    grouping, align = kind

    def make(rank: int, **options: Any) -> StreamLoader[int, Any]:
        return make_loader(rank, 2, dataset(), align, grouping, **options)

    whole = run_streams(2, make, with_states)
    longest = min(len(states) for _, states in whole)
    for num_done in [*range(0, longest, 5), longest - 2, longest - 1]:

        def go_on(loader: StreamLoader[int, Any], at: int = num_done) -> tuple[list[Any], int]:
            loader.load_state_dict(json.loads(whole[loader.rank][1][at]))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                iterator = iter(loader)
                first = list(itertools.islice(iterator, 1))
                num_read = getattr(loader.dataset, "num_read", 0)
                return summary([*first, *iterator]), num_read

        ranks = run_streams(2, make, go_on)
        for (rest, num_read), (minibatches, _) in zip(ranks, whole, strict=True):
            assert rest == minibatches[num_done:]
            # Of the pool as it was; and what it lacks is read ahead.
            assert num_read <= 2 * 20 + 20 * (num_done == longest - 2)


def test_a_state_is_small() -> None:
    loader = make_loader(0, 1, Indices(200), align="minibatch", grouping="pack", pool_size=150)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    num_pooled = len(state["position"]["places"])
    assert num_pooled > 100
    assert len(json.dumps(state)) <= 2048 + 24 * num_pooled


@pytest.mark.parametrize("number", [np.uint8, np.int64])
@pytest.mark.parametrize(
    "options",
    [
        {"grouping": "pool-sort", "batch_size": 3, "gradient_accumulation_steps": 3},
        {"align": "steps", "gradient_accumulation_steps": 3},
        {"grouping": "pack", "align": "minibatch", "minibatch_size": 5},
        {"dataset": Sequence(), "iterable_yields": "worker", "num_workers": 0},
    ],
)
def test_sizes_may_be_numbers_of_numpy(options: dict[str, Any], number: Callable[[int], Any]) -> None:
    given = {"max_tokens": 120, "pool_size": 40, "seed": 3, **options}
    numbers = {name: number(value) if isinstance(value, int) else value for name, value in given.items()}
    assert with_states(make_loader(**numbers)) == with_states(make_loader(**given))


@pytest.mark.parametrize("options", [{"infinite": True}, {"join": False}, {"gradient_accumulation_steps": 3}])
def test_it_goes_on_in_a_later_lap(options: dict[str, Any]) -> None:
    for dataset in (Indices, Sequence):

        def make(rank: int, dataset: Any = dataset) -> StreamLoader[int, Any]:
            return make_loader(rank, 2, dataset(), **options)

        def run(loader: StreamLoader[int, Any]) -> tuple[list[Any], list[str]]:
            states, found = [], []
            for minibatch in itertools.islice(loader, 75):
                found += summary([minibatch])
                states.append(json.dumps(loader.state_dict()))
            return found, states

        whole = run_streams(2, make, run)
        length = len(whole[0][0])
        for num_done in (length // 3, 2 * length // 3, length - 1):

            def go_on(loader: StreamLoader[int, Any], at: int = num_done, ranks: Any = whole) -> list[Any]:
                loader.load_state_dict(json.loads(ranks[loader.rank][1][at - 1]))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return summary(itertools.islice(loader, 75 - at))

            assert run_streams(2, make, go_on) == [found[num_done:] for found, _ in whole]


def test_a_stopped_iterable_is_gone_through_again_and_says_how_far() -> None:
    loader = make_loader(dataset=Sequence())
    for _ in zip(range(9), loader, strict=False):
        pass
    state = loader.state_dict()
    again = make_loader(dataset=Sequence(), num_workers=2)
    again.load_state_dict(state)
    with pytest.warns(
        UserWarning, match=r"rank 0 iterates again over \d\d samples of its dataset, which has no indices"
    ):
        rest = summary(again)
    assert rest == summary(make_loader(dataset=Sequence()))[9:]
    shorter = make_loader(dataset=Sequence(8))
    shorter.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"the dataset of rank 0 ended after 8 samples, and had \d\d when the state"):
        with pytest.warns(UserWarning, match="iterates again over"):
            next(iter(shorter))


def test_states_and_epochs() -> None:
    loader = make_loader()
    whole = summary(loader)
    done = loader.state_dict()
    loader.load_state_dict(done)
    assert summary(loader) == []  # the epoch of the state is over
    assert summary(loader) == whole
    loader.load_state_dict(done)
    loader.set_epoch(1)
    assert len(summary(loader)) > 5
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    other = make_loader()
    other.load_state_dict(state)
    other.set_epoch(1)  # the epoch of the state goes on
    assert summary(other) == summary(iterator)
    first = make_loader()
    iterator = iter(first)
    next(iterator)
    first.load_state_dict(state)
    with pytest.raises(RuntimeError, match="this iteration ended after minibatch 0"):
        next(iterator)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"world_size": 2}, "world_size=1, this loader world_size=2"),
        ({"seed": 1}, "seed=0, this loader seed=1"),
        ({"grouping": "pack"}, "grouping='token-budget', this loader grouping='pack'"),
        ({"max_tokens": 121}, "max_tokens=120, this loader max_tokens=121"),
        ({"pool_size": 21}, "pool_size=20, this loader pool_size=21"),
        ({"dataset": Indices(202)}, "num_samples=203, this loader num_samples=202"),
        ({"align": "minibatch"}, "align='dgap', this loader align='minibatch'"),
    ],
)
def test_the_state_of_another_stream_is_refused_by_name(other: dict[str, Any], name: str) -> None:
    loader = make_loader()
    next(iter(loader))
    with pytest.raises(ValueError, match=f"the state has {name}"):
        make_loader(**other).load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="has no position"):
        loader.load_state_dict({"epoch": 0})
    with pytest.raises(ValueError, match="the position has no source and no places"):
        loader.load_state_dict({**loader.state_dict(), "position": {"rounds": {}}})
    with pytest.raises(TypeError, match="the state is a list"):
        loader.load_state_dict([])  # type: ignore[arg-type]


def test_the_state_at_other_costs_is_refused_where_they_matter() -> None:
    for align, refused in (("minibatch", True), ("steps", True), ("dgap", False)):
        state = make_loader(align=align).state_dict()
        other = make_loader(align=align, cost=LinearCost())
        if refused:
            with pytest.raises(ValueError, match="costs_fingerprint"):
                other.load_state_dict(state)
        else:
            other.load_state_dict(state)


def test_a_sampler_must_give_the_order_that_it_gave() -> None:
    def make(order: Any) -> StreamLoader[int, Any]:
        return make_loader(0, 1, None, "minibatch", "pack", sampler=order, infinite=True)

    loader = make(InTurns())
    whole = []
    for minibatch in itertools.islice(loader, 30):  # a lap has ten
        whole += summary([minibatch])
        if len(whole) == 17:
            state = json.loads(json.dumps(loader.state_dict()))
    again = make(InTurns())
    again.load_state_dict(state)
    assert summary(itertools.islice(again, 13)) == whole[17:]
    other = make(list(range(50)))
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="another order for epoch 0 than when the state was taken"):
        next(iter(other))


class SharedEpoch:
    """An iterable that keeps its epoch in memory that all workers share, and adds to it, as ``datasets`` does."""

    def __init__(self) -> None:
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        difference = epoch - self.epoch
        time.sleep(0.02)
        self._epoch += difference

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * 6)


def test_workers_that_share_an_epoch_do_not_come_to_another_one() -> None:
    loader = make_loader(dataset=SharedEpoch(), grouping="none", length=lambda epoch: 1, num_workers=2, infinite=True)
    loader.set_epoch(3)
    found = [epoch for m in itertools.islice(loader, 12) for batch in m.microbatches for epoch in batch]
    assert len(found) >= 30
    assert found == [3 + i // 6 for i in range(len(found))]
