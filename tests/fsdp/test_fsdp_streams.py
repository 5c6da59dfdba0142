"""Layer 3: ranks as processes. FSDP over ``cuda_ipc`` and ``nvshmem``, on the fakes of ``bench/fake``.

The model computes on the CPU, so the streams do their work within the call (what lags is tested in
``test_stream_order.py``). What runs for real: the transport's memory by handles between processes, the daemon and the
atomics, the session, FSDP1 and FSDP2. What does not: a device. ``odc bench gpu`` trains on one.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from fake_nvshmem import registered_fakes
from process_ranks import run_ranks
from training import build, full_parameters, largest_difference, reference, sharded_by, train

import odc

TOLERANCE = 1e-5  # as in test_fsdp2_parity.py
COUNTS = [1, 3, 0]  # microbatches of each rank; two ranks run the first two
STEPS = 3


def patched(
    rank: int, world_size: int, kind: str, options: dict[str, Any]
) -> tuple[dict[str, Any], str, dict[str, int]]:
    with registered_fakes():
        model = sharded_by(kind, build(), world_size)
        session = odc.patch_fsdp(model, **{"transport": "fake_cuda", **options})
        memory = session._runtime.memory()
        train(model, None, rank, world_size, COUNTS[:world_size], STEPS)
        assert session.stats().minibatches == STEPS
        name = session.transport
        transport = session._runtime._transport
        session.close()
        assert transport.leaked == []
    return full_parameters(model), name, memory


OPTIONS: dict[str, dict[str, Any]] = {
    "atomics": {},
    "daemon": {"accumulate": "daemon"},
    "deterministic": {"deterministic": True},
    "deterministic-daemon": {"deterministic": True, "accumulate": "daemon"},
}


def patched_each_way(
    rank: int, world_size: int, kind: str, options: dict[str, dict[str, Any]]
) -> dict[str, tuple[dict[str, Any], str, dict[str, int]]]:
    return {name: patched(rank, world_size, kind, chosen) for name, chosen in options.items()}


@pytest.fixture(scope="module", params=["fsdp2", "fsdp1-orig", pytest.param("fsdp1-flat", marks=pytest.mark.extended)])
def trained(request: pytest.FixtureRequest) -> dict[str, tuple[dict[str, Any], str, dict[str, int]]]:
    """What rank 0 of two has with each option."""
    return run_ranks(2, patched_each_way, request.param, OPTIONS)[0]


@pytest.mark.parametrize("option", OPTIONS)
def test_training_matches_one_float64_process(option: str, trained: dict[str, Any]) -> None:
    ours, name, memory = trained[option]
    assert name == "fake_cuda"
    assert largest_difference(ours, reference(COUNTS, STEPS)) < TOLERANCE
    by_daemon = OPTIONS[option].get("accumulate") == "daemon"
    assert (memory["slots"] > 0) == by_daemon


def across(rank: int, world_size: int, kind: str) -> dict[str, tuple[dict[str, Any], str, dict[str, int]]]:
    """Ranks 0 and 1 on one host, rank 2 on another."""
    os.environ["ODC_HOST_ID"] = f"host{rank // 2}"
    options = {name: {"transport": "fake_nvshmem", **OPTIONS[name]} for name in ("daemon", "deterministic")}
    return patched_each_way(rank, world_size, kind, options)


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1-flat"])
def test_training_across_hosts_matches_one_float64_process(kind: str) -> None:
    expected = reference(COUNTS, STEPS)
    for of_rank in run_ranks(3, across, kind):
        for ours, name, memory in of_rank.values():
            assert name == "fake_nvshmem"
            assert largest_difference(ours, expected) < TOLERANCE
            assert memory["slots"] > 0
