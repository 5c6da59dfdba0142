"""Layer 1: no processes. The benchmark of planning, on small sizes, and what its committed result says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from odc.bench.harness.benchmark import Run
from odc.bench.harness.results import tables_of
from odc.bench.planning import planning as bench


def test_rows_on_small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LOADERS", ((4, 2, 3),))
    monkeypatch.setattr(bench, "REBALANCE_RANKS", (16,))
    monkeypatch.setattr(bench, "PLAN_RANKS", (16,))
    found = bench.measure(Run(), 2)
    (loader,), (moved,), (plan,) = found["loader"], found["rebalance"], found["plan"]
    assert (loader["ranks"], loader["samples_per_rank"], loader["minibatches"]) == (4, 2, 3)
    for row in (loader, moved, plan):
        assert 0 < row["cpu_s"]["min"] <= row["cpu_s"]["median"] <= row["cpu_s"]["max"]
    assert 0 < loader["training_thread_s"]["median"] <= loader["cpu_s"]["max"]
    assert 0 < moved["between_nodes"] < moved["moved"] < 1
    assert 0 <= moved["excess"] < 0.01
    assert {name for name in plan if name.startswith("even")} == {"even vision", "even audio", "even language"}
    assert all(1 <= value < 1.5 for name, value in plan.items() if name.startswith("even"))
    assert all(0 <= value < 1 for name, value in plan.items() if name.startswith("between"))
    assert [table.row_count for table in tables_of(bench.BENCHMARK, found)] == [1, 1, 1]


def test_the_committed_result() -> None:
    """A rank plans for itself; no plan is worse than these."""
    result = json.loads((Path(bench.__file__).parent.parent / "results" / "planning.json").read_text())
    assert all(row["excess"] <= 0.0004 for row in result["rebalance"])
    assert all(v <= 1.04 for row in result["plan"] for name, v in row.items() if name.startswith("even "))
    by_ranks = {row["ranks"]: row for row in result["loader"]}
    assert by_ranks[256]["cpu_s"]["median"] <= 0.076
    assert by_ranks[1024]["cpu_s"]["median"] <= 0.31
