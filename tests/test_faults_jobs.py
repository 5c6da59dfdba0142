"""Layer 3: ranks as processes. Signals at every wait, jobs without their launcher, restarts, strangers and neighbours.

Fault tests 9, 10, 22 and 23. What a death or an error does in itself is in ``test_faults.py``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pytest
from process_ranks import RankGroup, RankResult, run_ranks, start_ranks
from test_faults import (
    JOB,
    NOTICE_S,
    TIMEOUT,
    alive_members,
    assert_told,
    endless,
    output_of,
    start_job,
    survivors,
    wait_for_text,
)
from test_links import across
from training import build, full_parameters, largest_difference, loss_of, optimizer_of, reference, shard, tokens, train

import odc
from odc import Runtime
from odc.transports._links import Links
from odc.transports._rendezvous import _FRAME, _MAGIC, Mesh

# Signals at wait points: fault test 9

_stack: TextIO | None = None  # where SIGUSR1 writes; open as long as the process lives


def prepare(notes: str, rank: int, world_size: int) -> None:
    """Join rank 0's process group, have Ctrl-C interrupt, and have SIGUSR1 write down where this process is."""
    global _stack
    os.setpgid(0, 0 if rank == 0 else int(written(Path(notes, "leader"))))
    if rank == 0:
        Path(notes, "leader").write_text(f"{os.getpid()} ")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where pytest runs in the background
    _stack = Path(notes, f"stack{rank}").open("w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, _stack, all_threads=False)
    Path(notes, f"ready{rank}").touch()


def written(path: Path) -> str:
    """The content of a file that another process writes, once it ends with a blank."""
    until(lambda: path.exists() and path.read_text().endswith(" "), f"{path.name} was not written")
    return path.read_text()


def until(condition: Callable[[], bool], otherwise: str, timeout_s: float = 150.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


@dataclass(frozen=True)
class WaitPoint:
    """Where a rank waits when another one is stopped for good."""

    function: str
    """What the waiting rank is in."""
    fault: str = ""
    """Stops the other rank."""
    step_of_setup: str = ""
    """Or: the step of set-up before which the other rank stops."""
    order: str = ""
    """Rank 0 has stopped before the others begin ("first"), or stops when they are done with minibatch 3 ("last")."""
    accumulate: str = "auto"
    hosts: int = 1
    stopped: int = 0
    victim: int = 1


_STOP = "rank=0,do=stop,point="

# Points of publishing are passed once per unit, of which there are four.
WAITS = {
    "gather, for published": WaitPoint("_await_published", _STOP + "publish.before,at=9"),
    "push, for open sums": WaitPoint("_await_opened", _STOP + "publish.after,at=8"),
    "push, for a slot": WaitPoint("_await_acks", _STOP + "gather.before,at=1", "", "first", accumulate="daemon"),
    "push, for a lock": WaitPoint("add", _STOP + "scatter.after_chunk,at=1", "", "first", accumulate="direct"),
    "finish, for done": WaitPoint("_await_done", _STOP + "finish.before_done,at=3"),
    "gather, for bytes of another host": WaitPoint("_await", _STOP + "gather.before,at=1", "", "first", hosts=3),
    "finish, for another host": WaitPoint("_await_done", _STOP + "finish.before_done,at=3", "", "last", hosts=3),
}
FURTHER_WAITS = ["push, for open sums", "push, for a slot", "finish, for another host"]
ON_THE_PROCESS_GROUP = "for an answer on the process group"
SETUP_WAITS = {
    ON_THE_PROCESS_GROUP: WaitPoint("all_gather", _STOP + "setup"),
    "for memory": WaitPoint("_receive", step_of_setup="swap"),
    "for ranks of this host": WaitPoint("_answer", step_of_setup="connect", stopped=1, victim=0),
    "for ranks of other hosts": WaitPoint("_answer", step_of_setup="connect hosts", hosts=3, stopped=1, victim=0),
}
STEPS_OF_SETUP: dict[str, tuple[type, str]] = {
    "swap": (Mesh, "swap"),
    "connect": (Mesh, "connect"),
    "connect hosts": (Links, "connect"),
}
SIGNALS = pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=lambda sent: sent.name)


def interruptible(rank: int, world_size: int, at: WaitPoint) -> None:
    """Train until something happens, without any collective of torch: what ends a rank is a signal, or ODC."""
    if at.step_of_setup and rank == at.stopped:
        stop_before(*STEPS_OF_SETUP[at.step_of_setup])
    model = shard(build(), world_size)
    session = odc.patch_fsdp(model, accumulate=at.accumulate)
    if at.order == "first" and rank != at.stopped:
        until(lambda: scheduler_state(os.getpgrp()) == "T", "rank 0 has not stopped")  # it leads the process group
    if at.order == "last" and rank == at.stopped:
        session.on_finish = lambda: await_others_in(session._runtime, 3)
    optimizer = optimizer_of(model)
    for step in range(10_000):
        with session.minibatch():
            loss_of(model, tokens(step, rank, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def await_others_in(runtime: Runtime, minibatch: int) -> None:
    """If this is that minibatch: return when the others are done with it, as far as they can be without this rank."""
    if runtime.minibatch == minibatch:
        others = [rank for rank in range(runtime.topology.world_size) if rank != runtime.topology.rank]
        done = [runtime._protocol._done_at + rank for rank in others]
        until(lambda: all(runtime._transport.count(index) >= minibatch for index in done), "the others do not come")


def stop_before(owner: type, name: str) -> None:
    do_before(owner, name, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def do_before(owner: type, name: str, action: Callable[[], object]) -> None:
    """Have this process do something each time it comes to a method."""
    original = getattr(owner, name)

    def act(*args: Any) -> Any:
        action()
        return original(*args)

    setattr(owner, name, act)


def start_waiting(at: WaitPoint, notes: Path) -> RankGroup:
    """Three ranks, of which one is stopped and another one waits for it."""
    env = {"ODC_TIMEOUT": "150", "ODC_FAULT": at.fault}
    group = start_ranks(3, across, at.hosts, interruptible, at, env=env, enter=partial(prepare, str(notes)))
    with killed_on_error(group):
        until(lambda: all(Path(notes, f"ready{rank}").exists() for rank in range(3)), "the ranks did not start")
        until(lambda: scheduler_state(group.pids[at.stopped]) == "T", "no rank has stopped")
        until_in(group.pids[at.victim], Path(notes, f"stack{at.victim}"), at.function)
    return group


@contextlib.contextmanager
def killed_on_error(group: RankGroup) -> Iterator[None]:
    try:
        yield
    except BaseException:
        group.join(0.0, expendable=range(len(group.pids)))
        raise


def scheduler_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def until_in(pid: int, stack: Path, function: str) -> None:
    """Return when the process is in ``function`` now and a moment later: then it waits there."""
    seen, deadline = 0, time.monotonic() + 100
    while seen < 2:
        length = stack.stat().st_size
        os.kill(pid, signal.SIGUSR1)
        until(lambda before=length: stack.stat().st_size > before, "no stack was written")  # type: ignore[misc]
        time.sleep(0.1)
        newest = stack.read_text()[length:]
        seen = seen + 1 if f" in {function}\n" in newest else 0
        assert time.monotonic() < deadline, f"it does not wait in {function}, but: {newest}"


def assert_ended_by(result: RankResult, sent: signal.Signals) -> None:
    if sent is signal.SIGINT:
        assert result.error_type == "KeyboardInterrupt", result
        assert result.exitcode == 1
    else:
        assert result.exitcode == -sent


def signal_one(at: WaitPoint, sent: signal.Signals, notes: Path) -> list[RankResult]:
    """The rank that waits gets the signal; it ends; the stopped one goes on. How they ended, within ``NOTICE_S``."""
    group = start_waiting(at, notes)
    with killed_on_error(group):
        sent_at = time.monotonic()
        os.kill(group.pids[at.victim], sent)
        until(lambda: scheduler_state(group.pids[at.victim]) == "Z", "it did not end", NOTICE_S)
        os.kill(group.pids[at.stopped], signal.SIGCONT)
        results = group.join(400)
    assert max(result.seconds for result in results) < sent_at - group.started + 2 * NOTICE_S
    assert_ended_by(results[at.victim], sent)
    return results


@SIGNALS
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.extended] if name in FURTHER_WAITS else []) for name in WAITS],
)
def test_a_signal_ends_a_rank_that_waits_and_the_others_learn_who_it_was(
    name: str, sent: signal.Signals, tmp_path: Path
) -> None:
    at = WAITS[name]
    results = signal_one(at, sent, tmp_path)
    for result in survivors(results, at.victim):
        assert_told(result, f"rank {at.victim}")
        if sent is signal.SIGINT:
            assert_told(result, "KeyboardInterrupt")
        elif at.hosts == 1:  # of a process on another host nobody learns how it ended
            assert_told(result, "signal 15 (SIGTERM)")


@SIGNALS
@pytest.mark.parametrize("name", SETUP_WAITS)
def test_a_signal_ends_a_rank_that_waits_in_set_up_and_the_others_fail(
    name: str, sent: signal.Signals, tmp_path: Path
) -> None:
    at = SETUP_WAITS[name]
    results = signal_one(at, sent, tmp_path)
    assert all(r.error_type in ("SetupError", "RuntimeError") for r in survivors(results, at.victim)), results


def test_a_rank_that_ends_in_set_up_is_named(tmp_path: Path) -> None:
    results = signal_one(SETUP_WAITS[ON_THE_PROCESS_GROUP], signal.SIGTERM, tmp_path)
    for result in survivors(results):
        assert result.error_type == "SetupError", result.error
        assert "rank 1 " in (result.error or "")


@SIGNALS
@pytest.mark.parametrize(
    "name",
    [
        *("gather, for published", "finish, for another host", ON_THE_PROCESS_GROUP),
        *(pytest.param(name, marks=pytest.mark.extended) for name in ("push, for a slot", "push, for a lock")),
    ],
)
def test_a_signal_to_all_ranks_ends_all(name: str, sent: signal.Signals, tmp_path: Path) -> None:
    """As Ctrl-C in a terminal. The rank that the others wait for computes, or is stopped, and goes on with it."""
    at = {**WAITS, **SETUP_WAITS}[name]
    group = start_waiting(at, tmp_path)
    with killed_on_error(group):
        sent_at = time.monotonic() - group.started
        os.killpg(group.pids[0], sent)
        os.kill(group.pids[at.stopped], signal.SIGCONT)
        results = group.join(400)
    for result in results:
        assert_ended_by(result, sent)
    assert max(result.seconds for result in results) < sent_at + NOTICE_S


# The launcher dies: fault test 10

ORPHANS_JOB = """
if {hosts} > 1:
    os.environ["ODC_HOST_ID"] = f"host{{rank}}"
def note(name, text):
    with open(f"{notes}/{{name}}{{rank}}", "w") as file:
        file.write(text + " ")
model = shard(build(), world_size)
session = odc.patch_fsdp(model)
optimizer = optimizer_of(model)
try:
    for step in range(1_000_000):
        with session.minibatch():
            loss_of(model, tokens(step, rank, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        note("step", str(step))
        if step == 0:
            note("pid", str(os.getpid()))
except BaseException as error:
    note("told", f"{{time.monotonic()}} {{type(error).__name__}}: {{error}}")
    raise
"""


@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_ranks_outlive_their_launcher_and_still_watch_each_other(tmp_path: Path, hosts: int) -> None:
    """torchrun, killed, cannot tell its ranks. They train on, and a death among them ends them all as ever."""
    job = start_job(tmp_path, ORPHANS_JOB.format(notes=tmp_path, hosts=hosts))
    pids = [int(wait_for_text(tmp_path / f"pid{rank}", job)) for rank in range(2)]
    try:
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
        before = [int(written(tmp_path / f"step{rank}")) for rank in range(2)]
        until(
            lambda: all(last_step(tmp_path, rank) > before[rank] + 20 for rank in range(2)),
            "the ranks did not train on",
        )
        os.kill(pids[1], signal.SIGKILL)
        killed_at = time.monotonic()
        told_at, error = written(tmp_path / "told0").split(maxsplit=1)
        until(lambda: not any(alive_members(pid) for pid in pids), "a rank has not ended")  # each has its own session
    finally:
        for pid in pids:
            if pid in alive_members(pid):
                os.kill(pid, signal.SIGKILL)
    assert float(told_at) - killed_at < NOTICE_S
    assert error.startswith("PeerDiedError: ")
    assert f"rank 1 (host {'host1' if hosts > 1 else socket.gethostname()}, pid {pids[1]})" in error
    # Killed with something unread, it resets its connections.
    how = ("killed by signal 9",) if hosts == 1 else ("its connection ended", "Connection reset by peer")
    assert any(words in error for words in how), error
    assert "PeerDiedError" in output_of(job)


def last_step(notes: Path, rank: int) -> int:
    text = Path(notes, f"step{rank}").read_text()  # the rank may be about to write it anew
    return int(text) if text.endswith(" ") else -1


# Neighbours: fault test 22

COUNTS = [1, 3]


def beside_another_user(rank: int, world_size: int) -> tuple[int, dict[str, Any]]:
    """Rank 1 comes late to set-up; before it comes a process of another user, who knows its key."""
    reports: list[int] = []
    connect = Mesh.connect

    def come_late(self: Mesh, rows: Any, timeout_s: float) -> None:
        reports.append(stranger(*rows[0]))
        connect(self, rows, timeout_s)

    if rank == 1:
        Mesh.connect = come_late  # type: ignore[method-assign]
    parameters = trained(rank, world_size, COUNTS * (world_size // 2))
    return max(reports, default=-1), parameters


def stranger(address: str, key: str) -> int:
    """Of another user, with rank 1's name and key: 0 if it was sent away, 1 if it was let in."""
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)  # rank 0 may not have come to its door yet
            try:
                connection.connect(f"\0odc-{address}")
                connection.send(_FRAME.pack(_MAGIC, bytes.fromhex(key), 1, 0, 0))
                connection.recv(1)
            except TimeoutError:
                os._exit(1)
            except OSError:
                pass
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def trained(
    rank: int, world_size: int, counts: list[int], before: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    model = shard(build(), world_size)
    session = odc.patch_fsdp(model)
    before()
    train(model, session, rank, world_size, counts, 6)
    session.close()
    return full_parameters(model)


@pytest.mark.skipif(os.getuid() != 0, reason="needs a process of another user (root)")
@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_a_process_of_another_user_is_sent_away_and_disturbs_nothing(hosts: int) -> None:
    """Even one that knows the key. With two hosts the ranks in question are the two of the first one."""
    results = run_ranks(2 * hosts, across, hosts, beside_another_user)
    assert results[1][0] == 0, "the stranger was let in"
    assert largest_difference(results[0][1], reference(COUNTS * hosts, 6)) < 1e-5


def side_by_side(rank: int, world_size: int, notes: str, job: str, counts: list[int]) -> dict[str, Any]:
    """Both jobs are in set-up at the same time, with their doors open; and then in training."""

    def meet(where: str) -> None:
        Path(notes, f"{where} {job} {rank}").touch()
        everyone = 2 * world_size
        until(lambda: len(list(Path(notes).glob(f"{where} *"))) == everyone, "the other job did not come")

    do_before(Mesh, "connect", lambda: meet("set-up"))
    return trained(rank, world_size, counts, lambda: meet("training"))


@pytest.mark.parametrize("hosts", [1, 2])
def test_two_jobs_on_one_machine_do_not_meet(tmp_path: Path, hosts: int) -> None:
    """One of them on ``hosts`` hosts; each trains to its own numbers."""
    jobs = {"first": (COUNTS, 1), "second": ([2, 1], hosts)}
    groups = {
        job: start_ranks(2, across, on, side_by_side, str(tmp_path), job, counts, env=TIMEOUT)
        for job, (counts, on) in jobs.items()
    }
    for job, group in groups.items():
        results = group.join(240)
        assert all(r.error is None for r in results), [r.error for r in results]
        assert largest_difference(results[0].value, reference(jobs[job][0], 6)) < 1e-5


def noting_door(rank: int, world_size: int, notes: str, body: Callable[..., Any], *args: Any) -> Any:
    """``body``; the name of the socket at which this rank lets the others in is written down."""
    listen = Mesh.listen

    def noted(self: Mesh) -> list[str]:
        row = listen(self)
        Path(notes, f"door {row[0]}").touch()
        return row

    Mesh.listen = noted  # type: ignore[method-assign]
    return body(rank, world_size, *args)


def leaving(rank: int, world_size: int, where: str, sent: signal.Signals) -> None:
    """End, or stop for ever, with the door open to the other ranks, or in training."""
    if where == "set-up":
        do_before(Mesh, "connect", lambda: os.kill(os.getpid(), sent))
    endless(rank, world_size)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("where", ["set-up", "training"])
def test_what_a_job_has_left_does_not_disturb_the_next_one(where: str, sent: signal.Signals, tmp_path: Path) -> None:
    """All its ranks were killed in the middle, or hang about for ever."""
    # The delay lets both ranks come so far, and then end by themselves.
    point, do = "point=publish.before,at=9,do=", "kill" if sent is signal.SIGKILL else "stop"
    env = {**TIMEOUT, "ODC_FAULT": f"{point}delay:0.3;{point}{do}"}
    left = start_ranks(2, noting_door, str(tmp_path), leaving, where, sent, env=env)
    with killed_on_error(left):
        until(lambda: all(scheduler_state(pid) in "ZT" for pid in left.pids), "it goes on")
        if where == "set-up" and sent is signal.SIGSTOP:
            assert len(doors(tmp_path) & listening()) == 2
        results = run_ranks(2, noting_door, str(tmp_path), trained, COUNTS)
    ended = left.join(0.5, expendable=[0, 1])
    assert largest_difference(results[0], reference(COUNTS, 6)) < 1e-5
    if sent is signal.SIGSTOP or where == "training":
        assert [r.exitcode for r in ended] == [-signal.SIGKILL] * 2
    assert len(doors(tmp_path)) == 4
    assert not doors(tmp_path) & listening()


def doors(notes: Path) -> set[str]:
    """Names of sockets that ranks have noted."""
    return {f"@odc-{path.name.removeprefix('door ')}" for path in notes.glob("door *")}


def listening() -> set[str]:
    """Names of ODC's sockets on this machine."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.split()[-1] for line in lines if "@odc-" in line}


# Restarts: fault test 23

RESTARTED_JOB = """
if {hosts} > 1:
    os.environ["ODC_HOST_ID"] = f"host{{rank}}"
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if attempt == "0":
    os.environ["ODC_FAULT"] = "rank=1,point=scatter.after_chunk,at=30,do=kill"
counts = {counts}
model = shard(build(), world_size)
session = odc.patch_fsdp(model) if {patch} else None
train(model, session, rank, world_size, counts, 6)
name = session.transport if session else "patched by odc run"
if session:
    session.close()
difference = largest_difference(full_parameters(model), reference(counts, 6))
sys.stdout.write(f"ATTEMPT {{attempt}} rank {{rank}} {{difference < 1e-5}} {{name}}\\n")  # in one piece: ranks share it
sys.stdout.flush()
dist.barrier()
dist.destroy_process_group()
"""


def restarted(tmp_path: Path, launcher: list[str], through: list[str], patch: bool, hosts: int = 1) -> str:
    """What a job prints whose rank 1 kills itself in the first attempt.

    Rank 0 is told, or ended by the launcher first: which of the two comes first is the launcher's affair.
    """
    script = tmp_path / "job.py"
    body = RESTARTED_JOB.format(hosts=hosts, patch=patch, counts=COUNTS)
    script.write_text(JOB.format(tests=str(Path(__file__).parent), body=body))
    options = ["--nproc-per-node", "2", "--max-restarts", "1"]
    command = [sys.executable, "-m", *launcher, *options, *through, str(script)]
    # Without this, attempts share a store, and a rank of the second one may meet the address of a dead rank in gloo.
    env = {**os.environ, **TIMEOUT, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
    )
    text = output_of(job, 400)
    assert job.returncode == 0, text
    return text


TORCHRUN = ["torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]


@pytest.mark.parametrize(("hosts", "name"), [(1, "shm"), pytest.param(2, "tcp", marks=pytest.mark.extended)])
def test_a_restarted_job_trains_to_the_end(tmp_path: Path, hosts: int, name: str) -> None:
    text = restarted(tmp_path, TORCHRUN, [], patch=True, hosts=hosts)
    ends = sorted(re.findall("ATTEMPT .*", text))
    assert ends == [f"ATTEMPT 1 rank {rank} True {name}" for rank in range(2)], text


@pytest.mark.parametrize(
    ("launcher", "through"),
    [(["odc", "run"], []), pytest.param(TORCHRUN, ["-m", "odc.run"], marks=pytest.mark.extended)],
    ids=["odc run", "torchrun"],
)
def test_odc_run_restarts_a_job(tmp_path: Path, launcher: list[str], through: list[str]) -> None:
    """Patched anew in the second attempt."""
    text = restarted(tmp_path, launcher, through, patch=False)
    ends = sorted(re.findall("ATTEMPT .*", text))
    assert ends == [f"ATTEMPT 1 rank {rank} True patched by odc run" for rank in range(2)], text
    assert text.count("odc: patched Net (FSDP2)") == 2
