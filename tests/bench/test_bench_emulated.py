"""Layer 3: ranks as processes. Sleeping layers under real FSDP2, on two ranks and few small minibatches."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from odc.bench.harness.benchmark import Run
from odc.bench.harness.results import tables_of
from odc.bench.training.emulated import (
    BENCHMARK,
    NUM_UNTIMED,
    WAYS,
    RankRun,
    Settings,
    add_ratios,
    run_way,
    shares,
    work_of,
)
from odc.bench.training.emulated_model import Clock
from odc.timeline import Span, Timeline

TINY = Settings(ranks=2, layers=2, minibatches=3, minibatch_size=2, scale=0.05)


@pytest.fixture(scope="module", params=["odc-lb-mini", "collective-lb-micro"])
def entry(request: pytest.FixtureRequest) -> dict[str, Any]:
    return run_way(Run(), request.param, TINY)


def test_the_planned_rate_is_that_of_the_plans(entry: dict[str, Any]) -> None:
    comm, policy = WAYS[entry["way"]]
    idle = total = 0.0
    for plan, row in zip(TINY.plans(policy), entry["minibatches"], strict=True):
        times = plan.microbatch_times()
        makespan = times.sum(axis=1).max() if comm == "odc" else times.max(axis=0).sum()
        assert row["planned_bubble"] == pytest.approx(1 - times.sum() / (TINY.ranks * makespan))
        idle += TINY.ranks * makespan - times.sum()
        total += TINY.ranks * makespan
    assert entry["planned_bubble"] == pytest.approx(idle / total)
    assert entry["difference_points"] == pytest.approx(100 * (entry["bubble"] - entry["planned_bubble"]))


def test_parts_add_up_and_ranks_sleep_as_planned(entry: dict[str, Any]) -> None:
    for row in (entry, *entry["minibatches"]):
        assert row["compute"] + row["bubble"] == pytest.approx(1)
        assert row["waiting"] + row["communication"] + row["host"] == pytest.approx(row["bubble"])
        assert 0 <= row["waiting"] < 1
        assert 0 < row["communication"] < 1
        assert 0 < row["host"] < 1
        assert 0 < row["compute_s"] < row["minibatch_s"]
        assert row["cpu_s"] > 0
    assert entry["compute_s"] >= TINY.scale * 0.9  # what a sleep before the timed ones lasted too long is taken off
    assert json.loads(json.dumps(entry)) == entry


def test_table_shows_both_rates(entry: dict[str, Any]) -> None:
    add_ratios([entry])
    console = Console(width=200, record=True, file=io.StringIO())
    for table in tables_of(BENCHMARK, {"settings": asdict(TINY), "runs": [entry]}):
        console.print(table)
    text = console.export_text()
    for number in (f"{100 * entry['planned_bubble']:.1f}", f"{100 * entry['bubble']:.1f}"):
        assert number in text
    assert "…" not in text


def test_ranks_compute_as_long_as_the_scale_says_on_average() -> None:
    plans = TINY.plans("lb-mini")
    works = [work_of(plans, TINY.seconds_per_cost(plans), rank) for rank in range(TINY.ranks)]
    assert [len(work) for work in works] == [NUM_UNTIMED + TINY.minibatches] * 2
    assert [len(microbatches) for microbatches in works[0][NUM_UNTIMED:]] == [p.num_microbatches[0] for p in plans]
    timed = sum(seconds for work in works for microbatches in work[NUM_UNTIMED:] for seconds in microbatches)
    assert timed == pytest.approx(TINY.scale * TINY.ranks * TINY.minibatches)
    assert plans == TINY.plans("lb-mini")


def test_a_sleep_that_is_too_long_is_taken_off_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns, asked = [0], []

    def sleep(seconds: float) -> None:
        asked.append(round(seconds * 1e3, 6))
        now_ns[0] += round(seconds * 1e9) + 3_000_000

    fake = SimpleNamespace(sleep=sleep, monotonic_ns=lambda: now_ns[0])
    monkeypatch.setattr("odc.bench.training.emulated_model.time", fake)
    clock = Clock()
    for milliseconds in (10, 10, 2, 2, 10):
        clock.compute(milliseconds / 1e3)
    assert asked == [10, 7, 1, 7]  # 3 too long each; the first 2 are slept already
    assert clock.take() == 37_000_000
    assert clock.take() == 0


def test_time_is_shared_out() -> None:
    timeline = Timeline(0)
    timeline.spans = [
        Span("gather", "minibatch", 0, 20, 0),
        Span("gather", "layer0", 5, 15, 0),  # of the runtime itself: within the same operation
        Span("wait", "gather", 10, 15, 0),
        Span("publish", "minibatch", 90, 100, 0),
        Span("minibatch", "0", 0, 110, 0),
    ]
    found = shares([RankRun(timeline, compute_ns=[60], cpu_ns=[30])], [0], "odc")
    assert found["bubble"] == pytest.approx(5 / 11)
    assert (found["waiting"], found["communication"], found["host"]) == pytest.approx((5 / 110, 25 / 110, 20 / 110))
    assert found["minibatch_s"] == pytest.approx(110e-9)
    assert found["cpu_s"] == pytest.approx(30e-9)
