"""Layer 1: no processes but one that measures its own memory. The benchmarks of partitions, on small sizes."""

from __future__ import annotations

from odc.bench.harness.benchmark import Run
from odc.bench.planning.partition_quality import measure_law, measure_random
from odc.bench.planning.partition_speed import compare, peak_memory_bytes


def test_speed_compares_both_forms_on_the_same_costs() -> None:
    result = compare(64, 8, repetitions=3)
    for name in ("odc", "textbook"):
        times = result[name]["time_s"]
        assert 0 < times["min"] <= times["median"] <= times["max"]
    assert result["speedup"] == result["textbook"]["time_s"]["median"] / result["odc"]["time_s"]["median"]
    assert result["never_a_larger_makespan"]
    assert 0 <= result["odc"]["largest_excess"] <= result["textbook"]["largest_excess"]


def test_memory_is_that_of_the_partition() -> None:
    """An interpreter with numpy, but without what this process imported."""
    assert 10e6 < peak_memory_bytes(512, 8) < 200e6


def test_quality_is_measured_against_something_better() -> None:
    law = measure_law(Run(), "aime", 2, num_minibatches=4, time_limit_s=1.0)
    random = [measure_random(Run(), 10, equal_size) for equal_size in (False, True)]
    assert 0 <= law["points_above"] == law["bubble_percent"] - law["least_bubble_percent"] < 1
    assert law["num_near_bound"] + law["num_solved"] <= 4
    for found in random:
        assert -1e-12 <= found["mean_excess"] <= found["largest_excess"]
        assert found["mean_excess"] <= found["mean_excess_of_plain_differencing"] + 1e-12
