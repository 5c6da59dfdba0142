"""A script of TRL's GRPOTrainer, DPOTrainer or RewardTrainer, for the tests of `odc run --balance`: it knows nothing of
ODC.

Arguments: a trainer ("grpo", "dpo", "reward"), and a JSON object for its configuration. It writes out.json, with what
was logged at each step, and a folder with the model.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import Qwen2ForSequenceClassification, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer
from trl_sft import NUM_WORDS, build_model, build_tokenizer, use_cpu_ranks

NUM_PROMPTS = 64


def main() -> None:
    kind, given = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    set_seed(0)
    use_cpu_ranks()
    version = given.pop("fsdp_version", 2)
    fsdp: dict[str, Any] = {"version": version, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    if version == 1:
        fsdp["sync_module_states"] = False
    options: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "accelerator_config": {"use_configured_state": True},
        "fsdp": True,
        "fsdp_config": fsdp,
        **given,
    }
    trainer = {"grpo": grpo, "dpo": dpo, "reward": reward}[kind](options)
    trainer.train()
    if trainer.is_world_process_zero():
        Path("out.json").write_text(json.dumps(trainer.state.log_history))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def words(rng: Any, low: int, high: int) -> str:
    return " ".join(map(str, rng.integers(0, NUM_WORDS, rng.integers(low, high)).tolist()))


def saved_model() -> str:
    """Where a reference model is loaded from, too. Rank 0 writes it, as transformers do."""
    tokenizer = build_tokenizer()
    model = build_model(len(tokenizer))
    # A completion ends with a probability of 1/20 at each token.
    model.generation_config.eos_token_id = list(range(1, len(tokenizer), 20))
    tokenizer.padding_side = "left"
    model.save_pretrained("model")
    if PartialState().is_main_process:
        tokenizer.save_pretrained("model")
    PartialState().wait_for_everyone()
    return "model"


def reward_of(completions: list[str], **_: Any) -> list[float]:
    """The mean of what its words are modulo 7."""
    numbers = [[int(word) % 7 for word in text.split() if word.isdigit()] for text in completions]
    return [sum(own) / (1 + len(own)) for own in numbers]


def grpo(options: dict[str, Any]) -> Any:
    rng = np.random.default_rng(0)
    return GRPOTrainer(
        model=saved_model(),
        reward_funcs=reward_of,
        args=GRPOConfig(num_generations=4, max_completion_length=40, **options),
        train_dataset=Dataset.from_dict({"prompt": [words(rng, 2, 9) for _ in range(NUM_PROMPTS)]}),
    )


def pairs(low: int = 4, high: int = 120) -> Dataset:
    rng = np.random.default_rng(0)
    rows = [
        {"prompt": words(rng, 2, 9), "chosen": " " + words(rng, low, high), "rejected": " " + words(rng, low, high)}
        for _ in range(NUM_PROMPTS)
    ]
    return Dataset.from_list(rows)


def dpo(options: dict[str, Any]) -> Any:
    return DPOTrainer(
        model=saved_model(),
        args=DPOConfig(max_length=None, **options),
        train_dataset=pairs(),
        eval_dataset=pairs().select(range(16)),
        processing_class=build_tokenizer(),
    )


def reward(options: dict[str, Any]) -> Any:
    tokenizer = build_tokenizer()
    config = build_model(len(tokenizer)).config
    config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
    set_seed(0)
    return RewardTrainer(
        model=Qwen2ForSequenceClassification(config),
        args=RewardConfig(max_length=None, disable_dropout=True, **options),
        train_dataset=pairs(),
        eval_dataset=pairs().select(range(16)),
        processing_class=tokenizer,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    time.sleep(0.2)  # for gloo's threads
