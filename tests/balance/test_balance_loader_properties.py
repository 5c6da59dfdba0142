"""Layer 1: no processes. What holds for any lengths, ranks, policies and seeds, and at any point to resume from."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders import known_loader

from odc.balance import LinearCost, Minibatch, MinibatchLoader, QuadraticCost, loss_scale, policy_names

COST = QuadraticCost(1e-2, 1.0)
Epoch = list[Minibatch[list[int]]]


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Of a loader that has at least one minibatch."""
    world_size = draw(st.integers(1, 4))
    minibatch_size = draw(st.integers(1, 4))
    drop_last = draw(st.booleans())
    least = world_size * minibatch_size if drop_last else 1
    lengths = draw(st.lists(st.integers(1, 40), min_size=least, max_size=least + 40))
    return {
        "lengths": lengths,
        "world_size": world_size,
        "minibatch_size": minibatch_size,
        "drop_last": drop_last,
        "policy": draw(st.sampled_from(policy_names())),
        "max_tokens": max(lengths) + draw(st.integers(0, 60)),
        "seed": draw(st.integers(0, 3)),
        "shuffle": draw(st.booleans()),
        "num_loss_tokens": [draw(st.integers(0, length)) for length in lengths],
    }


def make_loader(rank: int, options: dict[str, Any]) -> MinibatchLoader[int, list[int]]:
    """Its batches are lists of sample indices."""
    return known_loader(range(len(options["lengths"])), collate=list, rank=rank, cost=COST, **options)


def samples_of(minibatch: Minibatch[list[int]]) -> list[int]:
    return [sample for microbatch in minibatch.microbatches for sample in microbatch]


def assert_epoch_is_covered(epochs: list[Epoch], options: dict[str, Any]) -> None:
    num_samples = len(options["lengths"])
    seen = sorted(sample for epoch in epochs for minibatch in epoch for sample in samples_of(minibatch))
    num_dropped = num_samples % (options["world_size"] * options["minibatch_size"]) if options["drop_last"] else 0
    assert len(set(seen)) == len(seen) == num_samples - num_dropped
    if not options["shuffle"]:
        assert seen == [*range(num_samples - num_dropped)]
    assert set(seen) <= set(range(num_samples))


def assert_losses_are_exact(minibatches: tuple[Minibatch[list[int]], ...], options: dict[str, Any]) -> None:
    samples = [sample for minibatch in minibatches for sample in samples_of(minibatch)]
    total = int(np.array(options["num_loss_tokens"])[samples].sum())
    assert {minibatch.num_loss_tokens for minibatch in minibatches} == {total}
    assert {minibatch.loss_scale for minibatch in minibatches} == {loss_scale(options["world_size"], total)}


def assert_limits_are_kept(minibatches: tuple[Minibatch[list[int]], ...], options: dict[str, Any]) -> None:
    lengths = options["lengths"]
    for rank, minibatch in enumerate(minibatches):
        assert minibatch.plan == minibatches[0].plan
        tokens = [sum(lengths[sample] for sample in microbatch) for microbatch in minibatch.microbatches]
        planned = [minibatch.plan.lengths[part].sum() for part in minibatch.plan.microbatches[rank]]
        assert tokens == planned
        assert max(tokens, default=0) <= options["max_tokens"]


@settings(deadline=None, max_examples=40)
@given(arguments(), st.integers(0, 2))
def test_ranks_share_out_an_epoch(options: dict[str, Any], epoch: int) -> None:
    loaders = [make_loader(rank, options) for rank in range(options["world_size"])]
    for loader in loaders:
        loader.set_epoch(epoch)
    epochs = [list(loader) for loader in loaders]
    assert {len(minibatches) for minibatches in epochs} == {len(loaders[0])}
    assert_epoch_is_covered(epochs, options)
    for minibatches in zip(*epochs, strict=True):
        assert_losses_are_exact(minibatches, options)
        assert_limits_are_kept(minibatches, options)


@settings(deadline=None, max_examples=40)
@given(arguments(), st.integers(0, 2), st.data())
def test_a_resumed_loader_yields_the_rest(options: dict[str, Any], epoch: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, options["world_size"] - 1))
    loaders = [make_loader(rank, options) for _ in range(3)]
    for loader in loaders[:2]:
        loader.set_epoch(epoch)
    whole = list(loaders[0])
    num_done = data.draw(st.integers(0, len(whole)))
    iterator = iter(loaders[1])
    for _ in range(num_done):
        next(iterator)
    loaders[2].load_state_dict(loaders[1].state_dict())
    rest = list(loaders[2])
    assert [m.microbatches for m in rest] == [m.microbatches for m in whole[num_done:]]
    assert [(m.plan, m.loss_scale) for m in rest] == [(m.plan, m.loss_scale) for m in whole[num_done:]]


def test_a_two_level_policy_resumes_in_the_middle_of_a_batch() -> None:
    lengths = list(range(1, 41))

    def make(batch_size: int) -> MinibatchLoader[int, list[int]]:
        return known_loader(
            lengths,
            lengths,
            list,
            1,
            2,
            minibatch_size=2,
            batch_size=batch_size,
            cost=LinearCost(),
            policy="verl-native",
        )

    expected = [minibatch.microbatches for minibatch in make(10)]
    stopped = make(np.uint8(10))  # type: ignore[arg-type]  # in a state it is a number of JSON
    for _ in zip(range(3), stopped, strict=False):
        pass
    resumed = make(10)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert [minibatch.microbatches for minibatch in resumed] == expected[3:]
    with pytest.raises(ValueError, match="global_batch_size=20, this loader global_batch_size=8"):
        make(4).load_state_dict(stopped.state_dict())
