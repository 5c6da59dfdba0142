"""Layer 3: worker processes. When they start and end, how their errors arrive, and none is left behind."""

from __future__ import annotations

import multiprocessing
import re
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from epochs import failure
from kernel_cases import some_of
from loaders import known_loader
from test_balance_loader_workers import (
    COST,
    WORKERS,
    Indices,
    Tokens,
    assert_same,
    make_index_loader,
    make_loader,
    refuse,
    with_pid,
)
from test_balance_loader_workers import (
    end_leftover_workers as end_leftover_workers,
)
from torch.utils.data import get_worker_info

from odc.balance import Minibatch, MinibatchLoader, pack_collate
from odc.balance.policies import LBMini
from odc.balance.policies.base import Job


def num_workers_alive() -> int:
    return len(multiprocessing.active_children())


def test_workers_end_with_the_epoch() -> None:
    for _ in make_index_loader(**WORKERS):
        assert num_workers_alive() == 2
    assert num_workers_alive() == 0


def test_workers_end_when_the_loop_is_left() -> None:
    loader = make_index_loader(**WORKERS)
    for _ in loader:
        break
    assert num_workers_alive() == 0
    iterator = iter(loader)
    assert num_workers_alive() == 0  # they start at the first minibatch
    next(iterator)
    assert num_workers_alive() == 2
    del iterator
    assert num_workers_alive() == 0


def train_until_error(loader: MinibatchLoader[Any, Any]) -> None:
    for _ in loader:
        raise ArithmeticError("loss is NaN")


def test_workers_end_when_training_fails() -> None:
    with pytest.raises(ArithmeticError) as error:
        train_until_error(make_index_loader(**WORKERS))
    del error  # its traceback holds the loop, and that the workers
    assert num_workers_alive() == 0


def test_a_second_iteration_ends_the_first() -> None:
    loader = make_index_loader(**WORKERS)
    first = iter(loader)
    next(first)
    assert [minibatch.microbatches for minibatch in loader] == [m.microbatches for m in make_index_loader()]
    with pytest.raises(RuntimeError, match="ended after minibatch 0: the loader was iterated again"):
        next(first)
    assert num_workers_alive() == 0


@pytest.mark.parametrize(("num_workers", "change"), some_of([0, 2], ["state", "epoch"]))
def test_an_iteration_does_not_outlive_its_epoch(num_workers: int, change: str) -> None:
    """Else ranks would mix plans of two epochs, each at the point that its own prefetching had reached."""
    loader = make_index_loader(num_workers=num_workers)
    iterator = iter(loader)
    next(iterator)
    loader.set_epoch(0)  # the same epoch
    next(iterator)
    if change == "epoch":
        loader.set_epoch(1)
    else:
        loader.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match="ended after minibatch 1"):
        next(iterator)


def open_dataset(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.dataset.opened_by = worker


def opened_by(samples: list[int]) -> int | None:
    info: Any = get_worker_info()
    result: int | None = info.dataset.dataset.opened_by
    return result


def test_worker_init_fn_finds_the_dataset() -> None:
    loader = make_index_loader(opened_by, worker_init_fn=open_dataset, **WORKERS)
    assert {batch for minibatch in loader for batch in minibatch.microbatches} == {0, 1}


# Persistent workers.


def pids(minibatches: Iterable[Minibatch[Any]]) -> set[int]:
    return {pid for minibatch in minibatches for pid, _ in minibatch.microbatches}


def test_persistent_workers_stay_for_the_next_epoch() -> None:
    loader = make_index_loader(with_pid, persistent_workers=True, **WORKERS)
    first = pids(loader)
    assert num_workers_alive() == 2
    loader.set_epoch(1)
    for _ in loader:
        break  # what was read ahead must not turn up in the next epoch
    loader.set_epoch(2)
    minibatches = list(loader)
    assert pids(minibatches) == first
    assert [i for m in minibatches for _, batch in m.microbatches for i in batch] == [*range(24)]
    del loader
    assert num_workers_alive() == 0


def test_persistent_workers_resume() -> None:
    loader = make_loader(persistent_workers=True, **WORKERS)
    whole = list(loader)
    assert_same(whole, list(make_loader()))
    loader.load_state_dict({**loader.state_dict(), "num_minibatches_done": 2})
    assert_same(list(loader), whole[2:])


# Errors.


PERSISTENT = pytest.param({**WORKERS, "persistent_workers": True}, marks=pytest.mark.extended)
SOME_WORKERS = pytest.mark.parametrize("options", [{}, WORKERS, PERSISTENT])


@SOME_WORKERS
def test_an_error_of_the_dataset_names_the_sample(options: dict[str, Any]) -> None:
    kind, message = failure(make_index_loader(dataset=Indices("key"), **options))
    assert kind is (KeyError if sys.version_info >= (3, 11) else RuntimeError)
    assert "when sample 17 was read" in message
    assert "text" in message
    assert num_workers_alive() == 0


@SOME_WORKERS
def test_an_error_of_collate_names_the_samples(options: dict[str, Any]) -> None:
    kind, message = failure(make_index_loader(refuse, policy="lb-mini", max_tokens=2, **options))
    assert kind is (TypeError if sys.version_info >= (3, 11) else RuntimeError)
    assert re.search(r"when samples \[(17, \d+|\d+, 17)\] were collated", message)
    assert "no batch of these" in message
    assert num_workers_alive() == 0


@SOME_WORKERS
def test_a_dataset_cannot_end_the_epoch(options: dict[str, Any]) -> None:
    kind, message = failure(make_index_loader(dataset=Indices("stop"), **options))
    assert kind is RuntimeError
    assert "StopIteration when sample 17 was read" in message


@SOME_WORKERS
def test_labels_are_checked_where_they_are_made(options: dict[str, Any]) -> None:
    dataset = Tokens()
    arguments: dict[str, Any] = {"minibatch_size": 3, "cost": COST, **options}
    kind, message = failure(known_loader(dataset, dataset.lengths, pack_collate, 0, 1, **arguments))
    assert kind is ValueError
    assert re.search(r"labels of samples \[.*the loss scale would be wrong", message)


def test_a_worker_that_hangs_is_an_error() -> None:
    kind, message = failure(make_index_loader(dataset=Indices("sleep"), worker_timeout_s=0.3, **WORKERS))
    assert kind is RuntimeError
    assert "timed out after 0.3 seconds" in message
    assert num_workers_alive() == 0


@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_dies_is_an_error_and_can_be_replaced(persistent: bool) -> None:
    dataset = Indices("killed")
    loader = make_index_loader(dataset=dataset, persistent_workers=persistent, **WORKERS)
    kind, message = failure(loader)
    assert kind is RuntimeError
    assert re.search("DataLoader worker .*(is killed by signal|exited unexpectedly)", message)
    assert num_workers_alive() == 0
    dataset.trouble = ""
    assert [i for m in loader for batch in m.microbatches for i in batch] == [*range(24)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, "num_workers=-1: expected an integer of at least 0"),
        ({"num_workers": 1.5}, "num_workers=1.5: expected an integer"),
        ({"prefetch_factor": 2}, "prefetch_factor=2 without workers: .* num_workers of at least 1"),
        ({**WORKERS, "prefetch_factor": 0}, "prefetch_factor=0: expected an integer of at least 1"),
        ({**WORKERS, "prefetch_factor": -1}, "prefetch_factor=-1"),
        ({"persistent_workers": True}, "persistent_workers=True without workers"),
        ({"multiprocessing_context": "fork"}, "multiprocessing_context='fork' without workers"),
        ({**WORKERS, "multiprocessing_context": "thread"}, "multiprocessing_context.*'thread'"),
        ({**WORKERS, "worker_timeout_s": -1}, "worker_timeout_s=-1: expected a finite number of at least 0"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_loader(**options)
    assert num_workers_alive() == 0


class FailingPolicy(LBMini):
    """Cannot plan the third minibatch."""

    def __init__(self) -> None:
        self.num_plans = 0

    def assign(self, job: Job) -> Sequence[list[list[int]]]:
        self.num_plans += 1
        if self.num_plans == 3:
            raise ArithmeticError("no plan")
        return super().assign(job)


def test_an_error_of_planning_comes_where_its_minibatch_is_asked_for() -> None:
    iterator = iter(make_index_loader(policy=FailingPolicy(), minibatch_size=1))
    next(iterator)
    next(iterator)
    with pytest.raises(ArithmeticError, match="no plan"):
        next(iterator)
    assert "odc-ahead" not in {thread.name for thread in threading.enumerate()}
