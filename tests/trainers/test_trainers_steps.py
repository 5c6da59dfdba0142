"""Layer 4: TRL's trainers of rollouts and of pairs, balanced: the losses and gradients of `torchrun`, on two ranks.

Ranks are forks of a process that has the libraries.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from odc.bench.harness.warm_launch import WarmLauncher, output_of

SCRIPT = str(Path(__file__).parents[1] / "rigs" / "scripts" / "trl_steps.py")
OFFLINE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
LIBRARIES = (
    *("torch._dynamo", "torch.distributed.fsdp", "odc.launch.main", "accelerate", "datasets"),
    *("transformers.trainer", "transformers.models.qwen2.modeling_qwen2", "transformers.generation.utils"),
    *("trl.trainer.grpo_trainer", "trl.trainer.dpo_trainer", "trl.trainer.reward_trainer"),
)
Warm = Callable[..., str]


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """Runs the script in a folder, ``with_odc`` or plain; returns what it printed."""
    launcher = WarmLauncher(LIBRARIES, {**os.environ, **OFFLINE})

    def run(words: list[str], folder: Path, *, with_odc: bool, code: int = 0) -> str:
        folder.mkdir(exist_ok=True)
        codes = launcher.run(words, folder, with_odc=with_odc)
        text = "".join(output_of(folder, rank).read_text() for rank in range(len(codes)))
        assert any(codes) == (code != 0), text
        return text

    yield run
    launcher.close()


def logs(folder: Path) -> list[dict[str, Any]]:
    """Of each step."""
    return [entry for entry in history(folder) if "loss" in entry]


def history(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "out.json").read_text())
    return found


def values(folder: Path, name: str) -> list[float]:
    return [entry[name] for entry in logs(folder) if name in entry]  # a step without a generation has no rewards


def both(warm: Warm, folder: Path, kind: str, options: dict[str, Any], *balanced: str) -> tuple[Path, Path, str]:
    """The script as ``torchrun`` starts it, and balanced; and what the second said."""
    plain, ours = folder / "plain", folder / "ours"
    words = [SCRIPT, kind, json.dumps(options)]
    warm(words, plain, with_odc=False)
    text = warm(["--balance", "lb-mini", *balanced, *words], ours, with_odc=True)
    return plain, ours, text


def assert_same(plain: Path, ours: Path, *names: str) -> None:
    for name in ("loss", "grad_norm", *names):
        assert values(ours, name) == pytest.approx(values(plain, name), rel=1e-5, abs=5e-6), name  # of terms near 1
    assert any(values(plain, "loss"))


# Rollouts


ROLLOUTS = {
    "dapo-two-steps-per-generation": {
        "steps_per_generation": 4,
        "importance_sampling_level": "sequence",
        "gradient_checkpointing": True,
    },
    "dapo": {},
    "grpo-two-iterations": {"loss_type": "grpo", "num_iterations": 2, "max_steps": 4, "beta": 0.1},
    "dr_grpo-fsdp1": {"loss_type": "dr_grpo", "fsdp_version": 1, "mask_truncated_completions": True},
    "two-generations-per-step": {"steps_per_generation": 1, "per_device_train_batch_size": 4},
    "cispo-fsdp1": {"loss_type": "cispo", "fsdp_version": 1, "steps_per_generation": 4, "max_steps": 4},
    "sapo": {"loss_type": "sapo", "gradient_accumulation_steps": 1, "per_device_train_batch_size": 8},
    "vespo": {"loss_type": "vespo", "num_iterations": 2},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
}
ALWAYS = ("grpo-two-iterations",)


@pytest.mark.parametrize(
    "case", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.extended) for name in ROLLOUTS]
)
def test_balanced_rollouts_have_the_same_losses(tmp_path: Path, warm: Warm, case: str) -> None:
    plain, ours, text = both(warm, tmp_path, "grpo", ROLLOUTS[case], "--max-tokens", "120")
    assert_same(plain, ours, "reward", "num_tokens", "completions/mean_length", "completions/max_length")
    # Means over tokens in place of means over microbatches.
    assert values(ours, "entropy") == pytest.approx(values(plain, "entropy"), rel=0.05)
    assert set(logs(ours)[0]) == set(logs(plain)[0])
    planned = re.search(r"balanced by lb-mini: (\d+) minibatches planned; microbatches of this rank: (\d+)", text)
    assert planned is not None
    assert int(planned[1]) == len(logs(plain))
    assert int(planned[2]) < 8 * len(logs(plain))  # packed


@pytest.mark.extended
def test_equal_numbers_over_collectives_have_the_same_losses(tmp_path: Path, warm: Warm) -> None:
    """Without ODC: `install` in front of the script, under ``torchrun``."""
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    warm([SCRIPT, "grpo"], plain, with_odc=False)
    script = tmp_path / "balanced.py"
    script.write_text(
        "import runpy, sys\n"
        "from odc.trainers import install\n"
        "launched = install('lb-micro', 120)\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    text = warm([str(script), SCRIPT, "grpo"], ours, with_odc=False)
    assert_same(plain, ours, "reward")
    assert "odc: patched" not in text


# Pairs


PAIRS = {
    "dpo": ("dpo", {"eval_strategy": "steps", "eval_steps": 2, "gradient_checkpointing": True}),
    "reward": ("reward", {}),
    "dpo-of-two-losses-fsdp1": ("dpo", {"loss_type": ["sigmoid", "bco_pair"], "ld_alpha": 0.5, "fsdp_version": 1}),
    "dpo-weighted": ("dpo", {"use_weighting": True, "loss_type": "ipo"}),
    "reward-centered-fsdp1": ("reward", {"center_rewards_coefficient": 0.01, "fsdp_version": 1}),
}


@pytest.mark.parametrize(
    "case", [name if name in ("dpo", "reward") else pytest.param(name, marks=pytest.mark.extended) for name in PAIRS]
)
def test_balanced_pairs_have_the_same_losses(tmp_path: Path, warm: Warm, case: str) -> None:
    kind, options = PAIRS[case]
    plain, ours, text = both(warm, tmp_path, kind, options, "--max-tokens", "300")
    assert_same(plain, ours, "num_tokens")
    for name in ("rewards/margins", "logps/chosen") if kind == "dpo" else ("mean_reward", "min_reward", "max_reward"):
        if name[:3] not in ("min", "max"):  # of the step, not means over its microbatches
            assert values(ours, name) == pytest.approx(values(plain, name), rel=1e-4, abs=1e-5), name
        else:
            sign = 1 if name.startswith("max") else -1
            assert all(
                sign * a >= sign * b - 1e-6 for a, b in zip(values(ours, name), values(plain, name), strict=True)
            )
    assert set(logs(ours)[0]) == set(logs(plain)[0])
    assert "balanced by lb-mini: 2 minibatches planned" in text
    evaluations = [
        [entry["eval_loss"] for entry in history(folder) if "eval_loss" in entry] for folder in (plain, ours)
    ]
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-5)
    assert bool(evaluations[0]) is (case == "dpo")
