"""Layer 3: ranks as processes. Ctrl-C and SIGTERM at every place where a rank waits. Fault test 9."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from faulty_ranks import ENDS, NOTICE_S, Fault, survivors
from process_ranks import RankGroup, RankResult, across, assert_all_say, start_ranks
from training import build, loss_of, optimizer_of, shard, tokens, use_up
from watching import do_before, killed_on_error, scheduler_state, until, written

import odc
from odc import Runtime
from odc.transports._rendezvous import TcpRendezvous, UnixRendezvous


def prepare(notes: str, rank: int, world_size: int) -> None:
    """Join rank 0's process group, have Ctrl-C interrupt, and have SIGUSR1 write down where this process is."""
    os.setpgid(0, 0 if rank == 0 else int(written(Path(notes, "leader"))))
    if rank == 0:
        Path(notes, "leader").write_text(f"{os.getpid()} ")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where pytest runs in the background
    stack = Path(notes, f"stack{rank}").open("w")  # noqa: SIM115  # faulthandler keeps it
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    Path(notes, f"ready{rank}").touch()


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
    "push, for a slot": WaitPoint("_await_room", _STOP + "gather.before,at=1", "", "first", accumulate="daemon"),
    "push, for a lock": WaitPoint("_await_lock", _STOP + "scatter.after_chunk,at=1", "", "first", accumulate="direct"),
    "finish, for done": WaitPoint("_await_done", _STOP + "finish.before_done,at=3"),
    "gather, for bytes of another host": WaitPoint("_await", _STOP + "gather.before,at=1", "", "first", hosts=3),
    "finish, for another host": WaitPoint("_await_done", _STOP + "finish.before_done,at=3", "", "last", hosts=3),
}
FURTHER_WAITS = ["push, for a slot", "finish, for another host"]
"""With ``-m extended`` all with both signals; in every run each of the others with one."""
OF_PUSHES = ["push, for a slot", "push, for a lock"]
ON_THE_PROCESS_GROUP = "for an answer on the process group"
SETUP_WAITS = {
    ON_THE_PROCESS_GROUP: WaitPoint("all_gather", _STOP + "setup"),
    "for memory": WaitPoint("_receive", step_of_setup="swap"),
    "for ranks of this host": WaitPoint("receive_until", step_of_setup="connect", stopped=1, victim=2),
    "for ranks of other hosts": WaitPoint("receive_until", step_of_setup="connect hosts", hosts=3, stopped=1, victim=2),
}
STEPS_OF_SETUP: dict[str, tuple[type, str]] = {
    "swap": (UnixRendezvous, "swap"),
    "connect": (UnixRendezvous, "connect"),
    "connect hosts": (TcpRendezvous, "connect"),
}


def each_signal(names: Sequence[str], further: Sequence[str] = ()) -> pytest.MarkDecorator:
    """The first with SIGINT, the second with SIGTERM, and so on; the rest with ``-m extended``."""
    signals = [signal.SIGTERM, signal.SIGINT]
    cases = [
        pytest.param(name, sent, marks=[] if name not in further and (i + j) % 2 else [pytest.mark.extended])
        for i, name in enumerate(names)
        for j, sent in enumerate(signals)
    ]
    return pytest.mark.parametrize(("name", "sent"), cases, ids=lambda value: getattr(value, "name", None))


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
        use_up(optimizer)


def await_others_in(runtime: Runtime, minibatch: int) -> None:
    """If this is that minibatch: return when the others are done with it, as far as they can be without this rank."""
    if runtime.minibatch == minibatch:
        others = [rank for rank in range(runtime.topology.world_size) if rank != runtime.topology.rank]
        done = runtime._protocol._done
        until(lambda: all(runtime._transport.count(r, done) >= minibatch for r in others), "the others do not come")


def stop_before(owner: type, name: str) -> None:
    do_before(owner, name, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def start_waiting(at: WaitPoint, notes: Path) -> RankGroup:
    """Three ranks, of which one is stopped and another one waits for it."""
    env = {"ODC_TIMEOUT": "150", "ODC_FAULT": at.fault}
    group = start_ranks(3, across, at.hosts, interruptible, at, env=env, enter=partial(prepare, str(notes)))
    with killed_on_error(group):
        until(lambda: all(Path(notes, f"ready{rank}").exists() for rank in range(3)), "the ranks did not start")
        until(lambda: scheduler_state(group.pids[at.stopped]) == "T", "no rank has stopped")
        until_in(group.pids[at.victim], Path(notes, f"stack{at.victim}"), at.function)
    return group


def until_in(pid: int, stack: Path, function: str) -> None:
    """Return when the process is in ``function`` now and a moment later: then it waits there."""
    seen, deadline = 0, time.monotonic() + 100
    while seen < 2:
        length, asked = stack.stat().st_size, 0.0

        def has_answered(before: int = length) -> bool:
            """Asked again every second: faulthandler drops a signal that comes while it is ending a dump."""
            nonlocal asked
            if time.monotonic() > asked + 1.0:
                asked = time.monotonic()
                os.kill(pid, signal.SIGUSR1)
            return stack.stat().st_size > before

        until(has_answered, "no stack was written")
        time.sleep(0.1)
        newest = stack.read_text()[length:]
        seen = seen + 1 if f" in {function}\n" in newest else 0
        assert time.monotonic() < deadline, f"it does not wait in {function}, but: {newest}"


def assert_ended_by(result: RankResult, sent: signal.Signals) -> None:
    assert result.error_type == ("KeyboardInterrupt" if sent is signal.SIGINT else None), result
    assert result.exitcode == ENDS[sent.name].exitcode


def signal_one(at: WaitPoint, sent: signal.Signals, notes: Path) -> tuple[int, list[RankResult]]:
    """The rank that waits gets the signal; it ends; the stopped one goes on. The number of the first one's process, and
    how all ended, within ``NOTICE_S``."""
    group = start_waiting(at, notes)
    with killed_on_error(group):
        sent_at = time.monotonic()
        os.kill(group.pids[at.victim], sent)
        until(lambda: scheduler_state(group.pids[at.victim]) == "Z", "it did not end", NOTICE_S)
        os.kill(group.pids[at.stopped], signal.SIGCONT)
        results = group.join(400)
    assert max(result.seconds for result in results) < sent_at - group.started + 2 * NOTICE_S
    assert_ended_by(results[at.victim], sent)
    return group.pids[at.victim], results


@each_signal([*WAITS], FURTHER_WAITS)
def test_a_signal_ends_a_rank_that_waits_and_the_others_learn_who_it_was(
    name: str, sent: signal.Signals, tmp_path: Path
) -> None:
    at = WAITS[name]
    fault = Fault(at.victim, at.function, sent.name, interruptible, at.hosts)
    pid, results = signal_one(at, sent, tmp_path)
    for rank, result in enumerate(results):
        if rank != at.victim:
            fault.assert_told(rank, result, pid)


@each_signal(["for memory", ON_THE_PROCESS_GROUP, "for ranks of other hosts", "for ranks of this host"])
def test_a_signal_ends_a_rank_that_waits_in_set_up_and_the_others_fail(
    name: str, sent: signal.Signals, tmp_path: Path
) -> None:
    at = SETUP_WAITS[name]
    _, results = signal_one(at, sent, tmp_path)
    assert all(r.error_type in ("SetupError", "RuntimeError") for r in survivors(results, at.victim)), results
    if name == ON_THE_PROCESS_GROUP and sent is signal.SIGTERM:
        assert_all_say(survivors(results), "rank 1 ", kinds=["SetupError"])


@each_signal(
    ["gather, for published", "finish, for another host", ON_THE_PROCESS_GROUP, *OF_PUSHES],
    OF_PUSHES,
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
