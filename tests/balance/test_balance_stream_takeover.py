"""Layer 3: a torch DataLoader becomes a stream of the same samples."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
from stream_ranks import run_streams
from test_balance_stream import (
    LENGTHS,
    Indices,
    Sequence,
    length_of,
    loss_tokens,
    make_tokens,
    pad_collate,
    samples_of,
    summary,
)
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from odc.balance import Grouping, ReadOptions, stream


def take(loader: Any, grouping: str = "token-budget", **options: Any) -> Any:
    sizes = {"max_tokens": 120, **options}
    found = {name: sizes.pop(name) for name in ("max_tokens", "pool_size", "batch_size") if name in sizes}
    return stream(loader, **{"length": length_of, "grouping": Grouping(grouping, **found), **sizes})  # type: ignore[arg-type]


def test_the_same_samples_in_batches_of_a_budget() -> None:
    for loader in (
        DataLoader(Indices(), batch_size=8, collate_fn=list),  # type: ignore[arg-type]
        DataLoader(Indices(), batch_size=8, collate_fn=list, shuffle=True, num_workers=2, drop_last=True),  # type: ignore[arg-type]
        DataLoader(Indices(), batch_size=None, collate_fn=list),  # type: ignore[arg-type]
    ):
        found = take(loader)
        minibatches = summary(found)
        assert samples_of([minibatches]) == list(range(203))
        assert all(len(batch) * max(LENGTHS[i] for i in batch) <= 120 for m in minibatches for batch in m[0])
        assert (found.order.shuffle, found.rank, found.world_size) == (loader.drop_last, 0, 1)
    assert not multiprocessing.active_children()
    in_fours = take(
        DataLoader(Indices(), batch_size=4, collate_fn=list), grouping="none", max_tokens=1000, batch_size=4
    )  # type: ignore[arg-type]
    assert [len(batch) for m in in_fours for batch in m.microbatches] == [4] * 50 + [3]


def test_ranks_and_order_of_a_distributed_sampler() -> None:
    def make(rank: int) -> Any:
        sampler: Any = DistributedSampler(Indices(), 3, rank, seed=5)  # type: ignore[arg-type]
        loader = take(DataLoader(Indices(), sampler=sampler, collate_fn=list))  # type: ignore[arg-type]
        assert (loader.rank, loader.world_size, loader.order.seed, loader.order.shuffle) == (rank, 3, 5, True)
        return loader

    assert samples_of(run_streams(3, make, summary)) == list(range(203))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(Sequence())


def test_an_iterable_and_an_option_that_is_given() -> None:
    loader = DataLoader(Stream(), batch_size=4, collate_fn=list, num_workers=1)
    found = take(loader, read=ReadOptions(), grouping="pack")
    assert found.grouping.name == "pack"
    assert samples_of([summary(found)]) == list(range(203))


def test_a_rank_without_samples_has_a_batch_without_loss() -> None:
    """One sample on two ranks: the other one has a dummy, which a collate_fn alone would not make."""
    samples = make_tokens()[:3]

    def make(rank: int, **options: Any) -> Any:
        loader = DataLoader(samples, collate_fn=pad_collate_of_some)  # type: ignore[arg-type]
        sizes = {"length": lambda s: len(s["input_ids"]), "num_loss_tokens": loss_tokens, "pool_size": 1}
        return take(loader, rank=rank, world_size=2, **sizes, **options)

    first, second = run_streams(2, make, list)
    assert [m.num_samples for m in first] == [m.num_samples for m in second] == [2, 1]
    batch = second[1].microbatches[0]
    assert (batch["labels"] == -100).all()
    assert batch["input_ids"].numel() > 0
    assert second[1].loss_scale == 0.0
    made = run_streams(2, lambda rank: make(rank, dummy=lambda: "nothing"), list)
    assert made[1][1].microbatches == ["nothing"]

    def unmasked(rank: int) -> Any:
        loader = DataLoader(Indices(3), collate_fn=list_of_some)  # type: ignore[arg-type]
        return take(loader, rank=rank, world_size=2, pool_size=1)

    with pytest.raises(ValueError, match="pass dummy=, a function that makes a batch whose summed loss is 0"):
        run_streams(2, unmasked, list)


def pad_collate_of_some(samples: list[Any]) -> Any:
    assert samples
    return pad_collate(samples)


def list_of_some(samples: list[int]) -> list[int]:
    assert samples
    return samples


class Blocks:
    """Batch sampler of its own."""

    def __iter__(self) -> Any:
        return iter([[1, 2], [3]])

    def __len__(self) -> int:
        return 2


def test_samplers_of_ones_own_give_the_order() -> None:
    repeated = [5, 5, 7, *range(50)]
    loader = DataLoader(Indices(), batch_size=4, sampler=repeated, collate_fn=list)  # type: ignore[arg-type]
    found = take(loader, grouping="none", max_tokens=1000, batch_size=4)
    assert [i for m in found for batch in m.microbatches for i in batch] == repeated
    some = RandomSampler(range(203), num_samples=7)
    assert len(samples_of([summary(take(DataLoader(Indices(), sampler=some, collate_fn=list)))])) == 7  # type: ignore[arg-type]
    inner = BatchSampler(repeated, 3, drop_last=False)
    batched = take(DataLoader(Indices(), batch_sampler=inner, collate_fn=list))  # type: ignore[arg-type]
    assert samples_of([summary(batched)]) == sorted(repeated)


@pytest.mark.parametrize(
    ("loader", "options", "error", "message"),
    [
        (DataLoader(Indices(), batch_sampler=Blocks()), {}, ValueError, "a batch sampler of its own, a Blocks"),  # type: ignore[arg-type]
        ([1, 2], {}, TypeError, "expected a torch.utils.data.DataLoader"),
        (DataLoader(Indices()), {"batchsize": 3}, TypeError, "unexpected keyword argument 'batchsize'"),
    ],
)
def test_what_cannot_be_taken_over_is_refused(
    loader: Any, options: dict[str, int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        take(loader, **options)
