"""Layer 3: ranks as processes. A minibatch of several modalities against the same samples one by one in one process."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_ranks import run_ranks, start_ranks, wait_until
from toy_modalities import CHANNELS, Toy, encoders, make_sample, orchestrator, reference, rows_of, split

from odc import ItemExchange
from odc.balance.multimodal import (
    Encoder,
    InStep,
    MinibatchLengths,
    MultimodalMinibatch,
    OnDemand,
    RankLengths,
    channels_of,
    run_minibatch,
)
from odc.balance.multimodal.payload import count_bytes, named
from odc.setup.agreement import ProcessGroupExchange

SEEDS = 2
OPTIONS: list[dict[str, Any]] = [
    {"policy": None, "balance_encoders": False, "comm": "collective"},
    {"policy": None, "balance_encoders": True, "comm": "collective"},
    {"policy": "lb-micro-global", "balance_encoders": True, "comm": "collective"},
    {"policy": "local", "balance_encoders": True, "comm": "collective"},
    {"policy": "lb-mini", "balance_encoders": True, "comm": "odc"},
    {"policy": "local", "balance_encoders": False, "comm": "odc"},
    {"policy": "joint", "balance_encoders": True, "comm": "odc"},
    {"policy": "whole", "balance_encoders": False, "comm": "odc"},
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


def compare(rank: int, world_size: int, kind: str) -> list[int]:
    """How often encoders ran on this rank, and on how many items."""
    if kind == "in step":
        return compare_by(rank, world_size, InStep(), OPTIONS)
    # So little room that channels have to grow.
    with ItemExchange.create(ProcessGroupExchange(), channels_of(list(CHANNELS)), capacity_bytes=256) as items:
        return compare_by(rank, world_size, OnDemand(items, rank), [o for o in OPTIONS if o["comm"] == "odc"])


def compare_by(rank: int, world_size: int, mover: InStep | OnDemand, chosen: list[dict[str, Any]]) -> list[int]:
    counts = [0, 0]
    for seed in range(SEEDS):
        for options in chosen:
            minibatch, numbers = minibatch_of(rank, world_size, seed, options)
            frozen = options.get("frozen", ())
            model, alone = Toy(), Toy()
            expected = reference(alone, numbers, seed, frozen)
            losses = run_minibatch(minibatch, encoders(model), model.loss, mover=mover)
            total = torch.stack([*losses, torch.zeros((), dtype=torch.float64)]).sum()
            dist.all_reduce(total)
            torch.testing.assert_close(float(total), expected, rtol=1e-12, atol=1e-12)
            with torch.no_grad():  # an evaluation in between
                again = run_minibatch(minibatch, encoders(Toy()), Toy().loss, mover=mover)
            assert [float(loss) for loss in again] == [float(loss) for loss in losses]
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
    # What has come from others is what the plans say: one cargo per encoder and direction, and texts that move.
    assert (
        mover.moved.cargoes["vision/outputs"] == 2 * mover.moved.cargoes["vision/gradients"] == 2 * SEEDS * len(chosen)
    )
    return counts


@pytest.mark.parametrize("kind", [pytest.param("in step", marks=pytest.mark.extended), "on demand"])
@pytest.mark.parametrize("world_size", [1, 4, pytest.param(2, marks=pytest.mark.extended)])
def test_losses_and_gradients_are_those_of_one_process(world_size: int, kind: str) -> None:
    assert all(runs > 0 and items > 0 for runs, items in run_ranks(world_size, compare, kind))


def need_nothing_of_the_last(rank: int, world_size: int) -> str:
    """The last rank encodes nothing before the others are through with the whole minibatch, and say so."""
    kinds = {"policy": None, "balance_encoders": False, "comm": "odc"}
    minibatch, _ = minibatch_of(rank, world_size, 2, kinds)
    model = Toy()
    parts = encoders(model)
    folder = Path(os.environ["ODC_TEST_FOLDER"])
    with ItemExchange.create(ProcessGroupExchange(), channels_of(list(CHANNELS)), capacity_bytes=256) as items:
        if rank == world_size - 1:
            wait_until(lambda: len(list(folder.iterdir())) == world_size - 1, "the others wait for the last rank")
        run_minibatch(minibatch, parts, model.loss, mover=OnDemand(items, rank))
        (folder / str(rank)).touch()
        dist.barrier()
    return "done"


def test_nobody_waits_for_outputs_that_it_does_not_need(tmp_path: Path) -> None:
    found = run_ranks(3, need_nothing_of_the_last, env={"ODC_TEST_FOLDER": str(tmp_path)})
    assert found == ["done"] * 3


def die_while_others_need(rank: int, world_size: int) -> str:
    for seed in range(100):  # until somebody needs what another one makes
        minibatch, _ = minibatch_of(rank, world_size, seed, {"policy": "lb-mini", "comm": "odc"})
        givers = [r for r in range(world_size) if gives(minibatch.schedule.outputs["vision"], r)]
        if givers:
            break
    needed = givers[0]
    model = Toy()
    parts = encoders(model)

    def die(items: Any) -> list[torch.Tensor]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    if rank == needed:
        parts["vision"] = type(parts["vision"])(die, parts["vision"].width, parts["vision"].dtype)
    items = ItemExchange.create(ProcessGroupExchange(), channels_of(list(CHANNELS)), capacity_bytes=256)
    try:
        run_minibatch(minibatch, parts, model.loss, mover=OnDemand(items, rank))
        items.close()
    except Exception as error:
        return f"{type(error).__name__}: {error}; killed: {needed}"
    return f"through; killed: {needed}"


def gives(route: Any, rank: int) -> bool:
    """Whether others need what this rank makes."""
    return any(route.sends(rank, to) for to in range(route.num_ranks) if to != rank)


def test_a_rank_that_dies_while_others_need_its_outputs_is_named() -> None:
    started = time.monotonic()
    results = start_ranks(3, die_while_others_need).join(60)
    texts = [result.value for result in results if result.value]
    assert len(texts) == 2, results
    killed = texts[0].rpartition(": ")[2]
    assert any(f"rank {killed} is dead: killed by signal 9" in text for text in texts), texts
    assert all("through" in text or f"rank {killed}" in text for text in texts), texts
    assert time.monotonic() - started < 50


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
    if what == "no dummy":
        minibatch, _ = minibatch_of(
            rank, world_size, 1, {"policy": None, "balance_encoders": False, "comm": "collective"}
        )
        parts = {name: type(part)(part.encode, part.width, part.dtype) for name, part in parts.items()}
    try:
        run_minibatch(minibatch, parts, model.loss)
    except Exception as error:
        dist.barrier()
        return type(error).__name__, str(error)
    return "", ""


REFUSED = {
    "loses an item": "phase 'vision': the encoder of rank 0 returned",
    "first dimension": "phase 'vision': the output of vision item 0 of sample",
    "no graph": "has no graph: run the encoder with gradients, or declare Phase(frozen=True)",
    "no encoder": "no encoder for phase 'audio'",
    "no dummy": "has a microbatch without items, as collectives need it, and the encoder has no dummy",
}


def all_refused(rank: int, world_size: int) -> list[tuple[str, str]]:
    """One after the other, in processes that live on."""
    return [refused(rank, world_size, what) for what in REFUSED]


def test_what_an_encoder_must_not_do_is_refused_on_all_ranks() -> None:
    for words, *results in zip(REFUSED.values(), *run_ranks(2, all_refused), strict=True):
        assert all(kind in ("ValueError", "AbortedError") for kind, _ in results), results
        assert all(words in text for _, text in results), results


def fail_alone(rank: int, world_size: int, where: str) -> str:
    """One rank cannot go on; it lives, and closes nothing."""
    minibatch, _ = minibatch_of(rank, world_size, 3, {"policy": "lb-mini", "comm": "odc"})
    model = Toy()
    parts, language = encoders(model), model.loss
    folder = Path(os.environ["ODC_TEST_FOLDER"])

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    if rank == 1 and where == "encoder":
        parts["vision"] = type(parts["vision"])(fail, parts["vision"].width, parts["vision"].dtype)
    if rank == 1 and where == "language":
        language = fail
    items = ItemExchange.create(ProcessGroupExchange(), channels_of(list(CHANNELS)), capacity_bytes=256)
    try:
        run_minibatch(minibatch, parts, language, mover=OnDemand(items, rank))
        wait_until(lambda: (folder / "failed").exists(), "rank 1 has not failed")
        items.begin("samples", [[], []])  # who needed nothing hears of it at its next operation
        found = "through"
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    (folder / ("told" if rank == 0 else "failed")).touch()
    wait_until(lambda: (folder / "told").exists(), "rank 0 is not told while rank 1 is alive")
    return found


@pytest.mark.parametrize("where", ["encoder", "language"])
def test_who_cannot_go_on_tells_the_others(where: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, fail_alone, where, env={"ODC_TEST_FOLDER": str(tmp_path)})
    assert second == "RuntimeError: out of memory"
    assert first.startswith("AbortedError: "), first
    assert "RuntimeError: out of memory" in first


def encode_to_one_number(rank: int, world_size: int) -> list[list[int]]:
    """Shapes of what the language model gets of encoders whose rows have one element."""
    found = []
    with ItemExchange.create(ProcessGroupExchange(), channels_of(list(CHANNELS)), capacity_bytes=256) as items:
        for mover in (InStep(), OnDemand(items, rank)):
            minibatch, _ = minibatch_of(rank, world_size, 3, {"policy": "lb-mini", "comm": "odc"})
            weights = {name: torch.ones(n, 1, dtype=torch.float64, requires_grad=True) for name, n in CHANNELS.items()}
            parts = {
                name: Encoder(
                    lambda given, name=name, weights=weights: [  # type: ignore[misc]
                        (item @ weights[name])[: rows_of(name, len(item))] for (item,) in given
                    ],
                    width=1,
                    dtype=torch.float64,
                )
                for name in CHANNELS
            }
            shapes = []

            def loss(_: Any, outputs: Any, shapes: Any = shapes) -> torch.Tensor:
                rows = [row for name in CHANNELS for row in outputs[name]]
                shapes += [tuple(row.shape) for row in rows]
                return torch.stack(
                    [torch.zeros((), dtype=torch.float64, requires_grad=True), *map(torch.sum, rows)]
                ).sum()

            run_minibatch(minibatch, parts, loss, mover=mover)
            found.append(shapes)
            dist.barrier()
    return found


def test_rows_of_one_element_are_rows() -> None:
    for in_step, on_demand in run_ranks(2, encode_to_one_number):
        assert in_step == on_demand
        assert all(len(shape) == 2 and shape[1] == 1 for shape in in_step)
    assert in_step


def use_another_group(rank: int, world_size: int) -> list[str]:
    """Two ranks share a minibatch, and there are four."""
    dist.barrier()
    minibatch, _ = minibatch_of(rank % 2, 2, 3, {"policy": "lb-mini", "comm": "odc"})
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found = []
    for mover in (InStep(), InStep(groups[rank // 2])):
        try:
            run_minibatch(minibatch, encoders(Toy()), Toy().loss, mover=mover)
            found.append("through")
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_group_of_other_ranks_is_refused_on_each() -> None:
    results = run_ranks(4, use_another_group)
    for rank, (refusal, own) in enumerate(results):
        ranks = f"a minibatch of rank {rank % 2} and a mover of rank {rank}"
        assert refusal.startswith("a minibatch of 2 ranks, and a process group of 4" if rank < 2 else ranks)
        assert own == "through"


def run_alone(parts: dict[str, Any], model: Toy, **options: Any) -> list[torch.Tensor]:
    """One rank, no process group."""
    plan = orchestrator(1, **options)
    samples = [split(make_sample(number, 0)) for number in range(40)]
    lengths = MinibatchLengths.of_samples([[sample.lengths for sample in samples]], plan.modalities)
    return run_minibatch(MultimodalMinibatch(plan.plan(lengths), 0, samples), parts, model.loss)


def test_encoders_that_are_not_trained_build_no_graph() -> None:
    model, seen = Toy(), set[tuple[str, bool]]()

    def watched(name: str, encoder: Any) -> Any:
        def encode(items: Any) -> list[torch.Tensor]:
            seen.add((name, torch.is_grad_enabled()))
            return encoder.encode(items)

        return type(encoder)(encode, encoder.width, encoder.dtype)

    parts = {name: watched(name, encoder) for name, encoder in encoders(model).items()}
    run_alone(parts, model, frozen=["audio"])
    assert seen == {("vision", True), ("audio", False)}
    assert torch.is_grad_enabled()


def test_the_first_problem_of_several_microbatches_counts() -> None:
    model, calls = Toy(), []
    parts = encoders(model)
    vision = parts["vision"]

    def encode(items: Any) -> list[torch.Tensor]:
        calls.append(len(items))
        outputs = vision.encode(items)
        return outputs[1:] if len(calls) == 1 else outputs

    parts["vision"] = type(vision)(encode, vision.width, vision.dtype)
    with pytest.raises(ValueError, match=r"phase 'vision': the encoder of rank 0 returned \d+ outputs for \d+ items"):
        run_alone(parts, model)
    assert len(calls) > 1
