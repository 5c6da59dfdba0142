"""Layer 1: no processes. What microbatches cost groups of devices, against slices counted token by token."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc.balance import (
    ActivationMemory,
    LinearCost,
    Machine,
    QuadraticCost,
    Scenario,
    TransformerCost,
    TransformerShape,
    preset,
    sample_lengths,
)
from odc.balance.costs.context_parallel import ContextParallel

MODEL = {**preset("qwen3-0.6b"), "num_hidden_layers": 3}
SHAPE = TransformerShape.from_config(MODEL)
COST = TransformerCost.from_config(MODEL)
RATE = 1e12
INFINITE = 1e30  # bytes per second


def group_of(size: int, bytes_per_s: float = 1e9) -> ContextParallel:
    return ContextParallel.from_config(MODEL, size, bytes_per_s)


def slices(tokens: int, size: int) -> list[list[int]]:
    """The positions of each device: of ``2 * size`` chunks it has one from each end."""
    chunks = np.arange(tokens).reshape(2 * size, -1)
    return [[*chunks[device].tolist(), *chunks[2 * size - 1 - device].tolist()] for device in range(size)]


@pytest.mark.parametrize(("tokens", "size"), [(48, 1), (48, 2), (64, 4), (1600, 8)])
def test_each_device_of_a_group_computes_what_its_slice_has(tokens: int, size: int) -> None:
    """A query at position q attends to q + 1/2 keys, as costs count them."""
    attention, head = COST.groups
    found = group_of(size, INFINITE).flops(COST, RATE)([tokens])[0]
    for mine in slices(tokens, size):
        pairs = sum(position + 0.5 for position in mine)
        own = attention.num_layers * (attention.flops_per_token * len(mine) + attention.flops_per_pair * pairs)
        own += head.flops_per_token * len(mine)
        assert found == pytest.approx(own, rel=1e-9)


@pytest.mark.parametrize(("tokens", "size"), [(48, 1), (48, 2), (64, 4)])
def test_exchange_is_what_a_device_receives(tokens: int, size: int) -> None:
    """Each device is sent the others' keys and values: twice them, once the gradients of its own, as many bytes."""
    received = [0] * size
    for _ in range(3 * SHAPE.num_layers):
        for to in range(size):
            for sender, mine in enumerate(slices(tokens, size)):
                if sender != to:
                    # Keys and values of 16 bits, of each head that queries share.
                    received[to] += len(mine) * 2 * SHAPE.attention.num_kv_heads * SHAPE.attention.head_dim * 2
    group, free = group_of(size, 1e9), group_of(size, INFINITE)
    exchange_s = (group.flops(COST, RATE)([tokens]) - free.flops(COST, RATE)([tokens])) / RATE
    for num_bytes in received:
        assert exchange_s[0] == pytest.approx(num_bytes / 1e9, rel=1e-6)
        assert group.exchange_s * SHAPE.num_layers * tokens == pytest.approx(num_bytes / 1e9)


def test_costs_in_seconds_by_hand() -> None:
    group = ContextParallel(size=4, kv_bytes=1000, num_layers=10, bytes_per_s=1e6)
    # 3 transfers of 3/4 of 1 ms in 10 layers.
    assert group.seconds(LinearCost(8.0)) == LinearCost(2.0 + 0.0225)
    assert group.seconds(QuadraticCost(4.0, 8.0)) == QuadraticCost(1.0, 2.0 + 0.0225)


def test_layers_without_attention_exchange_nothing() -> None:
    (before, head), (after, same) = COST.groups, group_of(2).flops(COST, RATE).groups
    assert same.flops_per_token == head.flops_per_token / 2
    assert after.flops_per_token > before.flops_per_token / 2
    assert after.flops_per_pair == before.flops_per_pair / 2


def test_a_group_of_one_changes_nothing() -> None:
    alone = group_of(1, 1e-3)
    memory = ActivationMemory.from_config(MODEL, recompute=True)
    assert alone.flops(COST, RATE) == COST
    assert alone.seconds(QuadraticCost(0.3, 0.7)) == QuadraticCost(0.3, 0.7)
    assert alone.activations(memory) == memory


def test_gathered_keys_and_values_are_in_memory() -> None:
    memory = ActivationMemory.from_config(MODEL, recompute=True, logits="chunked")
    more = group_of(4).activations(memory).bytes(100) - memory.bytes(100)
    others = 3 * 100 * 2 * SHAPE.attention.num_kv_heads * SHAPE.attention.head_dim
    assert more == 2 * (others + others)  # 16 bits, and the gradients


@settings(max_examples=20, deadline=None)
@given(
    tokens=st.integers(1, 200_000),
    size=st.integers(1, 64),
    slow=st.floats(1e6, 1e12),
    factor=st.floats(1.0, 1e3),
)
def test_a_faster_link_never_costs_more(tokens: int, size: int, slow: float, factor: float) -> None:
    before, after = (group_of(size, speed).flops(COST, RATE)([tokens])[0] for speed in (slow, slow * factor))
    assert COST([tokens])[0] / size * (1 - 1e-12) <= after <= before * (1 + 1e-12)


def test_groups_have_the_same_minibatches() -> None:
    scenario = Scenario(sample_lengths("aime", 300), COST, 8, 3, max_tokens=40_000, batch_size=6, seed=5)
    policies = ("lb-micro", "lb-mini", "verl-native")
    for policy in policies:
        alone = [sorted(each.samples.tolist()) for each in scenario.plan(policy).minibatches]
        for size in (1, 2, 8):
            groups = scenario.on_groups(size, group_of(size).flops(COST, RATE), 40_000 * size)
            assert (groups.world_size, groups.minibatch_size, groups.max_tokens) == (8 // size, 3 * size, 40_000 * size)
            found = [sorted(each.samples.tolist()) for each in groups.plan(policy).minibatches]
            if policy == "verl-native":  # which deals the samples of a batch out to minibatches by their costs
                alone, found = ([sorted(itertools.chain.from_iterable(each))] for each in (alone, found))
            assert found == alone


def test_a_group_waits_for_its_slowest_device_in_each_layer() -> None:
    """Against devices that are stepped layer by layer, meeting their partners before each."""
    lengths = np.array([9000, 400, 2500, 700, 8000, 100, 1200, 300])
    speeds = (1.0, 0.5, 1.0, 1.0, 0.8, 1.0, 0.25, 1.0)
    size = 2
    group = group_of(size, INFINITE)
    scenario = Scenario(lengths, COST, 8, 1, max_tokens=9000, speeds=speeds, seed=1)
    groups = scenario.on_groups(size, group.flops(COST, RATE), 18_000)
    assert groups.speeds == (0.5, 1.0, 0.8, 0.25)
    epoch = groups.plan("lb-mini")
    (minibatch,) = epoch.minibatches
    ends = []
    for number in range(4):
        clocks = [0.0] * size
        for microbatch in minibatch.of_rank(number):
            for count, costs in zip(COST.counts, COST.by_group(lengths[microbatch]), strict=True):
                for _ in range(2 * count):  # forward and backward
                    start = max(clocks)
                    for device in range(size):
                        own = costs.sum() / 2 / size
                        clocks[device] = start + own / speeds[size * number + device]
        ends.append(max(clocks))
    found = epoch.run("odc", Machine(forward_share=0.5))
    assert found.makespans[0] == pytest.approx(max(ends))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: group_of(0), "size=0: expected an integer of at least 1"),
        (lambda: group_of(2, 0.0), "bytes_per_s=0.0: expected a number greater than 0"),
        (lambda: group_of(2, float("nan")), "bytes_per_s=nan"),
        (lambda: Scenario([1] * 8, COST, 8, 1).on_groups(3, COST, 10), "size=3: expected a divisor of world_size=8"),
    ],
)
def test_bad_groups(action: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        action()
