"""Layer 3: ranks as processes. The benchmark of host times, on two ranks and few repetitions."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from odc.bench.communication.host_time import (
    BENCHMARK,
    IDLE,
    OPERATIONS,
    RankResult,
    Sample,
    Settings,
    SetUp,
    _cell,
    cells_of,
    measure,
)
from odc.bench.harness.benchmark import Numbers, Run
from odc.bench.harness.results import tables_of

TINY = Settings(num_units=3, numel=4, repetitions=2, setups=2)


def check_cell(cell: dict[str, Any], settings: Settings) -> None:
    assert cell["setup"]["slowest_wall_s"]["median"] > 0
    assert cell["setup"]["cpu_s"]["median"] > 0
    assert cell["setup"]["exchanges"] > 0
    assert cell["threads_per_rank"] >= sum(cell["python_threads"].values())
    assert cell["descriptors_per_rank"] >= 0
    assert cell["memory_bytes"] == sum(cell["memory"].values()) >= settings.num_units * settings.numel * 8
    for name in OPERATIONS:
        row = cell["operations"][name]
        # A finish for which somebody else was later than the last rank does not count.
        assert row["num_samples"] == 2 * settings.repetitions or (name == "finish" and row["num_samples"] <= 2)
        for clock in ("cpu_us", "wall_us") if row["num_samples"] else ():
            assert 0 < row[clock]["p20"] <= row[clock]["median"] <= row[clock]["p80"]
            assert row["cpu_us_per_owner"] == row["cpu_us"]["median"] / row["owners"]
    assert [cell["operations"][name]["owners"] for name in OPERATIONS] == [2, 1, 1, 2, 2, 1, 1]
    # Every owner has published long ago.
    assert cell["operations"]["gather_first"]["waits_per_call"] == cell["operations"]["gather"]["waits_per_call"] == 0


def test_both_ways_to_accumulate_on_one_host() -> None:
    direct, daemon = cells_of(Run(), 2, TINY, ["direct", "daemon"])
    assert [(cell["accumulate"], cell["transport"]) for cell in (direct, daemon)] == [
        ("direct", "shm"),
        ("daemon", "shm"),
    ]
    for cell in (direct, daemon):
        check_cell(cell, TINY)
        assert (cell["ranks"], cell["hosts"]) == (2, 1)
    assert direct["operations"]["push"]["waits_per_call"] == 0  # nobody else has the lock
    assert sum(daemon["python_threads"].values()) > sum(direct["python_threads"].values())
    assert json.loads(json.dumps([direct, daemon])) == [direct, daemon]


def test_ranks_that_pose_as_hosts() -> None:
    settings = Settings(num_units=3, numel=4, repetitions=2, setups=1, hosts=2)
    (cell,) = cells_of(Run(), 2, settings, ["daemon"])
    check_cell(cell, settings)
    assert (cell["transport"], cell["hosts"]) == ("tcp", 2)
    assert cell["threads_per_rank"] > 0


def result(samples: list[Sample], wall_s: float) -> RankResult:
    return RankResult("shm", [SetUp(wall_s, 0.1, 38, 100)], {"odc-x": 1}, 2, 5, {"sums": 2048, "slots": 1024}, samples)


def made_cell() -> dict[str, Any]:
    """Three units, two ranks: known numbers. Nobody measured a finish."""
    ranks = []
    for wall_s, factor in ((1.0, 1), (2.0, 3)):
        samples = [Sample(name, 6000 * factor, 3000 * factor, 3, 5000 * factor) for name in OPERATIONS]
        samples = [sample for sample in samples if sample.operation != "finish"]
        ranks.append(result([*samples, Sample(IDLE, 0, 0, 0, 1000)], wall_s))
    return _cell("daemon", Settings(num_units=3), ranks)


def test_figures_are_those_of_one_call() -> None:
    cell = made_cell()
    push = cell["operations"]["push"]
    assert push["cpu_us"]["median"] == pytest.approx(2.0)  # of 1 and 3
    assert push["cpu_us_per_owner"] == pytest.approx(1.0)
    assert push["wall_us"]["p20"] == pytest.approx(2.8)
    assert push["waits_per_call"] == 1
    # 5 + 15 microseconds of all threads, 2 of them for the turns; six calls.
    assert push["all_ranks_cpu_us"]["median"] == pytest.approx(3.0)
    assert cell["operations"]["finish"] == {"owners": 2, "num_samples": 0}
    assert cell["setup"]["slowest_wall_s"]["median"] == 2.0
    assert cell["memory_bytes"] == 3072


def test_tables_show_them() -> None:
    console = Console(width=125, record=True, file=io.StringIO())
    for table in tables_of(BENCHMARK, {"cells": [made_cell()], "settings": {"units": 3, "numel": 64}}):
        console.print(table)
    text = console.export_text()
    for words in ("2.0 (1.4-2.6)", "daemon", "2000.0 (2000.0-2000.0)", "38"):
        assert words in text
    assert "…" not in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": Numbers(1)}, "--ranks 1: expected at least 2"),
        ({"accumulate": ["both"]}, "expected one of direct, daemon"),
        ({"hosts": 2, "accumulate": ["direct"]}, "share no memory"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        measure(Run(), **options)
