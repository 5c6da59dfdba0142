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
ONLINE = ("--online", "--max-tokens", "64")
NUM_RANKS = 4
further = functools.partial(pytest.param, marks=pytest.mark.extended)

Launch = Callable[..., tuple[list[Any], str]]
"""(trainer, mesh, *options of ``odc run``) -> what each rank has written, what all have printed. ``checkpoints``: a
folder for these; ``resumes`` from what another job has left there."""


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    launcher = WarmLauncher((*LIBRARIES, "torch.distributed.tensor.parallel"), {**os.environ, **OFFLINE})

    @functools.cache
    def run(
        trainer: str, mesh: str, *options: str, with_odc: bool = True, checkpoints: str = "", resumes: bool = False
    ) -> tuple[list[Any], str]:
        assert resumes == bool(checkpoints and any(Path(checkpoints).glob("checkpoint-2")))
        folder = tmp_path_factory.mktemp(f"{trainer}-{mesh}")
        words = [*options, SCRIPT, str(folder), trainer, mesh, *filter(None, [checkpoints])]
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


@pytest.mark.parametrize("options", [further((), id="as it is"), pytest.param(BALANCED, id="balanced")])
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


@pytest.mark.parametrize("mesh", ["tp", further("accelerate"), further("replicas")])
def test_of_partners_in_a_trainer_one_takes_for_both(launch: Launch, mesh: str) -> None:
    """Ranks 2 and 3 are slow; of a mesh of partners, these are two."""
    plain, _ = launch("hf", mesh, with_odc=False)
    ours, said = launch("slow", mesh, *BALANCED, "--late-binding")
    for name, rel in (("loss", 1e-5), ("grad_norm", 1e-4)):
        assert logged(ours[0], name) == pytest.approx(logged(plain[0], name), rel=rel)
    assert_shared_out(ours, mesh)
    assert "samples taken from other ranks" in said


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
    ours, _ = launch(trainer, mesh, *ONLINE)
    assert_shared_out(ours, mesh)
    groups = [ours[0], ours[2]] if mesh != "replicas" else ours
    seen = [sample for found in groups for step in found["steps"] for _, row in step for sample in row]
    end = [1] if trainer == "trl" else []
    assert sorted(seen) == sorted(sample["input_ids"] + end for sample in samples(37))


@pytest.mark.extended  # by default test_mesh_loaders.py resumes on such a mesh, and test_trainer_scripts.py trainers
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        pytest.param("accelerate", BALANCED, id="tp-balanced"),
        pytest.param("accelerate", (), id="tp-as it is"),
        pytest.param("accelerate", ONLINE, id="tp-online"),
        pytest.param("replicas", BALANCED, id="replicas-balanced"),
    ],
)
def test_a_new_job_resumes_a_trainer_on_a_mesh(launch: Launch, tmp_path: Path, mesh: str, options: Any) -> None:
    """From its second step, over the end of an epoch, with the losses of plain FSDP2 where nobody interrupts it, and
    with the rows that it would have had."""
    whole, _ = launch("hf", mesh, *options, checkpoints=str(tmp_path))
    rest, said = launch("hf", mesh, *options, checkpoints=str(tmp_path), resumes=True)
    assert "odc: patched LlamaForCausalLM (FSDP2)" in said
    assert_shared_out(rest, mesh)
    for of_whole, of_rest in zip(whole, rest, strict=True):
        assert len(of_whole["steps"]) == 4
        assert of_rest["steps"] == of_whole["steps"][2:]
    expected = whole
    if options != ONLINE:  # else the samples of a step are others
        expected, _ = launch("hf", mesh, with_odc=False, checkpoints=str(tmp_path / "plain"))
    for name, rel in (("loss", 1e-5), ("grad_norm", 1e-4)):
        assert len(logged(rest[0], name)) == 4  # the first two are in the checkpoint
        assert logged(whole[0], name) == pytest.approx(logged(expected[0], name), rel=rel)
        assert logged(rest[0], name) == pytest.approx(logged(expected[0], name), rel=rel)


@pytest.mark.extended
@pytest.mark.parametrize("mesh", ["accelerate", "replicas"])
def test_checkpoints_of_trainers_on_a_mesh_are_those_of_plain_fsdp2(launch: Launch, tmp_path: Path, mesh: str) -> None:
    """Resumed under ODC from one of plain torch, and the other way round."""
    plain, _ = launch("hf", mesh, with_odc=False, checkpoints=str(tmp_path / "plain"))
    launch("hf", mesh, *BALANCED, checkpoints=str(tmp_path / "ours"))
    ours, _ = launch("hf", mesh, *BALANCED, checkpoints=str(tmp_path / "plain"), resumes=True)
    theirs, _ = launch("hf", mesh, with_odc=False, checkpoints=str(tmp_path / "ours"), resumes=True)
    for rest in (ours, theirs):
        assert logged(rest[0], "loss") == pytest.approx(logged(plain[0], "loss"), rel=1e-5)


@pytest.mark.extended
def test_a_model_that_transformers_has_sharded_has_no_checkpoints_to_resume_from(
    launch: Launch, tmp_path: Path
) -> None:
    """Without ODC either."""
    with pytest.raises(AssertionError, match="Resuming is not supported for models sharded at load time"):
        launch("hf", "tp", with_odc=False, checkpoints=str(tmp_path))
