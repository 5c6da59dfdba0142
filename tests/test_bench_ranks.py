"""Layer 3: ranks as processes. What becomes of a benchmark's ranks when one of them fails."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from odc.bench.ranks import RankFailedError, run_ranks


def fail(report: Callable[[float], object], rank: int, world_size: int, how: str) -> int:
    report(rank + 0.5)
    if rank == world_size - 1 and how == "raise":
        raise ValueError("on purpose")
    if rank == world_size - 1 and how == "exit":
        os._exit(0)
    if how != "none":
        dist.recv(torch.zeros(1), world_size - 1)
    return rank * world_size


def test_what_ranks_return_and_report() -> None:
    reported: list[float] = []
    assert run_ranks(3, fail, "none", on_progress=reported.append) == [0, 3, 6]
    assert sorted(reported) == [0.5, 1.5, 2.5]


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_one_that_fails_ends_all(how: str) -> None:
    """The other may be the first to say so: its connection ends."""
    with pytest.raises(RankFailedError, match="rank 1: ValueError: on purpose|rank 1 ended without|rank 0: "):
        run_ranks(2, fail, how)
