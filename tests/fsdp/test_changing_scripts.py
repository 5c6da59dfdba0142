"""Layer 3: ranks as processes. Scripts that change parameters between steps, plain and with ``odc.patch_fsdp(model)``.

No script says that it does. On two ranks all numbers are bit-equal; on four, which pose as two hosts, gradients are
sums in another order. What torch has not counted as written is noticed on a GPU by a comparison that the host waits
for: here on ranks that compare as there, in every run with some of the scripts that such a change is noticed in. With
``-m extended`` all run staged, too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import pytest
from fsdp_scripts import changing
from fsdp_scripts.run import Run, differences
from process_ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from training import BOTH, TOLERANCE, read_at_once

from odc.fsdp_patch import guard

ALL = tuple(changing.CASES)
ON_DEVICE = ("sharded teacher, data", "averages swapped in, data of the shard", "clamped to no effect")
SELDOM = (
    *("sharded teacher, data", "reference that follows seldom", "averages swapped in, data", "pruned by foreach"),
    *("stochastic weight averaging", "lookahead by hand"),
)
"""With ``-m extended``, here: every run has their like."""
OFTEN = tuple(name for name in ALL if name not in SELDOM)


def some(every_run: Sequence[str]) -> list[Any]:
    """These in every run, the rest with ``-m extended``."""
    return [*every_run, *(pytest.param(name, marks=pytest.mark.extended) for name in ALL if name not in every_run)]


OF_HOSTS = (
    *("sharded teacher, in place", "averages swapped in, data of the shard", "clamped on one rank", "stepped by hand"),
    *("schedule-free optimizer", "outer steps"),
)


def find_differences(
    rank: int, world_size: int, names: Sequence[str], sharding: str, ways: Sequence[str], on_device: bool
) -> dict[str, dict[str, float | str]]:
    """Per script and way: the largest difference between plain and patched, or how it failed."""
    if world_size == 4:
        os.environ["ODC_HOST_ID"] = f"host-{rank // 2}"
    if sharding == "hybrid":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world_size,))
    make_run = functools.partial(Run, rank, world_size, mesh=mesh)
    with pytest.MonkeyPatch.context() as patch:
        if on_device:
            patch.setattr(guard, "comparison_for", lambda device: guard.DeviceComparison(read_at_once))
        return {name: differences(changing.CASES[name], make_run, ways) for name in names}


@functools.cache
def found(
    world_size: int,
    names: tuple[str, ...],
    sharding: str = "full",
    ways: Sequence[str] = BOTH[:1],
    on_device: bool = False,
) -> list[dict[str, dict[str, float | str]]]:
    return run_ranks(world_size, find_differences, names, sharding, ways, on_device, timeout_s=300)


def check(name: str, names: tuple[str, ...], ways: Sequence[str], on_device: bool = False) -> None:
    for of_rank in found(2, names, ways=ways, on_device=on_device):
        assert of_rank[name] == dict.fromkeys(ways, 0.0), of_rank[name]


@pytest.mark.parametrize("name", some(OFTEN))
def test_what_is_changed_between_steps_is_what_all_ranks_compute_with(name: str) -> None:
    check(name, OFTEN if name in OFTEN else SELDOM, BOTH[:1])


@pytest.mark.extended
@pytest.mark.parametrize("name", ALL)
def test_the_same_in_the_other_way(name: str) -> None:
    check(name, ALL, BOTH[1:])


@pytest.mark.parametrize("name", some(ON_DEVICE))
def test_the_same_where_elements_are_compared_by_a_device(name: str) -> None:
    check(name, ON_DEVICE if name in ON_DEVICE else ALL, BOTH[:1], on_device=True)


@pytest.mark.extended
@pytest.mark.parametrize("name", OF_HOSTS)
@pytest.mark.parametrize("sharding", ["full", "hybrid"])
def test_the_same_over_two_hosts(name: str, sharding: str) -> None:
    for of_rank in found(4, OF_HOSTS, sharding):
        (worst,) = of_rank[name].values()
        assert not isinstance(worst, str), worst
        assert worst <= TOLERANCE
