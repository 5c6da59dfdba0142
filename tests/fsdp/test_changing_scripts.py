"""Layer 3: ranks as processes. Scripts that change parameters between steps, plain and with ``odc.patch_fsdp(model)``.

No script says that it does. On two ranks all numbers are bit-equal.
"""

from __future__ import annotations

import functools

import pytest
from fsdp_scripts import changing
from fsdp_scripts.run import Run, differences
from process_ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from training import BOTH


def find_differences(rank: int, world_size: int, names: list[str]) -> dict[str, dict[str, float | str]]:
    """Per script and way: the largest difference between plain and patched, or how it failed."""
    make_run = functools.partial(Run, rank, world_size, mesh=init_device_mesh("cpu", (world_size,)))
    return {name: differences(changing.CASES[name], make_run, BOTH) for name in names}


@functools.cache
def found() -> list[dict[str, dict[str, float | str]]]:
    return run_ranks(2, find_differences, list(changing.CASES), timeout_s=300)


@pytest.mark.parametrize("name", changing.CASES)
def test_what_is_changed_between_steps_is_what_all_ranks_compute_with(name: str) -> None:
    for of_rank in found():
        assert of_rank[name] == dict.fromkeys(BOTH, 0.0), of_rank[name]
