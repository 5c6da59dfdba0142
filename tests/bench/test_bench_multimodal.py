"""Layer 4: the multimodal demo as a user types it, small; and what is worked out of its runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from odc.bench.training.multimodal import CONFIGURATIONS, gradient_difference

ROOT = Path(__file__).parents[2]


@pytest.mark.extended  # half a minute; the parts of it are tests/multimodal's
def test_four_ways_train_to_the_same_losses_and_gradients(tmp_path: Path) -> None:
    sizes = ["--minibatches", "5", "--minibatch-size", "3", "--hidden-size", "32", "--repetitions", "1"]
    command = [sys.executable, "-m", "odc", "bench", "multimodal", "--out", str(tmp_path), *sizes]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = {row["name"]: row for row in json.loads((tmp_path / "summary.json").read_text())["runs"]}
    assert list(runs) == [configuration.name for configuration in CONFIGURATIONS]
    for name, run in runs.items():
        assert run["losses"] == pytest.approx(runs["none"]["losses"], rel=1e-6)
        assert run["max_gradient_difference"] < 1e-5
        assert run["losses"][-1] < run["losses"][0]
        # One exchange per encoder and direction; inputs move as well where encoders have a distribution of their own.
        outputs = {channel: count for channel, count in run["exchanges"].items() if not channel.endswith("/inputs")}
        assert outputs == {f"{kind}/{what}": 5 for kind in ("image", "audio") for what in ("outputs", "gradients")}
        assert (run["moved_bytes_per_minibatch"] > 0) is name.startswith("all")
    for picture in ("losses.png", "timeline.png"):
        assert (tmp_path / picture).stat().st_size > 10_000


def test_gradients_are_compared_by_their_largest_element() -> None:
    reference = {"a": torch.tensor([1.0, -4.0]), "b": torch.zeros(2)}
    assert gradient_difference(reference, reference) == 0
    assert gradient_difference({**reference, "a": torch.tensor([1.0, -4.4])}, reference) == pytest.approx(0.1)
    assert gradient_difference({**reference, "b": torch.ones(2)}, reference) == 1
    with pytest.raises(ValueError, match=r"different parameters: \['b'\]"):
        gradient_difference({"a": reference["a"]}, reference)
