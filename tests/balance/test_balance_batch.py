"""Layer 3: ranks as processes. Samples that ranks have are shared out anew: none is lost, no loss changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from process_ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from odc.balance import LinearCost, QuadraticCost, TransformerCost, balance_batch, policy_names
from odc.balance.data.loss_weights import LOSS_TYPES, loss_weights
from odc.balance.multimodal.payload import from_row, to_row
from odc.errors import UnsupportedError

COST = QuadraticCost(a=1e-3, b=1.0)
LONGEST = 40
WIDTH = 3
"""Parameters."""


# What travels


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool]).flatmap(
        lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.ones(shape).mul(1.3).to(dtype))
    ),
)
SAMPLES = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.lists(parts, max_size=3),
        st.lists(parts, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=4), parts, max_size=3),
    ),
    max_leaves=8,
)


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            assert_same(found[name], expected[name])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@given(SAMPLES)
@settings(max_examples=40, deadline=None)
def test_a_sample_comes_as_it_was(sample: Any) -> None:
    assert_same(from_row(to_row(sample, torch.device("cpu"))), sample)


# Losses


def token_losses(sample: dict[str, Any], theta: torch.Tensor) -> torch.Tensor:
    """Of the tokens that have a loss, (num_loss_tokens,): something whose gradient depends on all there is."""
    x = sample["x"][sample["mask"]]
    return torch.sin(x @ theta) * sample["advantage"] + (x @ theta) ** 2


def whole_loss(samples: list[dict[str, Any]], theta: torch.Tensor, loss_type: str) -> torch.Tensor:
    """Of a step in one process, as TRL computes it: padded rows and a mask."""
    losses = [token_losses(sample, theta) for sample in samples]
    mask = torch.zeros(len(samples), LONGEST)
    rows = torch.zeros(len(samples), LONGEST, dtype=torch.float64)
    for i, loss in enumerate(losses):
        mask[i, : loss.numel()] = 1
        rows[i, : loss.numel()] = loss
    if loss_type in ("dapo", "cispo", "vespo"):
        return (rows * mask).sum() / mask.sum().clamp(min=1)
    if loss_type in ("grpo", "sapo"):
        return ((rows * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    if loss_type == "dr_grpo":
        return (rows * mask).sum() / (len(samples) * LONGEST)
    return (rows * mask).sum(-1).mean()


def gradient(loss: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(loss, theta)
    return found


def check_losses(
    batch: Any, samples: list[dict[str, Any]], world_size: int, loss_types: Sequence[str] = LOSS_TYPES
) -> None:
    """Of the batch, whose samples on all ranks are these."""
    theta = torch.linspace(-1, 1, WIDTH, dtype=torch.float64, requires_grad=True)
    for loss_type in loss_types:
        options = {"max_completion_length": LONGEST} if loss_type == "dr_grpo" else {}
        total = torch.zeros(1 + WIDTH, dtype=torch.float64)
        weights = batch.loss_weights(loss_type, dtype=torch.float64, **options)
        for microbatch, factors in zip(batch.microbatches, weights, strict=True):
            if not microbatch:
                continue  # of a rank that has fewer
            sums = torch.stack([token_losses(sample, theta).sum() for sample in microbatch])
            loss = (sums * factors).sum()
            total += torch.cat([loss.detach()[None], gradient(loss, theta)])
        dist.all_reduce(total)
        expected = whole_loss(samples, theta, loss_type)
        expected = torch.cat([expected.detach()[None], gradient(expected, theta)])
        torch.testing.assert_close(total / world_size, expected, rtol=1e-12, atol=1e-14)


def make_sample(rng: random.Random, number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rng.randrange(10**6))
    length = rng.choice([1, rng.randrange(1, LONGEST), LONGEST])
    num_loss_tokens = rng.randrange(length + 1)
    mask = torch.zeros(length, dtype=torch.bool)
    mask[length - num_loss_tokens :] = True
    return {
        "number": number,
        "x": torch.randn(length, WIDTH, generator=generator, dtype=torch.float64),
        "mask": mask,
        "advantage": rng.gauss(0, 1),
        "old": (torch.randn(num_loss_tokens, generator=generator), {"length": torch.tensor(length)}),
    }


def lengths_of(samples: list[dict[str, Any]]) -> list[int]:
    return [len(sample["x"]) for sample in samples]


def everywhere(value: Any, world_size: int) -> list[Any]:
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, value)
    return found


def random_case(rank: int, world_size: int, seed: int, policy: str) -> int:
    """Samples that have changed ranks."""
    rng = random.Random(seed)
    sizes = [rng.choice([0, rng.randrange(8), 7]) for _ in range(world_size)]
    made: list[list[dict[str, Any]]] = []
    for size in sizes:
        made.append([make_sample(rng, sum(map(len, made)) + i) for i in range(size)])
    everything = [sample for mine in made for sample in mine]
    counts = [int(sample["mask"].sum()) for sample in made[rank]]
    max_tokens = rng.choice([None, LONGEST, 60, 1000])
    per_node = rng.choice([None, 1, world_size])
    batch = balance_batch(
        made[rank],
        lengths_of(made[rank]),
        cost=COST,
        max_tokens=max_tokens,
        policy=policy,
        num_loss_tokens=counts,
        ranks_per_node=per_node,
        comm=rng.choice(["odc", "collective"]),
    )
    assert batch.num_samples == len(everything)
    assert batch.num_loss_tokens == sum(int(sample["mask"].sum()) for sample in everything)
    moved = check_samples(rank, world_size, batch, made, everything, max_tokens)
    for sample in batch.samples:  # a pass without gradient, and what it has found
        sample["reference"] = sample["x"].sum(1)
    if not everything:
        return moved
    check_losses(batch, everything, world_size)
    num_minibatches = rng.randrange(1, min(4, len(everything)) + 1)
    for epoch in range(2):
        minibatches = batch.split(num_minibatches, seed=epoch)
        had = {id(sample) for sample in batch.samples}
        came = [sample for minibatch in minibatches for sample in minibatch.samples if id(sample) not in had]
        sent = sum(minibatch.sent_bytes for minibatch in minibatches)
        assert sum(everywhere(sent, world_size)) == sum(everywhere(num_bytes(came), world_size))
        assert len(minibatches) == num_minibatches
        seen: Counter[int] = Counter()
        for minibatch in minibatches:
            numbers = [s["number"] for mine in everywhere(minibatch.samples, world_size) for s in mine]
            assert len(numbers) in (len(everything) // num_minibatches, -(-len(everything) // num_minibatches))
            seen.update(numbers)
            check_losses(minibatch, [everything[i] for i in numbers], world_size, ("dapo", "grpo"))
            for sample in minibatch.samples:
                assert torch.equal(sample["reference"], sample["x"].sum(1))
                assert_same(without_reference(sample), without_reference(everything[sample["number"]]))
        assert seen == Counter(range(len(everything)))
    return moved


def num_bytes(samples: list[dict[str, Any]]) -> int:
    """As they travel."""
    return sum(to_row(sample, torch.device("cpu")).nbytes for sample in samples)


def without_reference(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name != "reference"}


def check_samples(
    rank: int, world_size: int, batch: Any, made: Any, everything: list[dict[str, Any]], max_tokens: int | None
) -> int:
    if max_tokens is None:
        max_tokens = max(lengths_of(everything), default=1)
    for microbatch in batch.microbatches:
        assert sum(lengths_of(microbatch)) <= max_tokens
    numbers = sorted(s["number"] for mine in everywhere(batch.samples, world_size) for s in mine)
    assert numbers == list(range(len(everything)))
    stayed = {id(sample) for sample in made[rank]}
    moved = [sample for sample in batch.samples if id(sample) not in stayed]
    assert sum(everywhere(batch.sent_bytes, world_size)) == sum(everywhere(num_bytes(moved), world_size))
    for sample in batch.samples:
        assert_same(sample, everything[sample["number"]])
    assert not {s["number"] for s in moved} & {s["number"] for s in made[rank]}  # what stays is not copied
    return len(moved)


def random_cases(rank: int, world_size: int) -> int:
    cases = [("lb-mini", seed) for seed in range(2)] + [(policy, 2) for policy in policy_names()]
    return sum(random_case(rank, world_size, seed, policy) for policy, seed in cases)


@pytest.mark.parametrize("world_size", [2, *(pytest.param(ranks, marks=pytest.mark.extended) for ranks in (3, 4))])
def test_nothing_is_lost_and_no_loss_changes(world_size: int) -> None:
    assert sum(run_ranks(world_size, random_cases)) > 0


# What moves


def little(rank: int, world_size: int) -> list[int]:
    def moved(home: list[list[int]], **options: Any) -> int:
        mine = [{"at": rank} for _ in home[rank]]
        batch = balance_batch(mine, home[rank], cost=LinearCost(), max_tokens=100, comm="odc", **options)
        return sum(sample["at"] != rank for sample in batch.samples)

    even = [[30, 20, 10]] * world_size
    found = [moved(even), moved(even, policy="lb-micro"), moved(even, policy="none")]
    # 4 ranks on 2 nodes: each node has the same, so nothing crosses between them.
    uneven = [[90, 30], [10, 10], [90, 30], [10, 10]]
    mine = [{"node": rank // 2} for _ in uneven[rank]]
    batch = balance_batch(mine, uneven[rank], cost=LinearCost(), max_tokens=100, comm="odc", ranks_per_node=2)
    found.append(sum(sample["node"] != rank // 2 for sample in batch.samples))
    assert batch.plan.makespan("odc") <= 90
    return found


def test_what_is_even_stays_and_nodes_are_evened_out_first() -> None:
    for none, of_micro, *others in run_ranks(4, little):
        assert (none, others) == (0, [0, 0])
        assert of_micro <= 1


def few_samples(rank: int, world_size: int) -> list[int]:
    """One sample for four ranks; and of pairs, whose costs are those of their sequences."""
    mine = [{"ids": torch.arange(5)}] if rank == 2 else []
    batch = balance_batch(
        mine, [5] * len(mine), cost=LinearCost(), max_tokens=9, comm="odc", num_loss_tokens=[4] * len(mine)
    )
    assert batch.num_samples == 1
    assert [w.tolist() for w in batch.loss_weights("dapo")] == ([[1.0]] if rank == 2 else [])
    nothing = balance_batch([], [], cost=LinearCost(), max_tokens=9)
    assert (nothing.microbatches, nothing.num_samples) == ([], 0)
    cost = TransformerCost.from_config("qwen2.5-7b")
    pairs = [(1000, 10), (500, 510)]
    both = balance_batch(pairs, pairs, cost=cost, max_tokens=1010, comm="odc")
    expected = [float(cost(np.array(pair)).sum()) for pair in pairs for _ in range(world_size)]
    assert np.allclose(np.sort(both.plan.costs), np.sort(expected), rtol=1e-12)
    assert set(both.plan.lengths) == {1010}
    return [len(one) for one in both.microbatches]


def test_few_samples_none_and_pairs() -> None:
    assert run_ranks(4, few_samples) == [[1, 1]] * 4


def over_a_mesh(rank: int, world_size: int) -> list[int]:
    """Two replicas of two ranks that have samples of their own, and groups of one dimension."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    both, one = mesh["dp_replicate", "dp_shard"], mesh["dp_shard"]
    mine = [rank] * 4 if rank == 0 else []
    options: dict[str, Any] = {"cost": LinearCost(), "max_tokens": 10, "comm": "odc"}
    batches = [
        balance_batch(mine, [10] * len(mine), mesh=both, **options),
        balance_batch(mine, [10] * len(mine), mesh=both, **options),
        balance_batch(mine, [10] * len(mine), mesh=one, **options),
        balance_batch(mine, [10] * len(mine), group=one.get_group(), **options),
    ]
    return [len(batch.samples) for batch in batches]


def test_ranks_of_meshes() -> None:
    assert run_ranks(4, over_a_mesh) == [[1, 1, 2, 2]] * 2 + [[1, 1, 0, 0]] * 2


# What is refused


def said(samples: list[Any], lengths: list[int], **changed: Any) -> str:
    """How balancing was refused, once all ranks have heard of it: gloo takes the connections of one that ends along."""
    try:
        balance_batch(samples, lengths, **{"cost": LinearCost(), "max_tokens": 9, "comm": "odc", **changed})
    except Exception as error:
        dist.barrier()
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was not refused")


def differing(rank: int, world_size: int, options: list[dict[str, Any]]) -> str:
    return said([{"a": 1}] * 3, [5, 6, 7], **options[rank])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([{}, {"max_tokens": 8}, {}], "max_tokens is 9 on ranks [0, 2], 8 on ranks [1]"),
        ([{}, {}, {"policy": "lb-micro"}], 'policy is "lb-mini" on ranks [0, 1], "lb-micro" on ranks [2]'),
        (
            [{"cost": COST}, {}, {}],
            "cost (of 1 and of 1024 tokens) is [1.001, 2072.576] on ranks [0], [1.0, 1024.0] on ranks [1, 2]",
        ),
        ([{}, {"num_loss_tokens": [1, 1, 1]}, {}], 'num_loss_tokens is "not given" on ranks [0, 2], "given" on'),
    ],
)
def test_a_rank_with_other_arguments_is_named_on_all(options: list[dict[str, Any]], words: str) -> None:
    for text in run_ranks(3, differing, options):
        assert text.startswith("ValueError: ranks that balance a batch together have different arguments: ")
        assert words in text


MASKED = {"input_ids": torch.arange(8), "attention_mask": torch.tensor([1] * 5 + [0] * 3)}


def bad_input(rank: int, world_size: int, lengths: list[int], sample: Any, changed: dict[str, Any]) -> str:
    return said([sample] * 2, lengths, **changed) if rank == 1 else said([{"a": 1}] * 2, [5, 6])


@pytest.mark.parametrize(
    ("lengths", "sample", "changed", "words"),
    [
        ([5, 12], {}, {}, "1 of 2 samples are longer than max_tokens=9 (the first: sample 1 with 12 tokens)"),
        ([5], {}, {}, "1 lengths for 2 samples"),
        ([5, []], {}, {}, "lengths[1] is empty"),
        ([5, 0], {}, {}, "lengths[1][0] is 0: expected at least 1"),
        ([5, 6], {"a": [torch.ones(2, requires_grad=True)]}, {}, "samples[0]['a'][0] requires a gradient"),
        ([5, 6], {"a": np.ones(2)}, {}, "samples[0]['a'] is a ndarray: expected tensors, numbers and texts"),
        ([5, 6], {"a": torch.ones(2, dtype=torch.complex64)}, {}, "has dtype torch.complex64: expected one of"),
        ([5, 6], {"input_ids": torch.arange(5)}, {}, "samples[1] has 5 tokens in its input_ids, and its length says 6"),
        ([5, 6], MASKED, {}, "samples[1] has 5 tokens in its input_ids, and its length says 6"),
        ([[5, 6], [6]], {"input_ids": [1] * 11}, {"max_tokens": 99}, "samples[1] has 11 tokens in its input_ids, and"),
        ([5, 6], {3: 1}, {}, "samples[0] has an entry named 3"),
        ([5, 6], {}, {"policy": "lb-mimi"}, "policy 'lb-mimi' is not known"),
        ([5, 6], {}, {"ranks_per_node": 2}, "3 ranks on nodes of ranks_per_node=2"),
        ([5, 6], {}, {"num_loss_tokens": [6, 6]}, "num_loss_tokens[0] is 6: expected at most its length, 5"),
        ([5, 6], {}, {"comm": "nccl"}, "comm='nccl': expected one of"),
    ],
)
def test_bad_input_is_refused_on_all_ranks(lengths: Any, sample: Any, changed: dict[str, Any], words: str) -> None:
    first, second, third = run_ranks(3, bad_input, lengths, sample, changed)
    assert second.startswith("ValueError: ")
    assert words in second
    assert first == third == f"AbortedError: rank 1 cannot balance its batch: {second.removeprefix('ValueError: ')}"


def refused_beside_it(rank: int, world_size: int) -> None:
    uneven, cost = ([3] * 9 if rank else [9]), QuadraticCost(1.0, 0.0)
    with pytest.raises(RuntimeError, match=r"gives the ranks \[1, 3\] microbatches in this batch, and ODC is not at"):
        balance_batch(uneven, uneven, cost=cost, max_tokens=9)
    batch = balance_batch(uneven, uneven, cost=cost, max_tokens=9, comm="odc")
    with pytest.raises(ValueError, match="num_minibatches=11: expected at most the 10 samples"):
        batch.split(11, seed=0)
    with pytest.raises(ValueError, match=r"seed is 0 on ranks \[0\], 1 on ranks \[1\]"):
        batch.split(2, seed=rank)
    with pytest.raises(ValueError, match=r'call is "balance_batch" on ranks \[0\], "split" on ranks \[1\]'):
        batch.split(2, seed=0) if rank else balance_batch([], [], cost=LinearCost(), max_tokens=9)
    with pytest.raises(ValueError, match="balanced without num_loss_tokens"):
        batch.loss_weights("grpo")
    batch.split(2, seed=0)  # all of which has done no harm


def test_what_ranks_do_differently_is_refused_and_does_no_harm() -> None:
    run_ranks(2, refused_beside_it)


@pytest.mark.parametrize(
    ("loss_type", "longest", "error", "message"),
    [
        ("bnpo", None, UnsupportedError, "bnpo.*mean over the tokens of a microbatch.*Use 'dapo'"),
        ("ppo", None, ValueError, "loss_type='ppo': expected one of 'dapo'"),
        ("dr_grpo", None, ValueError, "max_completion_length=None with loss_type='dr_grpo'"),
        ("grpo", 5, ValueError, "max_completion_length=5 with loss_type='grpo'"),
    ],
)
def test_losses_of_a_microbatch_and_unknown_ones_are_refused(
    loss_type: str, longest: int | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        loss_weights(loss_type, np.array([2, 3]), 2, num_samples=2, max_completion_length=longest)


def test_a_process_alone_has_all_it_had() -> None:
    mine = [{"n": n} for n in (5, 4, 6)]
    batch = balance_batch(mine, [5, 4, 6], cost=LinearCost(), max_tokens=9, num_loss_tokens=[1, 2, 3])
    assert sorted(sample["n"] for sample in batch.samples) == [4, 5, 6]
    assert all(any(sample is one for one in mine) for sample in batch.samples)
    assert torch.cat(batch.loss_weights("dapo")).tolist() == pytest.approx([1 / 6] * 3)
    assert sorted(len(one.samples) for one in batch.split(2, seed=3)) == [1, 2]
