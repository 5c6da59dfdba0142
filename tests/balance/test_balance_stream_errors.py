"""Layer 3: what is refused, and how errors of samples, datasets and collate arrive; workers are never left behind."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from epochs import failure
from process_ranks import wait_until
from stream_ranks import run_streams
from test_balance_stream import (
    LENGTHS,
    Indices,
    InTurns,
    Sequence,
    length_of,
    make_loader,
    pad_collate,
    samples_of,
    summary,
)
from torch.utils.data import IterableDataset, get_worker_info

from odc.balance import AlignedGroups, EqualMinibatches, Grouping, StreamLoader, pack_collate
from odc.balance.data import watched_store
from odc.balance.data.loss_tokens import check_batch
from odc.balance.data.watched_store import WatchedStore
from odc.errors import PeerDiedError

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grouping": "best"}, r"grouping='best': expected one of 'token-budget', 'prefer-closest'"),
        ({"loss_scaling": "mean"}, r"loss_scaling='mean': expected one of 'exact'"),
        ({"iterable_yields": "some"}, r"iterable_yields='some': expected one of 'all', 'rank', 'worker'"),
        ({"pool_size": 0}, "pool_size=0: expected an integer of at least 1"),
        ({"max_tokens": 0}, "max_tokens=0: expected"),
        ({"rank": 1}, "rank=1: expected less than world_size=1"),
        ({"align": "minibatch", "minibatch_size": None}, "minibatch_size=None: expected an integer of at least 1"),
        ({"grouping": "pool-sort", "batch_size": None}, "grouping='pool-sort' needs batch_size"),
        ({"batch_size": 4}, "batch_size=4 with grouping='token-budget', which cuts by max_tokens"),
        ({"align": "steps", "grouping": "pack"}, "grouping='pack' with EqualSteps"),
        ({"pin_memory": True}, "pin_memory=True for a stream, whose batches are made in this process"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0: expected"),
        ({"infinite": True, "join": False}, "join=False with infinite=True"),
        ({"align": "none", "world_size": 2, "loss_scaling": "exact"}, "pass loss_scaling='none'"),
        ({"dataset": []}, "the dataset has no samples"),
        ({"dataset": {1, 2}, "sampler": [0]}, "sampler with an iterable dataset"),
        ({"sampler": []}, r"sampler=\[\] gives no indices"),
        ({"join": False, "world_size": 300}, "203 samples on 300 ranks with join=False"),
        ({"align": "minibatch", "minibatch_size": 6}, "pool_size=20 with minibatch_size=6: expected at least four"),
        ({"timeout_s": 0}, "timeout_s=0: expected more than 0"),
        ({"prefetch_factor": 2}, "prefetch_factor=2 without workers"),
        ({"align": "none", "infinite": True, "world_size": 300}, "203 samples on 300 ranks with join=True"),
        ({"align": "steps", "cost": 3.0}, "cost=3.0: expected a cost model"),
        (
            {"align": "steps", "cost": math.sqrt},
            "sqrt.* fails for an array of 2 lengths .TypeError.*expected a function of an array",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_loader(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": 5}, "dataset=5: expected one with indices"),
        ({"dataset": iter([1, 2])}, "is an iterator, which can be gone through once"),
        ({"length": None}, "length=None: expected a function"),
        ({"collate": "pad"}, "collate='pad': expected a function"),
        ({"transform": 5}, "transform=5: expected a function"),
        ({"sampler": iter([1])}, "expected an iterable of indices that has a length"),
    ],
)
def test_what_is_something_else_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make_loader(**options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grouping": "pack"}, r"grouping='pack': expected a grouping, such as Grouping\('pack', max_tokens=32_768\)"),
        ({"align": "minibatch"}, r"align='minibatch': expected AlignedGroups\(\), EqualSteps\(\), EqualMinibatches\("),
        ({"align": AlignedGroups}, "AlignedGroups'>: expected AlignedGroups"),
        ({"order": 3}, r"order=3: expected Order\(...\) of odc.balance"),
        ({"read": {"num_workers": 2}}, r"read={'num_workers': 2}: expected ReadOptions\(...\) of odc.balance"),
    ],
)
def test_what_is_no_object_of_options_is_refused(given: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"length": length_of, "grouping": Grouping("pack", max_tokens=120), **given}
    with pytest.raises(TypeError, match=message):
        StreamLoader(Indices(), list, 0, 1, **options)


def test_what_has_no_default_or_no_place_is_given_by_name() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'minibatch_size'"):
        EqualMinibatches()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        AlignedGroups(4)  # type: ignore[misc]  # steps to accumulate, say, taken for ``join``


# Samples.


def bad_length(index: int) -> Any:
    return {40: 0, 41: None, 42: 121}.get(index, 10)


def no_length(index: int) -> int:
    return {i: 10 for i in range(203) if i != 17}[index]


def bad_count(index: int) -> int:
    return 11 if index == 9 else 1


def ten(index: int) -> int:
    return 10


@WORKERS
@pytest.mark.parametrize("dataset", [Indices, Sequence])
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"length": bad_length}, ValueError, r"length of it is 0: expected an integer of at least 1"),
        ({"length": no_length}, KeyError, r"17"),
        ({"length": ten, "num_loss_tokens": bad_count}, ValueError, r"num_loss_tokens of it is 11: expected at most"),
    ],
)
def test_a_sample_without_a_length_is_named(
    options: dict[str, Any], kind: type, message: str, dataset: Any, num_workers: int
) -> None:
    found, text = failure(make_loader(dataset=dataset(), shuffle=False, num_workers=num_workers, **options))
    assert issubclass(found, kind)
    named = {0: "sample 40", 1: "sample 17", 2: "sample 9"}[[bad_length, no_length, ten].index(options["length"])]
    assert f"(when {named} was measured)" in text
    assert message in text
    assert not multiprocessing.active_children()


def test_a_sample_that_is_too_long_is_named() -> None:
    found, text = failure(make_loader(length=lambda i: 121 if i == 42 else 1))
    assert found is ValueError
    assert "it has 121 tokens, more than max_tokens=120: raise max_tokens, or truncate it" in text
    assert "sample 42" in text


def refuses(index: int) -> int:
    if index == 33:
        raise KeyError("no text")
    return index


@WORKERS
@pytest.mark.parametrize("dataset", [Indices, Sequence])
def test_a_sample_that_is_not_transformed_is_named(dataset: Any, num_workers: int) -> None:
    found, text = failure(make_loader(dataset=dataset(), shuffle=False, num_workers=num_workers, transform=refuses))
    assert issubclass(found, KeyError)
    assert "(when sample 33 was transformed)" in text


def test_a_sampler_gives_indices_of_the_dataset() -> None:
    assert "the sampler gives 203: expected an index from 0 to 202" in failure(make_loader(sampler=[1, 203]))[1]
    assert "the sampler gives 1.5: expected an index" in failure(make_loader(sampler=[1.5]))[1]
    shrinking = InTurns()
    loader = make_loader(sampler=shrinking)
    shrinking.size = 30
    assert "the sampler gives 30 indices, its length says 50" in failure(loader)[1]


class Broken:
    """Raises at one of its samples."""

    def __init__(self, error: str) -> None:
        self.error = error

    def _check(self, index: int) -> int:
        if index == 30:
            raise {"index": IndexError("no row"), "stop": StopIteration(), "os": OSError(5, "disk")}[self.error]
        return index


class BrokenIndices(Broken):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return self._check(index)


class BrokenSequence(Broken):
    def __iter__(self) -> Iterator[int]:
        return (self._check(index) for index in range(100))


@WORKERS
@pytest.mark.parametrize("error", ["index", "stop", "os"])
@pytest.mark.parametrize("dataset", [BrokenIndices, BrokenSequence])
def test_no_error_of_a_dataset_passes_for_the_end_of_the_data(dataset: Any, error: str, num_workers: int) -> None:
    found, text = failure(make_loader(dataset=dataset(error), length=ten, num_workers=num_workers))
    assert "when sample 30 was read" in text
    assert issubclass(found, {"index": IndexError, "stop": RuntimeError, "os": OSError}[error])
    assert not multiprocessing.active_children()


def test_collate_that_fails_or_drops_samples_names_them() -> None:
    def fail(samples: list[int]) -> None:
        raise TypeError("no batch of these")

    found, text = failure(make_loader(collate=fail))
    assert found is TypeError
    assert "when samples [" in text
    samples = [{"input_ids": torch.arange(1, length + 1)} for length in (5, 6, 7, 8)]
    options = {"grouping": "none", "batch_size": 4, "shuffle": False, "length": lambda s: len(s["input_ids"])}

    def padded(samples: list[Any]) -> Any:
        kept = [{**s, "labels": s["input_ids"]} for s in samples if len(s["input_ids"]) != 7]
        batch = pad_collate(kept)
        del batch["labels"]
        return batch

    found, text = failure(make_loader(dataset=samples, collate=padded, **options))
    assert found is ValueError
    assert "collate made a batch of 3 samples out of samples [0, 1, 2, 3]: [2] are not in it" in text
    found, text = failure(make_loader(dataset=samples, collate=lambda s: pack_collate(s[:2]), **options))
    assert "the labels of samples [0, 1, 2, 3] have 9 loss tokens, num_loss_tokens says 22" in text
    found, text = failure(make_loader(dataset=samples, collate=lambda s: {"input_ids": torch.zeros(4, 31)}, **options))
    assert "has 124 tokens, padding included: expected at most max_tokens=120. Their lengths are [5, 6, 7, 8]" in text
    for collate, grouping, reason in (
        (pad_collate, "pack", "collate pads them to 2 rows of [78], where grouping='pack' counts on one row without p"),
        (lambda s: {"input_ids": torch.zeros(1, 16)}, "pack", "tokens of a sample in a batch, with what collate adds"),
        (
            lambda s: {"input_ids": torch.zeros(len(s), 64)},
            "token-budget",
            "their rows have 64: length.* round",
        ),
    ):
        changed = {**options, "grouping": grouping, "batch_size": None, "max_tokens": 15}
        found, text = failure(
            make_loader(dataset=[{**s, "labels": s["input_ids"]} for s in samples], collate=collate, **changed)
        )
        assert found is ValueError
        assert re.search(reason, text)
    unchecked = make_loader(dataset=samples, collate=padded, check_batches=False, **options)
    assert len(list(unchecked)) == 1


def test_batches_that_are_right_are_not_refused() -> None:
    def packed(samples: list[int]) -> Any:
        ids = torch.ones(1, sum(samples), dtype=torch.int64)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def ragged(samples: list[int]) -> Any:
        return {"input_ids": [[0] * n for n in samples], "labels": [[0] * n for n in samples]}

    for collate in (packed, ragged):
        loader = make_loader(dataset=[5, 6, 7, 8], length=int, collate=collate, grouping="pack")
        assert sum(m.num_samples for m in loader) == 4


def test_a_dummy_with_a_loss_is_refused() -> None:
    def collate(samples: list[int]) -> Any:
        ids = torch.ones(max(len(samples), 1), max([*samples, 3]), dtype=torch.int64)
        return {"input_ids": ids, "labels": ids if not samples else torch.full_like(ids, -100)}

    def make(rank: int) -> StreamLoader[Any, Any]:
        options = {"pool_size": 1, "length": int, "num_loss_tokens": lambda n: 0}
        return make_loader(rank, 2, [5, 6, 7], collate=collate, **options)

    with pytest.raises(ValueError, match=r"the labels of samples \[\] have 2 loss tokens"):
        run_streams(2, make, list)


class Locks(Sequence):
    """Sample 5 cannot be handed over by a worker."""

    def __iter__(self) -> Iterator[Any]:
        return iter([threading.Lock() if i == 5 else i for i in range(8)])


def test_what_cannot_be_handed_over_or_has_no_cost_is_named() -> None:
    found, text = failure(make_loader(dataset=Locks(), length=ten, num_workers=1))
    assert issubclass(found, TypeError)
    assert "when sample 5 was handed over by its worker" in text
    found, text = failure(make_loader(align="steps", cost=lambda lengths: np.where(lengths > 2, np.nan, 1.0)))
    assert found is ValueError
    assert "when the costs of samples [" in text

    class Closed(Sequence):
        def __iter__(self) -> Iterator[int]:
            raise OSError("no such file")

    assert "when rank 0 began to iterate over its dataset, epoch 0" in failure(make_loader(dataset=Closed()))[1]


def test_samples_of_an_iterable_are_named_by_their_place_in_it() -> None:
    def refuse(samples: list[int]) -> None:
        raise TypeError("no batch")

    options = {"grouping": "none", "collate": refuse, "align": "none"}
    assert "when samples [1, 3, 5] were collated" in failure(make_loader(1, 2, Sequence(), **options))[1]
    of_rank = make_loader(1, 2, Sequence(), iterable_yields="rank", **options)
    assert "when samples ['0 of rank 1', '1 of rank 1'] were" in failure(of_rank)[1]


# Iterable datasets and who has which part of them.


class SplitsItself(IterableDataset[int]):
    """Splits itself between workers, as torch's documentation says."""

    def __len__(self) -> int:
        return 203

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(203) if info is None else range(info.id, 203, info.num_workers))


@WORKERS
@pytest.mark.parametrize("yields", ["all", "rank", "worker"])
def test_a_dataset_that_splits_itself_is_not_split_twice(yields: str, num_workers: int) -> None:
    loader = make_loader(dataset=SplitsItself(), iterable_yields=yields, num_workers=num_workers)
    assert samples_of([summary(loader)]) == list(range(203))


def test_parts_of_ranks_and_workers() -> None:
    for num_workers in (0, 2):
        options = {"align": "none", "num_workers": num_workers}
        parts = [summary(make_loader(rank, 3, SplitsItself(), **options)) for rank in range(3)]
        assert [samples_of([part]) for part in parts] == [list(range(rank, 203, 3)) for rank in range(3)]


class Epochs(Sequence):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch * 10 + i for i in range(4)])


def test_an_iterable_is_told_its_epoch() -> None:
    loader = make_loader(dataset=Epochs(), grouping="none", batch_size=4, pool_size=4, length=ten, infinite=True)
    loader.set_epoch(2)
    found = [minibatch.microbatches[0] for _, minibatch in zip(range(3), loader, strict=False)]
    assert found == [[20, 21, 22, 23], [30, 31, 32, 33], [40, 41, 42, 43]]
    with pytest.raises(ValueError, match="the dataset of rank 0 yields nothing, which infinite=True would repeat"):
        next(iter(make_loader(dataset=Sequence(0), infinite=True)))
    assert list(make_loader(dataset=Sequence(0))) == []


# Lifetimes.


def test_workers_end_when_the_loop_is_left() -> None:
    loader = make_loader(num_workers=2)
    for _ in loader:
        assert len(multiprocessing.active_children()) == 2
        break
    assert not multiprocessing.active_children()
    first = iter(loader)
    next(first)
    assert samples_of([summary(loader)]) == list(range(203))
    with pytest.raises(RuntimeError, match="this iteration ended after minibatch 0: the loader was iterated again"):
        next(first)
    assert not multiprocessing.active_children()


@pytest.mark.extended
def test_workers_that_are_spawned_and_stay() -> None:
    options = {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}
    loader = make_loader(dataset=Sequence(), **options)
    assert summary(loader) == summary(make_loader(dataset=Sequence()))
    assert samples_of([summary(loader)]) == list(range(len(LENGTHS)))


ODD_TYPES = (
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
)


class Slow(Indices):
    def __getitem__(self, index: int) -> int:
        time.sleep(60)
        return index


def read_slowly(pipe: Any) -> None:
    """In a process of its own: a worker reads for a minute."""

    def send(number: int) -> None:
        pipe.send(os.getpid())

    list(make_loader(dataset=Slow(), num_workers=1, worker_init_fn=send))


def test_a_worker_ends_with_its_process_in_the_middle_of_a_sample() -> None:
    """It has copies of the connections, which the other ranks would wait for."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=read_slowly, args=(theirs,))
    process.start()
    worker = ours.recv()
    os.kill(worker, 0)
    process.kill()
    process.join()
    wait_until(lambda: not os.path.exists(f"/proc/{worker}"), "the worker has outlived its process")


def test_closing_ends_workers_that_stay() -> None:
    loader = make_loader(num_workers=1, persistent_workers=True)
    first = summary(loader)
    assert len(multiprocessing.active_children()) == 1
    loader.close()
    assert not multiprocessing.active_children()
    assert summary(loader) == first
    loader.close()


class Mixed:
    """Samples of several kinds of values."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "ids": torch.arange(index + 1),
            "half": torch.full((2, 3), index, dtype=torch.bfloat16).t(),
            "one": torch.tensor(float(index)),
            "none": torch.zeros(0, 3),
            **{f"{dtype}": torch.zeros(3, dtype=dtype) for dtype in ODD_TYPES},
            "scalar": torch.zeros((), dtype=torch.bfloat16),
            "sparse": torch.eye(2).to_sparse(),
            "grad": torch.ones(1, requires_grad=True),
            "text": f"sample {index}",
        }


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_samples_come_out_of_workers_as_they_went_in() -> None:
    def flat(num_workers: int) -> list[dict[str, Any]]:
        loader = make_loader(dataset=Mixed(), length=lambda s: len(s["ids"]), num_workers=num_workers)
        return [sample for m in loader for sample in m.microbatches[0]]

    for found, expected in zip(flat(2), flat(0), strict=True):
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert (found[name].dtype, found[name].layout) == (value.dtype, value.layout)
                if value.dtype not in ODD_TYPES:
                    assert torch.equal(found[name].to_dense(), value.to_dense())
            else:
                assert found[name] == value
        found["ids"][0] = 7  # may be written to


@pytest.mark.parametrize("layout", ["packed", "padded-attention"])
def test_a_batch_whose_attention_is_padded_is_read_as_a_packed_one(layout: Any) -> None:
    batch = {"input_ids": torch.zeros(1, 6), "cu_seqlens": torch.tensor([0, 2, 6])}
    check_batch(batch, ["a", "b"], [2, 4], 0, 6, layout)
    with pytest.raises(ValueError, match=r"made a batch of 2 samples out of samples .*: \['b'\] are not in it"):
        check_batch(batch, ["a", "b", "c"], [2, 3, 4], 0, 6, layout)


def gone() -> Any:
    raise RuntimeError("Connection was likely closed")


def test_who_can_do_without_a_store_does_not_fail_the_ranks_when_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that leaves its loop after the process that has the store has ended."""
    monkeypatch.setattr(watched_store, "wait_for_rank", lambda *_: pytest.fail("sessions end with what they hear so"))
    with pytest.raises(PeerDiedError, match="a process is gone from which this rank wanted an answer"):
        WatchedStore(gone, "ranks tell each other why").ask(id, 5.0)
