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
from process_ranks import across, run_ranks, start_ranks, wait_until
from training import Net, build, evaluated, shard, train, wrap

import odc
from odc.limits import STAY_S

NOTICE_S = 10.0  # at once, on a machine that may be busy; far below the limit on silence
STEPS = 3


def trained(rank: int, world_size: int, steps: int = STEPS) -> tuple[Net, odc.Session]:
    model = shard(build(num_blocks=1), world_size)
    session = odc.patch_fsdp(model)
    train(model, session, rank, world_size, [1] * world_size, steps)
    return model, session


def closing_early(rank: int, world_size: int, folder: str, is_fsdp1: bool, ends: bool) -> list[float] | None:
    """Rank 0 evaluates once and is through, with its process if it ``ends``; rank 1 goes on evaluating."""
    model = wrap(build(num_blocks=1)) if is_fsdp1 else shard(build(num_blocks=1), world_size)
    session = odc.patch_fsdp(model)
    train(model, session, rank, world_size, [2] * world_size, STEPS)
    losses = [float(evaluated(model))]
    if rank == 0:
        session.close()
        (Path(folder) / "closed").touch()
        if not ends:
            wait_until((Path(folder) / "done").exists, "rank 1 did not end")
        return losses
    wait_until((Path(folder) / "closed").exists, "rank 0 did not close")
    if ends:
        time.sleep(2.0)  # rank 0 is at the end of its process now
    losses += [float(evaluated(model)) for _ in range(3)]
    session.close()
    (Path(folder) / "done").touch()
    return losses


@pytest.mark.parametrize(
    ("is_fsdp1", "ends"),
    [
        pytest.param(False, True, id="fsdp2-ends"),
        pytest.param(False, False, id="fsdp2-closes"),
        pytest.param(True, False, id="fsdp1-closes", marks=pytest.mark.extended),
        pytest.param(True, True, id="fsdp1-ends", marks=pytest.mark.extended),
    ],
)
def test_a_rank_that_evaluates_longer_reads_from_one_that_has_closed(
    tmp_path: Path, is_fsdp1: bool, ends: bool
) -> None:
    first, second = run_ranks(2, across, 2, closing_early, str(tmp_path), is_fsdp1, ends, timeout_s=120)
    assert first == second[:1]
    assert second == second[:1] * 4


def closing_and_counting(rank: int, world_size: int, folder: str) -> list[str]:
    """Rank 1 closes when close() has returned at rank 0."""
    _model, session = trained(rank, world_size)
    assert threads()
    if rank == 1:
        wait_until((Path(folder) / "closed").exists, "close() waits for the other rank to close")
    session.close()
    (Path(folder) / "closed").touch()
    behind = threads()
    torch.distributed.barrier()  # after which both have closed
    wait_until(lambda: not threads(), f"left: {threads()}")
    return behind


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("odc")]


def test_closing_ends_in_the_background_when_all_have_closed(tmp_path: Path) -> None:
    behind, _ = run_ranks(2, across, 2, closing_and_counting, str(tmp_path), timeout_s=120)
    assert "odc-close" in behind


def leaving_behind(rank: int, world_size: int, what: str) -> float:
    """Rank 1 stops, or goes on without reading anything; rank 0 closes and its process ends."""
    _model, session = trained(rank, world_size)
    torch.distributed.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP) if what == "stopped" else time.sleep(600.0)
    started = time.monotonic()
    session.close()
    return time.monotonic() - started


@pytest.mark.parametrize("what", ["stopped", pytest.param("busy", marks=pytest.mark.extended)])
def test_the_end_of_a_process_waits_for_nobody_who_reads_nothing(what: str) -> None:
    group = start_ranks(2, across, 2, leaving_behind, what)
    group.processes[0].join(90)
    assert group.processes[0].exitcode == 0, "it has not ended"
    results = group.join(120, expendable=[1])
    assert results[0].value < NOTICE_S


def absent_for_long(rank: int, world_size: int, folder: str) -> float | None:
    """The whole job is paused while rank 0 stays only for rank 1, which goes on evaluating."""
    model, session = trained(rank, world_size)
    if rank == 0:
        session.close()
        (Path(folder) / "closed").write_text(str(os.getpid()))
        return None
    wait_until((Path(folder) / "closed").exists, "rank 0 did not close")
    time.sleep(3.0)  # rank 0 is at the end of its process now
    other = int((Path(folder) / "closed").read_text())
    float(evaluated(model))
    os.kill(other, signal.SIGSTOP)
    time.sleep(STAY_S + 3.0)
    os.kill(other, signal.SIGCONT)
    time.sleep(0.5)
    loss = float(evaluated(model))
    session.close()
    return loss


@pytest.mark.extended
def test_a_pause_of_the_whole_job_is_no_silence_of_a_reader(tmp_path: Path) -> None:
    assert run_ranks(2, across, 2, absent_for_long, str(tmp_path), timeout_s=120)[1] > 0


def interrupted_while_closing(rank: int, world_size: int, folder: str) -> tuple[bool, float]:
    """Ctrl-C in the moment for which rank 0 waits in close()."""
    model, session = trained(rank, world_size)
    torch.distributed.barrier()
    was_interrupted, loss = False, 0.0
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            session.close()
        except KeyboardInterrupt:
            was_interrupted = True
        (Path(folder) / "closed").touch()
    else:
        wait_until((Path(folder) / "closed").exists, "rank 0 did not close")
        loss = float(evaluated(model))
        session.close()
    torch.distributed.barrier()
    wait_until(lambda: not threads(), f"left: {threads()}")
    return was_interrupted, loss


def test_ctrl_c_while_closing_leaves_nothing_and_pulls_nothing_away(tmp_path: Path) -> None:
    (was_interrupted, _), (_, loss) = run_ranks(2, across, 2, interrupted_while_closing, str(tmp_path), timeout_s=120)
    assert was_interrupted
    assert loss > 0


def ending_after_close(rank: int, world_size: int) -> None:
    """Ranks 1 and 2 close; rank 2 is killed, and rank 1 is in the same collective as rank 0."""
    _model, session = trained(rank, world_size)
    torch.distributed.barrier()
    if rank:
        session.close()
    torch.distributed.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.all_reduce(torch.ones(1))


def test_of_ranks_that_have_closed_those_that_have_ended_are_named() -> None:
    """Rank 1 ends by the same error, with no session that could tell it why; perhaps before rank 0 looks."""
    result = start_ranks(3, ending_after_close).join(120)[0]
    assert result.error_type == "PeerClosedError", result.error
    assert re.search(r"rank 2 is gone: it closed its session|; so are ranks \[2\]", result.error or ""), result.error
