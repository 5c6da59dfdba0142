"""Layer 1: no processes. Sampler, packed batches, loader: same plans on all ranks, exact loss, resuming."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from loaders import known_loader
from torch.utils.data import RandomSampler, Subset

from odc.balance import (
    Minibatch,
    MinibatchLoader,
    MinibatchSampler,
    QuadraticCost,
    count_loss_tokens,
    loss_scale,
    pack_collate,
    policy_names,
)

COST = QuadraticCost(1e-2, 1.0)
Sample = dict[str, Any]


def make_dataset(num_samples: int, seed: int = 0, *, prompts: bool = False) -> list[Sample]:
    """Samples of 1 to 60 random tokens; with ``prompts``, labels start with a stretch of -100."""
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    for _ in range(num_samples):
        ids = torch.from_numpy(rng.integers(0, 1000, int(rng.integers(1, 61))))
        labels = ids.clone()
        if prompts:
            labels[: int(rng.integers(0, ids.numel() + 1))] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def lengths_of(dataset: list[Sample]) -> list[int]:
    return [sample["input_ids"].numel() for sample in dataset]


def make_loader(
    dataset: list[Sample], rank: int = 0, world_size: int = 3, **options: Any
) -> MinibatchLoader[Sample, dict[str, torch.Tensor]]:
    counts = [count_loss_tokens(sample["labels"]) for sample in dataset]
    arguments: dict[str, Any] = {"minibatch_size": 4, "cost": COST, "num_loss_tokens": counts, **options}
    return known_loader(dataset, lengths_of(dataset), pack_collate, rank, world_size, **arguments)


def token_losses(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Losses of the loss tokens of a model that shifts labels; they depend on input, position and target."""
    ids, labels, positions = (batch[name][0] for name in ("input_ids", "labels", "position_ids"))
    counted = labels[1:] != -100
    losses = torch.sin(ids[:-1].double() * 0.37 + positions[:-1].double() * 1.3) + labels[1:].double() * 1e-3
    return losses[counted]


class Pair(NamedTuple):
    first: torch.Tensor
    number: int


def test_microbatches_move_to_a_device_whatever_holds_their_tensors() -> None:
    """As Lightning and accelerate ask for it, whose own moves write into what holds the tensors."""
    x = torch.ones(2)
    microbatches = [{"a": x, "b": [x, (x, "text")]}, Pair(x, 3), x]
    minibatch = Minibatch[Any](microbatches, 0.5, num_loss_tokens=4, num_samples=2)
    moved = minibatch.to("meta", non_blocking=True)
    entries, pair, bare = moved.microbatches
    assert {t.device.type for t in (entries["a"], entries["b"][0], entries["b"][1][0], pair.first, bare)} == {"meta"}
    assert (entries["b"][1][1], type(pair), pair.number) == ("text", Pair, 3)
    assert minibatch.microbatches == microbatches
    assert x.device.type == "cpu"
    assert replace(moved, microbatches=microbatches).loss_scale == 0.5


# The loss scale.


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("prompts", [False, True])
def test_minibatch_loss_is_the_exact_mean_over_tokens(policy: str, prompts: bool) -> None:
    world_size = 3
    dataset = make_dataset(31, prompts=prompts)  # the last minibatch has 7 samples for 3 ranks
    options: dict[str, Any] = {"policy": policy, "drop_last": False, "max_tokens": 100}
    loaders = [make_loader(dataset, rank, world_size, **options) for rank in range(world_size)]
    num_minibatches = 0
    for planned, *minibatches in zip(loaders[0].sampler, *loaders, strict=True):
        num_minibatches += 1
        alone = [token_losses(pack_collate([dataset[sample]])) for sample in planned.samples]
        expected = torch.cat(alone).mean()
        total = torch.zeros((), dtype=torch.float64)
        for minibatch in minibatches:
            for batch in minibatch.microbatches:
                total += token_losses(batch).sum() * minibatch.loss_scale
        torch.testing.assert_close(total / world_size, expected, rtol=1e-12, atol=0)
        assert {m.num_loss_tokens for m in minibatches} == {torch.cat(alone).numel()}
    assert num_minibatches == 3


def test_loss_scale_by_hand() -> None:
    assert (loss_scale(4, 100), loss_scale(4, 0)) == (0.04, 0.0)


def test_default_loss_tokens_are_all_but_the_first_of_a_sample() -> None:
    dataset = make_dataset(12)
    minibatch = next(iter(make_loader(dataset, num_loss_tokens=None)))
    assert minibatch.num_loss_tokens == sum(lengths_of(dataset)) - 12


def test_labels_that_disagree_with_the_counts_are_an_error() -> None:
    dataset = make_dataset(12, prompts=True)
    with pytest.raises(ValueError, match=r"num_loss_tokens says .*: the loss scale would be wrong"):
        next(iter(make_loader(dataset, num_loss_tokens=None)))
    next(iter(make_loader(dataset, num_loss_tokens=None, check_loss_tokens=False)))


# Packed batches.


def test_pack_collate_by_hand() -> None:
    batch = pack_collate([{"input_ids": [5, 6, 7]}, {"input_ids": torch.tensor([8, 9]), "labels": [1, -100]}])
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 7, 8, 9]],
        "labels": [[-100, 6, 7, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1]],
        "cu_seqlens": [0, 3, 5],
    }
    dtypes = {name: tensor.dtype for name, tensor in batch.items()}
    assert dtypes == {**dict.fromkeys(batch, torch.int64), "cu_seqlens": torch.int32}


def test_packing_does_not_leak_between_samples_nor_change_them() -> None:
    dataset = make_dataset(6)
    before = [sample["labels"].clone() for sample in dataset]
    together = token_losses(pack_collate(dataset))
    alone = torch.cat([token_losses(pack_collate([sample])) for sample in dataset])
    assert torch.equal(together, alone)
    for sample, labels in zip(dataset, before, strict=True):
        assert torch.equal(sample["labels"], labels)


def test_count_loss_tokens() -> None:
    labels = ([3, 4, -100, 5], torch.tensor([3]), np.array([[1, 2, 3], [1, -100, 3]]))
    assert [count_loss_tokens(of_one) for of_one in labels] == [2, 0, 3]
    dataset = make_dataset(9, prompts=True)
    counts = [count_loss_tokens(sample["labels"]) for sample in dataset]
    assert count_loss_tokens(pack_collate(dataset)["labels"]) == sum(counts) > 0


def test_an_empty_microbatch_is_a_dummy_without_loss() -> None:
    batch = pack_collate([])
    assert batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape == (1, 2)
    assert count_loss_tokens(batch["labels"]) == 0
    assert token_losses(batch).sum() == 0
    assert batch["cu_seqlens"].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"tokens": [1]}, r"sample 1 .* no input_ids, only \['tokens'\]"),
        ({"input_ids": []}, r"input_ids of sample 1 .* shape \(0,\)"),
        ({"input_ids": [[1, 2]]}, r"input_ids of sample 1 .* shape \(1, 2\)"),
        ({"input_ids": [1, 2], "labels": [1]}, r"labels of sample 1 .* shape \(1,\): expected .* \(2,\)"),
        ({"input_ids": [1, 2, 3], "attention_mask": [0, 1, 1]}, "sample 1 .* attention_mask begins with 1 zeros"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, r"zeros between tokens .* \(the first at token 1\)"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 1, 0]}, "1 tokens of its padding .* have labels"),
        ({"input_ids": [1, 2], "labels": [-100, -100], "attention_mask": [0, 0]}, "sample 1 .* is all padding"),
        ({"input_ids": [1, 2, 3], "position_ids": [0, 1, 7]}, "position_ids are not 0, 1, 2, .*: at token 2 it is 7"),
    ],
)
def test_bad_samples(sample: Sample, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_collate([{"input_ids": [1]}, sample])


def test_padding_behind_a_sample_is_taken_off() -> None:
    padded = {"input_ids": [5, 6, 0], "labels": [5, 6, -100], "attention_mask": [1, 1, 0], "position_ids": [0, 1, 1]}
    batch = pack_collate([padded, {"input_ids": [8, 9]}])
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 8, 9]],
        "labels": [[-100, 6, -100, 9]],
        "position_ids": [[0, 1, 0, 1]],
        "cu_seqlens": [0, 2, 4],
    }


# The token limit.


def test_a_microbatch_with_more_tokens_than_its_lengths_say_is_refused_by_index_and_numbers() -> None:
    """At the limit that the user gave; lengths that are merely wrong only make plans worse."""
    dataset = make_dataset(24)
    lengths = lengths_of(dataset)
    longest = int(np.argmax(lengths))
    lengths[longest] = 3

    def make(**options: Any) -> MinibatchLoader[Sample, dict[str, torch.Tensor]]:
        return known_loader(
            dataset, lengths, pack_collate, 0, 1, minibatch_size=24, cost=COST, check_loss_tokens=False, **options
        )

    with pytest.raises(ValueError, match=f"more than max_tokens=59.*sample {longest} has 60 tokens, its length says 3"):
        list(make(max_tokens=59))
    assert len(list(make())) == len(list(make(max_tokens=2000))) == 1


def test_tokens_that_collate_adds_count_and_padding_does_not() -> None:
    dataset = [{"input_ids": list(range(10, 20))} for _ in range(8)]

    def make(collate: Any) -> MinibatchLoader[Any, Any]:
        arguments: dict[str, Any] = {"minibatch_size": 8, "cost": COST, "check_loss_tokens": False, "max_tokens": 20}
        return known_loader(dataset, [10] * 8, collate, 0, 1, **arguments)

    def with_start(samples: list[Any]) -> Any:
        return pack_collate([{"input_ids": [1, *sample["input_ids"]]} for sample in samples])

    def padded(samples: list[Any]) -> Any:
        ids = [sample["input_ids"] + [0] * 5 for sample in samples]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor([[1] * 10 + [0] * 5] * len(samples))}

    with pytest.raises(ValueError, match="has 22 tokens, more than max_tokens=20; lengths say 20. .* collate adds"):
        list(make(with_start))
    list(make(padded))


# Sampler and loader.


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("drop_last", [True, False])
def test_ranks_agree_and_cover_an_epoch(policy: str, drop_last: bool) -> None:
    dataset = [{"input_ids": torch.full((1 + i % 7,), i), "labels": torch.full((1 + i % 7,), i)} for i in range(31)]
    loaders = [make_loader(dataset, rank, policy=policy, drop_last=drop_last) for rank in range(3)]
    seen: list[int] = []
    for minibatches in zip(*loaders, strict=True):
        assert all(minibatch.plan == minibatches[0].plan for minibatch in minibatches)
        for rank, minibatch in enumerate(minibatches):
            assert len(minibatch.microbatches) == minibatch.plan.num_microbatches[rank]
            for batch, planned in zip(minibatch.microbatches, minibatch.plan.microbatches[rank], strict=True):
                if planned:
                    seen += batch["input_ids"][0, batch["cu_seqlens"][:-1].long()].tolist()
    assert len(set(seen)) == len(seen) == (24 if drop_last else 31)
    assert len(loaders[0]) == (2 if drop_last else 3)


def test_a_rank_may_get_no_microbatch() -> None:
    dataset = make_dataset(4)
    loader = make_loader(dataset, rank=2, minibatch_size=1, drop_last=False)
    assert [len(minibatch.microbatches) for minibatch in loader] == [1, 0]


def sample_order(sampler: MinibatchSampler) -> list[int]:
    return [int(sample) for planned in sampler for sample in planned.samples]


def test_shuffle_depends_on_seed_and_epoch_only() -> None:
    def make(**options: Any) -> MinibatchSampler:
        arguments: dict[str, Any] = {"minibatch_size": 4, "world_size": 2, "policy": "lb-mini", "cost": COST}
        return MinibatchSampler(range(1, 81), **arguments, **options)

    first = sample_order(make())
    assert sorted(first) == list(range(80)) != first
    assert sample_order(make()) == first
    assert sample_order(make(seed=1)) != first
    sampler = make()
    sampler.set_epoch(1)
    assert sample_order(sampler) != first
    sampler.set_epoch(0)
    assert sample_order(sampler) == first
    assert sample_order(make(shuffle=False)) == list(range(80))


def test_the_shuffle_is_pinned() -> None:
    """A resumed run must get the same order from another version of numpy."""
    sampler = MinibatchSampler([1] * 8, minibatch_size=8, world_size=1, policy="local-sort", cost=COST, seed=3)
    assert sample_order(sampler) == PINNED


PINNED = [0, 4, 7, 1, 5, 6, 3, 2]


def test_samples_keep_their_lengths() -> None:
    dataset = make_dataset(24)
    for planned in make_loader(dataset).sampler:
        for rank in range(3):
            for samples, microbatch in zip(planned.of_rank(rank), planned.plan.microbatches[rank], strict=True):
                assert [lengths_of(dataset)[s] for s in samples] == planned.plan.lengths[microbatch].tolist()


@pytest.mark.parametrize("given", [[5, 90, 30], RandomSampler(range(3)), MinibatchSampler, None])  # type: ignore[arg-type]
def test_what_is_no_sampler_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"sampler=.*: expected MinibatchSampler\(lengths, ...\) of odc.balance"):
        MinibatchLoader(range(3), given, list, 0)
    sampler = MinibatchSampler([5, 90, 30], world_size=2, minibatch_size=1, cost=COST)
    with pytest.raises(TypeError, match="read=2: expected ReadOptions"):
        MinibatchLoader(range(3), sampler, list, 0, read=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank=None, world_size=2, mesh=None: give rank, or mesh"):
        MinibatchLoader(range(3), sampler, list)


def test_default_limit_is_the_longest_sample() -> None:
    dataset = make_dataset(24)
    assert make_loader(dataset).sampler.max_tokens == max(lengths_of(dataset))


def first_tokens(loader: MinibatchLoader[Sample, dict[str, torch.Tensor]]) -> list[list[list[int]]]:
    return [[batch["input_ids"][0].tolist() for batch in m.microbatches] for m in loader]


@pytest.mark.parametrize("num_done", [0, 2, 5])
def test_resume_in_the_middle_of_an_epoch(num_done: int) -> None:
    dataset = make_dataset(60)
    loader = make_loader(dataset)
    loader.set_epoch(3)
    whole = first_tokens(loader)
    assert len(whole) == 5
    loader.set_epoch(2)
    loader.set_epoch(3)
    iterator = iter(loader)
    for _ in range(num_done):
        next(iterator)
    resumed = make_loader(dataset)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.state_dict() == loader.state_dict()
    resumed.set_epoch(3)
    assert first_tokens(resumed) == whole[num_done:]
    assert first_tokens(resumed) == whole  # only the first iteration continues
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(4)
    assert len(first_tokens(resumed)) == 5  # another epoch starts at its beginning


def test_the_samplers_epoch_is_that_of_the_next_iteration() -> None:
    dataset = make_dataset(60)
    loader = make_loader(dataset)
    first = first_tokens(loader)
    iterator = iter(loader)
    loader.sampler.set_epoch(1)
    assert [[batch["input_ids"][0].tolist() for batch in m.microbatches] for m in iterator] == first
    assert loader.state_dict()["epoch"] == 0
    expected = make_loader(dataset)
    expected.set_epoch(1)
    assert first_tokens(loader) == first_tokens(expected) != first
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize(
    ("count", "seed", "changed", "message"),
    [
        (59, 0, {}, "num_samples=60, this loader num_samples=59"),
        (60, 1, {}, "seed=0, this loader seed=1"),
        (60, 0, {"num_minibatches_done": 6}, "num_minibatches_done=6: expected at most 5"),
    ],
)
def test_a_state_of_another_loader_is_refused(count: int, seed: int, changed: dict[str, int], message: str) -> None:
    state = make_loader(make_dataset(60)).state_dict()
    with pytest.raises(ValueError, match=message):
        make_loader(make_dataset(count), seed=seed).load_state_dict({**state, **changed})


def make_native(world_size: int = 2, **options: Any) -> MinibatchLoader[Sample, dict[str, torch.Tensor]]:
    arguments = {"minibatch_size": 4, "policy": "verl-native", **options}
    return make_loader(make_dataset(64), 0, world_size, **arguments)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"cost": QuadraticCost(1.0, 1.0)}, "costs_fingerprint"),
        ({"speeds": [1.0, 2.0]}, "costs_fingerprint"),
        ({"world_size": 4, "minibatch_size": 2}, "world_size=2, this loader world_size=4"),
        ({"policy": "lb-mini", "batch_size": None}, "global_batch_size|policy='verl-native', this loader policy=None"),
        ({"drop_last": False, "batch_size": 32}, "drop_last|global_batch_size"),
    ],
)
def test_a_state_of_a_two_level_policy_is_for_the_same_costs_and_ranks(changed: dict[str, Any], named: str) -> None:
    state = make_native().state_dict()
    with pytest.raises(ValueError, match=named):
        make_native(**changed).load_state_dict(state)
    make_native().load_state_dict(state)


def test_what_a_two_level_state_would_repeat_in_another_world() -> None:
    """Why it is refused; and a one-level policy cuts the same minibatches for any number of ranks."""

    def epoch(policy: str, world_size: int) -> list[list[int]]:
        loader = make_native(world_size, minibatch_size=8 // world_size, policy=policy)
        return [sorted(planned.samples.tolist()) for planned in loader.sampler]

    assert epoch("verl-native", 2) != epoch("verl-native", 4)
    assert epoch("lb-mini", 2) == epoch("lb-mini", 4) == epoch("lb-micro", 2)
    wider = make_native(4, minibatch_size=2, policy="lb-mini")
    wider.load_state_dict(make_native(2, policy="lb-mini").state_dict())


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (None, TypeError, "the state is a NoneType: expected what state_dict"),
        ([1, 2], TypeError, "the state is a list"),
        ({}, ValueError, "the state has no epoch and no num_minibatches_done"),
        ({"epoch": "first"}, ValueError, "epoch='first'"),
        ({"num_minibatches_done": "2"}, ValueError, "num_minibatches_done='2'"),
        ({"num_minibatches_done": 2.0}, ValueError, "num_minibatches_done=2.0"),
        ({"num_minibatches_done": None}, ValueError, "num_minibatches_done=None"),
        ({"seed": [0]}, ValueError, r"seed=\[0\], this loader seed=0"),
        ({"loader": 1}, ValueError, "loader=1, this loader loader=None"),
    ],
)
def test_a_state_of_the_wrong_type_says_what_was_expected(state: Any, error: type[Exception], message: str) -> None:
    loader = make_loader(make_dataset(60))
    before = loader.state_dict()
    whole = {**before, **state} if isinstance(state, dict) and state else state
    with pytest.raises(error, match=message):
        loader.load_state_dict(whole)
    assert loader.state_dict() == before


def test_policies_and_costs_of_the_wrong_type_say_what_was_expected() -> None:
    for options, message in (
        ({"policy": 5}, "policy 5 is not known: expected"),
        ({"cost": 3.0}, "cost=3.0: expected"),
        ({"cost": math.sqrt}, r"fails for an array of 24 lengths \(TypeError: .*by np.vectorize"),
        ({"cost": lambda length: max(length, 5)}, r"fails for an array of 24 lengths \(ValueError"),
        ({"cost": lambda length: {60: 1.0}[length]}, r"fails for an array of 24 lengths \(TypeError: unhashable"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            make_loader(make_dataset(24), **options)
    vectorized = make_loader(make_dataset(24), cost=np.vectorize(lambda length: max(length, 5), otypes=[float]))
    assert len(vectorized) == len(make_loader(make_dataset(24)))


@pytest.mark.parametrize("num_lengths", [4, 8, 10])
def test_there_is_one_length_for_each_sample(num_lengths: int) -> None:
    """With fewer the rest would never be trained, with more an index fails far into the epoch."""
    dataset = make_dataset(9)

    def make(dataset: Any) -> Any:
        return known_loader(dataset, [4] * num_lengths, list, 0, 1, minibatch_size=2, cost=COST)

    with pytest.raises(ValueError, match=f"{num_lengths} lengths for a dataset of 9 samples: expected one for each"):
        make(dataset)
    unsized = SimpleNamespace(__getitem__=dataset.__getitem__)
    assert len(make(unsized)) == num_lengths // 2
    if num_lengths < 9:
        assert len(make(Subset(dataset, range(num_lengths)))) == num_lengths // 2


def test_a_second_pass_over_an_epoch_begins_with_nothing_done() -> None:
    """Also before its first minibatch was asked for, and while that is read."""
    dataset = make_dataset(60)
    states: list[Any] = []
    made: list[MinibatchLoader[Sample, dict[str, torch.Tensor]]] = []

    class Noting:
        def __getitem__(self, index: int) -> Sample:
            states.append(made[0].state_dict()["num_minibatches_done"])
            return dataset[index]

    counts = [count_loss_tokens(sample["labels"]) for sample in dataset]
    made.append(
        known_loader(Noting(), lengths_of(dataset), pack_collate, 0, 3, minibatch_size=4, cost=COST,
                        num_loss_tokens=counts)
    )  # fmt: skip
    loader = made[0]
    assert len(list(loader)) == loader.state_dict()["num_minibatches_done"] == 5
    states.clear()
    again = iter(loader)
    assert loader.state_dict()["num_minibatches_done"] == 0
    next(again)
    assert set(states) == {0}
    assert loader.state_dict()["num_minibatches_done"] == 1
    loader.load_state_dict({**loader.state_dict(), "num_minibatches_done": 3})
    iter(loader)  # nothing is asked of it
    assert loader.state_dict()["num_minibatches_done"] == 3
    assert len(list(loader)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"comm": "nccl"}, "comm='nccl': expected one of 'auto', 'odc', 'collective'"),
        ({"rank": 3}, "rank=3: expected less than world_size=3"),
        ({"rank": -1}, "rank=-1"),
        ({"minibatch_size": 0}, "minibatch_size=0"),
        ({"minibatch_size": 9}, r"24 samples make no minibatch of minibatch_size=9 .*\(27 samples\)"),
        ({"max_tokens": 10}, "longer than max_tokens=10"),
        ({"policy": "fifo"}, "policy 'fifo' is not known"),
        ({"seed": -1}, "seed=-1"),
        ({"num_loss_tokens": [1, 2]}, "2 entries for 24 lengths"),
        ({"num_loss_tokens": [61] * 24}, r"num_loss_tokens\[0\] is 61: expected at most its length"),
        ({"num_loss_tokens": [-1] * 24}, r"num_loss_tokens\[0\] is -1"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_loader(make_dataset(24), **options)
