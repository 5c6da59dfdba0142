"""Layer 1: no ranks. Who is to blame for a wait, by what ranks show of themselves; what is passed on meanwhile."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from odc import limits
from odc.errors import PeerClosedError
from odc.liveness.faults import FaultInjector
from odc.rank import waiting
from odc.rank.waiting import Failure, Patience, Waiter
from odc.rank.watchdog import InCollective, JobWatchdog
from odc.timeline import Stats
from odc.transports._control import Heartbeats
from odc.transports._peers import IN_COLLECTIVE, PeerState, in_collective

LIMIT_S = 10.0


@dataclass
class Shown:
    """What one rank shows."""

    progress: int = 0
    looks: int = 0
    beats: int = 0
    waits_for: int | None = None


@dataclass
class Ranks:
    """A job as rank 0 sees it. Time passes with :meth:`pass_time`."""

    seen: dict[int, Shown]
    now: float = 100.0
    rank: int = 0
    stopped: set[int] = field(default_factory=set)

    def sees(self, rank: int) -> bool:
        return rank in self.seen

    @property
    def others(self) -> list[int]:
        return [rank for rank in self.seen if rank != self.rank]

    def peer(self, rank: int) -> Any:
        shown = self.seen[rank]
        heartbeats = Heartbeats(shown.progress, shown.looks, shown.beats)
        return SimpleNamespace(heartbeats=heartbeats, waiting_on=shown.waits_for, state=PeerState.ALIVE)

    def blame_within(self, patience: Patience, awaited: int, seconds: int) -> tuple[int, int, str, bool] | None:
        """Look once a second; ranks that wait and are not stopped look as well."""
        for _ in range(seconds):
            found = patience.blame([awaited])
            if found is not None:
                return found
            self.now += 1.0
            for rank, shown in self.seen.items():
                if rank not in self.stopped:
                    shown.beats += 1
                    shown.looks += shown.waits_for is not None and shown.waits_for < IN_COLLECTIVE
        return None

    def blamed(self) -> tuple[int, int, str, bool]:
        """By who waits for rank 1, within half a minute."""
        found = self.blame_within(patience_of(self), 1, 30)
        assert found is not None
        return found


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    made = Ranks({rank: Shown() for rank in range(4)})
    monkeypatch.setattr(waiting.time, "monotonic", lambda: made.now)
    return made


def patience_of(ranks: Ranks) -> Patience:
    job: Any = ranks
    return Patience(job, LIMIT_S)


def test_who_makes_no_progress_is_to_blame_after_the_limit(ranks: Ranks) -> None:
    found = ranks.blamed()
    assert found[:2] == (1, 1)
    assert ranks.now - 100.0 == LIMIT_S + 1


def test_the_blame_follows_the_waits(ranks: Ranks) -> None:
    ranks.seen[1].waits_for, ranks.seen[2].waits_for = 2, 3
    found = ranks.blamed()
    assert found[:2] == (1, 3)


@pytest.mark.parametrize("stopped", [1, 2, 3])
def test_who_is_stopped_while_it_waits_is_to_blame(stopped: int, ranks: Ranks) -> None:
    """1 waits for 2, 2 for 3, 3 for this rank: a circle of which the part that the stopped rank says is of the past."""
    for rank, target in ((1, 2), (2, 3), (3, 0)):
        ranks.seen[rank].waits_for = target
    ranks.stopped = {stopped}
    found = ranks.blamed()
    assert found[1] == stopped
    assert "silent" in found[2]


@pytest.mark.parametrize(
    ("stopped", "fault"), [({1}, "alive but silent"), (set(), "has waited for 13.0 s in a collective")]
)
def test_a_rank_that_is_stopped_in_a_collective_waits_for_nobody(stopped: set[int], fault: str, ranks: Ranks) -> None:
    ranks.seen[1].waits_for, ranks.stopped = IN_COLLECTIVE, stopped
    found = ranks.blamed()
    assert fault in found[2]


def test_who_waits_for_a_rank_that_is_not_seen_from_here_is_left_to_judge_it(ranks: Ranks) -> None:
    ranks.seen[1].waits_for = 77
    assert ranks.blame_within(patience_of(ranks), 1, 100) is None
    ranks.stopped = {1}
    ranks.blamed()


def test_ranks_that_all_wait_for_each_other_are_not_waited_for_without_end(ranks: Ranks) -> None:
    ranks.seen[1].waits_for = 0
    found = ranks.blamed()
    assert "wait for each other" in found[2]


@pytest.mark.parametrize(
    ("entered", "waits_for", "stopped", "is_stuck"),
    [
        (4, {1: in_collective(5), 2: in_collective(5), 3: 1}, set(), True),
        (4, {1: 2, 2: in_collective(5), 3: in_collective(5)}, set(), True),
        (5, {1: in_collective(5), 2: 1, 3: 1}, set(), False),  # this rank has been there, and they come out of it
        (4, {1: in_collective(5), 2: 1}, set(), False),  # rank 3 works
        (4, {1: in_collective(5), 2: 1, 3: 1}, {1}, False),  # rank 1 does not run
    ],
)
def test_a_rank_that_waits_for_this_one_in_a_collective_of_all_is_not_waited_for(
    entered: int,
    waits_for: dict[int, int],
    stopped: set[int],
    is_stuck: bool,
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "num_entered", lambda group: entered)
    for rank, whom in waits_for.items():
        ranks.seen[rank].waits_for = whom
    ranks.stopped = stopped
    found = ranks.blamed()
    assert (ranks.now - 100.0 < LIMIT_S) == is_stuck
    assert ("neither goes on" in found[2]) == is_stuck
    assert found[3] != is_stuck


def test_progress_in_a_circle_shows_that_it_is_none(ranks: Ranks) -> None:
    ranks.seen[1].waits_for, ranks.seen[2].waits_for = 2, 0
    patience = patience_of(ranks)
    for _ in range(10):
        assert ranks.blame_within(patience, 1, 8) is None
        ranks.seen[2].progress += 1


def test_a_heartbeat_tells_a_busy_process_from_one_that_is_stopped(ranks: Ranks) -> None:
    patience = patience_of(ranks)
    ranks.stopped = {2}
    for _ in range(30):
        patience.silence_s(1, heartbeat=True), patience.silence_s(2, heartbeat=True)
        assert ranks.blame_within(patience, 3, 1) is None or ranks.now > 100.0 + LIMIT_S
    assert patience.silence_s(1, heartbeat=True) <= 1.0
    assert patience.silence_s(2, heartbeat=True) >= LIMIT_S


@dataclass
class TwoGroups:
    """The job of a rank that has been told of a failure by one of its groups."""

    told: list[str] = field(default_factory=list)
    is_told: threading.Event = field(default_factory=threading.Event)
    rank: int = 0
    others: tuple[int, ...] = ()
    own: Any = field(default_factory=lambda: SimpleNamespace(beat=lambda: None))

    def abort_notice(self) -> str:
        return "rank 3: ValueError"

    def abort(self, text: str) -> None:
        self.told.append(text)
        self.is_told.set()


def test_what_one_group_has_told_is_told_to_the_other_while_the_script_computes() -> None:
    job: Any = TwoGroups()
    watchdog = JobWatchdog(job, Failure(), InCollective(), LIMIT_S, lambda error: None, lambda: 0)
    try:
        assert job.is_told.wait(5)
    finally:
        watchdog.close()
    assert job.told == ["rank 3: ValueError"]


@pytest.mark.parametrize(("arrives_s", "closes_s"), [(0.5, 0.0), (6.5, 6.0), (8.0, 6.0), (None, 0.0)])
def test_what_a_rank_gave_to_a_collective_may_arrive_after_its_close(
    arrives_s: float | None, closes_s: float, ranks: Ranks
) -> None:
    """Within a second; a rank that has not come to the collective by then will not come."""
    started, own = ranks.now, SimpleNamespace(tick=lambda: None, set_waiting_on=lambda whom: None)

    def is_completed() -> bool:
        ranks.now += 0.05
        for shown in ranks.seen.values():
            shown.progress += 1
        return arrives_s is not None and ranks.now - started >= arrives_s

    def peer(rank: int) -> Any:
        state = PeerState.CLOSED if rank == 2 and ranks.now - started >= closes_s else PeerState.ALIVE
        about = {"who": f"rank {rank}", "is_dead": False, "describe": lambda: "it closed its session"}
        return SimpleNamespace(**{**vars(Ranks.peer(ranks, rank)), **about, "state": state})

    job: Any = SimpleNamespace(rank=0, own=own, sees=ranks.sees, others=ranks.others, peer=peer)
    job.abort_notice, job.after_refusal = lambda: None, lambda rank: ""
    transport: Any = SimpleNamespace(peers=own)
    waiter = Waiter(transport, LIMIT_S, FaultInjector("", rank=0), Stats(), Failure(), job)
    if arrives_s is not None and arrives_s - closes_s < limits.CLOSED_S:
        waiter.wait_for_work(is_completed, "parameters", [0, 2])
        return
    with pytest.raises(PeerClosedError, match="rank 2 is gone: it closed its session"):
        waiter.wait_for_work(is_completed, "parameters", [0, 2])
    assert limits.CLOSED_S < ranks.now - started - closes_s < limits.CLOSED_S + 0.5
