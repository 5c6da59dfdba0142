"""Layer 4: ``examples/vlm_sft.py``, which knows nothing of ODC, on two ranks of which one never has an image."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 8  # no sample of the last two has an image


@pytest.mark.parametrize("options", [[], pytest.param(["--freeze-encoder"], marks=pytest.mark.extended)])
def test_ranks_without_an_image_skip_the_encoder(tmp_path: Path, warm: Callable[..., str], options: list[str]) -> None:
    words = [str(ROOT / "examples/vlm_sft.py"), "--tiny", "--steps", str(STEPS), "--out", str(tmp_path / "data")]
    losses = []
    for ranks, with_odc in ((1, False), (2, True)):
        text = warm([*words, *options], tmp_path / str(ranks), with_odc=with_odc, ranks=ranks)
        (found,) = (json.loads(line) for line in text.splitlines() if line.startswith('{"losses"'))
        losses.append(found["losses"])
    samples = [json.loads(line) for line in (tmp_path / "data/data.jsonl").read_text().splitlines()]
    with_image = [number for number, sample in enumerate(samples) if "image" in sample]
    assert {number % 2 for number in with_image} == {0}
    assert max(with_image) < 6 * 8 < len(samples) == 8 * STEPS
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[1][-1] < losses[1][0]
