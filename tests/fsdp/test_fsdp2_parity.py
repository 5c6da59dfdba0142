"""Layer 3: ranks as processes. A patched model trains to the numbers of plain FSDP2 and of one float64 process."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from process_ranks import across, run_ranks
from torch.distributed.fsdp import MixedPrecisionPolicy
from training import (
    TOLERANCE,
    build,
    communicating,
    full_parameters,
    gradient_now,
    largest_difference,
    loss_of,
    mixed_modules,
    reference,
    shard,
    tokens,
    train,
)

import odc

STEPS = 3


def plain(rank: int, world_size: int, counts: list[int]) -> dict[str, Any]:
    model = shard(build(), world_size)
    train(model, None, rank, world_size, counts, STEPS)
    return full_parameters(model)


def patched(
    rank: int, world_size: int, counts: list[int], options: dict[str, Any], way: str = "small", *microbatch_options: Any
) -> dict[str, Any]:
    model = shard(build(), world_size)
    with communicating(way):
        session = odc.patch_fsdp(model, **options)
    train(model, session, rank, world_size, counts, STEPS, *microbatch_options)
    assert session.stats().minibatches == STEPS
    session.close()
    return full_parameters(model)


def patched_and_plain(rank: int, world_size: int, counts: list[int]) -> list[dict[str, Any]]:
    return [patched(rank, world_size, counts, {}), plain(rank, world_size, counts)]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.extended)])
def test_equal_counts_match_plain_fsdp2(world_size: int) -> None:
    counts = [2] * world_size
    ours, theirs = run_ranks(world_size, patched_and_plain, counts)[0]
    assert largest_difference(ours, theirs) < TOLERANCE
    start = {name: value.detach().numpy() for name, value in build().named_parameters()}
    assert largest_difference(theirs, start) > 1e-2  # the steps moved the parameters


OPTIONS: dict[str, dict[str, Any]] = {
    "direct": {},
    "daemon": {"accumulate": "daemon"},
    "deterministic": {"deterministic": True},
    "daemon-deterministic": {"accumulate": "daemon", "deterministic": True},
}
RUNS = [*((name, "small") for name in OPTIONS), ("direct", "in place"), ("daemon", "in place"), ("direct", "staged")]


def patched_each_way(rank: int, world_size: int, counts: list[int]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(name, way): patched(rank, world_size, counts, OPTIONS[name], way) for name, way in RUNS}


@pytest.fixture(scope="module")
def uneven() -> tuple[list[dict[tuple[str, str], dict[str, Any]]], dict[str, torch.Tensor]]:
    """Parameters of all ranks, and those of one float64 process."""
    counts = [1, 5, 0, 3]
    return run_ranks(4, patched_each_way, counts, timeout_s=180), reference(counts, STEPS)


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_uneven_counts_match_one_float64_process(
    run: tuple[str, str], uneven: tuple[list[Any], dict[str, torch.Tensor]]
) -> None:
    """Fault test 15: microbatches 1, 5, 0, 3 on 4 ranks, four minibatches."""
    ours, expected = uneven
    for rank in range(4):
        assert largest_difference(ours[rank][run], expected) < TOLERANCE


@pytest.mark.parametrize("counts", [[4, 1], [3]])
def test_two_ranks_and_one_match_one_float64_process(counts: list[int]) -> None:
    assert largest_difference(run_ranks(len(counts), patched, counts, {})[0], reference(counts, STEPS)) < TOLERANCE


def test_different_modules_per_rank_and_microbatch_match_one_float64_process() -> None:
    counts = [2, 1, 3]
    expected = reference(counts, STEPS, mixed_modules)
    assert largest_difference(run_ranks(3, patched, counts, {}, "small", mixed_modules)[0], expected) < TOLERANCE


def patched_mixed(rank: int, world_size: int, options: dict[str, Any]) -> tuple[str, int, dict[str, Any]]:
    """Some ranks evaluate where others do not: in the minibatch, of a unit twice, and where they have no microbatch."""
    model = shard(build(), world_size)
    session = odc.patch_fsdp(model, **options)
    evaluations = 0

    def evaluate(step: int, **modules: Any) -> None:
        nonlocal evaluations
        with torch.no_grad():
            loss_of(model, tokens(1000 + step, rank, 0), **modules)
        evaluations += 1

    def before_microbatch(step: int, rank: int, microbatch: int) -> dict[str, Any]:
        if rank == 0 and microbatch == 1 and step % 2:
            evaluate(step)
        if rank == 2 and microbatch == 2:
            evaluate(step, order=[1, 1, 0])
        return mixed_modules(step, rank, microbatch)

    if rank == 3:  # at the end of its minibatches, all of them empty
        session.on_finish = lambda: evaluate(evaluations)
    train(model, session, rank, world_size, [2, 1, 3, 0], microbatch_options=before_microbatch)
    name = session.transport
    session.close()
    return name, evaluations, full_parameters(model)


@pytest.mark.extended
@pytest.mark.parametrize(("hosts", "options"), [(2, {}), (2, {"deterministic": True}), (4, {})])
def test_different_modules_across_hosts_match_one_float64_process(hosts: int, options: dict[str, Any]) -> None:
    results = run_ranks(4, across, hosts, patched_mixed, options, timeout_s=300)
    expected = reference([2, 1, 3, 0], microbatch_options=mixed_modules)
    assert [evaluations for _, evaluations, _ in results] == [10, 0, 20, 20]
    for name, _, parameters in results:
        assert name == "tcp"
        assert largest_difference(parameters, expected) < TOLERANCE


def gradients(rank: int, world_size: int, way: str, dtype: torch.dtype, factor: float | None) -> dict[str, Any]:
    """.grad of every parameter after one minibatch: Adam and clipping would hide a wrong factor."""
    model = shard(build(), world_size, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    if factor:
        for module in (model, *model.blocks):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    with communicating(way), odc.patch_fsdp(model) if way != "plain" else nullcontext() as session:
        with session.minibatch() if session else nullcontext():
            for m in range(2):
                loss_of(model, tokens(0, rank, m)).backward()
                assert session is None or all(gradient_now(p) is None for p in model.parameters()), (
                    "nothing may be seen before it is final"
                )
        return {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}


FACTORS = [None, 1.0, 3.0]
DTYPES = [torch.float32, torch.bfloat16]


def all_gradients(rank: int, world_size: int) -> dict[tuple[torch.dtype, float | None], list[dict[str, Any]]]:
    """With and without ODC."""
    ways = ("in place", "small", "staged", "plain")
    return {
        (dtype, factor): [gradients(rank, world_size, way, dtype, factor) for way in ways]
        for dtype, factor in itertools.product(DTYPES, FACTORS)
    }


@pytest.fixture(scope="module")
def of_one_minibatch() -> dict[tuple[torch.dtype, float | None], list[dict[str, Any]]]:
    return run_ranks(2, all_gradients)[0]


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_fsdp2(dtype: torch.dtype, factor: float | None, of_one_minibatch: Any) -> None:
    *ours, theirs = of_one_minibatch[dtype, factor]
    for found in ours:
        assert largest_difference(found, theirs) < 2e-6
