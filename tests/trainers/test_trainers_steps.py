"""Layer 4: TRL's trainers of rollouts and of pairs, balanced: the losses and gradients of `torchrun`, on two and four
ranks, and of one process in float64.

Ranks are forks of a process that has the libraries.
"""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from faulty_ranks import NOTICE_S

from odc.bench.harness.warm_launch import output_of

SCRIPT = str(Path(__file__).parents[1] / "rigs" / "scripts" / "trl_steps.py")
COLUMNS = {"odc/bubble_rate", "odc/waiting_s", "odc/slowest_rank"}
"""That ODC adds to a trainer's log."""
Warm = Callable[..., str]


def logs(folder: Path) -> list[dict[str, Any]]:
    """Of each step."""
    return [entry for entry in history(folder) if "loss" in entry]


def history(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "out.json").read_text())
    return found


def values(folder: Path, name: str) -> list[float]:
    return [entry[name] for entry in logs(folder) if name in entry]  # a step without a generation has no rewards


def both(
    warm: Warm, folder: Path, kind: str, options: dict[str, Any], *balanced: str, ranks: int = 2
) -> tuple[Path, Path, str]:
    """The script as ``torchrun`` starts it, and balanced; and what the second said."""
    plain, ours = folder / "plain", folder / "ours"
    words = [SCRIPT, kind, json.dumps(options)]
    warm(words, plain, with_odc=False, ranks=ranks)
    text = warm(["--balance", "lb-mini", *balanced, *words], ours, with_odc=True, ranks=ranks)
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
    "reference-that-follows": {"beta": 1.0, "sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 3},
    "lora": {"lora": True, "beta": 1.0, "num_iterations": 2, "max_steps": 3},
    "lora-fsdp1": {"lora": True, "beta": 1.0, "fsdp_version": 1},
}


def further(case: str, *values: Any, always: Sequence[str] = ()) -> Any:
    """A case of the extended run, unless it is one of ``always``."""
    marks = [] if case in always else [pytest.mark.extended]
    if "lora" in case:
        missing = importlib.util.find_spec("peft") is None
        marks.append(pytest.mark.skipif(missing, reason="peft is not installed (pip install peft)"))
    return pytest.param(case, *values, marks=marks, id="-".join([case, *map(str, values)]))


@pytest.mark.parametrize(("case", "ranks"), [further(name, n) for name in ROLLOUTS for n in (2, 4)])
def test_balanced_rollouts_have_the_same_losses(tmp_path: Path, warm: Warm, case: str, ranks: int) -> None:
    plain, ours, text = both(warm, tmp_path, "grpo", ROLLOUTS[case], "--max-tokens", "120", ranks=ranks)
    assert_same(plain, ours, "reward", "num_tokens", "completions/mean_length", "completions/max_length")
    # Means over tokens in place of means over microbatches.
    assert values(ours, "entropy") == pytest.approx(values(plain, "entropy"), rel=0.05)
    assert set(logs(ours)[0]) == set(logs(plain)[0]) | COLUMNS
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


DPO_LOSSES = {
    **dict.fromkeys(("sigmoid", "hinge", "exo_pair", "nca_pair", "robust", "bco_pair"), 1.0),
    **dict.fromkeys(("apo_zero", "apo_down", "discopop", "sigmoid_norm"), 1.0),
    **dict.fromkeys(("ipo", "sppo_hard"), 0.01),  # squares of what is far from 0
}
"""All that are balanced, and what makes them of one size."""
ALL_LOSSES = {"loss_type": [*DPO_LOSSES], "loss_weights": [*DPO_LOSSES.values()], "label_smoothing": 0.1}
PAIRS = {
    "dpo": ("dpo", {"eval_strategy": "steps", "eval_steps": 2, "gradient_checkpointing": True}),
    "reward": ("reward", {}),
    "dpo-of-all-losses": ("dpo", ALL_LOSSES),
    "dpo-of-two-losses-fsdp1": ("dpo", {"loss_type": ["sigmoid", "bco_pair"], "ld_alpha": 0.5, "fsdp_version": 1}),
    "dpo-weighted": ("dpo", {"use_weighting": True, "loss_type": "ipo"}),
    "dpo-lora": ("dpo", {"lora": True}),
    "dpo-whose-reference-follows": ("dpo", {"sync_ref_model": True, "ref_model_sync_steps": 1}),
    "reward-lora": ("reward", {"lora": True}),
    "reward-centered-fsdp1": ("reward", {"center_rewards_coefficient": 0.01, "fsdp_version": 1}),
}


@pytest.mark.parametrize(("case", "ranks"), [further(name, n) for name in PAIRS for n in (2, 4)])
def test_balanced_pairs_have_the_same_losses(tmp_path: Path, warm: Warm, case: str, ranks: int) -> None:
    kind, options = PAIRS[case]
    plain, ours, text = both(warm, tmp_path, kind, options, "--max-tokens", "300", ranks=ranks)
    assert_same(plain, ours, "num_tokens")
    for name in ("rewards/margins", "logps/chosen") if kind == "dpo" else ("mean_reward", "min_reward", "max_reward"):
        if name[:3] not in ("min", "max"):  # of the step, not means over its microbatches
            assert values(ours, name) == pytest.approx(values(plain, name), rel=1e-4, abs=1e-5), name
        else:
            sign = 1 if name.startswith("max") else -1
            assert all(
                sign * a >= sign * b - 1e-6 for a, b in zip(values(ours, name), values(plain, name), strict=True)
            )
    assert set(logs(ours)[0]) == set(logs(plain)[0]) | COLUMNS
    assert "balanced by lb-mini: 2 minibatches planned" in text
    evaluations = [
        [entry["eval_loss"] for entry in history(folder) if "eval_loss" in entry] for folder in (plain, ours)
    ]
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-5)
    assert bool(evaluations[0]) is (case == "dpo")


# An output layer that nobody calls


ADAPTED = {"sft-lora": "sft", "dpo-lora": "dpo", "grpo-lora": "grpo"}


@pytest.mark.parametrize("case", [further(name) for name in ADAPTED])
def test_uneven_ranks_do_not_wait_for_an_output_layer(tmp_path: Path, warm: Warm, case: str) -> None:
    """With adapters it is a unit of its own, which TRL's fused head gathers by a collective."""
    kind, options = ADAPTED[case], {"lora": True, "given": ADAPTED[case] == "grpo", "max_steps": 3}
    most = {"sft": "130", "dpo": "300", "grpo": "64"}[kind]
    plain, ours, _ = both(warm, tmp_path, kind, options, "--max-tokens", most, ranks=4)
    assert_same(plain, ours)
    counts = [json.loads((ours / f"forwards-{rank}.json").read_text()) for rank in range(4)]
    assert any(len(set(of_step)) > 1 for of_step in zip(*counts, strict=True)), counts


@pytest.mark.parametrize("case", [further("sft-lora"), further("dpo-lora")])
def test_an_output_layer_of_its_own_that_is_trained_is_refused(tmp_path: Path, warm: Warm, case: str) -> None:
    words = ["--balance", "lb-mini", SCRIPT, ADAPTED[case], json.dumps({"lora": "head"})]
    text = warm(words, tmp_path, with_odc=True, code=1)
    assert "odc: refused: balancing by 'lb-mini' gives ranks different numbers of microbatches, but the output" in text
    assert "leave it out of modules_to_save" in text


# Checkpoints, meshes


RESUMED: dict[str, dict[str, Any]] = {"grpo": {"beta": 0.1, "loss_type": "grpo"}, "dpo": {}}


@pytest.mark.extended
@pytest.mark.parametrize("kind", RESUMED)
def test_a_new_job_resumes_with_the_losses_of_one_that_goes_on(tmp_path: Path, warm: Warm, kind: str) -> None:
    """Also from a checkpoint of plain FSDP2."""
    balanced = ["--balance", "lb-mini"]
    for whole, prefix in (("plain", []), ("ours", balanced)):
        options = {**RESUMED[kind], "max_steps": 4, "output_dir": str(tmp_path / whole / "checkpoints")}
        saved = json.dumps({**options, "save_strategy": "steps", "save_steps": 2})
        warm([*prefix, SCRIPT, kind, saved], tmp_path / whole, with_odc=bool(prefix))
        rest = tmp_path / f"of-{whole}"
        text = warm([*balanced, SCRIPT, kind, json.dumps({**options, "resumes": True})], rest, with_odc=True)
        assert "balanced by lb-mini: 2 minibatches planned" in text
        assert_same(tmp_path / "plain", rest)


@pytest.mark.extended
@pytest.mark.parametrize("case", ["grpo", "dpo"])
def test_replicas_have_the_same_losses(tmp_path: Path, warm: Warm, case: str) -> None:
    """HSDP: two replicas of two shards."""
    options = {"replicas": 2, **RESUMED[case]}
    plain, ours, text = both(warm, tmp_path, case, options, "--max-tokens", "300", ranks=4)
    assert_same(plain, ours)
    assert "over 2 ranks, 2 replicas" in text


# One process in float64


ALONE = {
    **{loss: ("grpo", {"loss_type": loss}) for loss in ("grpo", "dapo", "dr_grpo", "cispo", "sapo", "vespo", "luspo")},
    "dapo-sampled": ("grpo", {"given": "sampled"}),
    "vespo-sampled": ("grpo", {"given": "sampled", "loss_type": "vespo"}),
    "grpo-sampled-by-sequence": (
        "grpo",
        {"given": "sampled", "loss_type": "grpo", "vllm_importance_sampling_mode": "sequence_mask"},
    ),
    # Plain FSDP1 has other losses here than one process.
    "reference-that-follows-fsdp1": (
        "grpo",
        {"fsdp_version": 1, "dtype": "float32", "sync_ref_model": True, "ref_model_sync_steps": 1, "beta": 1.0},
    ),
    "dpo": ("dpo", ALL_LOSSES),
    "reward": ("reward", {"center_rewards_coefficient": 0.01}),
}


@pytest.mark.parametrize(
    ("case", "ranks"), [further("grpo", 2, always=("grpo",)), *(further(name, 4) for name in ALONE)]
)
def test_uneven_ranks_train_as_one_process(tmp_path: Path, warm: Warm, case: str, ranks: int) -> None:
    """In float64 like the one process, which has their samples in its batches. (FSDP1 clips in float32.)"""
    kind, options = ALONE[case]
    options = {"dtype": "float64", "optim": "sgd", "learning_rate": 0.1, "max_steps": 3, **options}
    if kind == "grpo":  # the second step trains on what the first has
        options = {"given": True, "num_iterations": 2, "beta": 0.1, **options}
        if "vespo" in case:
            options["vllm_importance_sampling_mode"] = "token_truncate"
    one, ours = tmp_path / "one", tmp_path / "ours"
    alone = {**options, "fsdp_version": 0, "per_device_train_batch_size": 4 * ranks}
    warm([SCRIPT, kind, json.dumps(alone)], one, with_odc=False, ranks=1)
    most = {2: "90", 4: "64"}[ranks] if kind == "grpo" else "300"  # of which counts become uneven
    words = ["--balance", "lb-mini", "--max-tokens", most]
    warm([*words, SCRIPT, kind, json.dumps(options)], ours, with_odc=True, ranks=ranks)
    for name in ("loss", "grad_norm"):
        # To rounding in float32, in which trainers add up losses of terms near 1.
        assert values(ours, name) == pytest.approx(values(one, name), rel=5e-6, abs=5e-7), name
    counts = [json.loads((ours / f"forwards-{rank}.json").read_text()) for rank in range(ranks)]
    assert any(len(set(of_step)) > 1 for of_step in zip(*counts, strict=True)), counts


# A rank that dies


PHASES = ("generation", "log-probabilities", "exchange", "training", "step")


@pytest.mark.extended
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_dies_is_named_by_the_others(tmp_path: Path, warm: Warm, phase: str) -> None:
    """In every run in tests/liveness/test_faults.py, without TRL."""
    options = {"given": True, "num_iterations": 2, "beta": 0.1, "max_steps": 9}
    options["killed"] = {"rank": 1, "in": phase, "step": 2}
    warm(["--balance", "lb-mini", SCRIPT, "grpo", json.dumps(options)], tmp_path, with_odc=True, code=1, ranks=3)
    ended = time.time()
    for rank in (0, 2):
        text = output_of(tmp_path, rank).read_text()
        assert re.search(r"odc: failed: .*rank 1 \(host .*\): .* Cause: rank 1 is dead", text), text
    assert ended - (tmp_path / "killed").stat().st_mtime < NOTICE_S
