"""Ranks and jobs that something happens to, and how the others are asked what they were told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from process_ranks import RankResult
from training import build, full_parameters, loss_of, shard, start, tokens, train, use_up
from watching import scheduler_state, until, wait_for_all

import odc
from odc.bench.harness import warm_launch
from odc.bench.harness.warm_launch import WarmLauncher

TIMEOUT = {"ODC_TIMEOUT": "60"}
# A death or a failure is known everywhere within this time: at once, on a machine that may be busy, and long before any
# limit on silence.
NOTICE_S = 10.0


def endless(rank: int, world_size: int, accumulate: str = "auto", died_at: Any = None) -> None:
    """Train until something happens."""
    model = shard(build(num_blocks=1), world_size)
    session = odc.patch_fsdp(model, accumulate=accumulate)
    train(model, session, rank, world_size, [2] * world_size, steps=10_000)


def stoppable(rank: int, world_size: int, steps: int, started: str, disturbed: str) -> dict[str, Any]:
    """Train; rank 1 does not come beyond the middle before it was disturbed, so that no rank ends before."""

    def wait_in_the_middle(step: int, rank: int, _: int) -> dict[str, Any]:
        if rank == 1 and step == steps // 2:
            until(Path(disturbed).exists, "nothing has disturbed the ranks")
        return {}

    model = shard(build(), world_size)
    session = odc.patch_fsdp(model, deterministic=True)
    Path(f"{started}{rank}").touch()
    train(model, session, rank, world_size, [2, 1], steps, wait_in_the_middle)
    session.close()
    return full_parameters(model)


def wait_for_training(started: Path) -> None:
    """Return when two ranks that are ``stoppable`` have trained for a moment."""
    wait_for_all(started, 2)
    time.sleep(0.3)


def fault(point: str, do: str, at: int = 9, rank: int = 1) -> dict[str, str]:
    return {**TIMEOUT, "ODC_FAULT": f"rank={rank},point={point},at={at},do={do}"}


def survivors(results: list[RankResult], dead: int = 1) -> list[RankResult]:
    return [result for rank, result in enumerate(results) if rank != dead]


def assert_told(result: RankResult, *words: str) -> None:
    assert result.error_type in ("PeerDiedError", "AbortedError", "PeerClosedError"), result.error
    assert result.error is not None
    for word in words:
        assert word in result.error, f"{word!r} not in: {result.error}"


def raising(rank: int, world_size: int) -> None:
    model, session, optimizer = start(world_size, num_blocks=1)
    for step in range(10_000):
        with session.minibatch():
            if rank == 1 and step == 3:
                raise ValueError("sample 17 has no answer")
            loss_of(model, tokens(step, rank, 0)).backward()
        use_up(optimizer)


RIGS = str(Path(__file__).parent)
JOB = """
import os, sys, time, torch
sys.path.insert(0, {tests!r})
import torch.distributed as dist
import odc
from training import *
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
{body}
"""


TRAIN_JOB = """
model = shard(build(num_blocks=1), world_size)
session = odc.patch_fsdp(model)
for step in range(10_000):
    train(model, session, rank, world_size, [1] * world_size, 1)
    if step == 3:
        {at_step_3}
"""


def start_job(tmp_path: Path, body: str, nproc: int = 2, prefix: list[str] | None = None) -> subprocess.Popen[str]:
    script = tmp_path / "job.py"
    script.write_text(JOB.format(tests=RIGS, body=body))
    command = [
        *(prefix or []),
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(script)),
    ]
    env = {**os.environ, **TIMEOUT, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
    )


def run_job(launcher: WarmLauncher, folder: Path, body: str) -> tuple[list[int], str]:
    """How each of two ranks ended, and what they printed. As under torchrun, one that ends with 0 is no failure."""
    script = folder / "job.py"
    script.write_text(JOB.format(tests=RIGS, body=body))
    codes = launcher.run([str(script)], folder)
    return codes, "".join(warm_launch.output_of(folder, rank).read_text() for rank in range(len(codes)))


def output_of(job: subprocess.Popen[str], timeout_s: float = 300) -> str:
    try:
        return job.communicate(timeout=timeout_s)[0]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def wait_for_text(path: Path, job: subprocess.Popen[str]) -> str:
    """The content of a file that a rank writes, once it ends with a blank."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and job.poll() is None:
        if path.exists() and path.read_text().endswith(" "):
            return path.read_text()
        time.sleep(0.05)
    raise AssertionError(f"{path.name} was not written: {output_of(job)}")


def session_members(session_id: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == session_id:
                    members.append(int(entry.name))
            except ProcessLookupError:
                continue
    return members


def alive_members(session_id: int) -> list[int]:
    """Members that are not mere zombies waiting for whoever adopted them."""
    return [pid for pid in session_members(session_id) if scheduler_state(pid) != "Z"]
