"""Layer 1: no ranks. Who is to blame for a wait, by what ranks show of themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from odc.liveness import waiting
from odc.liveness.waiting import Patience
from odc.transports._control import Heartbeats

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

    def peer(self, rank: int) -> Any:
        shown = self.seen[rank]
        heartbeats = Heartbeats(shown.progress, shown.looks, shown.beats)
        return SimpleNamespace(heartbeats=heartbeats, waiting_on=shown.waits_for)

    def blame_within(self, patience: Patience, awaited: int, seconds: int) -> tuple[int, int, str] | None:
        """Look once a second; ranks that wait and are not stopped look as well."""
        for _ in range(seconds):
            found = patience.blame([awaited])
            if found is not None:
                return found
            self.now += 1.0
            for rank, shown in self.seen.items():
                if rank not in self.stopped:
                    shown.beats += 1
                    shown.looks += shown.waits_for is not None
        return None


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    made = Ranks({rank: Shown() for rank in range(4)})
    monkeypatch.setattr(waiting.time, "monotonic", lambda: made.now)
    return made


def patience_of(ranks: Ranks) -> Patience:
    job: Any = ranks
    return Patience(job, LIMIT_S)


def test_who_makes_no_progress_is_to_blame_after_the_limit(ranks: Ranks) -> None:
    found = ranks.blame_within(patience_of(ranks), 1, 30)
    assert found is not None
    assert found[:2] == (1, 1)
    assert ranks.now - 100.0 == LIMIT_S + 1


def test_the_blame_follows_the_waits(ranks: Ranks) -> None:
    ranks.seen[1].waits_for, ranks.seen[2].waits_for = 2, 3
    found = ranks.blame_within(patience_of(ranks), 1, 30)
    assert found is not None
    assert found[:2] == (1, 3)


@pytest.mark.parametrize("stopped", [1, 2, 3])
def test_who_is_stopped_while_it_waits_is_to_blame(stopped: int, ranks: Ranks) -> None:
    """1 waits for 2, 2 for 3, 3 for this rank: a circle of which the part that the stopped rank says is of the past."""
    for rank, target in ((1, 2), (2, 3), (3, 0)):
        ranks.seen[rank].waits_for = target
    ranks.stopped = {stopped}
    found = ranks.blame_within(patience_of(ranks), 1, 30)
    assert found is not None
    assert found[1] == stopped
    assert "silent" in found[2]


def test_who_waits_for_a_rank_that_is_not_seen_from_here_is_left_to_judge_it(ranks: Ranks) -> None:
    ranks.seen[1].waits_for = 77
    assert ranks.blame_within(patience_of(ranks), 1, 100) is None
    ranks.stopped = {1}
    assert ranks.blame_within(patience_of(ranks), 1, 30) is not None


def test_ranks_that_all_wait_for_each_other_are_not_waited_for_without_end(ranks: Ranks) -> None:
    ranks.seen[1].waits_for = 0
    found = ranks.blame_within(patience_of(ranks), 1, 30)
    assert found is not None
    assert "wait for each other" in found[2]


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
