"""Layer 4: unmodified scripts of three training libraries, as ``torchrun`` and ``odc run`` start them: on two ranks,
and on four, where the model lies on a mesh of two dimensions.

Ranks are forks of a process that has the libraries; with `-m extended` whole commands start cold, too.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_trainers import losses_of, samples

from odc.bench.harness.warm_launch import WarmLauncher, output_of
from odc.cli.run import rank_options

ROOT = Path(__file__).parents[2]
RANKS = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", *RANKS]
ODC_RUN = [sys.executable, "-m", "odc", "run", *RANKS]
SCRIPTS = ["accelerate_sft", "hf_trainer", "trl_sft"]
STEPS = 4
OFFLINE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
further = functools.partial(pytest.param, marks=pytest.mark.extended)


def command(words: list[str], folder: Path, code: int = 0) -> str:
    """What a command printed."""
    env = {**os.environ, **OFFLINE}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode != 0) == (code != 0), done.stdout + done.stderr
    return done.stdout + done.stderr


def options_of(script: str | Path, *options: str) -> list[str]:
    """The words behind a launcher, for an example or a changed one."""
    path = script if isinstance(script, Path) else ROOT / "examples" / f"{script}.py"
    return [str(path), "--steps", str(STEPS), "--log-json", "out.json", *options]


def losses_in(folder: Path) -> list[float]:
    """Of each step of an example that has run there."""
    result: list[float] = json.loads((folder / "out.json").read_text())["losses"]
    assert len(result) == STEPS
    return result


def losses(launcher: list[str], script: str, folder: Path, *options: str) -> tuple[list[float], str]:
    """Of an example started by a command, and what it printed."""
    text = command([*launcher, *options_of(script, *options)], folder)
    return losses_in(folder), text


Warm = Callable[..., str]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Callable[[str], list[float]]:
    """Losses of a script with FSDP2's collectives, once; with FSDP1's they are the same to 1e-6."""

    @functools.cache
    def of_script(script: str) -> list[float]:
        folder = tmp_path_factory.mktemp(script)
        warm(options_of(script), folder, with_odc=False)
        return losses_in(folder)

    return of_script


@pytest.mark.parametrize(
    ("script", "version"),
    [
        ("hf_trainer", "2"),
        further("trl_sft", "2"),
        further("accelerate_sft", "2"),
        further("accelerate_sft", "1"),
        further("hf_trainer", "1"),
        further("trl_sft", "1"),
    ],
)
def test_odc_run_does_not_change_a_scripts_losses(
    tmp_path: Path, plain: Callable[[str], list[float]], warm: Warm, script: str, version: str
) -> None:
    text = warm(options_of(script, "--fsdp-version", version), tmp_path, with_odc=True)
    assert losses_in(tmp_path) == pytest.approx(plain(script), rel=1e-5)
    assert re.search(rf"odc: patched \w+ForCausalLM \(FSDP{version}\): \d units over 2 ranks", text)
    assert_logged(text, STEPS * (script != "accelerate_sft"))


def assert_logged(text: str, times: int = STEPS) -> None:
    """The trainer's own log has ODC's columns."""
    for name in ("odc/bubble_rate", "odc/waiting_s", "odc/slowest_rank"):
        assert text.count(f"'{name}': ") == times


BALANCED = ["--balance", "lb-mini", "--max-tokens", "400"]


@pytest.mark.parametrize("script", [further("hf_trainer"), "trl_sft"])
def test_balance_does_not_change_a_scripts_losses(
    tmp_path: Path, plain: Callable[[str], list[float]], warm: Warm, script: str
) -> None:
    text = warm([*BALANCED, *options_of(script)], tmp_path, with_odc=True)
    assert_balanced(losses_in(tmp_path), text, plain(script))
    assert_logged(text)


def assert_balanced(ours: list[float], text: str, expected: list[float]) -> None:
    assert ours == pytest.approx(expected, rel=1e-5)
    planned = re.search(r"balanced by lb-mini: (\d+) minibatches planned; .*, (\d+) to (\d+) in a minibatch", text)
    assert planned is not None
    assert int(planned[1]) == STEPS
    assert 0 < int(planned[2]) < int(planned[3])


@pytest.mark.parametrize(
    ("script", "version", "num_workers"),
    [("hf_trainer", "2", 1), further("trl_sft", "2", 0), further("hf_trainer", "1", 0)],
)
def test_late_binding_does_not_change_a_scripts_losses(
    tmp_path: Path, plain: Callable[[str], list[float]], warm: Warm, script: str, version: str, num_workers: int
) -> None:
    """Rank 1 is slow, so rank 0 takes some of its samples."""
    slow = (
        "import os, time\n"
        "class Slow(transformers.TrainerCallback):\n"
        "    def on_train_begin(self, args, state, control, model, **_):\n"
        "        if os.environ['RANK'] == '1':\n"
        "            model.register_forward_pre_hook(lambda *_: time.sleep(0.1))\n"
        "original = transformers.Trainer.__init__\n"
        "def init(self, *args, **kwargs):\n"
        "    original(self, *args, **kwargs)\n"
        "    self.add_callback(Slow())\n"
        f"    self.args.dataloader_num_workers = {num_workers}\n"
        "transformers.Trainer.__init__ = init"
    )
    words = options_of(changed_example(tmp_path, slow, script), "--fsdp-version", version)
    text = warm([*BALANCED, "--late-binding", *words], tmp_path, with_odc=True)
    assert losses_in(tmp_path) == pytest.approx(plain(script), rel=1e-5)
    assert re.search(r"balanced by lb-mini: .*; [1-9]\d* samples taken from other ranks", text)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("script", "version"), [("accelerate_sft", "2"), ("hf_trainer", "2"), ("trl_sft", "1"), ("trl_sft", "2")]
)
def test_lb_mini_does_not_change_a_scripts_losses(
    tmp_path: Path, plain: Callable[[str], list[float]], script: str, version: str
) -> None:
    """The whole command, cold."""
    own = ["--balance", "lb-mini"] if script == "accelerate_sft" else []  # the script's own line, and no option of ours
    launcher = [*ODC_RUN, *([] if own else BALANCED)]
    ours, text = losses(launcher, script, tmp_path, "--fsdp-version", version, *own)
    assert f"(FSDP{version}): " in text
    if own:
        assert ours == pytest.approx(plain(script), rel=1e-5)
    else:
        assert_balanced(ours, text, plain(script))


CHANGED_EXAMPLE = """
import sys
sys.path.insert(0, {examples!r})
import {script}, transformers
{change}
{script}.main()
"""


def changed_example(folder: Path, change: str, name: str = "hf_trainer") -> Path:
    """An example with lines before its ``main()``."""
    script = folder / "changed.py"
    script.write_text(CHANGED_EXAMPLE.format(examples=str(ROOT / "examples"), change=change, script=name))
    return script


@pytest.mark.extended
@pytest.mark.parametrize("version", [pytest.param("1", marks=pytest.mark.extended), "2"])
def test_lb_micro_over_collectives_does_not_change_a_scripts_losses(
    tmp_path: Path, plain: Callable[[str], list[float]], version: str
) -> None:
    script = changed_example(tmp_path, "from odc.trainers import install\ninstall('lb-micro', 450)")
    text = command([*TORCHRUN, *options_of(script, "--fsdp-version", version)], tmp_path)
    assert losses_in(tmp_path) == pytest.approx(plain("hf_trainer"), rel=1e-5)
    assert "odc: patched" not in text


def test_a_model_whose_packed_samples_see_one_another_is_refused_on_all_ranks(tmp_path: Path, warm: Warm) -> None:
    made = (
        "config = transformers.OPTConfig(vocab_size=512, hidden_size=32, ffn_dim=64, num_hidden_layers=2,"
        " num_attention_heads=2, word_embed_proj_dim=32)\n"
        "hf_trainer.build_model = lambda: transformers.OPTForCausalLM(config)"
    )
    script = changed_example(tmp_path, made)
    text = warm(["--balance", "lb-mini", str(script), "--steps", "1"], tmp_path, with_odc=True, code=1)
    assert text.count("OPTForCausalLM does not tell packed samples apart by position_ids") == 2


@pytest.mark.extended
def test_epochs_evaluations_and_resuming_do_not_change_losses(tmp_path: Path) -> None:
    results: list[dict[str, Any]] = []
    script = str(ROOT / "tests" / "rigs" / "lifecycle_script.py")
    for name, launcher in (("plain", TORCHRUN), ("ours", [*ODC_RUN, "--balance", "lb-mini", "--max-tokens", "64"])):
        folder = tmp_path / name
        folder.mkdir()
        command([*launcher, script, str(folder)], folder)
        results.append(json.loads((folder / "result.json").read_text()))
    plain, ours = results
    assert len(plain["losses"]) == 8
    for kind in ("losses", "resumed", "evaluations"):
        assert ours[kind] == pytest.approx(plain[kind], rel=1e-5), kind


@pytest.mark.parametrize("kind", ["indexed", further("4"), further("iterable"), further("1"), further("3")])
def test_online_scripts_train_on_what_one_process_would_and_resume(tmp_path: Path, warm: Warm, kind: str) -> None:
    """A dataset with indices, ``datasets`` in so many shards, an iterable; with evaluations in between."""
    words = ["--online", "--max-tokens", "64", str(ROOT / "tests/rigs/online_script.py"), ".", kind]
    text = warm(words, tmp_path, with_odc=True)
    assert re.search(r"balanced online: 13 minibatches of 1\d\.\d samples on average; microbatches of this rank", text)
    ranks = [json.loads((tmp_path / f"{kind}-{rank}.json").read_text()) for rank in range(2)]
    whole, rest = (
        [[tokens for rank in ranks for tokens in rank[name]["steps"][step]] for step in range(count)]
        for name, count in (("whole", 8), ("rest", 5))
    )
    assert ranks[0]["whole"]["losses"] == pytest.approx(losses_of(tmp_path, whole, 8), rel=1e-5)
    assert rest == whole[3:]
    assert [r["rest"]["losses"][-5:] for r in ranks] == [r["whole"]["losses"][3:] for r in ranks]
    if kind == "indexed":
        every = sorted(sample["input_ids"] for sample in samples(41))
        for epoch in (whole[:4], whole[4:]):
            assert sorted(tokens for step in epoch for tokens in step) == every


STREAMS_AND_ENDS = """
import torch.distributed as dist
from odc.balance import EqualMinibatches, Grouping, StreamLoader
dist.init_process_group("gloo")
where = {"grouping": Grouping("pack", max_tokens=64), "align": EqualMinibatches(4, comm="odc")}
loader = StreamLoader(range(200), list, dist.get_rank(), 2, length=lambda i: 1 + i % 40, **where)
assert sum(1 for _ in loader) == 25
"""


def test_a_script_with_a_stream_ends_well(tmp_path: Path, warm: Warm) -> None:
    """As soon as it has done its work, with nothing closed: a thread that is at it then would have it aborted."""
    (tmp_path / "script.py").write_text(STREAMS_AND_ENDS)
    for _ in range(3):
        warm(["script.py"], tmp_path, with_odc=False, ends_at_once=False)


@pytest.mark.extended
def test_a_loop_of_ones_own_is_told_that_balance_has_no_effect(tmp_path: Path) -> None:
    _, text = losses([*ODC_RUN, "--balance", "lb-mini"], "accelerate_sft", tmp_path)
    assert "--balance lb-mini had no effect" in text
    assert "odc.trainers.minibatches" in text


BAD_OPTIONS = [
    (["--balance", "lb-nano"], "policy 'lb-nano' is not known"),
    (["--pool-size", "5"], "--pool-size is of --online"),
    (["--online"], "--online needs --max-tokens"),
    (["--online", "--balance", "lb-mini"], "--online with --balance lb-mini: give one of them"),
    (["--late-binding"], "--late-binding is of --balance lb-mini"),
    (["--late-binding", "--balance", "lb-micro"], "late_binding=True with policy 'lb-micro': expected 'lb-mini'"),
    (["--late-binding", "--online", "--max-tokens", "5"], "late_binding=True with online=True"),
    (["--online", "--max-tokens", "0"], "--online: max_tokens=0: expected at least 1"),
]


@pytest.mark.parametrize(("options", "named"), BAD_OPTIONS)
def test_bad_options_end_the_run_before_a_rank_is_started(
    tmp_path: Path, options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").touch()
    with pytest.raises(SystemExit):
        rank_options([*options, str(tmp_path / "script.py")])
    assert named in capsys.readouterr().err


def test_a_rank_refuses_bad_options_before_the_script(tmp_path: Path, warm: Warm) -> None:
    options, named = BAD_OPTIONS[0]
    (tmp_path / "script.py").write_text("raise AssertionError('the script ran')")
    text = warm([*options, "script.py"], tmp_path, with_odc=True, code=1)
    assert named in text
    assert "the script ran" not in text


def test_lb_mini_over_collectives_is_refused_with_the_reason(tmp_path: Path, warm: Warm) -> None:
    """By each rank of the demo's script, before it meets the others."""
    words = [str(ROOT / "examples/sft.py"), "--comm", "collective", "--policy", "lb-mini"]
    text = warm(words, tmp_path, with_odc=False, code=2)
    assert text.count("use --comm odc, or --policy lb-micro") == 2


@pytest.mark.extended
def test_lb_mini_in_a_loop_over_collectives_is_refused(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "accelerate_sft.py")
    text = command([*TORCHRUN, script, "--steps", "1", "--balance", "lb-mini"], tmp_path, code=1)
    assert "start the script with `odc run`" in text


# On a mesh of two dimensions

MESH_SCRIPT = str(ROOT / "tests" / "rigs" / "mesh_script.py")
BALANCED_ON_MESH = ("--balance", "lb-mini", "--max-tokens", "60")
ONLINE = ("--online", "--max-tokens", "64")
NUM_RANKS = 4

Launch = Callable[..., tuple[list[Any], str]]
"""(trainer, mesh, *options of ``odc run``) -> what each rank has written, what all have printed. ``checkpoints``: a
folder for these; ``resumes`` from what another job has left there."""


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory, trainer_launcher: WarmLauncher) -> Launch:
    @functools.cache
    def run(
        trainer: str, mesh: str, *options: str, with_odc: bool = True, checkpoints: str = "", resumes: bool = False
    ) -> tuple[list[Any], str]:
        assert resumes == bool(checkpoints and any(Path(checkpoints).glob("checkpoint-2")))
        folder = tmp_path_factory.mktemp(f"{trainer}-{mesh}")
        words = [*options, MESH_SCRIPT, str(folder), trainer, mesh, *filter(None, [checkpoints])]
        codes = trainer_launcher.run(words, folder, with_odc=with_odc, ends_at_once=True, world_size=NUM_RANKS)
        text = "".join(output_of(folder, rank).read_text() for rank in range(NUM_RANKS))
        assert codes == [0] * NUM_RANKS, text
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)], text

    return run


def logged(found: Any, name: str) -> list[float]:
    return [entry[name] for entry in found["log"] if name in entry]


KINDS = [
    ("hf", "tp"),
    further("trl", "tp"),
    further("loop", "tp"),
    further("hf", "accelerate"),
    further("hf", "replicas"),
]


@pytest.mark.extended
@pytest.mark.parametrize("options", [further((), id="as it is"), pytest.param(BALANCED_ON_MESH, id="balanced")])
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


@pytest.mark.extended
@pytest.mark.parametrize("mesh", ["tp", "accelerate", "replicas"])
def test_of_partners_in_a_trainer_one_takes_for_both(launch: Launch, mesh: str) -> None:
    """Ranks 2 and 3 are slow; of a mesh of partners, these are two."""
    plain, _ = launch("hf", mesh, with_odc=False)
    ours, said = launch("slow", mesh, *BALANCED_ON_MESH, "--late-binding")
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


@pytest.mark.extended
@pytest.mark.parametrize(("trainer", "mesh"), KINDS)
def test_a_stream_gives_every_sample_once_on_a_mesh(launch: Launch, trainer: str, mesh: str) -> None:
    ours, _ = launch(trainer, mesh, *ONLINE)
    assert_shared_out(ours, mesh)
    groups = [ours[0], ours[2]] if mesh != "replicas" else ours
    seen = [sample for found in groups for step in found["steps"] for _, row in step for sample in row]
    end = [1] if trainer == "trl" else []
    assert sorted(seen) == sorted(sample["input_ids"] + end for sample in samples(37))


@pytest.mark.extended  # by default test_mesh_loaders.py resumes on such a mesh, and trainers do above
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        pytest.param("accelerate", BALANCED_ON_MESH, id="tp-balanced"),
        pytest.param("accelerate", (), id="tp-as it is"),
        pytest.param("accelerate", ONLINE, id="tp-online"),
        pytest.param("replicas", BALANCED_ON_MESH, id="replicas-balanced"),
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
    launch("hf", mesh, *BALANCED_ON_MESH, checkpoints=str(tmp_path / "ours"))
    ours, _ = launch("hf", mesh, *BALANCED_ON_MESH, checkpoints=str(tmp_path / "plain"), resumes=True)
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
