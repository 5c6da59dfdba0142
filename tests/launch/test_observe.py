"""Layers 1 and 3: what ``odc run`` shows while a run lasts: ``--timeline``, ``--live``."""

from __future__ import annotations

import io
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from test_launch import TRAIN, launch

from odc.cli.run import drawn_timeline
from odc.config import LaunchEnvironment
from odc.launch import observe
from odc.launch.observe import KEPT, Observation, bars_of
from odc.timeline import MinibatchStats, Stats


def events(folder: Path, kind: str) -> list[tuple[int, int]]:
    """Rank and minibatch of each in the trace."""
    found = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [(event["tid"], event["args"]["minibatch"]) for event in found if event.get("cat") == kind]


def test_a_timeline_is_drawn_behind_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / socket.gethostname()):
        folder.mkdir(exist_ok=True)
        (folder / "timeline-rank7.json").write_text("of an earlier run")
    with drawn_timeline(str(tmp_path)):
        (ended,) = launch((True, ["--timeline", str(tmp_path), TRAIN, "2", "clip"]))
    assert [rank.code for rank in ended] == [None, None]
    assert sorted(events(tmp_path, "minibatch")) == [(rank, minibatch) for rank in (0, 1) for minibatch in range(3)]
    assert {(0, 0), (1, 2)} <= set(events(tmp_path, "gather")) & set(events(tmp_path, "scatter"))
    assert (tmp_path / "timeline.png").stat().st_size > 10_000
    assert (
        "timeline.png and trace.json (open it at ui.perfetto.dev), of the last 3 minibatches" in capsys.readouterr().err
    )


def test_a_timeline_is_drawn_where_a_rank_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with drawn_timeline(str(tmp_path)):
        (ended,) = launch((True, ["--timeline", str(tmp_path), TRAIN, "2", "raise"]))
    assert all(rank.code for rank in ended)
    assert sorted(events(tmp_path, "minibatch")) == [(rank, minibatch) for rank in (0, 1) for minibatch in range(3)]
    with drawn_timeline(str(tmp_path / "empty")):
        pass
    assert "empty: no rank of this host has ended a minibatch" in capsys.readouterr().err


def minibatch(compute_s: dict[int, float]) -> MinibatchStats:
    return MinibatchStats(7, 4.0, 2, Stats(wait_s=1.5), compute_s)


def test_bars_are_as_long_as_ranks_compute() -> None:
    assert bars_of(minibatch({0: 1.0, 1: 4.0})).splitlines() == [
        "odc: minibatch 7: 4.00 s, overhead 38 %, rank 1 computed longest (4.00 s, the least 1.00 s)",
        f"rank 1    {'█' * 40}     4.00 s",
        f"rank 0    {'█' * 10}{'·' * 30}     1.00 s",
    ]
    assert bars_of(minibatch(dict.fromkeys(range(20), 1.0))).splitlines()[-1] == "and 4 ranks that were faster"
    assert minibatch({0: 1.0, 1: 4.0}).metrics() == {
        "odc/bubble_rate": 0.375,
        "odc/waiting_s": 1.5,
        "odc/slowest_rank": 1,
    }


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class FakeSession:
    """That ends minibatches by hand."""

    def start_timeline(self, timeline: Any) -> None:
        self.timeline = timeline

    def on_minibatch(self, call: Any) -> Any:
        self.end = call
        return lambda: setattr(self, "end", None)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_rank_0_shows_each_minibatch(rank: int, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(observe, "_SAY_EVERY_S", 0.0)
    session: Any = FakeSession()
    observation = Observation(LaunchEnvironment(rank=rank, world_size=2, local_world_size=2), None, True, said.append)
    observation.begin(session)
    if rank == 0:
        session.end(minibatch({0: 1.0, 1: 4.0}))
    observation.close(has_failed=False)
    assert getattr(session, "end", None) is None
    shown = "overhead 38 %" in stream.getvalue() and "██████████···" in stream.getvalue()
    assert (shown, len(said)) == (rank == 0 and stream.isatty(), int(rank == 0 and not stream.isatty()))
    stream.truncate(0)


@pytest.mark.parametrize("local_world_size", [4, 2])
def test_a_timeline_keeps_the_last_minibatches(
    local_world_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of several hosts each has a folder of its own: clocks differ, and the folder may be one for all."""
    session: Any = FakeSession()
    launched = LaunchEnvironment(rank=3, world_size=4, local_world_size=local_world_size)
    own = tmp_path / socket.gethostname() if local_world_size == 2 else tmp_path
    observation = Observation(launched, str(tmp_path), False, print)
    observation.begin(session)
    for _ in range(20):
        session.timeline.record("gather", "layer", 0, 1)
        session.end(minibatch({3: 1.0}))
    with drawn_timeline(str(tmp_path)):
        observation.close(has_failed=False)
    saved = json.loads((own / "timeline-rank3.json").read_text())
    assert {span[4] for span in saved["spans"]} == set(range(20 - KEPT, 20))
    assert f"odc: {own}: timeline.png and trace.json" in capsys.readouterr().err
