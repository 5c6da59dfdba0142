"""Layer 1: no processes but CBC. The benchmark of post-balancing, on small sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from odc.balance import QuadraticCost
from odc.bench.planning import post_balance as bench

LENGTHS = [4, 1, 1, 2]
"""By themselves they cost 20, 2, 2, 6."""


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "layout", "makespan"),
    [
        (LENGTHS, 1, "packed", 30),
        (LENGTHS, 2, "packed", 20),
        (LENGTHS, 2, "padded", 20),
        (LENGTHS, 1, "padded", 4 * 20),
        (LENGTHS, 1, "padded-attention", 8 + 4 * 16),
        ([3, 3, 1], 2, "padded-attention", 4 + 2 * 9),
    ],
)
def test_exhaustive_search_by_hand(lengths: list[int], num_ranks: int, layout: Any, makespan: int) -> None:
    assert bench.optimal_makespan(np.array(lengths), num_ranks, QuadraticCost(1.0, 1.0), layout) == makespan


def test_quality_and_speed_are_measured_against_what_nothing_beats() -> None:
    quality = bench.measure_quality(6)
    assert [row["layout"] for row in quality] == list(bench.LAYOUTS)
    for row in quality:
        assert -1e-12 <= row["mean_excess"] <= row["largest_excess"] < 0.1
        assert 0 < row["num_optimal"] <= 6
    for layout in bench.LAYOUTS:
        row = bench.measure_speed("llava", 16, layout, repetitions=2)
        assert row["num_samples"] == 16 * bench.SAMPLES_PER_RANK
        assert 0 < row["time_s"]["min"] <= row["time_s"]["median"] <= row["time_s"]["max"]
        assert -1e-12 <= row["largest_excess"] < 0.2


def test_nodes_are_measured_beside_the_integer_program() -> None:
    alone = bench.measure_nodes("sharegpt4o", 16, 0, None)
    assert 0 < alone["share"] < 1
    pytest.importorskip("pulp", reason="CBC, which comes with pulp, is not installed")
    both = bench.measure_nodes("sharegpt4o", 16, 0, 20.0)
    # On two nodes of 8 both are optimal.
    assert both["share"] == alone["share"] == pytest.approx(both["cbc_share"], rel=1e-6)
    assert both["least_share"] <= both["share"] * (1 + 1e-6)
