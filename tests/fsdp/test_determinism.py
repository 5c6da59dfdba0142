"""Layer 3: ranks as processes. ``deterministic=True``: bit-equal parameters whatever the timing.

Random delays are injected at every hook (``ODC_FAULT=point=*,do=jitter``), so that pushes arrive in another order each
time. The control shows that without the option the same delays do change bits: the test can fail.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from process_ranks import run_ranks
from training import build, shard, train

import odc

RUNS = 10
JITTER = {"ODC_FAULT": "point=*,do=jitter:0.001"}


def digests(rank: int, world_size: int, counts: Sequence[int], deterministic: bool, accumulate: str) -> list[str]:
    """Train from the same start, ten times or, without ``deterministic``, until bits have changed on any rank; a
    digest of this rank's parameters after each run."""
    found: list[str] = []
    for _ in range(RUNS):
        model = shard(build(num_blocks=1), world_size)
        with odc.patch_fsdp(model, deterministic=deterministic, accumulate=accumulate) as session:
            train(model, session, rank, world_size, counts, steps=2)
        parts = [parameter.to_local().detach().numpy().tobytes() for parameter in model.parameters()]  # type: ignore[attr-defined]
        found.append(hashlib.sha256(b"".join(parts)).hexdigest())
        if not deterministic:
            has_changed = torch.tensor(len(set(found)) > 1, dtype=torch.int32)
            dist.all_reduce(has_changed, dist.ReduceOp.MAX)
            if has_changed:
                break
    return found


@pytest.mark.parametrize(
    ("counts", "accumulate"),
    [
        pytest.param([3, 2], "direct", id="2-ranks"),
        pytest.param([1, 3, 0, 2], "direct", id="4-ranks", marks=pytest.mark.extended),
        pytest.param([1, 3, 0, 2], "daemon", id="4-ranks-daemon", marks=pytest.mark.extended),
    ],
)
def test_ten_runs_under_random_delays_are_bit_equal(counts: list[int], accumulate: str) -> None:
    """Fault test 24."""
    results = run_ranks(len(counts), digests, counts, True, accumulate, env=JITTER, timeout_s=600)
    for of_rank in results:
        assert len(of_rank) == RUNS
        assert len(set(of_rank)) == 1


def test_without_the_option_the_same_delays_change_bits() -> None:
    results = run_ranks(4, digests, [3, 3, 2, 3], False, "direct", env=JITTER, timeout_s=600)
    assert any(len(set(of_rank)) > 1 for of_rank in results)
