"""Layer 1: no processes. The trace for Perfetto, of timelines made by hand: what events have; none overlap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from odc.bench.training.bubble import Recording, write_trace
from odc.timeline import Span, Timeline

MS = 1_000_000


def spans(timeline: Timeline, late_ms: int, *, collectives: bool) -> Timeline:
    """Two microbatches of a minibatch; this rank joins the first gather ``late_ms`` later than it could."""
    timeline.record("phase", "microbatch 0", 0, 50 * MS, microbatch=0)
    timeline.record("phase", "microbatch 1", 50 * MS, 80 * MS, microbatch=1)
    timeline.record("gather", "layer", late_ms * MS, 12 * MS, bytes=64)
    if not collectives:
        timeline.record("wait", "gather of layer", late_ms * MS, 11 * MS, peer=1)
    timeline.record("scatter", "layer", 40 * MS, 45 * MS, bytes=128)
    timeline.record("minibatch", "minibatch 0", 0, 100 * MS)
    return timeline


def events(folder: Path, *, collectives: bool) -> list[dict[str, Any]]:
    for rank in range(2):
        spans(Timeline(rank), 2 + 4 * rank, collectives=collectives).save(folder / f"timeline-rank{rank}.json")
    write_trace(folder / "trace.json", {"a way": Recording.read(folder, collectives=collectives)})
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def of_rank(found: list[dict[str, Any]], rank: int, kind: str) -> list[tuple[float, float, dict[str, Any]]]:
    mine = [event for event in found if event["ph"] == "X" and (event["tid"], event["cat"]) == (rank, kind)]
    return [(event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3, event["args"]) for event in mine]


def test_what_events_say(tmp_path: Path) -> None:
    found = events(tmp_path, collectives=False)
    first = {"minibatch": 0, "microbatch": 0}
    assert of_rank(found, 0, "gather") == [(2, 12, {**first, "unit": "layer", "bytes": 64})]
    assert of_rank(found, 0, "scatter") == [(40, 45, {**first, "unit": "layer", "bytes": 128})]
    assert of_rank(found, 0, "wait") == [(2, 11, {**first, "peer": 1})]
    assert of_rank(found, 0, "compute") == [  # cut where the second microbatch begins, and where it ends
        (0, 2, first),
        (12, 40, first),
        (45, 50, first),
        (50, 80, {"minibatch": 0, "microbatch": 1}),
        (80, 100, {"minibatch": 0}),
    ]
    names = {event["name"] for event in found}
    assert {"process_name", "thread_name", "minibatch 0", "microbatch 1", "gather layer", "compute"} <= names


@pytest.mark.parametrize("collectives", [False, True])
def test_events_of_a_rank_lie_inside_each_other(collectives: bool, tmp_path: Path) -> None:
    found = events(tmp_path, collectives=collectives)
    for rank in range(2):
        is_open: list[float] = []  # the ends of those around the next one
        for event in (event for event in found if event["ph"] == "X" and event["tid"] == rank):
            while is_open and is_open[-1] <= event["ts"]:
                is_open.pop()
            assert not is_open or event["ts"] + event["dur"] <= is_open[-1]
            is_open.append(event["ts"] + event["dur"])


def test_waits_in_collectives_are_worked_out(tmp_path: Path) -> None:
    found = events(tmp_path, collectives=True)
    assert of_rank(found, 0, "wait") == [(2, 6, {"minibatch": 0, "microbatch": 0})]
    assert of_rank(found, 1, "wait") == []


def test_timelines_are_kept_with_their_arguments(tmp_path: Path) -> None:
    made = spans(Timeline(3), 2, collectives=False)
    made.save(tmp_path / "new.json")
    assert (read := Timeline.load(tmp_path / "new.json")).spans == made.spans
    assert read.rank == 3
    (tmp_path / "old.json").write_text('{"rank": 0, "spans": [["gather", "layer", 1, 2, 0]]}')  # without arguments
    assert Timeline.load(tmp_path / "old.json").spans == [Span("gather", "layer", 1, 2, 0)]
