"""Layer 3: ranks as processes. The benchmark with emulated compute, on two ranks and few small minibatches."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from odc.balance.simulate.hosts import Sharding
from odc.bench.harness import network
from odc.bench.harness.benchmark import Run
from odc.bench.harness.results import tables_of
from odc.bench.training.emulated import (
    BENCHMARK,
    NUM_UNTIMED,
    UNTIMED_SHARE,
    WAYS,
    RankRun,
    Settings,
    add_ratios,
    measure,
    run_way,
    shares,
    work_of,
)
from odc.bench.training.sleeping import Clock
from odc.timeline import Span, Timeline

TINY = Settings(ranks=2, layers=2, minibatches=3, minibatch_size=2, scale=0.05)


@pytest.fixture(scope="module", params=["collective-lb-micro", "odc-lb-mini"])
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
    assert entry["compute_s"] >= TINY.scale * 0.99  # a sleep is never too short
    assert (entry["overhead_mb"] > 0) == (WAYS[entry["way"]][0] == "odc")
    assert json.loads(json.dumps(entry)) == entry


def test_table_shows_both_rates(entry: dict[str, Any]) -> None:
    console = Console(width=150, record=True, file=io.StringIO())
    settings = {"ranks": 2, "law": "longalign", "minibatch_size": 2}
    for table in tables_of(BENCHMARK, {"runs": [entry], "settings": settings}):
        console.print(table)
    text = console.export_text()
    for number in (f"{100 * entry['planned_bubble']:.1f}", f"{100 * entry['bubble']:.1f}"):
        assert number in text
    assert "…" not in text


def test_speedups_are_over_the_first_way() -> None:
    rows = [{"minibatch_s": measured, "planned_s": planned} for measured, planned in ((3.0, 2.0), (2.0, 1.6))]
    add_ratios(rows)
    assert [(row["ratio"], row["planned_ratio"]) for row in rows] == [(1.0, 1.0), (1.5, pytest.approx(1.25))]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"way": ["odc"]}, "'odc': expected one of collective-lb-micro"),
        ({"ranks": 3, "between": "1Gb"}, "expected as many of 3 ranks"),
    ],
)
def test_what_cannot_be_run_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        measure(Run(), **options)


@pytest.mark.skipif(network.why_not() is not None, reason=str(network.why_not()))
@pytest.mark.parametrize(
    ("way", "sharding"),
    [
        ("odc-lb-mini", "shared"),
        *(
            pytest.param(way, sharding, marks=pytest.mark.extended)
            for way, sharding in (
                *(("collective-lb-micro", "full"), ("collective-lb-micro", "hybrid")),
                *(("odc-lb-mini", "hybrid"), ("odc-lb-mini", "full")),
            )
        ),
    ],
)
def test_between_hosts_there_crosses_what_the_plan_says(way: str, sharding: Sharding) -> None:
    """At 100 Mbit/s, of a model of 3.2 MB."""
    settings = replace(TINY, ranks=4, minibatches=1, scale=0.5, between=12.5e6, numel=100_000)
    entry = run_way(Run(), way, settings, sharding)
    # Each rank reads and pushes for itself there, and of two hosts one may have more microbatches.
    tolerance = 0.4 if (way, sharding) == ("odc-lb-mini", "full") else 0.1
    assert entry["crosses_mb"] == pytest.approx(entry["planned_crosses_mb"], rel=tolerance)
    assert entry["minibatch_s"] > 0.9 * entry["crosses_mb"] / 12.5


def test_ranks_compute_as_long_as_the_scale_says_on_average() -> None:
    plans = TINY.plans("lb-mini")
    works = [work_of(plans, TINY.seconds_per_cost(plans), rank) for rank in range(TINY.ranks)]
    assert [len(work) for work in works] == [NUM_UNTIMED + TINY.minibatches] * 2
    assert [len(microbatches) for microbatches in works[0][NUM_UNTIMED:]] == [p.num_microbatches[0] for p in plans]
    assert sum(works[0][0]) == pytest.approx(UNTIMED_SHARE * sum(works[0][1]))
    timed = sum(seconds for work in works for microbatches in work[NUM_UNTIMED:] for seconds in microbatches)
    assert timed == pytest.approx(TINY.scale * TINY.ranks * TINY.minibatches)
    assert plans == TINY.plans("lb-mini")


def test_a_sleep_that_is_too_long_is_taken_off_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns, asked = [0], []

    def sleep(seconds: float) -> None:
        asked.append(round(seconds * 1e3, 6))
        now_ns[0] += round(seconds * 1e9) + 3_000_000

    fake = SimpleNamespace(sleep=sleep, monotonic_ns=lambda: now_ns[0])
    monkeypatch.setattr("odc.bench.training.sleeping.time", fake)
    clock = Clock()
    for milliseconds in (10, 10, 2, 2, 10):
        clock.compute(milliseconds / 1e3)
    assert asked == [10, 7, 1, 7]  # 3 too long each; the first 2 are slept already
    assert clock.take() == 37_000_000
    assert clock.take() == 0


def test_time_is_shared_out() -> None:
    timeline = Timeline(0)
    timeline.spans = [
        Span("gather", "layer0", 5, 25, 0),
        Span("wait", "gather", 10, 15, 0),
        Span("publish", "minibatch", 90, 100, 0),
        Span("minibatch", "0", 0, 100, 0),
    ]
    found = shares([RankRun(timeline, compute_ns=[60], cpu_ns=[30])], [0], "odc")
    assert found["bubble"] == pytest.approx(0.4)
    assert (found["waiting"], found["communication"], found["host"]) == pytest.approx((0.05, 0.25, 0.10))
    assert found["minibatch_s"] == pytest.approx(100e-9)
    assert found["cpu_s"] == pytest.approx(30e-9)
