"""Layer 3: ranks as processes. What happens when a rank dies, stops, raises or leaves, and how the others learn of it.

Each test asserts the error's type and text, how soon it came, and (by conftest) that nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_ranks import (
    NOTICE_S,
    TIMEOUT,
    TRAIN_JOB,
    alive_members,
    assert_told,
    endless,
    fault,
    output_of,
    run_job,
    session_members,
    start_job,
    stoppable,
    survivors,
    wait_for_text,
    wait_for_training,
)
from process_ranks import assert_all_say, run_ranks, start_ranks
from torch.utils.data import DataLoader
from training import (
    Net,
    build,
    full_parameters,
    largest_difference,
    loss_of,
    reference,
    shard,
    start,
    tokens,
    train,
    use_up,
)
from watching import scheduler_state, until

import odc
from odc import ParamSlice, Runtime, RuntimeConfig, UnitSpec
from odc.bench.harness.warm_launch import WarmLauncher
from odc.setup.agreement import ProcessGroupExchange

EXTENDED = pytest.mark.extended

# Deaths: fault tests 1, 2, 8


@pytest.mark.parametrize(
    "point",
    [
        *("gather.after_chunk", "scatter.added", "publish.before", "finish.before_done"),
        # Before it, and in mid-push, ranks die in test_faults_replicas.py and in the next test, too.
        *(pytest.param(point, marks=EXTENDED) for point in ("gather.before", "scatter.after_chunk")),
    ],
)
def test_a_killed_rank_is_named_by_all_others(point: str) -> None:
    """Fault tests 1 and 2: SIGKILL while others gather from it, in mid-push, before publishing, before done."""
    group = start_ranks(3, endless, env=fault(point, "kill"))
    results = group.join(120)
    assert results[1].exitcode == -signal.SIGKILL
    for result in survivors(results):
        assert_told(result, "rank 1", f"pid {group.pids[1]}", "minibatch ", "signal 9")
    first = min(r.seconds for r in survivors(results))
    assert max(r.seconds for r in survivors(results)) - first < NOTICE_S


def half_push(rank: int, world_size: int, mode: dict[str, Any]) -> list[str]:
    """Rank 2 dies in its second push to rank 0; then rank 1 pushes, and both try to go on in every way."""
    unit = UnitSpec("layers.0", 8, torch.float32, (ParamSlice("w", 300_000),))
    runtime = Runtime.create(ProcessGroupExchange(), [unit], RuntimeConfig.from_environment(**mode))
    exchange = ProcessGroupExchange()
    values = torch.ones(300_000 * world_size)
    runtime.publish(0, lambda out: out.zero_())
    runtime.begin()
    for turn in (0, 2):
        if rank == turn:
            runtime.scatter_accumulate(0, values)
        exchange.all_gather(b"")
    if rank == 2:
        runtime.scatter_accumulate(0, values)
    until(lambda: scheduler_state(runtime.topology.pids[2]) == "Z", "rank 2 did not die: nothing was tested")
    told = []

    def try_to(operation: Callable[[], object]) -> None:
        with pytest.raises(odc.OdcError) as caught:
            operation()
        told.append(f"{type(caught.value).__name__}: {caught.value}")

    if rank == 1 and not mode:
        try_to(lambda: runtime.scatter_accumulate(0, values))  # the lock is the dead rank's for ever
    try_to(runtime.finish)
    try_to(lambda: runtime.gradient(0))
    try_to(lambda: runtime.publish(0, lambda out: out.zero_()))
    try_to(lambda: runtime.gather(0, torch.empty(8 * world_size)))
    try_to(lambda: runtime.scatter_accumulate(0, values))
    try_to(runtime.begin)
    return told


@pytest.mark.parametrize(
    ("mode", "point", "number"),
    [
        ({}, "scatter.after_chunk", 4),
        pytest.param({}, "scatter.added", 4, marks=EXTENDED),
        ({"deterministic": True}, "scatter.added", 4),
        ({"accumulate": "daemon"}, "scatter.before_post", 2),
    ],
)
def test_a_half_push_reaches_no_step(mode: dict[str, Any], point: str, number: int) -> None:
    """Fault test 2. Rank 2 adds at owners 0, 1, 2: its fourth pass is its second push to rank 0; through slots it
    pushes to all at once. No rank that is left gets a gradient, nor can it do anything else with that runtime."""
    results = start_ranks(3, half_push, mode, env=fault(point, "kill", at=number, rank=2)).join(150)
    assert results[2].exitcode == -signal.SIGKILL
    for result in results[:2]:
        assert result.error is None, result.error
        first, *later = result.value
        assert "rank 2" in first
        assert first.startswith(("PeerDiedError", "AbortedError"))
        assert len(later) >= 5


@pytest.mark.parametrize(
    ("do", "words"), [("exit", "exited with status 0"), pytest.param("segv", "signal 11", marks=EXTENDED)]
)
def test_a_rank_that_leaves_without_a_word_is_named(do: str, words: str) -> None:
    """Fault test 8: os._exit(0) and a segmentation fault."""
    for result in survivors(start_ranks(3, endless, env=fault("scatter.before", do)).join(120)):
        assert_told(result, "rank 1", words)


# A daemon that fails: fault test 3


def endless_daemons(rank: int, world_size: int) -> None:
    """As :func:`endless`. A rank whose daemon tells the others what has failed does not end in the middle of that: an
    interpreter that ends waits for the daemon too, ``os._exit`` does not."""
    try:
        endless(rank, world_size, "daemon")
    finally:
        for thread in threading.enumerate():
            if rank == 1 and thread.name == "odc-accumulation":
                thread.join(60)


def test_a_failing_daemon_stops_its_rank_and_the_others() -> None:
    results = start_ranks(3, endless_daemons, env=fault("daemon.before_add", "raise")).join(120)
    assert_all_say(results[1:2], "FaultInjected: fault injected at daemon.before_add", kinds=["OdcError"])
    assert_all_say(survivors(results), "rank 1", "FaultInjected", kinds=["AbortedError"])
    times = [result.seconds for result in results]
    assert max(times) - min(times) < NOTICE_S


# Stopped ranks: fault tests 4, 5, 17


@pytest.mark.extended  # every run has others stopped: test_faults_signals.py, and trials of chaos
def test_a_rank_stopped_for_a_while_changes_nothing(tmp_path: Path) -> None:
    """Fault test 4: SIGSTOP 3 s, then SIGCONT, with a limit of 20 s."""
    steps, started, stopped = 40, tmp_path / "started", tmp_path / "stopped"
    env = {"ODC_TIMEOUT": "20", "ODC_FAULT": "point=gather.before,do=delay:0.002"}  # about 1.5 s of training
    group = start_ranks(2, stoppable, steps, str(started), str(stopped), env=env)
    wait_for_training(started)
    stopped_at = time.monotonic() - group.started
    os.kill(group.pids[1], signal.SIGSTOP)
    stopped.touch()
    time.sleep(3)
    os.kill(group.pids[1], signal.SIGCONT)
    results = group.join(120)
    assert all(r.error is None for r in results), [r.error for r in results]
    ended = min(r.seconds for r in results)
    assert ended > stopped_at + 3, "the ranks had ended before the stop: nothing was tested"
    undisturbed = run_ranks(2, stoppable, steps, str(started), str(stopped))
    assert largest_difference(results[0].value, undisturbed[0]) == 0.0


def test_a_rank_stopped_for_ever_is_alive_but_silent() -> None:
    """Fault test 5."""
    group = start_ranks(2, endless, env={"ODC_TIMEOUT": "3", "ODC_FAULT": "rank=1,point=gather.before,at=9,do=stop"})
    results = group.join(120, expendable=[1])
    words = ("rank 1", f"pid {group.pids[1]}", "alive but silent for", "stopped by a signal", "ODC_TIMEOUT")
    assert_all_say(results[:1], *words, kinds=["PeerSilentError"])


def stopped_while_it_waits(rank: int, world_size: int, hosts: int) -> None:
    """Rank 1 is stopped while it waits for rank 0, which publishes only then and waits for rank 1 in its turn."""
    os.environ["ODC_HOST_ID"] = f"host{rank * hosts // world_size}"
    units = [UnitSpec("u", 4, torch.float32, (ParamSlice("w", 4),))]
    runtime = Runtime.create(ProcessGroupExchange(), units, RuntimeConfig.from_environment())
    if rank == 0:
        until(lambda: scheduler_state(runtime.topology.pids[1]) == "T", "rank 1 was not stopped: nothing was tested")
    runtime.publish(0, lambda shard: shard.fill_(rank))
    runtime.begin()
    runtime.gather(0, torch.empty(4 * world_size))
    runtime.finish()


@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=EXTENDED), 3])
def test_a_rank_stopped_while_it_waits_is_to_blame_and_not_the_one_it_had_waited_for(hosts: int) -> None:
    env = {"ODC_TIMEOUT": "3", "ODC_FAULT": "rank=1,point=wait,at=5,do=stop"}
    group = start_ranks(3, stopped_while_it_waits, hosts, env=env)
    results = group.join(120, expendable=[1])
    for result in survivors(results):
        text = (result.error or "").partition("\nTraceback")[0]
        assert f"rank 1 (host host{hosts // 3}, pid {group.pids[1]})" in text, text
        assert "Cause: rank 1 is alive but silent for" in text or "has answered nothing for" in text, text


@pytest.mark.extended
def test_suspending_the_whole_job_for_longer_than_the_limit_is_not_an_error(tmp_path: Path) -> None:
    """Ctrl-Z, a paused container, a suspended job: no rank may blame the others for its own absence."""
    started, stopped = tmp_path / "started", tmp_path / "stopped"
    env = {"ODC_TIMEOUT": "5", "ODC_FAULT": "point=gather.before,do=delay:0.002"}
    group = start_ranks(2, stoppable, 100, str(started), str(stopped), env=env)
    wait_for_training(started)
    for pid in group.pids:
        os.kill(pid, signal.SIGSTOP)
    stopped.touch()
    time.sleep(8)
    for pid in group.pids:
        os.kill(pid, signal.SIGCONT)
    results = group.join(120)
    assert all(r.error is None for r in results), [r.error for r in results]


def slow(rank: int, world_size: int) -> tuple[float, dict[str, Any]]:
    """How long this rank has waited for the other one, and the parameters."""
    model = shard(build(), world_size)
    session = odc.patch_fsdp(model)
    train(model, session, rank, world_size, [1, 3], 1)
    waited_s = session.stats().wait_s
    session.close()
    return waited_s, full_parameters(model)


def test_a_rank_slower_than_the_limit_that_makes_progress_is_not_an_error() -> None:
    """Fault test 17: rank 1 needs about 4 s for a minibatch, and gives a sign of life every 0.2 s; the limit is 2 s."""
    env = {"ODC_TIMEOUT": "2", "ODC_FAULT": "rank=1,point=gather.before,do=delay:0.2"}
    results = start_ranks(2, slow, env=env).join(120)
    assert all(r.error is None for r in results), [r.error for r in results]
    waited_s, parameters = results[0].value
    assert waited_s > 2.0, "rank 0 did not wait for longer than the limit: nothing was tested"
    assert largest_difference(parameters, reference([1, 3], 1)) < 1e-5


# Whole jobs, under torchrun or as forks that end like any other interpreter: fault tests 7, 8, 11, 13


def test_sys_exit_without_close_is_told_to_the_others(tmp_path: Path, warm_launcher: WarmLauncher) -> None:
    """Fault test 8. A launcher takes an exit status of 0 for success and lets rank 0 run on: ODC must end it."""
    at_step_3 = "sys.exit(0) if rank == 1 else None"
    codes, text = run_job(warm_launcher, tmp_path, TRAIN_JOB.format(at_step_3=at_step_3))
    assert codes == [1, 0], text
    assert "rank 0 waited" in text, text
    assert "rank 1 (host" in text
    assert "it closed its session" in text


def test_an_exception_that_ends_a_script_is_told_to_the_others(tmp_path: Path, warm_launcher: WarmLauncher) -> None:
    """Fault test 7, outside of any block of a session: nothing of ODC sees it pass. Inside: ``test_links.py``, and
    ``test_faults_replicas.py``."""
    at_step_3 = "None if rank == 0 else tokens('no', rank, 0)"
    codes, text = run_job(warm_launcher, tmp_path, TRAIN_JOB.format(at_step_3=at_step_3))
    assert codes == [1, 1], text
    assert re.search(r"rank 0 aborted because rank 1 \(pid \d+\): TypeError", text), text


@pytest.mark.extended  # every run has all ranks killed at one stroke, by themselves: test_faults_jobs.py
def test_killing_the_process_groups_leaves_nothing(tmp_path: Path) -> None:
    """Fault test 11. torchrun gives each rank its own group; all of them are killed at one stroke."""
    note_pid = f"open({str(tmp_path)!r} + f'/pid{{rank}}', 'w').write(f'{{os.getpid()}} ')"
    job = start_job(tmp_path, TRAIN_JOB.format(at_step_3=note_pid))
    pids = [int(wait_for_text(tmp_path / f"pid{rank}", job)) for rank in range(2)]
    sessions = [job.pid, *(os.getsid(pid) for pid in pids)]
    assert sum(len(session_members(session)) for session in sessions) >= 3
    for group in [job.pid, *(os.getpgid(pid) for pid in pids)]:
        with contextlib.suppress(ProcessLookupError):  # the end of one has ended the other one already
            os.killpg(group, signal.SIGKILL)
    output_of(job)
    until(lambda: not any(alive_members(session) for session in sessions), "a process lives on", 60)


def with_workers(rank: int, world_size: int) -> None:
    model, session, optimizer = start(world_size, num_blocks=1)
    loader = DataLoader(list(range(100_000)), num_workers=2, persistent_workers=True, multiprocessing_context="fork")
    for step, _ in enumerate(loader):
        with session.minibatch():
            loss_of(model, tokens(step, rank, 0)).backward()
        use_up(optimizer)


def in_a_nursery(rank: int, world_size: int) -> None:
    """multiprocessing forbids daemonic processes children; DataLoader workers need permission."""
    import multiprocessing

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    with_workers(rank, world_size)


def test_death_is_noticed_at_once_although_forked_workers_live_on() -> None:
    """Fault test 12: the workers keep the dead rank's sockets open; the pidfd does not care."""
    group = start_ranks(2, in_a_nursery, env=TIMEOUT)
    workers = list[int]()
    try:
        until(lambda: len(children_of(group.pids[1])) == 2, "the DataLoader workers did not start")
        workers = children_of(group.pids[1])
        time.sleep(1)
        for worker in workers:  # or DataLoader's own watchdog would end them some seconds after the rank
            os.kill(worker, signal.SIGSTOP)
        os.kill(group.pids[1], signal.SIGKILL)
        killed = time.monotonic()
        results = group.join(180, expendable=[1])  # the workers hold its pipe
        assert_told(results[0], "rank 1", "signal 9")
        assert results[0].seconds - (killed - group.started) < NOTICE_S
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


SMALL_SHM_JOB = """
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
torch.manual_seed(0)
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
model = torch.nn.Sequential(*[torch.nn.Linear(3620, 3620, bias=False) for _ in range(4)])  # 4 x 50 MB
mesh = init_device_mesh("cpu", (world_size,))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
session = odc.patch_fsdp(model)
with session.minibatch():
    model(torch.ones(2, 3620)).sum().backward()
assert all(p.grad is not None for p in model.parameters())
sys.stdout.write(f"MEMORY {session.memory().overhead >> 20} {os.listdir('/dev/shm')}\\n")  # in one piece
sys.stdout.flush()
session.close()
dist.barrier()  # gloo's threads must have dropped the last results before Python begins to end
dist.destroy_process_group()
"""


def can_mount() -> bool:
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=64m tmpfs /dev/shm"]
    try:
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.extended
def test_a_small_dev_shm_is_enough_for_a_large_model(tmp_path: Path) -> None:
    """Fault test 13: a 200 MB model where /dev/shm has 64 MB, as in docker."""
    if not can_mount():
        pytest.skip("needs permission to mount a small /dev/shm in a mount namespace (root)")
    prefix = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]
    job = start_job(tmp_path, SMALL_SHM_JOB, prefix=prefix)
    text = output_of(job)
    assert job.returncode == 0, text
    lines = [line.split(maxsplit=2) for line in text.splitlines() if line.startswith("MEMORY")]
    assert len(lines) == 2
    for _, megabytes, files in lines:
        assert int(megabytes) >= 199  # published shards and sums of half a model
        assert files == "[]"


# Error paths hold nothing up


def failing_then_closing(rank: int, world_size: int) -> float:
    model: Net = shard(build(num_blocks=1), world_size)
    session = odc.patch_fsdp(model)
    if rank == 1:
        time.sleep(1)
        os._exit(3)
    started = time.monotonic()
    with pytest.raises(odc.PeerDiedError), session.minibatch():
        loss_of(model, tokens(0, rank, 0)).backward()
    session.close()
    return time.monotonic() - started


def test_after_a_death_close_returns_at_once() -> None:
    results = start_ranks(2, failing_then_closing, env=TIMEOUT).join(120)
    assert results[0].error is None, results[0].error
    assert results[0].value < 1 + NOTICE_S
