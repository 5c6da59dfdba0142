"""Layer 1: no processes. What the benchmark makes of its runs, and the committed result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from odc.bench.training import stream_training
from odc.bench.training.runs import Run
from odc.bench.training.stream_training import CONFIGURATIONS, curve, rows_of


def make_run(rate: float, tokens: tuple[int, ...], losses: list[float], wait: float = 0.1) -> Run:
    samples = tuple(1 for _ in tokens)
    return Run(rate, 0.0, 1.0, [], losses, {"wait": wait}, Path(), 0, True, samples, tokens)


def test_losses_are_means_over_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_training, "NUM_PARTS", 2)
    # Middles at 5, 25, 60 of 80 tokens: the first two are in the first half.
    tokens, losses = curve(make_run(1.0, (10, 30, 40), [4.0, 2.0, 1.0]))
    assert losses == [2.5, 1.0]
    assert tokens == [20.0, 60.0]


def test_ways_are_compared_with_the_first() -> None:
    runs = {
        "a": [
            make_run(10.0, (5, 5), [2.0, 1.0]),
            make_run(12.0, (5, 5), [2.0, 1.0]),
            make_run(11.0, (5, 5), [2.0, 1.0]),
        ],
        "b": [make_run(22.0, (5, 5), [2.0, 1.0], wait=0.05)],
    }
    first, second = rows_of(runs)
    assert (first["times_first"], second["times_first"]) == (1.0, 2.0)
    assert (first["waiting_percent"], second["waiting_percent"]) == (10.0, 5.0)
    assert (first["minibatches"], first["samples"]) == (2, 2)


def test_names_of_streams() -> None:
    assert [one.name for one in CONFIGURATIONS] == [
        "collective-dgap",
        "collective-steps",
        "odc-minibatch",
        "odc-lb-mini",
    ]


def test_the_committed_result_is_of_the_same_samples() -> None:
    document = json.loads((Path(__file__).parents[2] / "bench/results/stream_training.json").read_text())
    rows = document["rows"]
    assert [row["name"] for row in rows] == [one.name for one in CONFIGURATIONS]
    assert {row["samples"] for row in rows} == {600}
    assert all(len(row["samples_per_s"]) >= 3 for row in rows)
