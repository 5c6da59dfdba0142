"""Layer 3: ranks as processes that pose as several hosts. Ranks that leave without a word, and modules that differ.

The same within one host: ``test_faults.py`` and ``test_fsdp2_parity.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_ranks import TRAIN_JOB, assert_told, endless, fault, run_job
from process_ranks import across, run_ranks, start_ranks
from training import (
    TOLERANCE,
    build,
    full_parameters,
    largest_difference,
    loss_of,
    mixed_modules,
    reference,
    shard,
    tokens,
    train,
)

import odc
from odc.bench.harness.warm_launch import WarmLauncher

# Fault test 16: other modules per rank and microbatch

COUNTS = [2, 1, 3, 0]


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
    train(model, session, rank, world_size, COUNTS, microbatch_options=before_microbatch)
    name = session.transport
    session.close()
    return name, evaluations, full_parameters(model)


@pytest.mark.parametrize(
    ("hosts", "options"),
    [
        pytest.param(2, {}, id="2", marks=pytest.mark.extended),
        pytest.param(2, {"deterministic": True}, id="2-deterministic", marks=pytest.mark.extended),
        pytest.param(4, {}, id="4", marks=pytest.mark.extended),
    ],
)
def test_different_modules_across_hosts_match_one_float64_process(hosts: int, options: dict[str, Any]) -> None:
    results = run_ranks(4, across, hosts, patched_mixed, options, timeout_s=300)
    expected = reference(COUNTS, microbatch_options=mixed_modules)
    assert [evaluations for _, evaluations, _ in results] == [10, 0, 20, 20]
    for name, _, parameters in results:
        assert name == "tcp"
        assert largest_difference(parameters, expected) < TOLERANCE


# Fault test 8: a rank that leaves without a word


LEFT = {"exit": (0, "exited with status 0"), "segv": (-11, "killed by signal 11 (SIGSEGV)")}


@pytest.mark.parametrize(
    ("do", "point"),
    [
        ("exit", "gather.before"),
        ("exit", "finish.before_done"),
        ("segv", "scatter.before_post"),
        pytest.param("exit", "scatter.before_post", marks=pytest.mark.extended),
        pytest.param("segv", "gather.before", marks=pytest.mark.extended),
        pytest.param("segv", "finish.before_done", marks=pytest.mark.extended),
    ],
)
def test_a_rank_that_leaves_without_a_word_is_named_on_every_host(do: str, point: str) -> None:
    """Rank 1 leaves; rank 0 is on its host and knows how, rank 2 and 3 are not."""
    exitcode, words = LEFT[do]
    results = start_ranks(4, across, 2, endless, env=fault(point, do)).join(150)
    assert results[1].exitcode == exitcode
    for rank in (0, 2, 3):
        assert_told(results[rank], "rank 1", "minibatch ")
    first = results[0].error or ""
    assert words in first or "aborted because rank" in first, first
    for rank in (2, 3):
        assert results[rank].error_type != "PeerSilentError"


def test_sys_exit_of_a_rank_is_told_to_the_other_host(tmp_path: Path, warm_launcher: WarmLauncher) -> None:
    """The interpreter ends in good order, which is no crash; a launcher takes its status of 0 for success."""
    body = TRAIN_JOB.format(at_step_3="sys.exit(0) if rank == 1 else None")
    codes, text = run_job(warm_launcher, tmp_path, f'os.environ["ODC_HOST_ID"] = f"host{{rank}}"\n{body}')
    assert codes == [1, 0], text
    assert "PeerClosedError: rank 0" in text, text
    assert "rank 1 (host host1" in text
    assert "closed its session" in text
    assert "minibatch 5" in text
