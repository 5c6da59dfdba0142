"""Layer 3: ranks as processes. What becomes of a job when something happens to one of its ranks: a few seeded trials.

`odc bench chaos` runs hundreds. The judgement of a trial is tested without ranks.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from odc.bench.proof.chaos import launch
from odc.bench.proof.chaos.launch import Outcome, _Seen, blamed_rank, judge, last_error, run_trials
from odc.bench.proof.chaos.trials import (
    ACTIONS,
    DIFFER,
    INJECTED,
    MESHES,
    PHASES,
    POINTS,
    RAISED,
    TRANSPORTS,
    WAYS,
    Trial,
    generate,
    generate_on_meshes,
)
from odc.liveness.faults import ACTIONS as FAULT_ACTIONS
from odc.liveness.faults import POINTS as FAULT_POINTS

PLAIN = Trial(0, "fsdp2", "shm", 2, 1, "kill", "gather", "", 2, 0.1, 1.0, False, "in place")
DEAD = "rank 0 waited 0.1 s for rank 1 (host a, pid 8): gather of unit 'x'. Cause: rank 1 is dead: killed by signal 9"


def trials_of(*changes: dict[str, Any]) -> list[Trial]:
    return [replace(PLAIN, number=number, **change) for number, change in enumerate(changes)]


ON_RANKS: list[dict[str, Any]] = [
    {"action": "kill", "phase": "push", "point": "scatter.after_chunk", "at": 9},
    {"action": "pause", "phase": "evaluation", "transport": "tcp", "pause_s": 1.5, "staging": "staged"},
    {"action": "raise", "phase": "gather", "transport": "tcp", "world_size": 3, "victim": 0, "staging": "staged"},
    {"action": "_exit", "phase": "step", "fsdp": "fsdp1-flat", "staging": ""},
    {"action": "interrupt", "phase": "finish", "world_size": 3, "victim": 2, "fsdp": "fsdp1-orig", "staging": ""},
    {"action": "stop", "phase": "publish", "point": "publish.before", "at": 9},
    {"action": "exit", "phase": "clip", "transport": "tcp", "fsdp": "fsdp1-flat", "staging": ""},
    {"action": "raise", "phase": "set-up", "transport": "replicas", "world_size": 4, "victim": 0, "idle": True},
    {"action": "interrupt", "phase": "save", "transport": "tcp", "world_size": 3},
]
ON_MESHES: list[dict[str, Any]] = [
    {"mesh": "dp cp tp", "action": "pause", "phase": "push", "idle": True, "victim": 5},
    {"mesh": "replicate dp tp", "action": "kill", "phase": "gather", "transport": "tcp", "victim": 6},
    {"mesh": "replicate dp tp", "action": "raise", "phase": "step", "victim": 3},
    {"mesh": "dp tp", "action": "raise", "phase": "push", "transport": "tcp", "staging": "staged"},
    {"mesh": "dp cp", "action": "kill", "phase": "gather", "transport": "tcp", "victim": 2},
    {"mesh": "dp cp tp", "action": "raise", "phase": "push", "transport": "tcp", "victim": 4},
    {"mesh": "dp cp tp", "action": DIFFER, "phase": DIFFER, "transport": "tcp", "victim": 7},
    {"mesh": "dp tp", "action": "terminate", "phase": "finish", "victim": 0},
]
EVERY_RUN = (ON_RANKS[0], ON_MESHES[3])
REST = (*ON_RANKS[1:], *ON_MESHES[:3], *ON_MESHES[4:])


@functools.cache
def outcomes(is_rest: bool) -> list[Outcome]:
    """All together: each job imports torch."""
    changes = [dict(change) for change in (REST if is_rest else EVERY_RUN)]
    for change in changes:
        if "mesh" in change:
            change["world_size"] = 2 ** len(change["mesh"].split())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("odc.bench.proof.chaos.trials.NOTICE_S", 60.0)  # how soon is what the benchmark is for
        return list(run_trials(trials_of(*changes), jobs=1))


@pytest.mark.parametrize("is_rest", [False, pytest.param(True, marks=pytest.mark.extended)])
@pytest.mark.parametrize("on_mesh", [False, True])
def test_ranks_that_come_to_grief_are_named_by_the_others(is_rest: bool, on_mesh: bool) -> None:
    found = [outcome for outcome in outcomes(is_rest) if bool(outcome.trial.mesh) is on_mesh]
    assert found
    for outcome in found:
        assert outcome.is_good, (outcome.trial.describe(), outcome.status, outcome.reason, outcome.last_errors)


class TwoAtATime:
    """Runs a trial, in its stead, only while another one runs."""

    both = threading.Barrier(2)

    def run(self, trial: Trial) -> Outcome:
        self.both.wait(30)
        return Outcome(trial, "right")

    def close(self) -> None:
        pass


def test_jobs_run_side_by_side_and_outcomes_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "Ranks", TwoAtATime)
    trials = trials_of(*[{}] * 4)
    assert [outcome.trial for outcome in run_trials(trials, jobs=2)] == trials


def seen(code: int = -9, other: int = 1, text: str = f"odc.errors.PeerDiedError: {DEAD}", **further: Any) -> _Seen:
    """What a good trial of ``PLAIN`` shows, or one that differs from it."""
    found = _Seen([7, 8], 10.0, {0: (other, 12.0), 1: (code, 10.0)}, texts=[text, ""])
    for name, value in further.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (seen(), "right"),
        (seen(killed={0}), "hang"),
        (seen(code=1), "exit code"),
        (seen(code=0), "no fault"),
        (seen(other=-6), "exit code"),
        (seen(other=0), "exit code"),
        (seen(ends={0: (1, 40.0), 1: (-9, 10.0)}), "late"),
        (seen(left=["sleep 100"]), "left"),
        (seen(text="RuntimeError: Connection closed by peer"), "unnamed"),
        (seen(text=""), "unnamed"),
        (seen(text="odc.errors.PeerDiedError: " + DEAD.replace("rank 1", "rank 3")), "wrong rank"),
        (seen(text="odc.errors.PeerDiedError: " + DEAD.replace("signal 9", "signal 15")), "wrong cause"),
    ],
)
def test_each_broken_promise_has_its_name(found: _Seen, status: str) -> None:
    assert judge(PLAIN, found).status == status


def test_how_a_process_of_another_host_has_ended_its_reporter_cannot_know() -> None:
    trial = replace(PLAIN, transport="tcp", world_size=4, victim=3)
    far, near = (
        "rank 2 aborted because rank 1 (pid 8): PeerDiedError: rank 3 is dead: its connection ended",
        "rank 3 gone",
    )
    assert trial.says_why(far, 1)
    assert not trial.says_why(near, 2)
    found = seen(
        ends={0: (1, 12.0), 1: (1, 12.0), 2: (1, 12.0), 3: (-9, 10.0)}, texts=[f"odc.errors.AbortedError: {far}"] * 3
    )
    assert judge(trial, replace(found, pids=[7, 8, 9, 10], texts=[*found.texts, ""])).status == "right"


ENDS = {0: (0, 12.0), 1: (0, 12.0)}


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (seen(ends=ENDS, text=""), "right"),
        (seen(ends=ENDS, text="AssertionError: wrong numbers: parameter x"), "wrong numbers"),
        (seen(ends={0: (1, 12.0), 1: (0, 12.0)}), "exit code"),
        (seen(ends=ENDS, text="", happened_at=13.0), "no fault"),
    ],
)
def test_a_pause_must_end_in_the_right_numbers(found: _Seen, status: str) -> None:
    assert judge(replace(PLAIN, action="pause"), found).status == status


@pytest.mark.parametrize(
    ("pair", "status"), [((2, 3), "right"), ((2, 1), "wrong rank"), ((0, 1), "wrong rank"), ((2, 2), "wrong rank")]
)
def test_ranks_that_differ_are_named_with_one_that_they_compute_with(pair: tuple[int, int], status: str) -> None:
    trial = replace(PLAIN, action=DIFFER, phase=DIFFER, mesh="dp tp", world_size=4, victim=2)
    text = (
        "odc.errors.AbortedError: rank 0 aborted because rank 3 (pid 9): ProtocolError: ranks that compute together "
        f"have different numbers of microbatches: rank {pair[0]} has ended minibatch 3 after 1, rank {pair[1]} after 2"
    )
    ends = dict.fromkeys(range(4), (1, 12.0))
    assert judge(trial, seen(ends=ends, pids=[7, 8, 9, 10], texts=[text] * 4)).status == status


@pytest.mark.parametrize(
    ("error", "blamed"),
    [
        (DEAD, 1),
        (f"rank 0 aborted because rank 2 (pid 9): PeerDiedError: {DEAD.replace('rank 0', 'rank 2')}", 1),
        (f"rank 0 aborted because rank 2 (pid 9): ValueError: {RAISED}", 2),
        ("rank 0 aborted because rank 2 (pid 9): PeerDiedError: rank 2: gather: rank 3 (host b) cannot be reached", 3),
        ("set-up failed on rank 3: ValueError: x", 3),
        ("Connection closed by peer", None),
    ],
)
def test_the_blame_is_that_of_the_first_cause(error: str, blamed: int | None) -> None:
    assert blamed_rank(error, 0) == blamed


def test_the_last_error_of_an_output() -> None:
    text = (
        'Traceback\n  File "odc/bench/chaos/script.py", line 9, in train\n    dist.all_reduce(total)\n'
        "RuntimeError: closed\nby peer\n"
    )
    assert last_error(f"ValueError: first\n{text}") == "RuntimeError: closed by peer"
    assert last_error("a warning") == ""


def test_trials_are_those_of_the_seed_and_all_kinds_come() -> None:
    trials = list(itertools.islice(generate(0), 300))
    assert trials == list(itertools.islice(generate(0), 300))
    assert trials != list(itertools.islice(generate(1), 300))
    assert {t.transport for t in trials} == set(TRANSPORTS)
    assert {t.action for t in trials} == set(ACTIONS)
    assert {t.phase for t in trials} == set(PHASES)
    assert all(count >= 2 for count in Counter((t.transport, t.action) for t in trials).values())


def test_each_mesh_meets_each_end() -> None:
    trials = list(itertools.islice(generate_on_meshes(0), 100))
    assert trials == list(itertools.islice(generate_on_meshes(0), 100))
    counts = Counter((t.mesh, t.action) for t in trials)
    assert all(counts[mesh, action] >= 2 for mesh in MESHES for action in (*ACTIONS, DIFFER))
    for values in (TRANSPORTS, PHASES):
        assert {t.transport for t in trials} | {t.phase for t in trials} >= set(values) - {"replicas", "shared"}
    assert {t.victim for t in trials if t.world_size == 8} == set(range(8))


def test_fsdp2_meets_every_end_in_place_and_staged() -> None:
    trials = [trial for trial in itertools.islice(generate(0), 300) if trial.fsdp == "fsdp2"]
    for values in (TRANSPORTS, ACTIONS, PHASES):
        met = Counter((t.staging, v) for t in trials for v in (t.transport, t.action, t.phase) if v in values)
        assert all(met[way, value] >= 2 for way in WAYS if way for value in values), met


def test_injected_faults_are_those_that_odc_knows() -> None:
    assert {point for points in POINTS.values() for point in points} <= set(FAULT_POINTS)
    assert set(INJECTED.values()) <= set(FAULT_ACTIONS)
