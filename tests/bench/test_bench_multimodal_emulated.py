"""Layer 3: ranks as processes. Minibatches of several modalities with emulated compute, on two ranks."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from odc.bench.harness.benchmark import Run
from odc.bench.harness.results import tables_of
from odc.bench.training.multimodal_emulated import BENCHMARK, NUM_UNTIMED, WAYS, Settings, add_ratios, run_way, shares
from odc.bench.training.sleeping import RankRun, segments
from odc.timeline import Span

TINY = Settings(ranks=2, minibatches=2, minibatch_size=8, scale=0.1)
CHOSEN = ("none", "all", "all, ODC")


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[dict[str, Any], list[RankRun]]]:
    found = {}
    for way in CHOSEN:
        found[way] = run_way(Run(), "MLLM-84B", way, TINY)
    add_ratios([entry for entry, _ in found.values()])
    return found


@pytest.mark.parametrize("way", CHOSEN)
def test_ranks_compute_and_move_what_the_plan_says(way: str, results: Any) -> None:
    entry, runs = results[way]
    # What came costs what was planned. A sleep that is too long is taken off later ones, and none of all is too short.
    timed = range(NUM_UNTIMED, NUM_UNTIMED + TINY.minibatches)
    costs_s = [rank.cost_s[number] for rank in runs for number in timed]
    assert sum(costs_s) / len(costs_s) == pytest.approx(entry["planned_compute_s"])
    assert all(sum(rank.compute_ns) >= 1e9 * sum(rank.cost_s) * (1 - 1e-6) for rank in runs)
    assert {name: count for name, count in entry["planned_bytes"].items() if count} == entry["bytes"]
    assert bool(entry["bytes"]) == (way != "none")
    if way.startswith("all"):
        assert {"vision/inputs", "vision/outputs", "vision/gradients", "audio/outputs"} <= set(entry["bytes"])
        assert entry["bytes"]["vision/outputs"] == entry["bytes"]["vision/gradients"]
    assert entry["minibatch_s"] >= entry["planned_s"] * 0.8
    assert sum(entry[name] for name in ("compute", "waiting", "moving", "load", "rest")) == pytest.approx(1)
    assert min(entry[name] for name in ("compute", "waiting", "moving", "load", "rest")) >= 0
    assert entry["planning_s"] > 0
    assert json.loads(json.dumps(entry)) == entry
    kinds = {span.kind for rank in runs for span in rank.spans}
    assert kinds == {"minibatch", "load", "encode", "backward", "language", "move", "wait", "compute"}


def test_lockstep_is_that_of_collectives(results: Any) -> None:
    """Under collectives ranks meet in every phase: as often on both, and more often than under ODC."""
    meetings = {
        way: [
            sum(span.kind == "wait" and span.label in ("vision", "audio", "language") for span in r.spans) for r in rs
        ]
        for way, (_, rs) in results.items()
    }
    for way, (first, second) in meetings.items():
        assert first == second
        assert (first > 0) == (WAYS[way] == "collective")


def test_ratios_and_table(results: Any) -> None:
    entries = [entry for entry, _ in results.values()]
    assert entries[0]["ratio"] == entries[0]["planned_ratio"] == 1
    for entry in entries:
        assert entry["ratio"] == pytest.approx(entries[0]["minibatch_s"] / entry["minibatch_s"])
    console = Console(width=220, record=True, file=io.StringIO())
    for table in tables_of(BENCHMARK, {"runs": entries, "settings": {"ranks": 2, "shrink": 64}}):
        console.print(table)
    text = console.export_text()
    assert f"{1e3 * entries[2]['minibatch_s']:.0f}" in text
    assert "…" not in text


def test_time_is_shared_out() -> None:
    spans = [
        Span("load", "minibatch", 0, 10, 0),
        Span("wait", "vision", 10, 15, 0),
        Span("compute", "vision", 15, 45, 0),
        Span("encode", "vision", 10, 45, 0),
        Span("wait", "vision/outputs", 45, 55, 0),
        Span("move", "vision outputs", 45, 75, 0),
        Span("wait", "finish", 75, 80, 0),
        Span("minibatch", "0", 0, 100, 0),
        Span("minibatch", "1", 100, 900, 1),
    ]
    run = RankRun(spans, [3e-8, 0.0], [30, 0], [11, 0], [0.5, 0.0], [{"vision/outputs": 7}, {}])
    found = shares([run], [0])
    assert found["minibatch_s"] == pytest.approx(100e-9)
    parts = {name: found[name] for name in ("load", "compute", "waiting", "moving", "rest")}
    assert parts == pytest.approx({"load": 0.1, "compute": 0.3, "waiting": 0.2, "moving": 0.2, "rest": 0.2})
    assert (found["planning_s"], found["bytes"]) == (0.5, {"vision/outputs": 7})
    assert found["moving_cpu_s"] == pytest.approx(11e-9)
    activities = [(segment.activity, segment.start_ns, segment.end_ns) for segment in segments(run, 0)]
    assert activities == [
        ("load", 0, 10),
        ("wait", 10, 15),
        ("vision", 15, 45),
        ("wait", 45, 55),
        ("move", 55, 75),
        ("wait", 75, 80),
        ("other", 80, 100),
    ]
