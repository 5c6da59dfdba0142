"""Layer 3: ranks as processes. What happens when a rank dies, stops, raises or leaves, and how the others learn of it.

Each test asserts the error's type and text, how soon it came, and (by conftest) that nothing is left behind.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_jobs import (
    items,
    replicas,
    rollouts,
    sets_up,
    sets_up_again,
    waits_for_rank_0,
    with_a_child,
)
from faulty_ranks import (
    TIMEOUT,
    TRAIN_JOB,
    Fault,
    alive_members,
    endless,
    output_of,
    run_job,
    session_members,
    start_job,
    stoppable,
    wait_for_text,
    wait_for_training,
)
from process_ranks import across, run_ranks, start_ranks
from training import (
    build,
    full_parameters,
    largest_difference,
    reference,
    shard,
    train,
)
from watching import scheduler_state, until

import odc
from odc import ParamSlice, Runtime, RuntimeConfig, UnitSpec
from odc.bench.harness.warm_launch import WarmLauncher
from odc.setup.agreement import ProcessGroupExchange

EXTENDED = pytest.mark.extended

# The table: a rank is hurt, and all others say so

TRAINING = ("minibatch ",)
OF_ITEMS = ("of round ", "'outputs'")
ABSENT = "rank 1 has not come to it, and has ended"
FAULTS = [
    # Fault tests 1, 2 and 8: a rank ends while others gather from it, in mid-push, before publishing, before done.
    Fault(1, "gather.after_chunk", "kill", endless, says=TRAINING),
    Fault(1, "scatter.added", "kill", endless, says=TRAINING),
    Fault(1, "publish.before", "kill", endless, says=TRAINING),
    Fault(1, "finish.before_done", "kill", endless, says=TRAINING),
    Fault(1, "scatter.before", "exit", endless, says=TRAINING),
    # Of two hosts: rank 0 is on that of rank 1, and sees how it ends; rank 2 is not.
    Fault(1, "scatter.after_chunk", "kill", endless, hosts=2, says=TRAINING),
    Fault(1, "gather.before", "exit", endless, hosts=2, says=TRAINING),
    Fault(1, "finish.before_done", "exit", endless, hosts=2, says=TRAINING),
    Fault(1, "scatter.before_post", "segv", endless, hosts=2, says=TRAINING),
    # Fault test 3: its daemon fails.
    Fault(1, "daemon.before_add", "raise", endless, env={"ODC_ACCUMULATE": "daemon"}),
    # Fault test 5: it stops for ever; in a wait, too, where nobody may blame the rank that it had waited for.
    Fault(1, "gather.before", "stop", endless, says=("stopped by a signal", "ODC_TIMEOUT")),
    Fault(1, "wait", "stop", waits_for_rank_0, at=5),
    Fault(1, "wait", "stop", waits_for_rank_0, at=5, hosts=3),
    # Fault test 12: a fork of it lives on. With two ranks on two hosts nobody sees its process.
    Fault(1, "gather.before", "kill", with_a_child),
    Fault(1, "gather.before", "kill", with_a_child, ranks=2, hosts=2),
    # Two replicas of a shard group of two: pairwise over the kind of FSDP, hosts, place, fault and rank.
    Fault(2, "gather.before", "stop", replicas, ranks=4, hosts=2, model="fsdp2"),
    Fault(1, "scatter.before", "stop", replicas, ranks=4, hosts=1, model="fsdp1"),
    Fault(0, "scatter.before", "kill", replicas, ranks=4, hosts=2, model="fsdp2"),
    Fault(3, "replicas.before", "kill", replicas, ranks=4, hosts=2, model="fsdp1"),
    Fault(1, "replicas.before", "raise", replicas, ranks=4, hosts=2, model="int"),
    Fault(2, "clipping", "raise", replicas, ranks=4, hosts=1, model="fsdp1"),
    Fault(3, "collective", "raise", replicas, ranks=4, hosts=2, model="fsdp2"),
    # Set-up, before anything watches a rank.
    Fault(1, "set-up", "raise", sets_up, told=ABSENT),
    Fault(1, "set-up", "kill", sets_up, told=ABSENT),
    Fault(2, "first exchange", "kill", sets_up, told=r"rank 2 \(pid {pid}\) has ended"),
    Fault(2, "set-up", "kill", sets_up_again, told=r"rank 2 \(pid {pid}\) has ended: [^;]*(killed|gone)"),
    # Items are exchanged; their memory has to grow.
    Fault(1, "items.publish.before_post", "kill", items, says=OF_ITEMS),
    Fault(1, "items.publish.before", "exit", items, hosts=2, says=OF_ITEMS),
    Fault(1, "items.read.after_chunk", "kill", items, hosts=2, says=OF_ITEMS),
    Fault(1, "items.read.before", "raise", items, hosts=2),
    Fault(1, "items.publish.before", "stop", items),
    Fault(1, "growth", "kill", items, says=("the channel has to grow from 4096 to",)),
    # The phases of a step of reinforcement learning
    Fault(1, "generation", "kill", rollouts),
    Fault(1, "exchange", "kill", rollouts),
    Fault(1, "log-probabilities", "kill", rollouts),
    Fault(1, "training", "kill", rollouts),
    Fault(1, "step", "kill", rollouts),
]
"""In every run. Of those that stop there are few: others name them behind a time limit."""
FURTHER = [
    Fault(1, "set-up", "exit", sets_up, told=ABSENT),
    Fault(1, "gather.before", "kill", endless, says=TRAINING),
    Fault(1, "scatter.after_chunk", "kill", endless, says=TRAINING),
    Fault(1, "scatter.before", "segv", endless, says=TRAINING),
    Fault(1, "gather.before", "kill", endless, hosts=2, says=TRAINING),
    Fault(1, "publish.before", "kill", endless, hosts=2, says=TRAINING),
    Fault(1, "finish.before_done", "kill", endless, hosts=2, says=TRAINING),
    Fault(1, "scatter.before_post", "exit", endless, hosts=2, says=TRAINING),
    Fault(1, "gather.before", "segv", endless, hosts=2, says=TRAINING),
    Fault(1, "finish.before_done", "segv", endless, hosts=2, says=TRAINING),
    Fault(1, "wait", "stop", waits_for_rank_0, at=5, hosts=2),
    Fault(1, "items.read.before", "segv", items, says=OF_ITEMS),
    Fault(1, "items.done.before", "kill", items, says=OF_ITEMS),
    Fault(1, "items.publish.before_post", "kill", items, hosts=2, says=OF_ITEMS),
    Fault(0, "collective", "kill", replicas, ranks=4, model="int"),
]
REPLICAS = itertools.product(
    range(4),
    ("gather.before", "scatter.before", "replicas.before", "clipping", "collective"),
    ("kill", "raise", "stop"),
    (1, 2),
    ("fsdp2", "fsdp1"),
)
FURTHER += [Fault(who, where, how, replicas, hosts, 4, model) for who, where, how, hosts, model in REPLICAS]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_rank_that_is_hurt_is_named_by_all_others(fault: Fault) -> None:
    fault.check()


@EXTENDED
@pytest.mark.parametrize("fault", [fault for fault in FURTHER if fault not in FAULTS], ids=str)
def test_further_ranks_that_are_hurt_are_named_by_all_others(fault: Fault) -> None:
    fault.check()


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
    env = {**TIMEOUT, "ODC_FAULT": f"rank=2,point={point},at={number},do=kill"}
    results = start_ranks(3, half_push, mode, env=env).join(150)
    assert results[2].exitcode == -signal.SIGKILL
    for result in results[:2]:
        assert result.error is None, result.error
        first, *later = result.value
        assert "rank 2" in first
        assert first.startswith(("PeerDiedError", "AbortedError"))
        assert len(later) >= 5


# Stopped ranks: fault tests 4 and 17


@EXTENDED  # every run has others stopped: test_faults_signals.py, and trials of chaos
@pytest.mark.parametrize(
    ("who", "seconds", "limit_s", "hosts"),
    [
        pytest.param([1], 3, 20, 1, id="one rank"),
        pytest.param([1], 3, 60, 2, id="one rank of another host"),
        pytest.param([0, 1], 8, 5, 1, id="the whole job, for longer than the limit"),
    ],
)
def test_ranks_that_are_stopped_for_a_while_go_on_as_if_nothing_had_been(
    who: list[int], seconds: int, limit_s: int, hosts: int, tmp_path: Path
) -> None:
    """SIGSTOP, then SIGCONT. No rank may blame the others for its own absence: Ctrl-Z, a paused container."""
    steps, started, stopped = 40, tmp_path / "started", tmp_path / "stopped"
    env = {"ODC_TIMEOUT": str(limit_s), "ODC_FAULT": "point=gather.before,do=delay:0.002"}  # 1.5 s of training
    group = start_ranks(2, across, hosts, stoppable, steps, str(started), str(stopped), env=env)
    wait_for_training(started)
    stopped_at = time.monotonic() - group.started
    for rank in who:
        os.kill(group.pids[rank], signal.SIGSTOP)
    stopped.touch()
    time.sleep(seconds)
    for rank in who:
        os.kill(group.pids[rank], signal.SIGCONT)
    results = group.join(300)
    assert [result.error for result in results] == [None, None]
    ended = min(result.seconds for result in results)
    assert ended > stopped_at + seconds, "the ranks had ended before the stop: nothing was tested"
    # On one host: deterministic sums do not know the wire.
    undisturbed = run_ranks(2, stoppable, steps, str(started), str(stopped), timeout_s=300)
    assert largest_difference(results[0].value, undisturbed[0]) == 0.0


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

ON_HOSTS = 'os.environ["ODC_HOST_ID"] = f"host{rank}"\n'
LEAVES = "sys.exit(0) if rank == 1 else "
PENDING = """
model = shard(build(num_blocks=1), world_size)
session = odc.patch_fsdp(model)
if rank == 0:
    from watching import scheduler_state, until
    until(lambda: scheduler_state(session._runtime.topology.pids[1]) == "Z", "rank 1 does not end", 30)
    sys.exit(0)
work = dist.all_reduce(torch.ones(4), async_op=True)
try:
    with session.minibatch():
        raise ValueError("sample 17 has no answer")
finally:
    dist.destroy_process_group()
"""
SCRIPTS = {
    # A launcher takes an exit status of 0 for success and lets rank 0 run on: ODC must end it.
    "rank 1-after a step-sys.exit": (
        TRAIN_JOB.format(at_step_3=LEAVES + "None"),
        [1, 0],
        r"PeerClosedError: rank 0 waited .* for rank 1 \(host .*it closed its session",
    ),
    "rank 1-after a step-sys.exit-2 hosts": (
        ON_HOSTS + TRAIN_JOB.format(at_step_3=LEAVES + "None"),
        [1, 0],
        r"PeerClosedError: rank 0 waited .* for rank 1 \(host host1.* minibatch 5.*closed its session",
    ),
    # Its process may stay for readers; a collective that it will not come to any more ends at once, and says why.
    "rank 1-while others are in a collective-sys.exit-2 hosts": (
        ON_HOSTS + TRAIN_JOB.format(at_step_3=LEAVES + "dist.all_reduce(torch.ones(1))"),
        [1, 0],
        r"PeerClosedError: rank 0 waited .* a collective of the script.*rank 1 is gone: it closed",
    ),
    # Outside of any block of a session: nothing of ODC sees it pass.
    "rank 1-between steps-exception": (
        TRAIN_JOB.format(at_step_3="None if rank == 0 else tokens('no', rank, 0)"),
        [1, 1],
        r"rank 0 aborted because rank 1 \(pid \d+\): TypeError",
    ),
    # Its process group would wait for the other rank, in its destructor. Rank 0 goes on until rank 1 has ended, unless
    # it has failed itself: it may still be in set-up.
    "rank 1-while a collective of it is pending-exception": (PENDING, [None, 1], "ValueError: sample 17 has no answer"),
}


@pytest.mark.parametrize(("body", "codes", "told"), SCRIPTS.values(), ids=SCRIPTS)
def test_how_a_script_ends_is_told_to_the_others(
    body: str, codes: list[int | None], told: str, tmp_path: Path, warm_launcher: WarmLauncher
) -> None:
    started = time.monotonic()
    found, text = run_job(warm_launcher, tmp_path, body)
    assert all(expected in (code, None) for code, expected in zip(found, codes, strict=True)), text
    assert re.search(told, text), text
    assert time.monotonic() - started < 60


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
