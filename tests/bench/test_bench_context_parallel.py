"""Layer 3: ranks as processes. Groups of ranks with emulated compute, on few ranks and small minibatches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from odc.balance import TransformerCost, bubble_rate
from odc.bench.harness.benchmark import Numbers, Run
from odc.bench.training.context_parallel import BENCHMARK, FLOPS_PER_S, GroupSettings, measure
from odc.bench.training.emulated import WAYS, run_rank
from odc.cli.app import app


def settings(group_size: int, **options: Any) -> GroupSettings:
    return GroupSettings(
        ranks=4,
        layers=2,
        minibatches=3,
        minibatch_size=2,
        scale=0.1,
        model="qwen2.5-7b",
        group_size=group_size,
        **options,
    )


def test_plans_are_of_the_same_samples_and_work() -> None:
    """By hand: a group has a share of the FLOPs, and receives the others' part of keys and values at 450 GB/s."""
    cost = TransformerCost.from_config("qwen2.5-7b")
    lengths = {size: [plan.lengths.tolist() for plan in settings(size).plans("lb-mini")] for size in (1, 2, 4)}
    assert lengths[1] == lengths[2] == lengths[4]
    for size in (1, 2, 4):
        plans = settings(size).plans("lb-mini")
        assert [len(plan.num_microbatches) for plan in plans] == [4 // size] * 3
        for plan in plans:
            work = cost(plan.lengths).sum() / size
            exchange = 3 * 28 * 2 * 512 * 2 * (size - 1) / size / 450e9 * plan.lengths.sum() * FLOPS_PER_S
            assert plan.microbatch_times().sum() == pytest.approx(work + exchange)


@pytest.mark.parametrize(("way", "exactly"), [("odc-lb-mini", 1e-9), ("collective-lb-micro-global", 2e-3)])
def test_plans_are_those_of_the_command(way: str, exactly: float, tmp_path: Path) -> None:
    """Of the same lengths, ``odc plan`` says the same; for collectives it looks at the head apart from the layers."""
    alone = settings(1).scenario()
    np.save(tmp_path / "a.npy", np.asarray(alone.lengths))
    options = ("--world-size", "4", "--minibatch-size", "2", "--max-tokens", str(alone.max_tokens))
    arguments = ("plan", "context-parallel", str(tmp_path / "a.npy"), *options, "--sizes", "1,2,4", "--json")
    found = json.loads(CliRunner().invoke(app, [*arguments]).stdout)
    comm, policy = WAYS[way]
    for group in found["groups"]:
        plans = settings(group["context_parallel"]).plans(policy)
        (row,) = (row for row in group["policies"] if (row["policy"], row["comm"]) == (policy, comm))
        assert row["bubble_rate"] == pytest.approx(bubble_rate(plans, comm), abs=exactly)
        seconds = sum(plan.makespan(comm) for plan in plans) / FLOPS_PER_S
        assert row["samples_per_s"] == pytest.approx(8 * len(plans) / seconds, rel=exactly)


def test_partners_wait_for_each_other_in_each_layer() -> None:
    """One of two ranks takes half a second longer: its partner waits for that inside the microbatches, though ODC
    would let it go on."""
    works = [[[0.02, 0.02]], [[0.27, 0.27]]]
    together = GroupSettings(ranks=2, layers=2, group_size=2)
    fast, slow = Run().ranks(2, run_rank, together, "odc", "full", works)

    def waited(run: Any) -> float:
        return sum(span.seconds for span in run.timeline.spans if (span.kind, span.label) == ("wait", "partners"))

    # Behind the slow one's last sleep nothing is waited for: two thirds of one of two layers. On a busy machine the
    # slow one waits, too.
    assert waited(fast) > 0.7 * (0.5 - 0.25 / 3)
    assert waited(slow) < waited(fast) / 2
    alone = Run().ranks(2, run_rank, GroupSettings(ranks=2, layers=2), "odc", "full", works)
    assert [waited(run) for run in alone] == [0, 0]


def test_a_result_has_each_way_on_each_size() -> None:
    run = Run(quick=True)
    options: dict[str, Any] = {"minibatch_size": Numbers(1), "context_parallel": Numbers(1, 2), "samples": 2}
    found = measure(run, **options, way=["collective-lb-micro-global", "odc-lb-mini"], ranks=2, scale=0.02, layers=2)
    rows = found["runs"]
    assert [(row["context_parallel"], row["way"]) for row in rows] == [
        (size, way) for size in (1, 2) for way in ("collective-lb-micro-global", "odc-lb-mini")
    ]
    assert json.loads(json.dumps(found)) == found
    for row in rows:
        assert row["ratio"] == pytest.approx(rows[0]["minibatch_s"] / row["minibatch_s"])
        assert row["waiting"] + row["communication"] + row["host"] == pytest.approx(row["bubble"])
    assert rows[2]["planned_bubble"] == rows[3]["planned_bubble"] == 0
    assert rows[2]["planned_ratio"] == pytest.approx(1 / (1 - rows[0]["planned_bubble"]), rel=0.01)
    largest = max(abs(100 * (row["bubble"] - row["planned_bubble"])) for row in rows)
    assert found["largest_difference_points"] == pytest.approx(largest)
    texts = [text for _, make, _ in BENCHMARK.figures for text in make(found)]
    assert [fixed for fixed, _ in texts] == ["| 1, 1 |", "| 1, 2 |"]
    assert f" {100 * rows[1]['bubble']:.1f} % |" in texts[0][1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"way": ["odc"]}, "'odc': expected one of collective-lb-micro"),
        ({"link": "ethernet"}, "'ethernet': expected one of nvlink"),
        ({"context_parallel": Numbers(1, 3)}, "--context-parallel 3: 8 ranks cannot be shared out evenly"),
    ],
)
def test_what_cannot_be_run_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        measure(Run(), **options)


def test_a_difference_that_is_too_large_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"minibatch_s": 1.0, "planned_s": 1.0, "planned_bubble": 0.1, "bubble": 0.2}
    runs = iter(np.array([4.9, 5.1, -5.1, 0.0]).tolist())
    monkeypatch.setattr(
        "odc.bench.training.context_parallel.run_way", lambda *_: {**entry, "difference_points": next(runs)}
    )
    run = Run()
    measure(run, context_parallel=Numbers(1, 2), minibatch_size=Numbers(4), way=["odc-lb-mini", "odc-lb-micro"])
    assert [text.split(":")[0] for text in run.missed] == [
        "odc-lb-micro, 4 samples a rank, groups of 1",
        "odc-lb-mini, 4 samples a rank, groups of 2",
    ]
