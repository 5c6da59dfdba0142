"""Layer 3: ranks as processes. The benchmark of FSDP2's host time, small; and what its committed results promise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import odc.bench
from odc.bench.communication.fsdp_host_time import KINDS, PARTS, Settings, measure_rank, summarize
from odc.bench.harness.ranks import run_ranks
from odc.fsdp_patch.guard import Guard
from odc.minibatch.runtime import Runtime

RESULTS = Path(odc.bench.__file__).parent / "results"


@pytest.mark.parametrize("keep", [False, True])
def test_each_kind_takes_time_and_parts_are_their_differences(keep: bool) -> None:
    progress: list[float] = []
    ranks = run_ranks(2, measure_rank, Settings(2, 1, 2, keep), on_progress=progress.append)
    assert [set(row) for rows in ranks for row in rows] == [set(KINDS)] * 4
    assert all(us > 0 for rows in ranks for row in rows for us in row.values())
    assert sum(progress) == 3
    found = json.loads(json.dumps(summarize(ranks)))
    assert [row["part"] for row in found["parts"]] == list(PARTS)


def test_parts_in_per_cent_of_what_fsdp_spends() -> None:
    rows = [dict(zip(KINDS, (10.0, 110.0, 111.0, 113.0, 116.0, 121.0, 125.0), strict=True))] * 3
    parts = summarize([rows, rows])["parts"]
    assert {part["part"]: (part["us"]["median"], part["percent"]["median"]) for part in parts} == {
        "FSDP2's own": (100.0, 100.0),
        "other models": (1.0, 1.0),
        "interception": (2.0, 2.0),
        "guard": (3.0, 3.0),
        "transfers": (5.0, 5.0),
        "all of ODC": (10.0, 10.0),
        "bytes": (4.0, 4.0),
    }


def test_nothing_stays_switched_off() -> None:
    assert Runtime.gather.__name__ == "gather"
    assert Guard.check_push.__name__ == "check_push"


@pytest.mark.parametrize("name", ["fsdp_host_time.json", "fsdp_host_time_before.json"])
def test_committed_results_are_of_this_benchmark(name: str) -> None:
    document = json.loads((RESULTS / name).read_text())
    assert [row["part"] for row in document["parts"]] == list(PARTS)
    assert [row["kind"] for row in document["kinds"]] == list(KINDS)
