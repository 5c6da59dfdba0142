"""Layer 1: no processes. What the benchmark of loaders makes of its times, and the committed result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from odc.bench.batching.loading import LOADERS, Epoch, Samples, memory_of_tree_mb, pad, summarize


def test_the_slowest_rank_counts() -> None:
    ranks = [{loader: [Epoch(10.0 * (at + 1), 0.1), Epoch(20.0, 0.3)] for at, loader in enumerate(LOADERS)}, {}]
    ranks[1] = {loader: [Epoch(30.0, 0.2), Epoch(10.0, 0.1)] for loader in LOADERS}
    rows = summarize(ranks, {loader: 100.0 + at for at, loader in enumerate(LOADERS)})
    assert [row["us_per_sample"] for row in rows] == [[30.0, 20.0]] * 3 + [[40.0, 20.0], [50.0, 20.0]]
    assert [row["times_torch"] for row in rows] == [1.0, 1.0, 1.0, 1.2, 1.4]
    assert rows[0]["first_batch_s"] == [0.2, 0.3]
    assert [row["memory_over_torch_mb"] for row in rows] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_samples_and_batches() -> None:
    samples = Samples()
    batch = pad([samples[0], samples[1]])
    assert batch["input_ids"].shape == batch["labels"].shape == (2, max(samples.lengths[:2]))
    assert int((batch["labels"] != -100).sum()) == sum(samples.lengths[:2])
    assert int((pad([])["labels"] != -100).sum()) == 0
    assert memory_of_tree_mb() > 10


def test_the_committed_result() -> None:
    document = json.loads((Path(__file__).parents[2] / "bench/results/loading.json").read_text())
    rows = {row["loader"]: row for row in document["rows"]}
    assert list(rows) == list(LOADERS)
    assert rows["dgap"]["times_torch"] <= 1.5
    assert max(rows["dgap"]["first_batch_s"]) <= 1.0
    assert rows["dgap"]["memory_over_torch_mb"] <= 60
    assert rows["dgap"]["times_torch"] == pytest.approx(
        sorted(rows["dgap"]["us_per_sample"])[2] / sorted(rows[LOADERS[0]]["us_per_sample"])[2], abs=0.01
    )
