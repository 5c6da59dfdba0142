"""Layer 3: worker processes. The loader yields the same with and without them, also when it is resumed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from loaders import known_loader

from odc.balance import Minibatch, MinibatchLoader, QuadraticCost, get_policy, pack_collate
from odc.balance.policies import LBMini
from odc.balance.policies.base import Job

COST = QuadraticCost(1e-2, 1.0)
WORKERS = {"num_workers": 2}
POLICIES = ["lb-mini", "lb-micro", "verl-native"]


@pytest.fixture(scope="module", autouse=True)
def end_leftover_workers() -> Iterator[None]:
    """pytest keeps the traceback of a failed test and what that holds; the end of the tests would wait for it."""
    yield
    for worker in multiprocessing.active_children():
        worker.terminate()
        worker.join()


# Top level, because workers that are spawned import them by name.


class Tokens:
    """Samples cut out of one tensor of tokens; the first tokens of a sample are its prompt."""

    def __init__(self, num_samples: int = 46, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = rng.integers(1, 61, num_samples)
        self.prompts = rng.integers(1, self.lengths + 1)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.tokens = torch.from_numpy(rng.integers(0, 1000, int(self.lengths.sum())))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.tokens[self.starts[index] :][: self.lengths[index]]
        labels = ids.clone()
        labels[: self.prompts[index]] = -100
        return {"input_ids": ids, "labels": labels}


class Indices:
    """Sample i is i, unless it is the one that does what ``trouble`` says."""

    def __init__(self, trouble: str = "", sample: int = 17) -> None:
        self.trouble = trouble
        self.sample = sample
        self.opened_by: int | None = None

    def __getitem__(self, index: int) -> int:
        if index == self.sample:
            self._trouble()
        return index

    def _trouble(self) -> None:
        if self.trouble == "key":
            raise KeyError("text")
        if self.trouble == "stop":
            raise StopIteration
        if self.trouble == "sleep":
            time.sleep(2.5)
        if self.trouble == "killed":
            os.kill(os.getpid(), signal.SIGKILL)


def with_pid(samples: list[int]) -> tuple[int, list[int]]:
    return os.getpid(), samples


def as_array(samples: list[int]) -> Any:
    return np.array(samples, dtype=np.int64)


def refuse(samples: list[int]) -> list[int]:
    if 17 in samples:
        raise TypeError("no batch of these")
    return samples


def make_loader(rank: int = 0, **options: Any) -> MinibatchLoader[Any, dict[str, torch.Tensor]]:
    """46 samples on 4 ranks: three full minibatches and one of 10 samples."""
    dataset = Tokens()
    arguments: dict[str, Any] = {"minibatch_size": 3, "cost": COST, "drop_last": False, **options}
    counts = dataset.lengths - dataset.prompts
    return known_loader(dataset, dataset.lengths, pack_collate, rank, 4, num_loss_tokens=counts, **arguments)


def make_index_loader(
    collate: Any = list, dataset: Any = None, rank: int = 0, world_size: int = 1, **options: Any
) -> MinibatchLoader[int, Any]:
    """24 samples in their order: minibatches of 4 samples per rank, each a microbatch."""
    arguments: dict[str, Any] = {"minibatch_size": 4, "policy": "local-sort", **options}
    dataset = Indices() if dataset is None else dataset
    return known_loader(dataset, [1] * 24, collate, rank, world_size, cost=COST, shuffle=False, **arguments)


def assert_same(found: list[Minibatch[Any]], expected: list[Minibatch[Any]]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.loss_scale, a.num_loss_tokens, a.plan) == (b.loss_scale, b.num_loss_tokens, b.plan)
        assert len(a.microbatches) == len(b.microbatches)
        for left, right in zip(a.microbatches, b.microbatches, strict=True):
            assert left.keys() == right.keys()
            assert all(torch.equal(left[name], right[name]) for name in left)


# The same stream.


@pytest.mark.parametrize(("policy", "rank"), [*zip(POLICIES, (0, 3, 0), strict=True)])
def test_workers_change_nothing(policy: str, rank: int) -> None:
    expected = make_loader(rank, policy=policy)
    loader = make_loader(rank, policy=policy, **WORKERS)
    for epoch in range(2):
        expected.set_epoch(epoch)
        loader.set_epoch(epoch)
        assert_same(list(loader), list(expected))


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.extended)])
def test_workers_that_are_not_forked(method: str) -> None:
    loader = make_loader(multiprocessing_context=method, num_workers=1)
    assert_same(list(loader), list(make_loader()))


def test_empty_microbatches() -> None:
    """Two samples that need a microbatch each on two ranks, and one that is left over."""
    options: dict[str, Any] = {"minibatch_size": 2, "max_tokens": 1, "policy": "lb-micro", "drop_last": False}
    streams = []
    for num_workers in (0, 2):
        loaders = [
            known_loader(
                Indices(), [1] * 7, list, rank, 2, cost=COST, shuffle=False, num_workers=num_workers, **options
            )
            for rank in range(2)
        ]
        streams.append([[minibatch.microbatches for minibatch in loader] for loader in loaders])
    assert streams[0] == streams[1]
    assert [rank[-1].count([]) for rank in streams[1]] in ([0, 1], [1, 0])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_rank_without_any_microbatch(num_workers: int) -> None:
    """Fewer samples than ranks in every minibatch but the first two."""
    streams = []
    for rank in range(3):
        loader = known_loader(
            Indices(), [1] * 7, list, rank, 3, minibatch_size=1, cost=COST, drop_last=False, num_workers=num_workers
        )
        streams.append([minibatch.microbatches for minibatch in loader])
    assert [len(stream) for stream in streams] == [3, 3, 3]
    assert sorted(len(stream[-1]) for stream in streams) == [0, 0, 1]
    assert sorted(i for stream in streams for minibatch in stream for part in minibatch for i in part) == [*range(7)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_what_collate_returned(num_workers: int) -> None:
    """Lists stay lists and arrays arrays; torch would make tensors of them."""
    for collate, kind in ((list, list), (as_array, np.ndarray)):
        loader = make_index_loader(collate, num_workers=num_workers)
        batches = [batch for minibatch in loader for batch in minibatch.microbatches]
        assert all(type(batch) is kind for batch in batches)
        assert [int(i) for batch in batches for i in batch] == [*range(24)]


def test_workers_do_the_work() -> None:
    batches = [batch for minibatch in make_index_loader(with_pid, **WORKERS) for batch in minibatch.microbatches]
    assert len({pid for pid, _ in batches} - {os.getpid()}) == 2
    assert os.getpid() not in {pid for pid, _ in batches}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_random_numbers_of_the_model_are_left_alone(num_workers: int) -> None:
    before = torch.get_rng_state()
    list(make_index_loader(num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), before)


def random_numbers(samples: list[int]) -> list[int]:
    return [int(torch.randint(1 << 40, ())) for _ in samples]


def test_workers_are_seeded_by_seed_epoch_and_rank() -> None:
    def draw(epoch: int, **options: Any) -> set[int]:
        loader = make_index_loader(random_numbers, **WORKERS, **options)
        loader.set_epoch(epoch)
        return {number for minibatch in loader for batch in minibatch.microbatches for number in batch}

    first = draw(0)
    assert len(first) == 24
    assert draw(0) == first
    assert not draw(1) & first
    assert not draw(0, seed=1) & first
    assert not draw(0, rank=0, world_size=2) & draw(0, rank=1, world_size=2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pinned_memory(num_workers: int) -> None:
    loader = make_loader(pin_memory=True, num_workers=num_workers)
    if torch.accelerator.is_available():
        minibatches = list(loader)
        assert all(t.is_pinned() for m in minibatches for batch in m.microbatches for t in batch.values())
    else:
        with pytest.warns(UserWarning, match="no accelerator"):
            minibatches = list(loader)
    assert_same(minibatches, list(make_loader()))


class CountingPolicy(LBMini):
    def __init__(self) -> None:
        self.num_plans = 0

    def assign(self, job: Job) -> Sequence[list[list[int]]]:
        self.num_plans += 1
        return super().assign(job)


@pytest.mark.parametrize(("options", "num_plans"), [({}, [1, 3, 4]), ({**WORKERS, "prefetch_factor": 1}, [4, 5, 6])])
def test_minibatches_are_planned_when_needed(options: dict[str, Any], num_plans: list[int]) -> None:
    """Each of two workers has a microbatch in advance, and from then on one minibatch more is planned in a thread."""
    for num_taken, expected in enumerate(num_plans, 1):
        policy = CountingPolicy()
        iterator = iter(make_index_loader(policy=policy, minibatch_size=1, **options))
        for _ in range(num_taken):
            next(iterator)
        iterator.close()  # type: ignore[attr-defined]  # not before the thread has ended
        assert policy.num_plans == expected


# Resuming.


@pytest.mark.parametrize(
    ("policy", "before", "after"),
    [
        pytest.param(policy, *workers, marks=[] if (one + other) % 3 == 0 else pytest.mark.extended)
        for one, policy in enumerate(POLICIES)
        for other, workers in enumerate([(2, 0), (0, 2), (2, 2)])
    ],
)
def test_resume_with_other_workers(policy: str, before: int, after: int) -> None:
    def make(num_workers: int) -> MinibatchLoader[Any, dict[str, torch.Tensor]]:
        loader = make_loader(policy=policy, num_workers=num_workers, seed=5)
        loader.set_epoch(1)
        return loader

    whole = list(make(0))
    for num_done in (1, len(whole) - 1, len(whole)):
        interrupted, resumed = make(before), make(after)
        iterator = iter(interrupted)
        start = [next(iterator) for _ in range(num_done)]
        resumed.load_state_dict(interrupted.state_dict())
        assert_same(start + list(resumed), whole)


def test_reading_ahead_does_not_count_as_done() -> None:
    loader, expected = make_loader(prefetch_factor=4, **WORKERS), make_loader()
    assert loader.state_dict() == expected.state_dict()
    for _ in zip(loader, expected, strict=True):
        assert loader.state_dict() == expected.state_dict()
    assert loader.state_dict()["num_minibatches_done"] == 4


def test_policies_of_these_tests_are_of_both_kinds() -> None:
    assert {get_policy(name).two_level for name in POLICIES} == {True, False}
    assert {get_policy(name).equal_counts for name in POLICIES} == {True, False}
