"""Layer 4: trainers whose model lies on a mesh of two dimensions, on four ranks, as ``torchrun`` and ``odc run`` start
them."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_trainer_scripts import LIBRARIES, OFFLINE
from tiny_trainers import samples

from odc.bench.harness.warm_launch import WarmLauncher, output_of

SCRIPT = str(Path(__file__).parents[1] / "rigs" / "mesh_script.py")
BALANCED = ("--balance", "lb-mini", "--max-tokens", "60")
NUM_RANKS = 4
further = functools.partial(pytest.param, marks=pytest.mark.extended)

Launch = Callable[..., tuple[list[Any], str]]
"""(trainer, mesh, *options of ``odc run``) -> what each rank has written, what all have printed"""


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    launcher = WarmLauncher((*LIBRARIES, "torch.distributed.tensor.parallel"), {**os.environ, **OFFLINE})

    @functools.cache
    def run(trainer: str, mesh: str, *options: str, with_odc: bool = True) -> tuple[list[Any], str]:
        folder = tmp_path_factory.mktemp(f"{trainer}-{mesh}")
        words = [*options, SCRIPT, str(folder), trainer, mesh]
        codes = launcher.run(words, folder, with_odc=with_odc, world_size=NUM_RANKS)
        text = "".join(output_of(folder, rank).read_text() for rank in range(NUM_RANKS))
        assert codes == [0] * NUM_RANKS, text
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)], text

    yield run
    launcher.close()


def logged(found: Any, name: str) -> list[float]:
    return [entry[name] for entry in found["log"] if name in entry]


KINDS = [
    ("hf", "tp"),
    further("trl", "tp"),
    further("loop", "tp"),
    further("hf", "accelerate"),
    further("hf", "replicas"),
]


@pytest.mark.parametrize("options", [(), BALANCED], ids=["as it is", "balanced"])
@pytest.mark.parametrize(("trainer", "mesh"), KINDS)
def test_odc_run_does_not_change_losses_on_a_mesh(launch: Launch, trainer: str, mesh: str, options: Any) -> None:
    """Partners run the same rows, and what is counted over all ranks counts theirs once."""
    plain, said = launch(trainer, mesh, with_odc=False)
    assert "odc:" not in said
    ours, said = launch(trainer, mesh, *options)
    assert "odc: patched LlamaForCausalLM (FSDP2)" in said
    num_steps = 3 if mesh != "replicas" else 2
    for name, rel in (("loss", 1e-5), *([("grad_norm", 1e-4)] if trainer != "loop" else [])):
        assert len(logged(ours[0], name)) == num_steps
        assert logged(ours[0], name) == pytest.approx(logged(plain[0], name), rel=rel)
    if trainer == "trl":  # accelerate leaves ranks out of what it gathers at the end of an epoch
        assert logged(ours[0], "num_tokens")[:2] == logged(plain[0], "num_tokens")[:2]
    assert_shared_out(ours, mesh)
    if options:
        counts = [[len(step) for step in found["steps"]] for found in ours]
        assert len(set(map(tuple, counts))) > 1  # uneven
        assert any(len(row) > 1 for found in ours for step in found["steps"] for _, row in step)  # packed


def assert_shared_out(ranks: list[Any], mesh: str) -> None:
    """Ranks that differ in the tensor parallel dimension have the same rows, others different ones."""
    steps = [found["steps"] for found in ranks]
    groups = [steps[0], steps[2]] if mesh != "replicas" else steps
    if mesh != "replicas":
        assert (steps[0], steps[2]) == (steps[1], steps[3])
    for at, mine in enumerate(groups):
        assert all(mine != others for others in groups[at + 1 :])


@pytest.mark.parametrize(("trainer", "mesh"), KINDS)
def test_a_stream_gives_every_sample_once_on_a_mesh(launch: Launch, trainer: str, mesh: str) -> None:
    ours, _ = launch(trainer, mesh, "--online", "--max-tokens", "64")
    assert_shared_out(ours, mesh)
    groups = [ours[0], ours[2]] if mesh != "replicas" else ours
    seen = [sample for found in groups for step in found["steps"] for _, row in step for sample in row]
    end = [1] if trainer == "trl" else []
    assert sorted(seen) == sorted(sample["input_ids"] + end for sample in samples(37))
