"""Layer 3: ranks as processes. A minibatch of several modalities against the same samples one by one in one process."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_ranks import run_ranks
from toy_modalities import Toy, encoders, make_sample, orchestrator, reference, split

from odc.balance.multimodal import MinibatchLengths, MultimodalMinibatch, RankLengths, run_minibatch
from odc.balance.multimodal.payload import count_bytes, named

OPTIONS: list[dict[str, Any]] = [
    {"policy": None, "balance_encoders": False, "comm": "collective"},
    {"policy": None, "balance_encoders": True, "comm": "collective"},
    {"policy": "lb-micro-global", "balance_encoders": True, "comm": "collective"},
    {"policy": "local", "balance_encoders": True, "comm": "collective"},
    {"policy": "lb-mini", "balance_encoders": True, "comm": "odc"},
    {"policy": "local", "balance_encoders": False, "comm": "odc"},
    {"policy": "lb-mini", "balance_encoders": True, "comm": "odc", "frozen": ["audio"], "limit": None},
]


def lengths_of(numbers: list[int], seed: int, names: tuple[str, ...]) -> RankLengths:
    parts = [split(make_sample(number, seed)) for number in numbers]
    halves = [parts[: len(parts) // 2], parts[len(parts) // 2 :]]
    return RankLengths.of_samples(
        [[part.lengths for part in half] for half in halves if half],
        names,
        [count_bytes(named(part.text)) for part in parts],
        {name: [count_bytes(item) for part in parts for item in part.items.get(name, ())] for name in names},
    )


def minibatch_of(
    rank: int, world_size: int, seed: int, options: dict[str, Any]
) -> tuple[MultimodalMinibatch, list[int]]:
    rng = random.Random(seed)
    numbers = [[rng.randrange(1000) for _ in range(rng.randrange(6))] for _ in range(world_size)]
    plan = orchestrator(world_size, **options)
    rows = [lengths_of(mine, seed, plan.modalities) for mine in numbers]
    schedule = plan.plan(MinibatchLengths.of_ranks(rows, plan.modalities))
    parts = [split(make_sample(number, seed)) for number in numbers[rank]]
    return MultimodalMinibatch(schedule, rank, parts), [number for mine in numbers for number in mine]


def compare(rank: int, world_size: int) -> list[int]:
    """How often encoders ran on this rank, and on how many items."""
    counts = [0, 0]
    for seed in range(4):
        for options in OPTIONS:
            minibatch, numbers = minibatch_of(rank, world_size, seed, options)
            frozen = options.get("frozen", ())
            model, alone = Toy(), Toy()
            expected = reference(alone, numbers, seed, frozen)
            losses = run_minibatch(minibatch, encoders(model), model.loss)
            total = torch.stack([*losses, torch.zeros((), dtype=torch.float64)]).sum()
            dist.all_reduce(total)
            torch.testing.assert_close(float(total), expected, rtol=1e-12, atol=1e-12)
            for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
                grad = torch.zeros_like(mine) if mine.grad is None else mine.grad
                dist.all_reduce(grad)
                wanted = torch.zeros_like(mine) if theirs.grad is None else theirs.grad
                torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
            if options["comm"] == "collective":  # every rank goes through every encoder as often
                runs = [name for name, _ in model.num_encoded]
                everybody: list[Any] = [None] * world_size
                dist.all_gather_object(everybody, runs)
                assert everybody == [runs] * world_size
            counts[0] += len(model.num_encoded)
            counts[1] += sum(number for _, number in model.num_encoded)
    return counts


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_losses_and_gradients_are_those_of_one_process(world_size: int) -> None:
    assert all(runs > 0 and items > 0 for runs, items in run_ranks(world_size, compare))


def refused(rank: int, world_size: int, what: str) -> tuple[str, str]:
    minibatch, _ = minibatch_of(rank, world_size, 1, {"policy": "lb-mini", "comm": "odc"})
    model = Toy()
    parts = encoders(model)
    bad = next(r for r in range(world_size) if minibatch.schedule.encoders["vision"].microbatches[r])
    vision = parts["vision"]

    def encode(items: Any) -> list[torch.Tensor]:
        outputs = vision.encode(items)
        if what == "loses an item":
            return outputs[:-1]
        if what == "first dimension":
            return [torch.cat([output, output[:0], output.new_zeros(1, output.shape[1])]) for output in outputs]
        if what == "no graph":
            return [output.detach() for output in outputs]
        return outputs

    if rank == bad:
        parts["vision"] = type(vision)(encode, vision.width, vision.dtype)
    if what == "no encoder":
        del parts["audio"]
    try:
        run_minibatch(minibatch, parts, model.loss)
    except Exception as error:
        dist.barrier()
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("loses an item", "phase 'vision': the encoder of rank 0 returned"),
        ("first dimension", "phase 'vision': the output of vision item 0 of sample"),
        ("no graph", "has no graph: run the encoder with gradients, or declare Phase(frozen=True)"),
        ("no encoder", "no encoder for phase 'audio'"),
    ],
)
def test_what_an_encoder_must_not_do_is_refused_on_all_ranks(what: str, words: str) -> None:
    results = run_ranks(2, refused, what)
    assert all(kind in ("ValueError", "AbortedError") for kind, _ in results), results
    assert all(words in text for _, text in results), results
