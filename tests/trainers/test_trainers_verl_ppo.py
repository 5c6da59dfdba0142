"""Layer 4: `python -m verl.trainer.main_ppo`, its workers under Ray on two CPU ranks, with and without ODC.

ODC comes in by the environment: verl imports the module in each of its processes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from process_ranks import run_ranks
from verl_ranks import FOLDER, IS_INSTALLED, enter_verl, save_model, save_prompts

pytestmark = [
    pytest.mark.extended,  # verl is not among the extras
    pytest.mark.skipif(
        not IS_INSTALLED, reason="verl is not installed; ODC_TEST_VERL names a folder that has it (CONTRIBUTING.md)"
    ),
]

RIGS = Path(__file__).parents[1] / "rigs"
MODULES = "verl_cpu,verl_rollouts"
"""verl's platform and its rollouts: what a CPU does not have."""

BALANCED = """
import json, os
from odc.trainers import verl
verl.install("lb-mini")

if "RANK" in os.environ:  # else another process of verl's that has imported it
    balance_batch = verl.balance_batch

    def noting(*args, **kwargs):
        batch = balance_batch(*args, **kwargs)
        with open(os.environ["NOTED"] + os.environ["RANK"], "a") as file:
            print(json.dumps(batch.plan.num_microbatches), file=file)
        return batch

    verl.balance_batch = noting
"""


def saved(rank: int, world_size: int, folder: Path) -> None:
    enter_verl(rank, world_size)
    save_model(folder / "model")
    save_prompts(folder, count=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, prompts, and the module that users write."""
    made = tmp_path_factory.mktemp("verl")
    assert run_ranks(1, saved, made) == [None]
    (made / "balanced.py").write_text(BALANCED)
    return made


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    """Of Ray's sockets, whose paths have to be short."""
    made = Path(tempfile.mkdtemp(prefix="ray"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def engine(place: str, strategy: str) -> list[str]:
    """Of a role: float32, no compiler."""
    return [
        f"+{place}.mixed_precision={{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}}",
        f"{place}.use_torch_compile=False",
        f"{place.rpartition('.')[0]}.strategy={strategy}",
    ]


def words(folder: Path, strategy: str) -> list[str]:
    """Two steps of four prompts, two answers to each, and two updates of what they give."""
    actor, rollout, ray = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "ray_kwargs.ray_init"
    return [
        *(f"data.{kind}_files={folder / 'prompts.parquet'}" for kind in ("train", "val")),
        *("data.train_batch_size=4", "data.shuffle=False", "data.dataloader_num_workers=0"),
        *("data.max_prompt_length=8", "data.max_response_length=24"),
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        *engine(f"{actor}.fsdp_config", strategy),
        *(f"{actor}.ppo_mini_batch_size=4", f"{actor}.ppo_epochs=2", f"{actor}.use_torch_compile=False"),
        *(f"{actor}.use_dynamic_bsz=True", f"{actor}.ppo_max_token_len_per_gpu=24"),
        *(f"{actor}.entropy_coeff=0.01", f"{actor}.optim.lr=1e-3"),
        *(f"{rollout}.name=transformers", f"{rollout}.n=2", f"{rollout}.agent.num_workers=1"),
        *("reward.num_workers=1", f"reward.custom_reward_function.path={RIGS / 'verl_rollouts.py'}"),
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        *("trainer.logger=[file]", "trainer.nnodes=1", "trainer.n_gpus_per_node=2", "trainer.device=cpu"),
        *("trainer.total_epochs=1", "trainer.val_before_train=False", "trainer.resume_mode=disable"),
        # GPUs that are not there: verl counts them before it takes its platform's resource.
        *(f"{ray}.num_cpus=4", f"+{ray}.num_gpus=2", f"+{ray}.object_store_memory=200000000"),
        f"+{ray}.include_dashboard=False",
    ]


def run(folder: Path, room: Path, name: str, *more: str, modules: str = MODULES) -> list[dict[str, float]]:
    """What the command logs, a row each step."""
    log = folder / f"{name}.jsonl"
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_TMPDIR": str(room), "RAY_USAGE_STATS_ENABLED": "0"}
    own |= {"VERL_USE_EXTERNAL_MODULES": modules, "VERL_FILE_LOGGER_PATH": str(log), "NOTED": f"{folder / name}-rank-"}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), str(RIGS), FOLDER, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *more],
        cwd=folder,
        env={**{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}, **own},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
    )
    deadline = time.monotonic() + 60
    while left := [path.parent.name for path in Path("/proc").glob("[0-9]*/environ") if has(path, str(log))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [json.loads(line)["data"] for line in log.read_text().splitlines()]


def has(environ: Path, value: str) -> bool:
    """A process of Ray's, which ends by itself once the command has ended."""
    with suppress(OSError):
        return value.encode() in environ.read_bytes()
    return False


def assert_equal(metrics: list[dict[str, float]], plain: list[dict[str, float]], *names: str) -> None:
    assert len(metrics) == len(plain) == 2
    names += ("actor/loss", "actor/pg_loss", "actor/entropy_loss", "actor/grad_norm", "actor/entropy")
    names += ("critic/score/mean", "critic/rewards/mean", "response_length/mean")
    for mine, theirs in zip(metrics, plain, strict=True):
        for name in names:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name


def plans(folder: Path, name: str) -> list[list[int]]:
    """Of both ranks, which have the same: numbers of microbatches, an update each."""
    noted = [(folder / f"{name}-rank-{rank}").read_text().splitlines() for rank in range(2)]
    assert noted[0] == noted[1]
    return [json.loads(line) for line in noted[0]]


def test_grpo_with_a_reference_model_is_verls(folder: Path, room: Path) -> None:
    """The reference model's engine stays as it is."""
    reference = engine("actor_rollout_ref.ref.fsdp_config", "fsdp2")
    loss = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.1")
    options = [*words(folder, "fsdp2"), *reference, *loss, "algorithm.adv_estimator=grpo"]
    plain = run(folder, room, "grpo", *options)
    metrics = run(folder, room, "grpo-odc", *options, modules=f"{MODULES},balanced")
    assert_equal(metrics, plain, "actor/kl_loss")
    counts = plans(folder, "grpo-odc")
    assert len(counts) == 4
    assert any(a != b for a, b in counts)


def test_ppo_with_a_critic_is_verls(folder: Path, room: Path) -> None:
    """Both have their microbatches from a plan."""
    critic = [f"critic.model.path={folder / 'critic'}", *engine("critic.fsdp", "fsdp"), "critic.ppo_mini_batch_size=4"]
    critic += ["critic.use_dynamic_bsz=True", "critic.ppo_epochs=2", "critic.optim.lr=1e-3"]
    critic += ["+critic.ppo_infer_max_token_len_per_gpu=24"]  # verl's trainer takes it for updates, too
    options = [*words(folder, "fsdp"), *critic, "algorithm.adv_estimator=gae"]
    plain = run(folder, room, "ppo", *options)
    metrics = run(folder, room, "ppo-odc", *options, modules=f"{MODULES},balanced")
    assert_equal(metrics, plain, "critic/loss", "critic/vf_loss", "critic/grad_norm", "critic/values/mean")
    counts = plans(folder, "ppo-odc")
    assert len(counts) == 8
    assert any(a != b for a, b in counts)
