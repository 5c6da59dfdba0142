"""Layer 3: ranks as processes. Scripts that change parameters between steps, plain and with ``odc.patch_fsdp(model)``.

No script says that it does. On two ranks all numbers are bit-equal; on four, which pose as two hosts, gradients are
sums in another order. What torch has not counted as written is noticed on a GPU by a comparison that the host waits
for: here on ranks that compare as there.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import pytest
import torch
from fsdp_scripts import changing
from fsdp_scripts.run import Run, differences
from process_ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from training import BOTH, TOLERANCE

from odc.fsdp_patch import guard

OF_HOSTS = (
    "sharded teacher, in place",
    "averages swapped in, data of the shard",
    "schedule-free optimizer",
    "clamped on one rank",
    "outer steps",
    "stepped by hand",
)


def find_differences(
    rank: int, world_size: int, names: Sequence[str], sharding: str
) -> dict[str, dict[str, float | str]]:
    """Per script and way: the largest difference between plain and patched, or how it failed."""
    if world_size == 4:
        os.environ["ODC_HOST_ID"] = f"host-{rank // 2}"
    if sharding == "hybrid":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world_size,))
    make_run = functools.partial(Run, rank, world_size, mesh=mesh)
    ways = BOTH if world_size == 2 else BOTH[:1]
    return {name: differences(changing.CASES[name], make_run, ways) for name in names}


def find_differences_as_on_a_device(rank: int, world_size: int) -> dict[str, dict[str, float | str]]:
    def read_at_once(flag: torch.Tensor) -> guard.Verdict:
        is_set = bool(flag)
        return lambda: is_set

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "comparison_for", lambda device: guard.DeviceComparison(read_at_once))
        make_run = functools.partial(Run, rank, world_size, mesh=init_device_mesh("cpu", (world_size,)))
        return {name: differences(case, make_run, BOTH[:1]) for name, case in changing.CASES.items()}


@functools.cache
def found_as_on_a_device() -> list[dict[str, dict[str, float | str]]]:
    return run_ranks(2, find_differences_as_on_a_device, timeout_s=300)


@functools.cache
def found(world_size: int, names: tuple[str, ...], sharding: str = "full") -> list[dict[str, dict[str, float | str]]]:
    return run_ranks(world_size, find_differences, names, sharding, timeout_s=300)


@pytest.mark.parametrize("name", changing.CASES)
def test_what_is_changed_between_steps_is_what_all_ranks_compute_with(name: str) -> None:
    for of_rank in found(2, tuple(changing.CASES)):
        assert of_rank[name] == dict.fromkeys(BOTH, 0.0), of_rank[name]


@pytest.mark.parametrize("name", changing.CASES)
def test_the_same_where_elements_are_compared_by_a_device(name: str) -> None:
    for of_rank in found_as_on_a_device():
        assert of_rank[name] == dict.fromkeys(BOTH[:1], 0.0), of_rank[name]


@pytest.mark.parametrize("name", OF_HOSTS)
@pytest.mark.parametrize("sharding", [pytest.param("full", marks=pytest.mark.extended), "hybrid"])
def test_the_same_over_two_hosts(name: str, sharding: str) -> None:
    for of_rank in found(4, OF_HOSTS, sharding):
        (worst,) = of_rank[name].values()
        assert not isinstance(worst, str), worst
        assert worst <= TOLERANCE
