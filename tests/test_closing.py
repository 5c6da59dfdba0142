"""Layer 3. Ranks close when their scripts come to it: what the others may still do, and who waits for whom.

Ranks here pose as hosts, where reading a rank's parameters needs its process; on one host it never did.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from process_ranks import run_ranks, start_ranks, wait_until
from test_faults import TRAIN_JOB, output_of, start_job
from test_links import across
from training import build, loss_of, shard, tokens, train, wrap

import odc

NOTICE_S = 10.0  # at once, on a machine that may be busy; far below the limit on silence
STEPS = 3


def evaluate(model: torch.nn.Module) -> float:
    with torch.no_grad():
        return float(loss_of(model, tokens(99, 0, 0)))


def closing_early(rank: int, world_size: int, folder: str, is_fsdp1: bool, ends: bool) -> list[float] | None:
    """Rank 0 evaluates once and is through, with its process if it ``ends``; rank 1 goes on evaluating."""
    model = wrap(build()) if is_fsdp1 else shard(build(), world_size)
    session = odc.patch_fsdp(model)
    train(model, session, rank, world_size, [2] * world_size, STEPS)
    losses = [evaluate(model)]
    if rank == 0:
        session.close()
        (Path(folder) / "closed").touch()
        if not ends:
            wait_until((Path(folder) / "done").exists, "rank 1 did not end")
        return losses
    wait_until((Path(folder) / "closed").exists, "rank 0 did not close")
    if ends:
        time.sleep(3.0)  # rank 0 is at the end of its process now
    losses += [evaluate(model) for _ in range(3)]
    session.close()
    (Path(folder) / "done").touch()
    return losses


@pytest.mark.parametrize("ends", [False, True], ids=["closes", "ends"])
@pytest.mark.parametrize("is_fsdp1", [False, True], ids=["fsdp2", "fsdp1"])
def test_a_rank_that_evaluates_longer_reads_from_one_that_has_closed(
    tmp_path: Path, is_fsdp1: bool, ends: bool
) -> None:
    first, second = run_ranks(2, across, 2, closing_early, str(tmp_path), is_fsdp1, ends, timeout_s=120)
    assert first == second[:1]
    assert second == second[:1] * 4


def closing_and_counting(rank: int, world_size: int) -> float:
    """Rank 1 closes a good while after rank 0."""
    session = odc.patch_fsdp(model := shard(build(), world_size))
    train(model, session, rank, world_size, [1] * world_size, STEPS)
    torch.distributed.barrier()
    if rank == 1:
        time.sleep(6.0)
    before = threads()
    started = time.monotonic()
    session.close()
    took_s = time.monotonic() - started
    torch.distributed.barrier()  # after which both have closed
    wait_until(lambda: not threads(), f"left: {threads()}")
    assert before
    return took_s


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("odc")]


def test_closing_ends_in_the_background_when_all_have_closed() -> None:
    took_s = run_ranks(2, across, 2, closing_and_counting, timeout_s=120)
    assert took_s[0] < 6.0
    assert took_s[1] < 2.0


def leaving_behind(rank: int, world_size: int, what: str) -> float:
    """Rank 1 stops, or goes on without a sign of progress; rank 0 closes and its process ends."""
    session = odc.patch_fsdp(model := shard(build(), world_size))
    train(model, session, rank, world_size, [1] * world_size, STEPS)
    torch.distributed.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP) if what == "stopped" else time.sleep(600.0)
    time.sleep(2.0)  # rank 1 must have been heard of since
    started = time.monotonic()
    session.close()
    return time.monotonic() - started


@pytest.mark.parametrize(("what", "timeout_s"), [("stopped", "600"), ("silent", "5")])
def test_nobody_stays_for_a_rank_that_gives_no_sign_of_life(what: str, timeout_s: str) -> None:
    group = start_ranks(2, across, 2, leaving_behind, what, env={"ODC_TIMEOUT": timeout_s})
    started = time.monotonic()
    group.processes[0].join(90)
    assert group.processes[0].exitcode == 0, "it has not ended"
    assert time.monotonic() - started < 90
    results = group.join(90, expendable=[1])
    assert results[0].value < NOTICE_S


def test_steps_that_need_a_rank_that_has_closed_name_it() -> None:
    """It lends its parameters; it takes part in nothing any more."""
    results = start_ranks(2, across, 2, leaving_early).join(120)
    assert results[0].error is None, results[0].error
    assert results[1].error_type == "PeerClosedError", results[1].error
    assert "it closed its session" in (results[1].error or "")
    assert results[1].seconds < 60


def leaving_early(rank: int, world_size: int) -> None:
    session = odc.patch_fsdp(model := shard(build(), world_size))
    train(model, session, rank, world_size, [1] * world_size, STEPS + rank)
    session.close()


def test_a_script_that_is_over_keeps_nobody_waiting_in_a_collective(tmp_path: Path) -> None:
    """Its process may stay for readers; a collective it will not come to any more ends at once, and says why."""
    on_hosts = "import os, sys, torch.distributed as dist; os.environ['ODC_HOST_ID'] = 'host' + os.environ['RANK']\n"
    at_step_3 = "sys.exit(0) if rank == 1 else dist.all_reduce(torch.ones(1))"
    job = start_job(tmp_path, on_hosts + TRAIN_JOB.format(at_step_3=at_step_3))
    started = time.monotonic()
    text = output_of(job)
    assert job.returncode != 0
    assert re.search(
        r"PeerClosedError: rank 0 waited .* a collective of the script.*rank 1 is gone: it closed", text
    ), text
    assert time.monotonic() - started < 60
