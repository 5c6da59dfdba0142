"""Layer 1: no processes. What the pictures of ``odc plan`` show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is an optional package")

from matplotlib.figure import Figure

from odc.balance import Machine, Scenario, even_lengths
from odc.cli import plots
from odc.cli.comparison import Comparison, at_minibatch_sizes, compare
from odc.cli.costs import make_training
from odc.cli.lengths import some_of

POLICIES = ("lb-micro", "lb-mini")


def compared(machine: Machine | None = None, world_size: int = 4, odc_slower: float = 1.0) -> Comparison:
    machine = machine or Machine()
    lengths = even_lengths("aime", 1024)
    training = make_training("qwen2.5-1.5b", "h100", 0.4, world_size, recompute=True, timings=None)
    scenario = Scenario(some_of(lengths, 512, 0), training.cost, world_size, 2, max_tokens=int(lengths.max()))
    slower = replace(machine, gather=machine.gather * odc_slower, scatter=machine.scatter * odc_slower)
    return compare(scenario, lengths, POLICIES, training, {"collective": machine, "odc": slower})


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
    baseline, candidate = at_minibatch_sizes(comparison, [2])[2]
    for curve, key in ((baseline, ("lb-micro", "collective")), (candidate, ("lb-mini", "odc"))):
        row = comparison.simulations[key]
        np.testing.assert_array_equal(curve.makespans, row.makespans)
        assert curve.bubble_rate == row.bubble_rate


def test_the_minibatch_by_itself_is_that_of_all_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = compared()
    both = panels(comparison, tmp_path, monkeypatch).axes
    (alone,) = panels(comparison, tmp_path, monkeypatch, minibatch_only=True).axes
    assert alone.get_title(loc="left") == both[1].get_title(loc="left")
    bars = [[(bar.get_x(), bar.get_width()) for bar in axes.patches] for axes in (alone, both[1])]
    assert bars[0] == bars[1] != []


def test_titles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, timeline, *_ = panels(compared(), tmp_path, monkeypatch).axes
    assert lengths.get_title(loc="left").startswith("512 of 1,024 samples")
    assert "as planned" not in timeline.get_title(loc="left")
    for machine in (Machine(noise=0.1), Machine(gather=1e-3)):
        timeline = panels(compared(machine), tmp_path, monkeypatch).axes[1]
        assert "as planned" in timeline.get_title(loc="left")


def test_at_most_16_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for world_size, shown in ((16, 16), (32, 16)):
        timeline = panels(compared(world_size=world_size), tmp_path, monkeypatch).axes[1]
        assert len(timeline.get_yticks()) == 2 * shown
        assert ("16 of 32 ranks" in timeline.get_title(loc="left")) == (world_size == 32)


def test_the_rank_that_others_wait_for_is_among_them() -> None:
    plan = compared(world_size=32).planned["lb-mini"].minibatches[0].plan
    slowest = int(plan.microbatch_times().sum(axis=1).argmax())
    reverse = replace(plan, microbatches=plan.microbatches[slowest + 1 :] + plan.microbatches[: slowest + 1])
    ranks = plots._ranks_to_show(reverse)
    assert ranks == [*range(15), 31]


def test_ranges_of_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_rank = panels(compared(world_size=1), tmp_path, monkeypatch, (1, 2, 4)).axes[2:]
    assert [axes.get_ylim() for axes in one_rank] == [(0.0, 1.0), (0.0, 1.0)]
    costly = Machine(gather=0.02, scatter=0.02, overlap=0.0)
    slower = panels(compared(costly, odc_slower=4.0), tmp_path, monkeypatch, (1, 2, 4)).axes[3]
    assert slower.get_ylim()[0] <= min(slower.lines[0].get_ydata()) < 0
