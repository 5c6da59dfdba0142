"""Layer 2: ranks as threads. What a stream gives: every sample once, the same whatever the timing, the right loss."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import some_of
from loaders import stream_loader
from stream_ranks import run_streams

from odc.balance import Minibatch, QuadraticCost, StreamLoader, pack_collate

COST = QuadraticCost(1e-2, 1.0)
LENGTHS = np.random.default_rng(0).integers(1, 61, 203).tolist()
ALIGNS = {"dgap": {}, "minibatch": {"minibatch_size": 5, "comm": "odc"}, "none": {"loss_scaling": "none"}}
GROUPINGS: dict[str, dict[str, Any]] = {
    "token-budget": {},
    "prefer-closest": {},
    "prefer-first": {},
    "pack": {},
    "pool-sort": {"batch_size": 3},
    "none": {"batch_size": 3},
}
KINDS = [*itertools.product(GROUPINGS, ALIGNS), ("token-budget", "steps")]


def kind_id(value: Any) -> str | None:
    """What a test is called by, of its grouping and alignment."""
    return "-".join(value) if isinstance(value, tuple) else None


class Indices:
    """Sample i is i. With indices."""

    def __init__(self, num_samples: int = len(LENGTHS)) -> None:
        self.num_samples = num_samples
        self.num_read = 0

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        self.num_read += 1
        return index


class Sequence:
    """Sample i is i. To be gone through."""

    def __init__(self, num_samples: int = len(LENGTHS)) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_samples))


def length_of(index: int) -> int:
    return int(LENGTHS[index])


def make_loader(
    rank: int = 0,
    world_size: int = 1,
    dataset: Any = None,
    align: str = "dgap",
    grouping: str = "token-budget",
    **given: Any,
) -> StreamLoader[int, Any]:
    options = {
        **GROUPINGS.get(grouping, {}),
        **ALIGNS.get(align, {}),
        "max_tokens": 120,
        "pool_size": 20,
        "cost": COST,
        **given,
    }
    options = {"length": length_of, "collate": list, **options}
    collate = options.pop("collate")
    dataset = Indices() if dataset is None else dataset
    return stream_loader(dataset, collate, rank, world_size, align=align, grouping=grouping, **options)  # type: ignore[arg-type]


def summary(minibatches: Any) -> list[tuple[Any, float, int, int]]:
    return [(m.microbatches, m.loss_scale, m.num_loss_tokens, m.num_samples) for m in minibatches]


def samples_of(ranks: list[Any]) -> list[int]:
    return sorted(i for mine in ranks for m in mine for batch in m[0] for i in batch)


# Every sample once, whoever has it.


@pytest.mark.parametrize(("dataset", "kind"), some_of([Indices, Sequence], KINDS), ids=kind_id)
def test_every_sample_once_on_ranks_that_do_not_divide_it(dataset: Any, kind: tuple[str, str]) -> None:
    grouping, align = kind

    def make(rank: int) -> StreamLoader[int, Any]:
        return make_loader(rank, 3, dataset(), align, grouping)

    ranks = run_streams(3, make, summary)
    assert samples_of(ranks) == list(range(203))
    for mine in ranks:
        for batches, *_ in mine:
            assert all(batch or align in ("dgap", "steps") for batch in batches)
            for batch in batches:
                lengths = [LENGTHS[i] for i in batch]
                assert (sum(lengths) if grouping == "pack" else len(batch) * max(lengths, default=0)) <= 120
    if align == "none":
        return
    assert len({len(mine) for mine in ranks}) == 1
    for minibatches in zip(*ranks, strict=True):
        if align != "minibatch":
            assert [len(batches) for batches, *_ in minibatches] == [1, 1, 1]
        found = [i for batches, *_ in minibatches for batch in batches for i in batch]
        assert {num_samples for *_, num_samples in minibatches} == {len(found)}
        assert {tokens for _, _, tokens, _ in minibatches} == {sum(LENGTHS[i] - 1 for i in found)}
    assert run_streams(3, make, summary, delay_s=0.003) == ranks


STREAMS = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 40), min_size=1, max_size=60),
        "world_size": st.integers(1, 4),
        "pool_size": st.integers(1, 12),
        "max_tokens": st.integers(40, 100),
        "kind": st.sampled_from(KINDS),
        "indexed": st.booleans(),
        "steps": st.integers(1, 3),
    }
)


@settings(deadline=None, max_examples=24)
@given(case=STREAMS)
def test_no_pool_is_too_small_and_no_data_set_too_short(case: dict[str, Any]) -> None:
    lengths, (grouping, align) = case["lengths"], case["kind"]
    size, world_size = len(lengths), case["world_size"]
    options: dict[str, Any] = {"gradient_accumulation_steps": case["steps"]}
    if align == "minibatch":
        options = {"minibatch_size": case["steps"]}
        case["pool_size"] = max(case["pool_size"], 4 * case["steps"])

    def make(rank: int) -> StreamLoader[int, Any]:
        dataset = Indices(size) if case["indexed"] else Sequence(size)
        limits = {"pool_size": case["pool_size"], "max_tokens": case["max_tokens"]}
        return make_loader(rank, world_size, dataset, align, grouping, length=lengths.__getitem__, **limits, **options)

    ranks = run_streams(world_size, make, summary)
    assert samples_of(ranks) == list(range(size))
    assert align == "none" or len({len(mine) for mine in ranks}) == 1
    if align == "minibatch" and case["indexed"]:
        assert len(ranks[0]) == -(-size // (world_size * case["steps"]))


@pytest.mark.parametrize(
    ("dataset", "kind"),
    some_of([Indices, Sequence], [("token-budget", "dgap"), ("pack", "minibatch"), ("pool-sort", "none")]),
    ids=kind_id,
)
def test_workers_change_nothing(dataset: Any, kind: tuple[str, str]) -> None:
    grouping, align = kind
    expected = make_loader(1, 2, dataset(), "none", grouping, loss_scaling="none")
    loader = make_loader(1, 2, dataset(), "none", grouping, loss_scaling="none", num_workers=2)
    assert summary(loader) == summary(expected)
    alone = make_loader(0, 1, dataset(), align, grouping)
    assert summary(make_loader(0, 1, dataset(), align, grouping, num_workers=2)) == summary(alone)


def test_unequal_shares_lose_nothing() -> None:
    """ODB's table 6: 16 ranks with 47, 46 .. 33 samples and none. (Its ranks have emitted 21 fewer.)"""
    shares = [*range(47, 32, -1), 0]
    starts = np.cumsum([0, *shares])
    lengths = np.random.default_rng(1).integers(1, 2000, sum(shares)).tolist()

    def make(rank: int) -> StreamLoader[int, Any]:
        mine = range(starts[rank], starts[rank + 1])
        options = {"max_tokens": 4096, "pool_size": 1024, "length": lengths.__getitem__}
        return make_loader(rank, 16, _Share(mine), iterable_yields="rank", **options)

    ranks = run_streams(16, make, summary)
    assert [sum(len(batch) for batches, *_ in mine for batch in batches) for mine in ranks] == shares
    assert samples_of(ranks) == list(range(sum(shares)))
    for minibatches in zip(*ranks, strict=True):
        counts = [sum(lengths[i] - 1 for batch in batches for i in batch) for batches, *_ in minibatches]
        assert [tokens for _, _, tokens, _ in minibatches] == [sum(counts)] * 16


class _Share:
    def __init__(self, samples: range) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(self.samples)


# Epochs.


@pytest.mark.parametrize("align", ["dgap", "steps", "minibatch"])
def test_an_endless_stream_begins_anew_in_another_order(align: str) -> None:
    def use(loader: StreamLoader[int, Any]) -> list[Any]:
        found: list[Any] = []
        for minibatch in loader:
            found += summary([minibatch])
            if sum(number for *_, number in found) >= 3 * 203:
                return found
        raise AssertionError("it has ended")

    ranks = run_streams(2, lambda rank: make_loader(rank, 2, align=align, infinite=True), use)
    counts = np.bincount(samples_of(ranks), minlength=203)
    # What is in the pools of two ranks is late by less than a pool, and what comes early is not more than that.
    assert counts.min() >= 2
    assert counts.max() <= 4
    assert counts.sum() < 4 * 203


def test_every_epoch_has_its_order() -> None:
    loader = make_loader()
    first = summary(loader)
    assert summary(loader) == first
    loader.set_epoch(1)
    second = summary(loader)
    assert second != first
    assert samples_of([second]) == samples_of([first])
    unshuffled = make_loader(grouping="none", shuffle=False, pool_size=7)
    assert [i for m in unshuffled for i in m.microbatches[0]] == list(range(203))


@settings(deadline=None, max_examples=20)
@given(
    num_samples=st.integers(1, 60),
    world_size=st.integers(1, 4),
    pool_size=st.integers(1, 12),
    steps=st.integers(1, 3),
    grouping=st.sampled_from(sorted(GROUPINGS)),
)
def test_without_join_an_epoch_is_a_number_of_samples(
    num_samples: int, world_size: int, pool_size: int, steps: int, grouping: str
) -> None:
    """ODB's theorem 2: at least as many as the data set has, and less than a step more."""
    num_samples = max(num_samples, world_size)

    def make(rank: int) -> StreamLoader[int, Any]:
        options = {"pool_size": pool_size, "gradient_accumulation_steps": steps, "join": False}
        return make_loader(rank, world_size, Indices(num_samples), "dgap", grouping, **options)

    ranks = run_streams(world_size, make, summary)
    numbers = [number for *_, number in ranks[0]]
    assert num_samples <= sum(numbers) < num_samples + numbers[-1]
    assert len(samples_of(ranks)) == sum(numbers)
    assert set(samples_of(ranks)) <= set(range(num_samples))


def test_without_join_the_first_rank_without_samples_ends_an_iterable() -> None:
    shares = [range(40), range(40, 45)]

    def make(rank: int) -> StreamLoader[int, Any]:
        return make_loader(rank, 2, _Share(shares[rank]), join=False, iterable_yields="rank", pool_size=4)

    ranks = run_streams(2, make, summary)
    counts = [sum(len(batch) for batches, *_ in mine for batch in batches) for mine in ranks]
    assert counts[1] == 5
    assert counts[0] < 40


def test_several_steps_make_a_minibatch() -> None:
    single = run_streams(2, lambda rank: make_loader(rank, 2), summary)
    double = run_streams(2, lambda rank: make_loader(rank, 2, gradient_accumulation_steps=2), summary)
    for one, two in zip(single, double, strict=True):
        assert [batch for batches, *_ in two for batch in batches] == [
            batch for batches, *_ in one for batch in batches
        ]
        assert {len(batches) for batches, *_ in two[:-1]} == {2}
        assert [m[2:] for m in two] == [
            tuple(np.sum([m[2:] for m in one[at : at + 2]], axis=0)) for at in range(0, len(one), 2)
        ]


# The loss.


def make_tokens(seed: int = 2) -> list[dict[str, torch.Tensor]]:
    """Samples with masks of their own: from all of the tokens to none has a loss."""
    rng = np.random.default_rng(seed)
    found = []
    for length in rng.integers(1, 41, 90):
        ids = torch.from_numpy(rng.integers(0, 50, length))
        labels = torch.where(torch.from_numpy(rng.random(length) < rng.random()), ids, -100)
        found.append({"input_ids": ids, "labels": labels})
    return found


def loss_tokens(sample: dict[str, torch.Tensor]) -> int:
    return int((sample["labels"][1:] != -100).sum())


def pad_collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    if not samples:
        return {"input_ids": torch.zeros(1, 2, dtype=torch.int64), "labels": torch.full((1, 2), -100)}
    pad = torch.nn.utils.rnn.pad_sequence
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    return {
        "input_ids": pad([sample["input_ids"] for sample in samples], True, 0),
        "labels": pad([sample["labels"] for sample in samples], True, -100),
        "attention_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long(),
    }


class Bigrams(torch.nn.Module):
    """Predicts a token from the one before it, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(50, 50, generator=torch.Generator().manual_seed(0)).double())

    def summed_loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self.table[batch["input_ids"][:, :-1]]
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )


def averaged_gradients(minibatches: list[list[Minibatch[Any]]]) -> Iterator[tuple[torch.Tensor, list[Minibatch[Any]]]]:
    """As FSDP averages them over ranks, for each minibatch."""
    for same in zip(*minibatches, strict=True):
        gradients = []
        for minibatch in same:
            model = Bigrams()
            for batch in minibatch.microbatches:
                (model.summed_loss(batch) * minibatch.loss_scale).backward()
            gradients.append(torch.zeros(50, 50).double() if model.table.grad is None else model.table.grad)
        yield torch.stack(gradients).mean(dim=0), list(same)


@pytest.mark.parametrize(
    ("grouping", "align"), [*itertools.product(GROUPINGS, ["dgap", "minibatch"]), ("token-budget", "steps")]
)
def test_the_gradient_is_that_of_one_process(grouping: str, align: str) -> None:
    """Of the mean over the loss tokens of the minibatch, with per-sample masks: to 1e-12."""
    samples = make_tokens()

    def make(rank: int) -> StreamLoader[Any, Any]:
        collate = pack_collate if grouping == "pack" else pad_collate
        options = {"length": lambda s: len(s["input_ids"]), "num_loss_tokens": loss_tokens, "collate": collate}
        steps = {} if align == "minibatch" else {"gradient_accumulation_steps": 2}
        return make_loader(rank, 3, samples, align, grouping, **options, **steps)

    for gradient, minibatches in averaged_gradients(run_streams(3, make, list)):
        alone = Bigrams()
        losses = [alone.summed_loss(batch) for m in minibatches for batch in m.microbatches]
        count = sum(int((b["labels"][:, 1:] != -100).sum()) for m in minibatches for b in m.microbatches)
        assert {m.num_loss_tokens for m in minibatches} == {count}
        if count:
            (torch.stack(losses).sum() / count).backward()
            assert alone.table.grad is not None
            assert (gradient - alone.table.grad).abs().max() <= 1e-12 * alone.table.grad.abs().max()
        else:
            assert gradient.abs().max() == 0


@pytest.mark.parametrize("scaling", ["exact", "approx", "sample", "none"])
def test_loss_scales_are_the_weights_of_the_paper(scaling: str) -> None:
    """ODB, appendix B: the mean loss of rank r times its weight w_r, summed over ranks."""
    samples = make_tokens()
    options: dict[str, Any] = {"length": lambda s: len(s["input_ids"]), "num_loss_tokens": loss_tokens}
    options |= {"pool_size": 1000, "loss_scaling": scaling, "collate": list}
    ranks = run_streams(2, lambda rank: make_loader(rank, 2, samples, **options), list)
    # One round: a rank's mean loss tokens per sample are those of all its samples.
    means = [np.mean([loss_tokens(s) for m in mine for batch in m.microbatches for s in batch]) for mine in ranks]
    for same in zip(*ranks, strict=True):
        groups = [m.microbatches[0] for m in same]
        tokens = np.array([sum(map(loss_tokens, group)) for group in groups], dtype=float)
        numbers = np.array([len(group) for group in groups], dtype=float)
        estimated = numbers * means
        weights = {
            "exact": tokens / max(tokens.sum(), 1),
            "approx": estimated / estimated.sum(),
            "sample": numbers / numbers.sum(),
            "none": np.full(2, 0.5),
        }[scaling]
        for m, weight, own in zip(same, weights, tokens, strict=True):
            # The factor of the summed loss, which is `own` times the mean.
            assert m.loss_scale == pytest.approx(2 * weight / own if own else 0.0, rel=1e-12)


# Arguments of their own


class InTurns:
    """A sampler: another order for each epoch, all of them known."""

    def __init__(self, size: int = 50) -> None:
        self.size = size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter((np.arange(self.size) * 7 + self.epoch) % 203)


@pytest.mark.parametrize(("grouping", "align"), KINDS)
def test_a_sampler_gives_the_samples_of_each_epoch(grouping: str, align: str) -> None:
    def make(rank: int) -> StreamLoader[int, Any]:
        loader = make_loader(rank, 2, None, align, grouping, sampler=InTurns())
        loader.set_epoch(3)
        return loader

    assert samples_of(run_streams(2, make, summary)) == sorted(int(i * 7 + 3) % 203 for i in range(50))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Indices, Sequence])
def test_samples_are_what_transform_makes_of_those_of_this_rank(dataset: Any, num_workers: int) -> None:
    numbers = multiprocessing.get_context("fork").Value("i", 0)

    def as_text(index: int) -> str:
        with numbers.get_lock():
            numbers.value += 1
        return str(index)

    loader = make_loader(
        1,
        3,
        dataset(),
        "none",
        "none",
        loss_scaling="none",
        transform=as_text,
        length=lambda text: length_of(int(text)),
        shuffle=False,
        num_workers=num_workers,
    )
    found = [text for m in loader for batch in m.microbatches for text in batch]
    assert found == [str(i) for i in range(1, 203, 3)]
    assert numbers.value == len(found)


def test_an_epoch_of_minibatches_has_a_length() -> None:
    loader = make_loader(0, 3, None, "minibatch", "pack")
    assert loader.alignment.minibatch_size is not None
    assert len(loader) == -(-203 // (3 * loader.alignment.minibatch_size))
    assert len(list(make_loader(0, 1, None, "minibatch", "pack"))) == -(-203 // loader.alignment.minibatch_size)
    for other in (
        make_loader(),
        make_loader(0, 1, Sequence(), "minibatch", "pack"),
        make_loader(0, 1, None, "minibatch", "pack", infinite=True),
    ):
        with pytest.raises(TypeError, match="has no length"):
            len(other)
