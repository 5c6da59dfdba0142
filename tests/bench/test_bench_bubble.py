"""Layer 1: no processes. The demo's numbers: the bubble rate, on timelines made by hand, and the summary."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from odc.bench.harness.results import shown
from odc.bench.training.bubble import LOSS_LABEL, Segment, bubble_rate, segments, shares
from odc.bench.training.runs import Run, quietest, runs_table, summarize
from odc.timeline import KINDS, Span, Timeline


def timeline(rank: int, *spans: tuple[str, str, int, int], minibatch: int = 0) -> Timeline:
    made = Timeline(rank)
    made.spans = [Span(*span, minibatch) for span in spans]
    return made


def test_collectives_idle_from_own_start_to_the_last_ranks_start() -> None:
    # gather: both leave at 14, rank 1 joins at 10, so rank 0 idles from 4 to 10 and transfers from 10 to 14.
    # scatter: rank 1 joins at 20 and waits for rank 0, which joins at 50. Idle: 6 + 30 of 2 * 100.
    ranks = [
        timeline(0, ("gather", "l", 4, 14), ("scatter", "l", 50, 60), ("minibatch", "m", 0, 100)),
        timeline(1, ("gather", "l", 10, 14), ("scatter", "l", 20, 60), ("minibatch", "m", 0, 100)),
    ]
    assert bubble_rate(ranks, [0], collectives=True) == pytest.approx(36 / 200)
    assert shares(segments(ranks, [0], collectives=True)) == pytest.approx(
        {"wait": 36 / 200, "gather": 8 / 200, "scatter": 20 / 200, "other": 0, "compute": 136 / 200}
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "minibatch"])
def test_every_kind_of_span_can_be_in_the_picture(kind: str) -> None:
    ranks = [timeline(0, (kind, "l", 0, 10), ("minibatch", "m", 0, 100))]
    left = 1.0 if kind == "phase" else 0.9  # a phase is a name for what is computed in it
    assert shares(segments(ranks, [0], collectives=False))["compute"] == pytest.approx(left)


def test_idle_in_a_collective_ends_when_the_rank_leaves_it() -> None:
    # A rank may leave a collective before another one has entered it (a broadcast's sender, for example).
    ranks = [
        timeline(0, ("gather", "l", 0, 10), ("minibatch", "m", 0, 100)),
        timeline(1, ("gather", "l", 70, 80), ("minibatch", "m", 0, 100)),
    ]
    assert bubble_rate(ranks, [0], collectives=True) == pytest.approx(10 / 200)


def test_odc_idles_in_its_waits_and_each_moment_counts_once() -> None:
    # The waits lie inside a gather and a finish, and two of them overlap: their union is 10..30 and 80..100.
    ranks = [
        timeline(
            0,
            ("wait", "a", 10, 25),
            ("wait", "b", 20, 30),
            ("gather", "l", 5, 40),
            ("wait", "c", 80, 100),
            ("finish", "", 70, 100),
            ("minibatch", "m", 0, 100),
        ),
        timeline(1, ("gather", "l", 0, 50), ("publish", "l", 90, 95), ("minibatch", "m", 0, 100)),
    ]
    assert bubble_rate(ranks, [0], collectives=False) == pytest.approx(40 / 200)
    assert shares(segments(ranks, [0], collectives=False)) == pytest.approx(
        {"wait": 40 / 200, "gather": 65 / 200, "scatter": 0, "other": 15 / 200, "compute": 80 / 200}
    )


@pytest.mark.parametrize("collectives", [True, False])
def test_the_all_reduce_of_the_loss_is_a_collective_in_both(collectives: bool) -> None:
    ranks = [
        timeline(0, ("finish", LOSS_LABEL, 40, 95), ("minibatch", "m", 0, 100)),
        timeline(1, ("finish", LOSS_LABEL, 90, 95), ("minibatch", "m", 0, 100)),
    ]
    assert bubble_rate(ranks, [0], collectives=collectives) == pytest.approx(50 / 200)


def test_only_the_chosen_minibatches_count_and_longer_ones_count_for_more() -> None:
    ranks = []
    for rank in range(2):
        made = Timeline(rank)
        made.spans = [
            Span("wait", "", 0, 100, 0),  # a warm-up minibatch, all idle
            Span("minibatch", "", 0, 100, 0),
            Span("wait", "", 200, 210, 1),
            Span("minibatch", "", 200, 220, 1),
            Span("minibatch", "", 300, 380, 2),
        ]
        ranks.append(made)
    assert bubble_rate(ranks, [1, 2], collectives=False) == pytest.approx(10 / 100)


def test_segments_cover_the_minibatch_without_gaps() -> None:
    one = timeline(
        0,
        ("wait", "w", 12, 15),
        ("gather", "l", 10, 20),
        ("publish", "l", 105, 120),  # after the minibatch: not part of it
        ("minibatch", "m", 0, 100),
    )
    assert segments([one], [0], collectives=False) == [
        [
            Segment("compute", 0, 10),
            Segment("gather", 10, 12),
            Segment("wait", 12, 15),
            Segment("gather", 15, 20),
            Segment("compute", 20, 100),
        ]
    ]


def test_different_collectives_are_an_error() -> None:
    ranks = [
        timeline(0, ("gather", "l", 0, 1), ("minibatch", "m", 0, 9)),
        timeline(1, ("minibatch", "m", 0, 9)),
    ]
    with pytest.raises(ValueError, match="ranks 0 and 1 have different collectives"):
        bubble_rate(ranks, [0], collectives=True)
    assert bubble_rate(ranks, [0], collectives=False) == 0


def test_a_missing_minibatch_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"rank 0 has no minibatch span for minibatches \[1\]"):
        bubble_rate([timeline(0, ("minibatch", "m", 0, 9))], [0, 1], collectives=False)


def make_run(samples_per_s: float, losses: list[float], seconds: float = 10.0) -> Run:
    return Run(
        samples_per_s=samples_per_s,
        tokens_per_s=1234567.0,
        seconds=seconds,
        minibatch_seconds=[1.0],
        losses=losses,
        shares={"wait": 0.25, "gather": 0.1, "scatter": 0.05, "other": 0.01, "compute": 0.59},
        folder=Path(),
        num_untimed=2,
        collectives=False,
    )


def test_summary_compares_each_repetition_with_the_baseline_of_the_same_one() -> None:
    runs = {
        "collective-lb-micro": [make_run(1, [4.0, 2.0]), make_run(10, [4.0, 2.0]), make_run(4, [4.0, 2.0])],
        "odc-lb-mini": [make_run(2, [4.0, 2.0]), make_run(15, [4.0, 2.5]), make_run(5, [4.2, 2.0])],
    }
    base, odc = summarize(runs)
    assert (base["samples_per_s"], odc["samples_per_s"]) == (4, 5)
    assert odc["speedup"] == 1.5  # of 2, 1.5, 1.25
    assert odc["max_loss_difference"] == pytest.approx(0.25)
    assert odc["bubble_rate"] == 0.25


def test_the_drawn_runs_are_of_one_repetition() -> None:
    runs = {
        "a": [make_run(1, [4.0], seconds=9.0), make_run(2, [4.0], seconds=6.0)],
        "b": [make_run(3, [4.0], seconds=2.0), make_run(4, [4.0], seconds=3.0)],
    }
    assert {name: run.samples_per_s for name, run in quietest(runs).items()} == {"a": 2, "b": 4}


def test_table_fits_untruncated() -> None:
    runs = {name: [make_run(123.45, [9.0, 8.7654])] * 3 for name in ("collective-lb-micro", "odc-lb-mini")}
    console = Console(width=130, record=True, file=io.StringIO())
    result = {"runs": summarize(runs), "settings": {"ranks": 2, "repetitions": 3}}
    console.print(shown(runs_table(), result["runs"], result))
    text = console.export_text()
    for word in ("collective-lb-micro", "123.5", "1.00 (1.00-1.00)", "1234567", "25.0%", "16.0%", "8.7654"):
        assert word in text
    assert "…" not in text
