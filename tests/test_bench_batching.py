"""Layer 1: no processes. Epochs of online dynamic batching, by hand and beside what its paper has published."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from odc.balance import LinearCost
from odc.bench import batching
from odc.bench.batching import (
    ROWS,
    Result,
    gmt_updates,
    minibatch_epoch,
    odb_epoch,
    simulate,
    simulate_known,
    simulate_waiting,
    standard_padding,
)


def test_an_epoch_by_hand() -> None:
    # Rank 0 has 800, 500, 100 and 200 tokens, rank 1 has 300 four times: three groups, and one of 3 and one of 1.
    lengths = np.array([800, 300, 500, 300, 100, 300, 200, 300])
    epoch = odb_epoch(lengths, 1000, world_size=2, pool_size=4)
    assert (epoch.updates, epoch.num_samples, epoch.tokens) == (3, 8, int(lengths.sum()))
    assert epoch.padded_tokens == (2 * 200 + 500 + 800) + (2 * 300 + 300 + 300)
    assert epoch.padding_percent == pytest.approx(100 * (1 - 2800 / 2900))


@pytest.mark.parametrize(("num_samples", "pool_size"), [(1, 4), (7, 2), (64, 8), (65, 1000)])
def test_every_sample_is_emitted_once_also_where_ranks_do_not_divide_them(num_samples: int, pool_size: int) -> None:
    lengths = np.random.default_rng(num_samples).integers(1, 900, num_samples)
    epoch = odb_epoch(lengths, 1000, world_size=4, pool_size=pool_size)
    assert (epoch.num_samples, epoch.tokens) == (num_samples, int(lengths.sum()))
    assert -(-num_samples // 4) >= epoch.updates >= 1


def test_the_comparators_by_hand() -> None:
    # Sorted: 100 100 200 | 300 300 300 | 900 | 2000, at 900 tokens.
    lengths = np.array([300, 100, 2000, 900, 200, 300, 100, 300])
    assert [gmt_updates(lengths, 900, world_size) for world_size in (1, 2, 3)] == [4, 2, 2]
    assert standard_padding(np.array([1, 3, 2, 2, 4]), 2) == pytest.approx(100 * (1 - 12 / (6 + 4 + 4)))


def test_equal_quotas_by_hand() -> None:
    # Two ranks, each with two of the samples at a time; a minibatch is one average sample of 2 tokens, or the dearest.
    epoch = minibatch_epoch(np.array([2, 2, 2, 2, 2, 2, 2, 2]), LinearCost(), 1, 2, world_size=2)
    assert (epoch.bubble_rate, epoch.samples_per_minibatch) == (0.0, 1.0)
    assert epoch.time_per_1000 == pytest.approx(1000 * 2 / 2)
    alone = minibatch_epoch(np.array([3, 1, 1, 1]), LinearCost(), 1, 2, world_size=2, deals=False)
    # A quota of 3: 3 and 1 + 1, and then 1 on rank 0 alone.
    assert alone.bubble_rate == pytest.approx(1 - 6 / (2 * (3 + 1)))


@pytest.mark.parametrize(("law", "num_samples"), [("longalign", 4096), ("sharegpt4o", 8192)])
def test_ranks_that_fill_equal_quotas_hardly_wait(law: str, num_samples: int) -> None:
    as_they_are, dealt = (simulate_waiting(law, num_samples, deals) for deals in (False, True))
    assert as_they_are.bubble_before_the_end < 0.01
    assert dealt.bubble_rate < 0.025
    assert dealt.bubble_rate < as_they_are.bubble_rate < 0.08
    assert 3.5 < dealt.samples_per_minibatch < 4.5
    assert dealt.oldest < 256
    assert simulate_known(law, num_samples).bubble_rate > 5 * as_they_are.bubble_before_the_end


@pytest.mark.parametrize("row", [row for row in ROWS if row.dataset == "sharegpt4o" or row.method != "odb"])
def test_rows_come_out_as_published(row: batching.Row) -> None:
    result = simulate(row)
    assert result.is_good
    assert abs(result.error) < (1.0 if row.method == "standard" else 0.02)


def test_a_row_that_is_too_far_off_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def simulated(row: batching.Row, seed: int) -> Result:
        return Result(row, row.paper + (1.1 if row.method == "standard" else 0.0), row.padding_percent)

    monkeypatch.setattr(batching, "simulate", simulated)
    monkeypatch.setattr(batching, "WAITING", ())
    path = tmp_path / "new" / "batching.json"
    done = CliRunner().invoke(batching.app, ["--json", str(path)])
    assert done.exit_code == 1
    assert done.output.count("standard: further off than 1") == 2
    rows = json.loads(path.read_text())["rows"]
    assert [row["row"]["dataset"] for row in rows] == [row.dataset for row in ROWS]
    assert not replace(simulated(ROWS[0], 0), simulated=ROWS[0].paper * 1.1).is_good


def test_the_committed_result_is_of_all_rows() -> None:
    document = json.loads((Path(__file__).parent.parent / "bench/results/batching.json").read_text())
    assert [row["row"] for row in document["rows"]] == [vars(row) for row in ROWS]
    assert [row["law"] for row in document["quotas"]] == ["longalign"] * 2 + ["sharegpt4o"] * 2
    assert max(abs(row["error"]) for row in document["rows"] if row["row"]["method"] != "standard") < 0.02
