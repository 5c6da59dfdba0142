"""Layer 3: ranks as processes. Jobs without their launcher, restarts, strangers and neighbours.

Fault tests 10, 22 and 23. What a death or an error does in itself is in ``test_faults.py``.
"""

from __future__ import annotations

import hmac
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_ranks import NOTICE_S, TIMEOUT, TORCHRUN, alive_members, endless, output_of, start_job, wait_for_text
from process_ranks import across, run_ranks, start_ranks
from training import build, full_parameters, largest_difference, reference, shard, train
from watching import do_before, killed_on_error, scheduler_state, until, written

import odc
from odc.transports._frames import KEY_BYTES, WIRE_VERSION, Frame, Kind
from odc.transports._rendezvous import UnixRendezvous

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
        use_up(optimizer)
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
    connect = UnixRendezvous.connect

    def come_late(self: UnixRendezvous, rows: Any, timeout_s: float) -> None:
        reports.append(stranger(*rows[0]))
        connect(self, rows, timeout_s)

    if rank == 1:
        UnixRendezvous.connect = come_late  # type: ignore[method-assign]
    parameters = trained(rank, world_size, COUNTS * (world_size // 2))
    return max(reports, default=-1), parameters


def stranger(address: str, key: str) -> int:
    """Of another user, with rank 1's name and key: 0 if it was sent away, 1 if it was let in."""
    hello = Frame(Kind.HELLO, 1, 0, 0, WIRE_VERSION).pack()
    greeting = hello + hmac.digest(bytes.fromhex(key), hello, "sha256")[:KEY_BYTES]
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)  # rank 0 may not have come to its door yet
            try:
                connection.connect(f"\0odc-{address}")
                connection.send(greeting)
                os._exit(1 if connection.recv(1) else 0)
            except TimeoutError:
                os._exit(1)
            except OSError:
                os._exit(0)  # sent away without a word
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def trained(
    rank: int, world_size: int, counts: list[int], before: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    model = shard(build(torch.float64), world_size)  # in which no rounding grows
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

    do_before(UnixRendezvous, "connect", lambda: meet("set-up"))
    return trained(rank, world_size, counts, lambda: meet("training"))


@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.extended)])
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
    listen = UnixRendezvous.listen

    def noted(self: UnixRendezvous) -> list[str]:
        row = listen(self)
        Path(notes, f"door {row[0]}").touch()
        return row

    UnixRendezvous.listen = noted  # type: ignore[method-assign]
    return body(rank, world_size, *args)


def leaving(rank: int, world_size: int, where: str, sent: signal.Signals) -> None:
    """End, or stop for ever, with the door open to the other ranks, or in training."""
    if where == "set-up":
        do_before(UnixRendezvous, "connect", lambda: os.kill(os.getpid(), sent))
    endless(rank, world_size)


@pytest.mark.parametrize(
    ("where", "sent"),
    [
        pytest.param("set-up", signal.SIGSTOP, id="set-up-stopped"),
        pytest.param("training", signal.SIGKILL, id="training-killed"),
        pytest.param("set-up", signal.SIGKILL, id="set-up-killed", marks=pytest.mark.extended),
        pytest.param("training", signal.SIGSTOP, id="training-stopped", marks=pytest.mark.extended),
    ],
)
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
    os.environ["ODC_FAULT"] = "rank=1,point=scatter.after_chunk,at=15,do=kill"
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


@pytest.mark.extended
@pytest.mark.parametrize(
    ("launcher", "through", "hosts", "patched"),
    [
        pytest.param(TORCHRUN, [], 1, "shm", id="torchrun"),
        pytest.param(TORCHRUN, [], 2, "tcp", id="torchrun-2 hosts"),
        pytest.param(("odc", "run"), [], 1, "patched by odc run", id="odc run"),
        pytest.param(TORCHRUN, ["-m", "odc.run"], 1, "patched by odc run", id="torchrun odc.run"),
    ],
)
def test_a_restarted_job_trains_to_the_end(
    launcher: Sequence[str], through: list[str], hosts: int, patched: str, tmp_path: Path
) -> None:
    """Rank 1 kills itself in the first attempt; `odc run` patches anew in the second one.

    Rank 0 is told, or ended by the launcher first: which of the two comes first is the launcher's affair.
    """
    by_odc_run = patched == "patched by odc run"
    body = RESTARTED_JOB.format(hosts=hosts, patch=not by_odc_run, counts=COUNTS)
    # Without this, attempts share a store, and a rank of the second one may meet the address of a dead rank in gloo.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    job = start_job(tmp_path, body, "--max-restarts", "1", *through, launcher=launcher, env=env)
    text = output_of(job, 400)
    assert job.returncode == 0, text
    ends = sorted(re.findall("ATTEMPT .*", text))
    assert ends == [f"ATTEMPT 1 rank {rank} True {patched}" for rank in range(2)], text
    assert text.count("odc: patched Net (FSDP2)") == 2 * by_odc_run, text
