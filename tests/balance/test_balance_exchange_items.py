"""Layer 3: ranks as processes. Items that change ranks, and gradients that come home, bit for bit as in one process."""

from __future__ import annotations

import importlib
import os
import random
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_ranks import run_ranks, start_ranks
from test_balance_rearrangement import distribution

from odc import AbortedError
from odc.balance import Rearrangement, exchange

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8]


def make_items(rng: random.Random, num_items: int) -> list[torch.Tensor]:
    items = []
    for number in range(num_items):
        dtype = rng.choice(DTYPES)
        shape = [rng.choice([0, 1, rng.randrange(1, 9)]), *[rng.randrange(1, 4) for _ in range(rng.randrange(3))]]
        generator = torch.Generator().manual_seed(rng.randrange(10**6))
        item = torch.randn(shape, generator=generator) * 10
        wants_gradient = dtype.is_floating_point and rng.random() < 0.7
        items.append(item.to(dtype).requires_grad_(wants_gradient))
        del number
    return items


def weigh(tensor: torch.Tensor, item: int) -> torch.Tensor:
    """A loss whose gradient depends on the values."""
    return (tensor * tensor * (item + 1)).sum().double()


def random_case(rank: int, world_size: int, seed: int, use: str) -> int:
    """Bytes that this rank has sent, forward and backward, checked against the volume. ``use``: how it goes back."""
    rng = random.Random(seed)
    num_items = rng.randrange(10)
    all_items = make_items(rng, num_items)
    route = Rearrangement.between(*(distribution(rng, world_size, num_items) for _ in range(2)))
    unused = {item for item in range(num_items) if rng.random() < 0.3}
    idle = rng.randrange(world_size)  # uses nothing
    owner = {int(item): r for r in range(world_size) for item in route.target[r]}

    # One process: what each item is worth where it ends.
    reference = [item.detach().clone().requires_grad_(item.requires_grad) for item in all_items]
    parts = [
        weigh(item, number)
        for number, item in enumerate(reference)
        if item.requires_grad and number not in unused and owner[number] != idle
    ]
    if parts:
        torch.stack(parts).sum().backward()

    sent = []
    original = dist.all_to_all_single

    def counted(out: torch.Tensor, data: torch.Tensor, receives: Any, sends: Any, **options: Any) -> Any:
        sent.append(data.numel())
        return original(out, data, receives, sends, **options)

    mine = [all_items[item] for item in route.source[rank]]
    dist.all_to_all_single = counted
    try:
        received = exchange(mine, route)
        assert len(received) == len(route.target[rank])
        for item, tensor in zip(route.target[rank].tolist(), received, strict=True):
            assert tensor.dtype == all_items[item].dtype
            assert torch.equal(tensor, all_items[item])
            assert tensor.requires_grad == all_items[item].requires_grad
        tensors = received.leaves if use == "leaves" else list(received)
        losses = [
            weigh(tensor, item)
            for item, tensor in zip(route.target[rank].tolist(), tensors, strict=True)
            if tensor.requires_grad and item not in unused and rank != idle
        ]
        if use == "leaves":
            for loss in losses:  # a backward each, as microbatches have them
                loss.backward()
        elif losses:
            torch.stack(losses).sum().backward()
        received.backward()
        received.backward()  # once more does nothing
    finally:
        dist.all_to_all_single = original
    for item, tensor in zip(route.source[rank].tolist(), mine, strict=True):
        if tensor.requires_grad:
            expected = reference[item].grad
            assert torch.equal(tensor.grad, torch.zeros_like(tensor) if expected is None else expected)
        else:
            assert tensor.grad is None

    def off_rank(sizes: list[int], row: Rearrangement) -> float:
        volume = row.volume(sizes)
        return float(volume[rank].sum() - volume[rank, rank])

    values = [item.nbytes for item in all_items]
    with_gradient = [item.nbytes if item.requires_grad else 0 for item in all_items]
    assert sent[1] == off_rank(values, route)  # the first of the three says what the tensors are
    if len(sent) > 2:
        assert sent[2] == off_rank(with_gradient, route.inverse())
    else:
        assert not any(item.requires_grad for item in all_items)
    return sum(sent[1:])


def random_cases(rank: int, world_size: int, use: str) -> int:
    return sum(random_case(rank, world_size, seed, use) for seed in range(25))


@pytest.mark.parametrize(
    ("world_size", "use"), [pytest.param(2, "graph", marks=pytest.mark.extended), (3, "leaves"), (4, "graph")]
)
def test_values_and_gradients_are_those_of_one_process(world_size: int, use: str) -> None:
    assert all(sent > 0 for sent in run_ranks(world_size, random_cases, use))


def to_the_next(world_size: int) -> Rearrangement:
    ranks = [[r] for r in range(world_size)]
    return Rearrangement.between(ranks, ranks[-1:] + ranks[:-1])


def refused(rank: int, world_size: int, what: str) -> tuple[str, str]:
    route, tensors = to_the_next(world_size), [torch.ones(2, requires_grad=True)]
    if what == "other order":
        second = [torch.ones(2, requires_grad=True)]
    if what == "plans" and rank == 1:
        route = Rearrangement.between([[r] for r in range(world_size)], [[r] for r in range(world_size)])
    if what == "count" and rank == 1:
        tensors = []
    if what == "kind" and rank == 1:
        tensors = [torch.ones(2, dtype=torch.complex64)]
    if what == "ranks" and rank == 1:
        route = to_the_next(world_size + 1)
    try:
        received = exchange(tensors, route)
        if what == "no backward":
            if rank == 0:
                received.backward()
            else:
                exchange(tensors, route)
        if what == "twice":
            received.backward()
            received[0].sum().backward()
        if what == "other order":  # autograd goes back through the last one first
            other = exchange(second, route)
            (received[0].sum() + (other[0].sum() if rank else 0)).backward()
            other.backward()
        if what == "both ways":
            received.leaves[0].sum().backward()
            received[0].sum().backward()
            received.backward()
        if what == "second derivative":
            (grad,) = torch.autograd.grad((received[0] ** 2).sum(), tensors, create_graph=True)
            grad.sum().backward()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


REFUSED = {
    "plans": ({"ValueError"}, "ranks 0 and 1 have different rearrangements: item 0 goes to rank 1 against rank 0"),
    "count": ({"ValueError", "AbortedError"}, "rank 1 gives 0 tensors for 1 items"),
    "kind": ({"ValueError", "AbortedError"}, "item 1 of rank 1 has dtype torch.complex64"),
    "ranks": ({"ValueError", "AbortedError"}, "the rearrangement is one of 4 ranks, the group has 3"),
    "no backward": ({"ProtocolError"}, "is at the backward of an exchange"),
    "twice": ({"ProtocolError"}, "a second backward through one exchange"),
    "other order": ({"ProtocolError"}, "ranks go back through different exchanges"),
    "both ways": ({"ProtocolError"}, "the gradients of received.leaves cannot go home"),
    "second derivative": ({"RuntimeError"}, "once_differentiable"),
}


def all_refused(rank: int, world_size: int) -> list[tuple[str, str]]:
    """One after the other: the process group is as good as before."""
    found = []
    for what in REFUSED:
        found.append(refused(rank, world_size, what))
        dist.barrier()
    return found


def test_what_does_not_fit_is_refused_on_all_ranks() -> None:
    for (what, (kinds, words)), *results in zip(REFUSED.items(), *run_ranks(3, all_refused), strict=True):
        assert {kind for kind, _ in results} == kinds, (what, results)
        assert all(words in text for _, text in results), (what, results)


def refused_in_a_group(rank: int, world_size: int) -> str:
    """In a group that does not begin at rank 0."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return ""
    route = Rearrangement.between([[0], [1]], [[1], [0]])
    try:
        exchange([torch.ones(2)] if rank == 1 else [], route, group)
    except (ValueError, AbortedError) as error:
        return str(error)
    return "not refused"


def test_ranks_of_a_group_are_named_as_in_the_job() -> None:
    _, first, second = run_ranks(3, refused_in_a_group)
    assert second == "rank 2 gives 0 tensors for 1 items: expected one for each item of rearrangement.source"
    assert first == f"rank 2 has refused an exchange: {second}"


def come_late(rank: int, world_size: int) -> str:
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    importlib.import_module("odc.balance.rearrange.exchange")._ROLL_CALL_S = 0.2
    if rank == 1:
        time.sleep(3.0)
        return "slow"
    try:
        exchange([torch.ones(2)], to_the_next(world_size), group)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "through"


def test_a_rank_that_is_slow_is_not_called_dead() -> None:
    first, _ = run_ranks(2, come_late)
    assert first.startswith("PeerSilentError: rank 1 did not come to an exchange of items in time")


def die_in_the_middle(rank: int, world_size: int, when: str) -> str:
    items = [torch.ones(1 << 20, requires_grad=True)]
    for number in range(1000):
        try:
            received = exchange(items, to_the_next(world_size))
            if rank == 1 and number == 3 and when == "backward":
                os.kill(os.getpid(), signal.SIGKILL)
            received.backward()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if rank == 1 and number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    return "nobody died"


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_that_is_killed_is_named(when: str) -> None:
    started = time.monotonic()
    results = start_ranks(3, die_in_the_middle, when).join(60, expendable=[1])
    for rank in (0, 2):
        assert "PeerDiedError: rank 1 gone in the middle of an exchange" in (results[rank].value or ""), results
    assert time.monotonic() - started < 50
