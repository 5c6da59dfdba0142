"""Layer 3: ranks as processes. Scripts that read, skip and throw away gradients, under FSDP1."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from fsdp_scripts import by_unit, changing, kept, loops, reading
from fsdp_scripts.pairs import PAIRS
from fsdp_scripts.run import Run, difference
from process_ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from training import Net, wrap

READING = {**reading.CASES, **reading.FSDP1_CASES}
CASES = {**loops.CASES, **READING, **kept.CASES, **by_unit.CASES, **changing.FSDP1_CASES, **PAIRS}
FURTHER = (
    *("gradients scaled in a compiled function", "compiled step", *PAIRS, *kept.CASES),
    *("clipping in two parts", "step by hand, cleared in place", "step by hand through data", "norm after the step"),
    *("optimizer state asked for early", "nested optimizers", "step by unit, steps as usual between"),
    *("another divide factor, without sync", "averages swapped in, data", "clamped", "a bias summoned"),
    *(name for name in READING if name.startswith("skipped")),
)
"""With ``-m extended``: every run has pairs in generated scripts (test_bench_parity.py). What is kept, skipped or
stepped by hand is the same state under both: test_gradient_state.py has every loop, and test_fsdp2_scripts.py these,
and a compiled step."""


class Fsdp1Run(Run):
    """A run with FSDP1's wrapper."""

    def shard(self, model: Net, **options: Any) -> Any:
        strategy = (
            ShardingStrategy.FULL_SHARD
            if options.pop("reshard_after_forward", True)
            else ShardingStrategy.SHARD_GRAD_OP
        )
        return wrap(model, use_orig_params=True, sharding_strategy=strategy, **options)


def differences(rank: int, world_size: int, names: Sequence[str]) -> dict[str, float | str]:
    """Per script: the largest difference between plain and patched, or how it failed."""
    mesh = init_device_mesh("cpu", (world_size,))
    return {
        name: difference(CASES[name], lambda patched: Fsdp1Run(rank, world_size, patched, mesh, 1)) for name in names
    }


@functools.cache
def found(further: bool) -> list[dict[str, float | str]]:
    return run_ranks(2, differences, [name for name in CASES if (name in FURTHER) == further], timeout_s=300)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.extended) if name in FURTHER else name for name in CASES]
)
def test_scripts_keep_their_numbers(name: str) -> None:
    for of_rank in found(name in FURTHER):
        worst = of_rank[name]
        assert not isinstance(worst, str), worst
        assert worst <= CASES[name].tolerance
