"""Layer 3: ranks as processes. The benchmark of peak memory: whether it sees buffers, freed and shared memory; and what
its committed result promises."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import odc.bench
from odc.bench.communication import memory
from odc.bench.communication.memory import (
    BY_UNIT,
    FSDP2,
    IN_PLACE,
    STAGED,
    WAYS,
    Settings,
    compare,
    measure_rank,
    summarize,
)
from odc.bench.harness.ranks import Rank, run_ranks

RESULTS = Path(odc.bench.__file__).parent / "results"
SETTINGS = Settings(IN_PLACE, width=512, num_blocks=3, steps=1)


def with_buffers(me: Rank, settings: Settings) -> dict[str, Any]:
    """As :func:`measure_rank`, with one of a unit's size in a forward, which torch does not know of, and one in a
    backward."""
    forward, clear, numel, kept = memory.Block.forward, memory._Training.clear, 12 * settings.width**2, []

    def keep(grad: torch.Tensor) -> None:
        kept.clear()
        kept.append(torch.ones(numel))

    def forward_with_buffers(self: Any, x: torch.Tensor) -> torch.Tensor:
        kept.clear()
        out = forward(self, x)
        np.ones(numel, np.float32)
        out.register_hook(keep)
        return out

    def clear_too(self: Any) -> None:
        kept.clear()
        clear(self)

    memory.Block.forward = forward_with_buffers  # type: ignore[method-assign]
    memory._Training.clear = clear_too  # type: ignore[method-assign]
    return measure_rank(me, settings)


@pytest.mark.extended
def test_a_buffer_of_a_units_size_is_seen() -> None:
    clean, with_them = (summarize(run_ranks(2, body, SETTINGS)) for body in (measure_rank, with_buffers))
    assert clean["largest_buffer_units"] < 0.6, "the gradients of a shard"
    assert clean["forward_units"] < 1.6, "what is shared counts as private, or what is freed is there"
    assert clean["backward_units"] < 2.6
    assert with_them["largest_buffer_units"] == pytest.approx(1.0, abs=0.01)
    for phase in ("forward", "backward"):
        assert with_them[f"{phase}_units"] - clean[f"{phase}_units"] == pytest.approx(1.0, abs=0.15), phase
    for row in (clean, with_them):
        for name in ("published", "sums", "gradients"):
            assert row[name] == pytest.approx(row["parameters"], rel=1e-3), name
        assert row["state"] >= 2 * row["parameters"]
        assert 0 <= row["other_shared"] < 1 << 20
    missed = compare({FSDP2: {**clean, "peak": clean["peak"] - clean["sums"]}, IN_PLACE: with_them})
    assert len(missed) == 2, missed


@pytest.mark.extended  # by default gradients are counted: test_step_by_unit.py
def test_a_step_by_unit_holds_the_gradients_of_one_unit() -> None:
    usual, by_unit = (summarize(run_ranks(2, measure_rank, replace(SETTINGS, way=way))) for way in (IN_PLACE, BY_UNIT))
    assert usual["gradients"] == pytest.approx(usual["parameters"], rel=1e-3)
    assert by_unit["gradients"] == 0
    assert by_unit["end_units"] - usual["end_units"] == pytest.approx(0.5, abs=0.15), "more than a shard of one unit"


def peaks(me: Rank, keep_nothing: bool) -> list[int]:
    """Above what there was first: with nothing, 8 MB that are freed again, and so on. By default malloc keeps what has
    been freed once before."""
    if keep_nothing:
        memory.keep_nothing_freed()
    found = []
    for numel in (1, 1 << 21, 1, 1 << 21, 1):
        memory.begin_peak()
        torch.ones(numel)
        found.append(memory.private_peak())
    return [peak - found[0] for peak in found]


def test_a_peak_is_that_of_its_phase() -> None:
    (found,), (kept,) = (run_ranks(1, peaks, keep_nothing) for keep_nothing in (True, False))
    assert found == pytest.approx([0, 1 << 23, 0, 1 << 23, 0], abs=1 << 20)
    assert kept[-1] > 1 << 22


def row(**changed: Any) -> dict[str, Any]:
    sizes = {"peak": 200.0, "published": 40.0, "sums": 40.0, "backward_units": 2.1, "largest_buffer_units": 0.5}
    return {**sizes, **changed}


@pytest.mark.parametrize(
    ("changed", "num_missed"),
    [
        ({}, 0),
        ({"peak": 279.0}, 0),
        ({"peak": 280.0}, 1),
        ({"backward_units": 2.9}, 1),
        ({"largest_buffer_units": 1.0}, 1),
    ],
)
def test_what_of_odc_in_place_is_not_as_it_should_be(changed: dict[str, float], num_missed: int) -> None:
    rows = {FSDP2: row(backward_units=4.0), STAGED: row(peak=300.0), IN_PLACE: row(**changed)}
    assert len(compare(rows)) == num_missed
    assert (rows[STAGED]["ratio"], rows[STAGED]["more"]) == (1.5, 100.0)


@pytest.mark.parametrize(("millions", "numel"), [(25, 25), (100, 101)])
def test_width_for_so_many_parameters(millions: int, numel: int) -> None:
    width = memory.width_of(millions, 8)
    assert round(8 * 12 * width**2 / 1e6) == numel


def test_committed_result() -> None:
    document = json.loads((RESULTS / "memory.json").read_text())
    rows = {(row["millions"], row["ranks"], row["way"]): row for row in document["results"]}
    ways = [way for way in WAYS if (25, 2, way) in rows]
    assert {FSDP2, STAGED, IN_PLACE} <= set(ways)
    assert set(rows) == set(itertools.product((25, 100), (2, 4), ways))
    for millions, ranks in itertools.product((25, 100), (2, 4)):
        assert not compare({way: rows[millions, ranks, way] for way in ways})
