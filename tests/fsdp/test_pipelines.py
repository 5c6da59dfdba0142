"""Layer 3: ranks as processes. Pipeline schedules of torch with FSDP2 in each stage; they scale ``.grad`` by hand."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as schedules_of_torch
from training import DEVICE, Block, largest_difference, use_up

import odc
from odc.fsdp_patch.compat import torch_version

pytestmark = pytest.mark.skipif(
    torch_version() < (2, 12), reason="torch's pipelines over FSDP2 crash in gloo before 2.12, without ODC too"
)
WIDTH, STEPS, ROWS = 13, 2, 4
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
SEVERAL = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")
NAMES = (*SINGLE, *SEVERAL)
PRODUCT = list(itertools.product(NAMES, (True, False), (2, 4)))
PAIRS = [case for i, case in enumerate(PRODUCT) if i % 16 in (0, 7, 9, 14)]
"""Those that every run covers: each schedule once, and each number with both."""
REST = [case for case in PRODUCT if case not in PAIRS]


def blocks(num_stages: int, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(Block(WIDTH), nn.Linear(WIDTH, WIDTH)).to(dtype) for _ in range(num_stages)]


def rows(step: int, replica: int, number: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 1009 + replica * 101 + seed)
    return torch.randn(number * ROWS, WIDTH, generator=generator)


def loss_of_rows(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum() * 0.01


def stages_here(name: str, rank: int) -> list[int]:
    if name in SINGLE:
        return [rank]
    return [rank, 3 - rank] if "ZBV" in name else [rank, rank + 2]


@functools.cache
def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))


def train(rank: int, name: str, scale_grads: bool, num_microbatches: int, patched: bool, uneven: bool = False) -> Any:
    """Two pipelines of two ranks; the ranks of a stage share its parameters. ``uneven``: the second pipeline runs its
    schedule twice a step, the first once. What the ranks are left with, and their norms."""
    mesh = make_mesh()
    replica, place = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
    numbers = stages_here(name, place)
    num_stages = 2 * len(numbers)
    modules = {number: blocks(num_stages)[number] for number in numbers}
    for module in modules.values():
        for block in module.children():
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(module, mesh=mesh["dp"])
    sessions = [odc.patch_fsdp(module) for module in modules.values()] if patched else []
    stages = [
        PipelineStage(modules[number], number, num_stages, DEVICE, group=mesh["pp"].get_group()) for number in numbers
    ]
    kind = getattr(schedules_of_torch, name)
    schedule = kind(
        stages[0] if name in SINGLE else stages, num_microbatches, loss_fn=loss_of_rows, scale_grads=scale_grads
    )
    parameters = [p for module in modules.values() for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    norms = []
    is_first, is_last = 0 in numbers, num_stages - 1 in numbers
    for step in range(STEPS):
        for turn in range(2 if uneven and replica else 1):
            inputs, target = (rows(step, replica, num_microbatches, 7 * turn + seed) for seed in (0, 1))
            schedule.step(*([inputs] if is_first else []), **({"target": target} if is_last else {}))
        norms.append(nn.utils.clip_grad_norm_(parameters, 0.3).full_tensor())  # type: ignore[attr-defined]
        use_up(optimizer)
    found = {f"norm {i}": norm for i, norm in enumerate(norms)}
    for number, module in modules.items():
        found |= {f"{number}.{n}": p.full_tensor().detach() for n, p in module.named_parameters()}  # type: ignore[attr-defined]
    for session in sessions:
        session.close()
    return found


def differences(rank: int, world_size: int, cases: list[tuple[str, bool, int]]) -> list[float]:
    found = []
    for case in cases:
        plain, ours = (train(rank, *case, patched) for patched in (False, True))
        found.append(largest_difference(ours, plain))
        dist.barrier()
    return found


@functools.cache
def found(is_rest: bool) -> list[list[float]]:
    return run_ranks(4, differences, REST if is_rest else PAIRS, timeout_s=300)


@pytest.mark.parametrize(
    "case",
    [*PAIRS, *(pytest.param(case, marks=pytest.mark.extended) for case in REST)],
    ids=lambda case: f"{case[0]}-{'scaled' if case[1] else 'sums'}-{case[2]}",
)
def test_schedules_keep_their_numbers(case: tuple[str, bool, int]) -> None:
    cases = REST if case in REST else PAIRS
    assert max(of_rank[cases.index(case)] for of_rank in found(case in REST)) < 1e-5


# Replicas that run a schedule different numbers of times in a step


def reference(name: str, num_microbatches: int) -> Any:
    """All of it in one process, in float64."""
    model = nn.Sequential(*blocks(2 if name in SINGLE else 4, torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = {}
    for step in range(STEPS):
        for replica, turn in ((0, 0), (1, 0), (1, 1)):
            inputs, target = (rows(step, replica, num_microbatches, 7 * turn + seed).double() for seed in (0, 1))
            (loss_of_rows(model(inputs), target) / 2).backward()
        for place in (0, 1):  # each pipeline rank clips what it has
            parameters = [p for number in stages_here(name, place) for p in model[number].parameters()]
            found[f"{place} norm {step}"] = nn.utils.clip_grad_norm_(parameters, 0.3)
        use_up(optimizer)
    return found | {f"{name}": p.detach() for name, p in model.named_parameters()}


def uneven(rank: int, world_size: int) -> list[float]:
    differences = []
    for name in NAMES[:3]:  # those of zero bubble over FSDP2 are not one process in torch 2.13, without ODC either
        found = train(rank, name, False, 2, True, uneven=True)
        place, expected = rank % 2, reference(name, 2)
        norms = {key.partition(" ")[2]: norm for key, norm in expected.items() if key.startswith(f"{place} norm")}
        wanted = {**norms, **{key: expected[key] for key in found if "norm " not in key}}
        differences.append(largest_difference(found, wanted))
    return differences


@pytest.mark.extended
def test_replicas_that_run_a_schedule_more_often_than_others_are_one_process() -> None:
    assert max(max(of_rank) for of_rank in run_ranks(4, uneven)) < 1e-5
