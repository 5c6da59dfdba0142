"""Layer 2: ranks as threads. An iterable dataset with a state of its own is resumed by that, as far as it leads."""

from __future__ import annotations

import itertools
import json
import os
import random
import warnings
from collections.abc import Iterator
from typing import Any

import datasets
import pytest
from kernel_cases import some_of
from stream_ranks import run_streams
from test_balance_stream import make_loader, summary

from odc.balance import StreamLoader


class Stateful:
    """Yields numbers, and tells how many were yielded."""

    def __init__(self, size: int = 203) -> None:
        self.size = size
        self.num_yielded = 0
        self.start = 0
        self.num_read = 0

    def __iter__(self) -> Iterator[int]:
        self.num_yielded, self.start = self.start, 0
        while self.num_yielded < self.size:
            self.num_yielded += 1
            self.num_read += 1
            yield self.num_yielded - 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_yielded": self.num_yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["num_yielded"]


class Lossy(Stateful):
    """Yields from a buffer, which is not in its state."""

    def __iter__(self) -> Iterator[int]:
        chance, buffer = random.Random(0), []
        for item in super().__iter__():
            buffer.append(item)
            if len(buffer) == 6:
                yield buffer.pop(chance.randrange(6))
        yield from buffer


class NotForJson(Stateful):
    def state_dict(self) -> dict[str, Any]:
        return {"iterator": self}


def shards(num_shards: int, shuffled: bool) -> Any:
    rows = datasets.Dataset.from_dict({"n": list(range(203))}).to_iterable_dataset(num_shards=num_shards)
    return rows.shuffle(seed=3, buffer_size=16) if shuffled else rows


def number_of(row: Any) -> int:
    return int(row["n"])


def make(rank: int, dataset: Any, num_workers: int, **options: Any) -> StreamLoader[int, Any]:
    of_table = {"transform": number_of} if isinstance(dataset, datasets.IterableDataset) else {}
    return make_loader(rank, 2, dataset, "minibatch", "pack", num_workers=num_workers, **of_table, **options)


def stopped(make_dataset: Any, num_workers: int, at: int, count: int, **options: Any) -> tuple[list[Any], list[Any]]:
    """Minibatches of two ranks, and their states after so many."""

    def run(loader: StreamLoader[int, Any]) -> tuple[list[Any], str]:
        found, state = [], ""
        for minibatch in itertools.islice(loader, count):
            found += summary([minibatch])
            if len(found) == at:
                state = json.dumps(loader.state_dict())
        loader.close()
        return found, state

    ranks = run_streams(2, lambda rank: make(rank, make_dataset(), num_workers, **options), run)
    return [found for found, _ in ranks], [json.loads(state) for _, state in ranks]


def resumed(make_dataset: Any, num_workers: int, states: list[Any], count: int, **options: Any) -> Any:
    """Minibatches from these states on, and the loaders."""

    def run(loader: StreamLoader[int, Any]) -> tuple[list[Any], Any]:
        loader.load_state_dict(states[loader.rank])
        return summary(itertools.islice(loader, count)), loader

    ranks = run_streams(2, lambda rank: make(rank, make_dataset(), num_workers, **options), run)
    return [found for found, _ in ranks], [loader for _, loader in ranks]


@pytest.mark.parametrize(("num_workers", "infinite", "at"), some_of([0, 2], [False, True], [9, 1, 17]))
def test_a_state_of_its_own_leads_back_without_reading_all(num_workers: int, infinite: bool, at: int) -> None:
    count = 40 if infinite else 100
    whole, states = stopped(Stateful, num_workers, at, count, infinite=infinite)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rest, loaders = resumed(Stateful, num_workers, states, count - at, infinite=infinite)
    assert rest == [found[at:] for found in whole]
    if not num_workers and not infinite:
        read_before = 203 - max(state["position"]["source"]["mark"][0] * 2 for state in states)
        for loader in loaders:
            assert loader.dataset.num_read <= read_before + 2 * 2 * 20  # of the pool, and of the round before it


def test_whoever_begins_the_epoch_again_begins_at_its_beginning() -> None:
    whole, states = stopped(Stateful, 0, 9, 100)
    _, loaders = resumed(Stateful, 0, states, 100)
    assert loaders[0].dataset.start == 0
    again = run_streams(2, lambda rank: loaders[rank], summary)
    assert again == whole


LOST = r"iterates again over \d+ samples of its dataset, whose state_dict does not"


@pytest.mark.parametrize(
    ("dataset", "num_workers", "then", "at", "message"),
    [
        pytest.param(Lossy, 0, 0, 12, LOST, id="samples are lost"),
        pytest.param(Lossy, 2, 2, 12, LOST, id="samples are lost, by workers"),
        pytest.param(Stateful, 2, 0, 9, "iterates again over", id="another number of workers"),
        pytest.param(NotForJson, 0, 0, 9, "which has no indices and no state_dict", id="not for json"),
    ],
)
def test_a_state_that_leads_nowhere_is_noticed_and_all_is_read_again(
    dataset: Any, num_workers: int, then: int, at: int, message: str
) -> None:
    whole, states = stopped(dataset, num_workers, at, 100)
    with pytest.warns(UserWarning, match=message):
        rest, _ = resumed(dataset, then, states, 100)
    assert rest == [found[at:] for found in whole]


@pytest.mark.parametrize(
    ("num_shards", "shuffled", "num_workers"),
    [
        *((1, False, 2), (4, True, 0)),
        *(pytest.param(*case, marks=pytest.mark.extended) for case in ((1, False, 0), (4, True, 2))),
        *(pytest.param(4, False, num_workers, marks=pytest.mark.extended) for num_workers in (0, 2)),
    ],
)
def test_streams_of_datasets_are_resumed(num_shards: int, shuffled: bool, num_workers: int) -> None:
    whole, states = stopped(lambda: shards(num_shards, shuffled), num_workers, 9, 40, infinite=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rest, _ = resumed(lambda: shards(num_shards, shuffled), num_workers, states, 31, infinite=True)
    assert rest == [found[9:] for found in whole]
    assert any("iterates again" in str(one.message) for one in caught) == shuffled


class Fickle:
    """Another order each time."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(203), 203))


@pytest.mark.filterwarnings("ignore:rank . iterates again")
def test_an_iterable_that_yields_others_is_refused() -> None:
    _, states = stopped(lambda: sorted_set(), 0, 3, 5)
    with pytest.raises(RuntimeError, match="yields other samples than when the state was taken"):
        resumed(Fickle, 0, states, 5)


class Shuffled:
    """By a seed of the rank, or of the process."""

    def __init__(self, seed: int | None) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        chance = random.Random(os.getpid() if self.seed is None else self.seed)
        return iter(chance.sample(range(203), 203))


def test_ranks_and_workers_that_shuffle_differently_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ranks \d and \d go through the dataset in different orders"):
        run_streams(2, lambda rank: make(rank, Shuffled(rank), 0), summary)
    loader = make_loader(dataset=Shuffled(None), num_workers=2)
    with pytest.raises(ValueError, match="the workers of rank 0 go through the dataset in different orders"):
        summary(loader)
    run_streams(2, lambda rank: make(rank, Shuffled(5), 2 * rank), summary)
    own_parts = run_streams(2, lambda rank: make(rank, Shuffled(rank), 0, iterable_yields="rank"), summary)
    assert sum(len(batch) for mine in own_parts for m in mine for batch in m[0]) == 2 * 203


def sorted_set() -> Any:
    return dict.fromkeys(range(203)).keys()
