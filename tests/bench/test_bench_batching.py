"""Layer 1: no processes. Epochs of online dynamic batching, by hand and beside what its paper has published."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from odc.bench.batching import batching
from odc.bench.batching.batching import (
    BOUNDS,
    ROWS,
    SURPLUS,
    Bound,
    Result,
    dropped_percent,
    gmt_updates,
    odb_epoch,
    simulate,
    simulate_streams,
    standard_padding,
)
from odc.bench.harness.benchmark import Run


def test_an_epoch_by_hand() -> None:
    # Rank 0 has 800, 500, 100 and 200 tokens, rank 1 has 300 four times: three groups, and one of 3 and one of 1.
    lengths = np.array([800, 300, 500, 300, 100, 300, 200, 300])
    epoch = odb_epoch(lengths, 1000, world_size=2, pool_size=4)
    assert (epoch.updates, epoch.num_samples.sum(), epoch.tokens) == (3, 8, int(lengths.sum()))
    assert epoch.padded_tokens == (2 * 200 + 500 + 800) + (2 * 300 + 300 + 300)
    assert epoch.padding_percent == pytest.approx(100 * (1 - 2800 / 2900))
    assert epoch.costs.tolist() == [[400, 600], [500, 300], [800, 300]]
    assert epoch.bubble_rate() == pytest.approx(1 - 2900 / (2 * (600 + 500 + 800)))
    assert epoch.bubble_rate(0.5) == pytest.approx(1 - 1000 / (2 * 600))


@pytest.mark.parametrize(("num_samples", "pool_size"), [(1, 4), (7, 2), (64, 8), (65, 1000)])
def test_every_sample_is_emitted_once_also_where_ranks_do_not_divide_them(num_samples: int, pool_size: int) -> None:
    lengths = np.random.default_rng(num_samples).integers(1, 900, num_samples)
    epoch = odb_epoch(lengths, 1000, world_size=4, pool_size=pool_size)
    assert (epoch.num_samples.sum(), epoch.tokens) == (num_samples, int(lengths.sum()))
    assert -(-num_samples // 4) >= epoch.updates >= 1


def test_the_comparators_by_hand() -> None:
    # Sorted: 100 100 200 | 300 300 300 | 900 | 2000, at 900 tokens.
    lengths = np.array([300, 100, 2000, 900, 200, 300, 100, 300])
    assert [gmt_updates(lengths, 900, world_size) for world_size in (1, 2, 3)] == [4, 2, 2]
    assert standard_padding(np.array([1, 3, 2, 2, 4]), 2) == pytest.approx(100 * (1 - 12 / (6 + 4 + 4)))


@pytest.mark.parametrize(
    ("law", "num_samples", "max_tokens"),
    [pytest.param("longalign", 2048, 65536, marks=pytest.mark.extended), ("sharegpt4o", 4096, 16384)],
)
def test_streams_whose_ranks_hardly_wait(law: str, num_samples: int, max_tokens: int) -> None:
    rows = {row.kind: row for row in simulate_streams(law, num_samples, max_tokens)}
    published, quotas = rows["dgap"], rows["minibatch"]
    assert published.bubble_percent > 10
    assert rows["steps"].bubble_percent < published.bubble_percent / 2
    assert rows["steps"].padding_percent < 4
    assert quotas.bubble_percent < 4
    assert quotas.early_bubble_percent is not None
    assert quotas.early_bubble_percent < 1
    assert quotas.bubble_percent < rows["minibatch/shards"].bubble_percent < 16
    assert 3.5 < quotas.samples_per_step < 4.5
    assert quotas.oldest < batching.SMALL_POOL
    assert rows["pool-sort"].padding_percent < 3
    assert rows["LB-Mini (known)"].bubble_percent > 5 * quotas.early_bubble_percent


@pytest.mark.parametrize("bound", [bound for bound in BOUNDS if bound.dataset == "sharegpt4o"])
def test_without_join_less_is_dropped_than_the_bound(bound: Bound) -> None:
    dropped = dropped_percent(bound)
    assert dropped is not None
    assert 0 <= dropped <= bound.percent


def test_bounds_and_surplus_are_those_of_the_paper() -> None:
    assert [round(bound.percent, 1) for bound in BOUNDS] == [bound.paper_percent for bound in BOUNDS]
    assert [-num_samples % batching.WORLD_SIZE for num_samples, _ in SURPLUS.values()] == [4, 7]


@pytest.mark.parametrize("row", [row for row in ROWS if row.dataset == "sharegpt4o" or row.method != "odb"])
def test_rows_come_out_as_published(row: batching.Row) -> None:
    result = simulate(row)
    assert result.is_good
    assert abs(result.error) < (1.0 if row.method == "standard" else 0.02)


def test_a_row_that_is_too_far_off_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulated(row: batching.Row, seed: int) -> Result:
        return Result(row, row.paper + (1.1 if row.method == "standard" else 0.0), row.padding_percent)

    monkeypatch.setattr(batching, "simulate", simulated)
    monkeypatch.setattr(batching, "WAITING", ())
    monkeypatch.setattr(batching, "dropped_percent", lambda bound, seed: None)
    run = Run()
    rows = batching.measure(run)["rows"]
    assert len(run.missed) == 2
    assert all("standard: further off than 1" in text for text in run.missed)
    assert [row["row"]["dataset"] for row in rows] == [row.dataset for row in ROWS]
    assert not replace(simulated(ROWS[0], 0), simulated=ROWS[0].paper * 1.1).is_good


def test_the_committed_result_is_of_all_rows() -> None:
    document = json.loads((Path(__file__).parents[2] / "bench/results/batching.json").read_text())
    assert [row["row"] for row in document["rows"]] == [vars(row) for row in ROWS]
    kinds = [*batching.STREAMS, "LB-Mini (known)"]
    assert [row["kind"] for row in document["streams"]] == 2 * kinds
    found = {(row["law"], row["kind"]): row["bubble_percent"] for row in document["streams"]}
    padding = {row["law"]: row["padding_percent"] for row in document["streams"] if row["kind"] == "pool-sort"}
    assert padding["longalign"] < 8
    assert padding["sharegpt4o"] < 2
    for law in ("longalign", "sharegpt4o"):
        assert found[law, "steps"] < found[law, "dgap"] / 2
        assert found[law, "minibatch"] < 1.5
    assert max(abs(row["error"]) for row in document["rows"] if row["row"]["method"] != "standard") < 0.02
