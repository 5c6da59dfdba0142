"""Layer 4: commands of training frameworks that start ranks themselves, alone and behind ``odc exec``, on CPU ranks.

``ODC_TEST_FRAMEWORKS`` names a folder with virtual environments, called as below, of which each has torch 2.13 for
CPUs, rich, typer, tensorboard, and

- llamafactory: ``llamafactory==0.9.5 transformers==5.6.0``, without torchvision, with an empty ``torchaudio.py``;
- ms-swift: ``ms-swift==4.6.0 transformers==5.19.0``;
- axolotl: ``--no-deps -r tests/rigs/axolotl_requirements.txt``, as axolotl asks for packages of GPUs.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import process_ranks
import pytest
from verl_ranks import save_model

import odc

FOLDER = Path(os.environ.get("ODC_TEST_FRAMEWORKS", "nowhere"))
STEPS = 4
VARIABLES = {
    "NPROC_PER_NODE": "2",
    "FORCE_TORCHRUN": "1",  # ms-swift and LLaMA-Factory; the latter only
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",  # on CPU ranks a whole one ends torch's FSDP1 by a segmentation fault
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
}


class Framework(NamedTuple):
    command: str
    """The first word is the program, "CONFIG" the path of its configuration."""

    suffix: str
    """Of this path. JSON is YAML, too."""

    config: dict[str, Any]
    """"VERSION" is FSDP's."""

    refusal: str = ""
    """What is said where steps would be balanced; "": they are."""

    versions: str = "12"
    """Of FSDP."""


FSDP = {
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "cpu_ram_efficient_loading": False,
    "sync_module_states": False,
}
OF_EACH = {
    "output_dir": "out",
    "save_strategy": "no",
    "logging_steps": 1,
    "max_steps": STEPS,
    "seed": 1,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.02,
    "bf16": False,
    "fp16": False,
}
OF_TRAINERS = {"per_device_train_batch_size": 2, "use_cpu": True, "report_to": "tensorboard", **OF_EACH}
FRAMEWORKS = {
    "llamafactory": Framework(
        "llamafactory-cli train CONFIG",
        ".yaml",
        {
            "model_name_or_path": "../model",
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "full",
            "dataset_dir": "..",
            "dataset": "samples",
            "template": "empty",
            "cutoff_len": 64,
            "disable_gradient_checkpointing": True,
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {"version": "VERSION", **FSDP},
            **OF_TRAINERS,
        },
    ),
    "ms-swift": Framework(
        "swift sft CONFIG",
        ".json",
        {
            "model": "../model",
            "model_type": "llama",
            "template": "dummy",
            "dataset": "../samples.jsonl",
            "split_dataset_ratio": 0,
            "max_length": 64,
            "tuner_type": "full",
            "torch_dtype": "float32",
            "gradient_checkpointing": False,
            "add_version": False,
            "fsdp": {
                "fsdp": "full_shard auto_wrap",
                "fsdp_config": {"fsdp_version": "VERSION", "version": "VERSION", **FSDP},
            },
            **OF_TRAINERS,
        },
    ),
    "axolotl": Framework(
        "axolotl train CONFIG --launcher torchrun -- --standalone --nproc-per-node 2",
        ".yaml",
        {
            "base_model": "../model",
            "datasets": [
                {
                    "path": "../samples.jsonl",
                    "ds_type": "json",
                    "type": {
                        "field_instruction": "instruction",
                        "field_output": "output",
                        "format": "{instruction} ",
                        "no_input_format": "{instruction} ",
                    },
                }
            ],
            "sequence_len": 64,
            "micro_batch_size": 2,
            "optimizer": "adamw_torch",
            "lr_scheduler": "constant",
            "tf32": False,
            "use_tensorboard": True,
            "fsdp_version": "VERSION",
            "fsdp_config": {
                "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
                "state_dict_type": "FULL_STATE_DICT",
                **FSDP,
            },
            **OF_EACH,
        },
        refusal="average_tokens_across_devices=False",
        versions="2",  # of another state dict than a whole one its saving misses files
    ),
}

pytestmark = [
    pytest.mark.extended,
    pytest.mark.parametrize(
        ("name", "version"),
        [
            pytest.param(
                name,
                version,
                marks=pytest.mark.skipif(
                    not (FOLDER / name / "bin").is_dir(),
                    reason=f"ODC_TEST_FRAMEWORKS names no folder with an environment {name} (CONTRIBUTING.md)",
                ),
            )
            for name, framework in FRAMEWORKS.items()
            for version in framework.versions
        ],
    ),
]

Run = Callable[..., tuple[str, Path]]
"""(framework, version of FSDP, *options of ``odc exec``) -> what the command printed, and where it ran; once each."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("frameworks")
    save_model(folder / "model")
    draw = random.Random(0)
    with (folder / "samples.jsonl").open("w") as file:
        for _ in range(8 * STEPS):
            words = [" ".join(str(draw.randrange(2, 10)) for _ in range(n)) for n in (3, draw.randrange(4, 40))]
            print(json.dumps({"instruction": words[0], "input": "", "output": words[1]}), file=file)
    (folder / "dataset_info.json").write_text(json.dumps({"samples": {"file_name": "samples.jsonl"}}))
    path = folder / "path"
    path.mkdir()
    (path / "odc").symlink_to(Path(odc.__file__).parent)  # and none of what lies beside it
    (path / "sitecustomize.py").symlink_to(Path(process_ranks.__file__).with_name("accelerate_cpu.py"))

    @functools.cache
    def run_once(name: str, version: str, *options: str, with_odc: bool = True, code: int = 0) -> tuple[str, Path]:
        framework, programs = FRAMEWORKS[name], FOLDER.absolute() / name / "bin"
        here = Path(tempfile.mkdtemp(prefix=name, dir=folder))
        config = here / f"config{framework.suffix}"
        config.write_text(json.dumps(framework.config).replace('"VERSION"', version))
        words = framework.command.replace("CONFIG", str(config)).split()
        before = [str(programs / "python"), "-m", "odc", "exec", *options, "--"] if with_odc else []
        env = {**os.environ, **VARIABLES, "PYTHONPATH": str(path), "PATH": f"{programs}:{os.environ['PATH']}"}
        done = subprocess.run([*before, *words], cwd=here, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr, here

    return run_once


def metrics_in(text: str) -> list[tuple[str, str]]:
    """Of each step, as they are printed."""
    found = re.findall(r"'(loss|grad_norm|token_acc)': '?([^',}]+)", text)
    assert [name for name, _ in found].count("loss") == STEPS, text
    return found


def test_odc_exec_does_not_change_what_a_framework_prints(run: Run, name: str, version: str) -> None:
    (plain, _), (ours, folder) = run(name, version, with_odc=False), run(name, version)
    assert "odc:" not in plain
    assert ours.count(f"odc: patched LlamaForCausalLM (FSDP{version})") == 1
    assert metrics_in(ours) == metrics_in(plain)
    [events] = folder.rglob("events.out.tfevents.*")
    for column in (b"train/odc/bubble_rate", b"train/odc/waiting_s", b"train/odc/slowest_rank"):
        assert column in events.read_bytes()


BALANCED = ("--balance", "lb-mini", "--max-tokens", "64")


def test_balance_does_not_change_what_a_framework_prints_or_is_refused(run: Run, name: str, version: str) -> None:
    refusal = FRAMEWORKS[name].refusal
    text, _ = run(name, version, *BALANCED, code=1 if refusal else 0)
    if refusal:
        assert refusal in text
        assert "'loss': " not in text
    else:
        plain, _ = run(name, version, with_odc=False)
        assert metrics_in(text) == metrics_in(plain)
        assert f"odc: balanced by lb-mini: {STEPS} minibatches planned" in text
