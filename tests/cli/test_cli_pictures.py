"""Layer 1: no processes. What the pictures of ``odc plan`` show."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is an optional package")

from matplotlib.figure import Figure

from odc.balance import Machine, Scenario, even_lengths
from odc.cli import plots
from odc.cli.comparison import Comparison, Study, at_minibatch_sizes, compare, recommend
from odc.cli.costs import make_training
from odc.cli.lengths import some_of
from odc.cli.output import significant

POLICIES = ("lb-micro", "lb-micro-global", "lb-mini")


@functools.cache
def compared(machine: Machine = Machine(), world_size: int = 4, odc_slower: float = 1.0) -> Comparison:  # noqa: B008
    lengths = even_lengths("aime", 256)
    training = make_training("qwen2.5-1.5b", "h100", 0.4, world_size, recompute=True, timings=None)
    scenario = Scenario(some_of(lengths, 128, 0), training.cost, world_size, 2, max_tokens=int(lengths.max()))
    slower = replace(machine, gather=machine.gather * odc_slower, scatter=machine.scatter * odc_slower)
    return compare(Study(scenario, lengths, "", training, {"collective": machine, "odc": slower}), POLICIES)


def panels(
    comparison: Comparison,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, ...] = (2,),
    minibatch_only: bool = False,
) -> Figure:
    """With curves over few ``sizes``: planning takes most of the time, and most tests look at other panels."""
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    monkeypatch.setattr(plots, "_SIZES", sizes)
    plots.plot_plan(path / "a.png", comparison, minibatch_only=minibatch_only)
    return saved[0]


def test_curves_are_of_the_same_machines_as_the_table() -> None:
    comparison = compared(Machine(noise=0.3, gather=2e-3, scatter=2e-3, overlap=0.2), odc_slower=3.0)
    fsdp, odc = comparison.best("collective"), comparison.best("odc")
    found = at_minibatch_sizes(comparison, fsdp.policy, odc.policy, [2])[2]
    for curve, row in zip(found, (fsdp, odc), strict=True):
        np.testing.assert_array_equal(curve.makespans, row.makespans)
        assert curve.bubble_rate == row.bubble_rate


def test_the_minibatch_by_itself_is_that_of_all_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = compared()
    both = panels(comparison, tmp_path, monkeypatch).axes
    (alone,) = panels(comparison, tmp_path, monkeypatch, minibatch_only=True).axes
    assert alone.get_title(loc="left") == both[1].get_title(loc="left")
    bars = [[(bar.get_x(), bar.get_width()) for bar in axes.patches] for axes in (alone, both[1])]
    assert bars[0] == bars[1] != []


def test_the_picture_and_the_sentence_are_of_the_same_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = compared()
    fsdp, odc = comparison.best("collective"), comparison.best("odc")
    assert fsdp.policy == "lb-micro-global"  # not the paper's baseline
    _, timeline, bubbles, speedup = panels(comparison, tmp_path, monkeypatch).axes
    assert [text.get_text().strip() for text in timeline.texts] == ["FSDP with lb-micro-global", "ODC with lb-mini"]
    assert [line.get_label() for line in bubbles.lines] == ["lb-micro-global, FSDP", "lb-mini, ODC"]
    (gain,) = speedup.lines[0].get_ydata()
    assert f"{1 + gain / 100:.2f}x speedup over the best FSDP plan" in recommend({"shuffled": comparison})
    plans = [comparison.planned[each.policy].minibatches for each in (fsdp, odc)]
    ratios = fsdp.makespans / odc.makespans
    typical = int(np.argsort(ratios, kind="stable")[ratios.size // 2])
    title = f"One step of 8 samples: FSDP {significant(plans[0][typical].plan.makespan('collective'))} s, ODC "
    assert timeline.get_title(loc="left").startswith(title)


@pytest.mark.parametrize("policy", ["lb-micro", "lb-mini"])
def test_pictures_of_one_kind_of_communication(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = compared()
    only = {key: each for key, each in comparison.simulations.items() if key[0] == policy}
    _, timeline, bubbles, _ = panels(replace(comparison, simulations=only), tmp_path, monkeypatch).axes
    assert len(timeline.texts) == (2 if policy == "lb-micro" else 1)
    assert len(bubbles.lines) == 2


def test_titles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, timeline, *_ = panels(compared(), tmp_path, monkeypatch).axes
    assert lengths.get_title(loc="left").startswith("128 of 256 samples")
    assert "as planned" not in timeline.get_title(loc="left")
    for machine in (Machine(noise=0.1), Machine(gather=1e-3)):
        timeline = panels(compared(machine), tmp_path, monkeypatch).axes[1]
        assert "as planned" in timeline.get_title(loc="left")


def test_at_most_16_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for world_size, shown in ((16, 16), (32, 16)):
        timeline = panels(compared(world_size=world_size), tmp_path, monkeypatch).axes[1]
        assert len(timeline.get_yticks()) == 2 * shown
        assert timeline.get_ylabel() == ("16 of 32 ranks" if world_size == 32 else "rank")


def test_the_rank_that_others_wait_for_is_among_them() -> None:
    plan = compared(world_size=32).planned["lb-mini"].minibatches[0].plan
    slowest = int(plan.microbatch_times().sum(axis=1).argmax())
    reverse = replace(plan, microbatches=plan.microbatches[slowest + 1 :] + plan.microbatches[: slowest + 1])
    ranks = plots.ranks_to_show(reverse.microbatch_times().sum(axis=1))
    assert ranks == [*range(15), 31]


def test_ranges_of_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_rank = panels(compared(world_size=1), tmp_path, monkeypatch, (1, 2, 4)).axes[2:]
    assert [axes.get_ylim() for axes in one_rank] == [(0.0, 1.0), (0.0, 1.0)]
    costly = Machine(gather=0.02, scatter=0.02, overlap=0.0)
    slower = panels(compared(costly, odc_slower=4.0), tmp_path, monkeypatch, (1, 2, 4)).axes[3]
    assert slower.get_ylim()[0] <= min(slower.lines[0].get_ydata()) < 0
