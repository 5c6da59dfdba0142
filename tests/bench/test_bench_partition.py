"""Layer 1: no processes. The benchmark of partitions, on small sizes."""

from __future__ import annotations

from odc.bench.harness.benchmark import Run
from odc.bench.planning.partition_quality import measure_law, measure_random


def test_quality_is_measured_against_something_better() -> None:
    law = measure_law(Run(), "aime", 2, num_minibatches=4, time_limit_s=1.0)
    random = [measure_random(Run(), 10, equal_size) for equal_size in (False, True)]
    assert 0 <= law["points_above"] == law["bubble_percent"] - law["least_bubble_percent"] < 1
    assert law["num_near_bound"] + law["num_solved"] <= 4
    for found in random:
        assert -1e-12 <= found["mean_excess"] <= found["largest_excess"]
        assert found["mean_excess"] <= found["mean_excess_of_plain_differencing"] + 1e-12
