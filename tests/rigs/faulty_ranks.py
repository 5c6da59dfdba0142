"""Ranks and jobs that something happens to, and how the others are asked what they were told."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from process_ranks import RankGroup, RankResult, across, start_ranks
from training import build, full_parameters, shard, train
from watching import scheduler_state, until, wait_for_all

import odc
from odc.bench.harness import warm_launch
from odc.bench.harness.warm_launch import WarmLauncher
from odc.liveness.faults import POINTS

TIMEOUT = {"ODC_TIMEOUT": "60"}
# A death or a failure is known everywhere within this time: at once, on a machine that may be busy, and long before any
# limit on silence.
NOTICE_S = 10.0
SILENCE_S = 3
"""After so long a rank that is stopped counts as silent. For all other faults no limit runs out within a test."""
STEP = 2
"""In which a job comes to the place of a fault."""


@dataclass(frozen=True)
class End:
    """What one leaves behind: the exit code of its process, and how the others fail and what they say of it."""

    exitcode: int
    seen: str
    kinds: tuple[str, ...] = ("PeerDiedError", "AbortedError", "PeerClosedError")
    from_afar: str = "its connection ended|cannot be reached any more|Connection reset by peer"
    """Or so, on another host, where nobody sees how a process ends; "(?!)" if nothing else will do. One that is killed
    resets its connections where something is unread."""


ENDS = {
    "kill": End(-signal.SIGKILL, "is dead: killed by signal 9"),
    "segv": End(-signal.SIGSEGV, "is dead: killed by signal 11"),
    "exit": End(0, "is dead: it exited with status 0"),
    "SIGTERM": End(-signal.SIGTERM, r"is dead: killed by signal 15 \(SIGTERM\)"),
    "SIGINT": End(1, "KeyboardInterrupt", from_afar="(?!)"),
    "raise": End(1, "FaultInjected: fault injected at|ValueError: sample 17", ("AbortedError",), "(?!)"),
    "stop": End(-signal.SIGKILL, "is alive but silent", ("PeerSilentError", "AbortedError"), "has answered nothing"),
}
"""By what is done to a rank. One that is stopped is killed behind the test."""


@dataclass(frozen=True)
class Fault:
    """Which rank is hurt, where and how; in which job, and what the others say of it besides its name and its end."""

    who: int
    where: str
    """A point of :mod:`odc.liveness.faults`, or a place that the job itself comes to, in its step :data:`STEP` if it
    has steps."""
    how: str
    """One of :data:`ENDS`."""
    job: Callable[..., Any]
    """Called with rank, world size and this, on each rank."""
    hosts: int = 1
    ranks: int = 3
    model: str = ""
    at: int = 9
    """The number of the pass of such a point."""
    env: Mapping[str, str] = field(default_factory=dict)
    says: tuple[str, ...] = ()
    told: str = ""
    """In set-up, before ranks know each other's processes: a pattern of what stands for the name and the end."""

    def __str__(self) -> str:
        hosts = f"{self.hosts} hosts" if self.hosts > 1 else ""
        return "-".join(filter(None, (f"rank {self.who}", self.where, self.how, self.job.__name__, self.model, hosts)))

    def host_of(self, rank: int) -> str:
        return f"host{rank * self.hosts // self.ranks}" if self.hosts > 1 else ""

    def come_to(self, place: str, rank: int, step: int = STEP) -> None:
        """Hurt this rank if it is the one, and this the place."""
        if (place, rank, step) != (self.where, self.who, STEP):
            return
        if self.how == "raise":
            raise ValueError("sample 17 has no answer")
        if self.how == "exit":
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGSTOP)

    def start(self) -> RankGroup:
        env = {"ODC_TIMEOUT": f"{SILENCE_S}" if self.how == "stop" else "600", **self.env}
        if self.where in POINTS:
            env["ODC_FAULT"] = f"rank={self.who},point={self.where},at={self.at},do={self.how}"
        if self.hosts == 1:
            return start_ranks(self.ranks, self.job, self, env=env)
        return start_ranks(self.ranks, across, self.hosts, self.job, self, env=env)

    def check(self) -> list[RankResult]:
        """The one oracle: the rank that is hurt ends as it must. Each of the others fails by itself, at once, before
        any limit could run out; it names that rank with its host and process, and how it ended."""
        group = self.start()
        results = group.join(100, expendable=[self.who] if self.how == "stop" else [])
        assert results[self.who].exitcode == ENDS[self.how].exitcode, results[self.who]
        assert self.how != "raise" or re.search(ENDS["raise"].seen, results[self.who].error or "")
        for rank, result in enumerate(results):
            if rank != self.who:
                self.assert_told(rank, result, group.pids[self.who])
                assert result.exitcode == 1, result
        assert self.how != "stop" or "PeerSilentError" in {result.error_type for result in results}
        ends = [result.seconds for result in results if result.seconds]
        assert max(ends) - min(ends) < NOTICE_S
        return results

    def assert_told(self, rank: int, result: RankResult, pid: int) -> None:
        text = (result.error or "").partition("\nTraceback")[0]
        assert "gloo" not in text, text
        assert all(words in text for words in self.says), text
        if self.told:
            assert result.error_type == "BrokenExchangeError", result
            assert re.search(self.told.format(pid=pid), text), text
            return
        end = ENDS[self.how]
        assert result.error_type in end.kinds, result
        host = self.host_of(self.who)
        assert re.search(rf"rank {self.who} \((host {host or '.*'}, )?pid {pid}\)", text), text
        # Who is on that host has seen it, or was told by one who is not.
        has_seen = not host or (host == self.host_of(rank) and result.error_type != "AbortedError")
        assert re.search(end.seen if has_seen else f"{end.seen}|{end.from_afar}", text), text


def endless(rank: int, world_size: int, fault: Fault | None = None) -> None:
    """Train until something happens. The session is closed then, as scripts do it, and waits for nobody."""
    model = shard(build(num_blocks=1), world_size)
    with contextlib.closing(odc.patch_fsdp(model)) as session:
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


def survivors(results: list[RankResult], dead: int = 1) -> list[RankResult]:
    return [result for rank, result in enumerate(results) if rank != dead]


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


TORCHRUN = ("torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")


def start_job(
    tmp_path: Path,
    body: str,
    *options: str,
    launcher: Sequence[str] = TORCHRUN,
    prefix: Sequence[str] = (),
    env: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[str]:
    """Two ranks, under a module that launches them, with ``options``; ``prefix``: a command in front of it."""
    script = tmp_path / "job.py"
    script.write_text(JOB.format(tests=RIGS, body=body))
    command = [*prefix, sys.executable, "-m", *launcher, "--nproc-per-node", "2", *options, str(script)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    env = {**os.environ, **TIMEOUT, "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen(command, **pipes, env=env, start_new_session=True)


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
