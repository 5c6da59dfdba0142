"""Layer 3: ranks as processes. The benchmark of FSDP2's host time, small; and what its committed results promise."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import odc.bench
from odc import patch_fsdp
from odc.bench.communication import fsdp_host_time
from odc.bench.communication.fsdp_host_time import KINDS, PARTS, Settings, measure_rank, summarize
from odc.bench.harness.ranks import Rank, run_ranks
from odc.engines.base import Engine
from odc.fsdp_patch.guard import Guard
from odc.minibatch.runtime import Runtime

RESULTS = Path(odc.bench.__file__).parent / "results"


@pytest.mark.parametrize("keep", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_each_kind_takes_time_and_parts_are_their_differences(keep: bool) -> None:
    progress: list[float] = []
    ranks = run_ranks(2, measure_rank, Settings(2, 1, 2, keep), on_progress=progress.append)
    assert [set(row) for rows in ranks for row in rows] == [set(KINDS)] * 4
    assert all(us > 0 for rows in ranks for row in rows for us in row.values())
    assert sum(progress) == 3
    found = json.loads(json.dumps(summarize(ranks, {"ranks": 2, "parameters": 12})))
    assert [row["part"] for row in found["parts"]] == list(PARTS)
    assert all(row["ranks"] == 2 for rows in found.values() for row in rows)


def times(**changed: float) -> dict[str, float]:
    us = (10.0, 110.0, 111.0, 61.0, 73.0, 76.0, 81.0, 85.0, 130.0, 135.0, 60.0)
    return dict(zip(KINDS, us, strict=True)) | changed


def test_parts_in_per_cent_of_what_fsdp_spends() -> None:
    parts = summarize([[times()] * 3] * 2, {})["parts"]
    assert {part["part"]: (part["us"]["median"], part["percent"]["median"]) for part in parts} == {
        "FSDP2's own": (100.0, 100.0),
        "other models": (1.0, 1.0),
        "staging": (50.0, 50.0),
        "interception": (12.0, 12.0),
        "guard": (3.0, 3.0),
        "transfers": (5.0, 5.0),
        "all of ODC": (-30.0, -30.0),
        "bytes": (4.0, 4.0),
    }


def test_ways_are_compared_without_the_model_and_within_a_repetition() -> None:
    slow = {name: 10 * us for name, us in times().items()}
    (ways,) = summarize([[times(), slow, times()]], {"ranks": 2})["ways"]
    assert ways["ranks"] == 2
    assert (ways["staged"]["median"], ways["in_place"]["median"]) == (120.0, 71.0)
    assert ways["ratio"]["p20"] == ways["ratio"]["p80"] == pytest.approx(71 / 120)
    assert ways["ratio_small"]["median"] == pytest.approx(50 / 125)


def _moved_by(me: Rank, staging: str) -> list[str]:
    called = []

    def noting(name: str, original: Callable[..., None]) -> Callable[..., None]:
        return staticmethod(lambda *args: called.append(name) or original(*args))

    model = fsdp_host_time._sharded(Settings(1), me.world_size)
    fsdp_host_time._patch_from_now_on(me, staging=staging)
    with patch_fsdp(model) as session:
        model(torch.zeros(8)).sum().backward()
        for name in ("copy", "add", "zero", "write_rows", "read_rows"):
            setattr(Engine, name, noting(name, getattr(Engine(), name)))
        model(torch.zeros(8)).sum().backward()
        session.discard()
    return called


@pytest.mark.parametrize(("staging", "num_read"), [("on", 1), ("auto", 2)])
def test_what_moves_bytes_is_switched_off(staging: str, num_read: int) -> None:
    """Else its time would count as another part's."""
    wanted = ["copy"] * 2 * num_read + ["add"] * 2
    assert run_ranks(2, _moved_by, staging) == [wanted] * 2
    assert set(wanted) <= set(fsdp_host_time._SWITCHES[Engine])


def test_nothing_stays_switched_off() -> None:
    assert Runtime.gather.__name__ == "gather"
    assert Guard.check_push.__name__ == "check_push"


def test_in_place_needs_no_more_of_the_host_than_staged() -> None:
    document = json.loads((RESULTS / "fsdp_host_time.json").read_text())
    cells = {(row["ranks"], row["parameters"]): row for row in document["ways"]}
    assert set(cells) == set(itertools.product((2, 8, 16), (1, 12, 30)))
    assert all(row[ratio]["median"] <= 1.0 for row in cells.values() for ratio in ("ratio", "ratio_small"))
    assert [row["part"] for row in document["parts"]] == list(PARTS) * len(cells)
    assert [row["kind"] for row in document["kinds"]] == list(KINDS) * len(cells)
