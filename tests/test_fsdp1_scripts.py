"""Layer 3: ranks as processes. Scripts that read, skip and throw away gradients, under FSDP1."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from fsdp_scripts import reading
from fsdp_scripts.run import Run, difference
from process_ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from training import Net, wrap


class Fsdp1Run(Run):
    """A run with FSDP1's wrapper."""

    def shard(self, model: Net, **options: Any) -> Any:
        return wrap(model, use_orig_params=True, **options)


def differences(rank: int, world_size: int) -> dict[str, float | str]:
    """Per script: the largest difference between plain and patched, or how it failed."""
    mesh = init_device_mesh("cpu", (world_size,))
    return {
        name: difference(case, lambda patched: Fsdp1Run(rank, world_size, patched, mesh))
        for name, case in reading.CASES.items()
    }


@functools.cache
def found() -> list[dict[str, float | str]]:
    return run_ranks(2, differences, timeout_s=300)


@pytest.mark.parametrize("name", reading.CASES)
def test_scripts_keep_their_numbers(name: str) -> None:
    for of_rank in found():
        worst = of_rank[name]
        assert not isinstance(worst, str), worst
        assert worst <= reading.CASES[name].tolerance
