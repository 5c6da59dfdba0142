"""Layer 4: a script of Lightning's, on two ranks or a mesh of 2x2, as ``torchrun`` and ``odc run`` start it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from odc.bench.harness.warm_launch import WarmLauncher, output_of

pytestmark = [
    pytest.mark.extended,  # Lightning is not among the extras
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None, reason="Lightning is not installed (pip install lightning)"
    ),
]

SCRIPT = Path(__file__).parents[1] / "rigs" / "scripts" / "lightning_train.py"
LIBRARIES = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "lightning.pytorch"),
    *("odc.launch.main", "odc.fsdp_patch", "odc.transports.shm", "odc.balance"),
)
Launch = Callable[..., tuple[list[dict[str, Any]], str]]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Runs the script; what each rank has written, and what all have printed."""
    launcher = WarmLauncher(LIBRARIES, {**os.environ, "OMP_NUM_THREADS": "1"})

    def run(kind: str, mode: str, *more: str, with_odc: bool) -> tuple[list[dict[str, Any]], str]:
        folder = tmp_path_factory.mktemp(f"{kind}-{mode}")
        ranks = range(4 if kind == "tp" else 2)
        words = [str(SCRIPT), kind, mode, str(folder), *more]
        codes = launcher.run(words, folder, with_odc=with_odc, ends_at_once=True, world_size=len(ranks))
        text = "".join(output_of(folder, rank).read_text() for rank in ranks)
        assert not any(codes), text
        return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in ranks], text

    yield run
    launcher.close()


@pytest.mark.parametrize(
    ("kind", "name"), [("fsdp1", "Script (FSDP1)"), ("fsdp2", "Sequential (FSDP2)"), ("tp", "Sequential (FSDP2)")]
)
def test_odc_run_does_not_change_what_lightning_trains(launch: Launch, kind: str, name: str) -> None:
    """Microbatches, clipping, evaluations, a checkpoint and a resume from it."""
    plain, said = launch(kind, "accumulate", with_odc=False)
    assert "odc:" not in said
    ours, said = launch(kind, "accumulate", with_odc=True)
    assert re.search(rf"odc: patched {re.escape(name)}: \d units over 2 ranks", said)
    assert all(found == ours[0] for found in ours)
    for run, counts in (("whole", {"losses": 11, "evaluations": 4}), ("resumed", {"losses": 5, "evaluations": 0})):
        for what, count in counts.items():
            assert len(plain[0][run][what]) == count
            assert ours[0][run][what] == pytest.approx(plain[0][run][what], rel=1e-5), (run, what)
        assert ours[0][run]["steps"] == plain[0][run]["steps"] == 4
    assert ours[0]["resumed"]["losses"] != ours[0]["whole"]["losses"][:5]  # it has gone on


@pytest.mark.parametrize("kind", ["fsdp2", "tp"])
def test_lb_mini_in_lightning_trains_on_the_same_minibatches(launch: Launch, kind: str) -> None:
    """Steps by hand, over a loader of ours: LB-Micro with collectives, LB-Mini with ODC."""
    plain, _ = launch(kind, "balanced", "lb-micro", with_odc=False)
    ours, said = launch(kind, "balanced", "lb-mini", with_odc=True)
    assert "odc: patched Sequential (FSDP2)" in said
    assert len(ours[0]["losses"]) == 4
    assert ours[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-5)
    assert plain[0]["microbatches"] == plain[-1]["microbatches"]
    assert ours[0]["microbatches"] != ours[-1]["microbatches"]
    if kind == "tp":
        assert ours[0]["microbatches"] == ours[1]["microbatches"]
