"""A script of TRL's GRPOTrainer, DPOTrainer, RewardTrainer or SFTTrainer, for the tests of `odc run --balance`.

It knows nothing of ODC.

Arguments: a trainer ("grpo", "dpo", "reward", "sft"), and a JSON object for its configuration. Besides TRL's options:

- "fsdp_version": 1, 2, or 0 for none;
- "dtype": of the model;
- "lora": train an adapter; "head", and the output layer;
- "given": rollouts are not generated, but made of their prompts: the same whatever rank has them; "sampled", by an
  engine like vLLM, whose log-probabilities differ;
- "replicas": HSDP, of so many;
- "resumes": from checkpoint-2 in "output_dir";
- "killed": {"rank": r, "in": phase, "step": n}: the rank kills itself there, and leaves a file "killed".

It writes out.json, with what was logged at each step, forwards-RANK.json, how many microbatches the rank has run in
each step, and a folder with the model.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import numpy as np
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig, PartialState
from datasets import Dataset
from transformers import Qwen2ForSequenceClassification, TrainerCallback, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl_sft import NUM_WORDS, build_model, build_tokenizer, use_cpu_ranks

NUM_PROMPTS = 64


def main() -> None:
    kind, given = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    set_seed(0)
    own = {name: given.pop(name, None) for name in ("lora", "given", "replicas", "resumes", "killed", "dtype")}
    version = given.pop("fsdp_version", 2)
    if version:
        use_cpu_ranks()
    fsdp: dict[str, Any] = {"version": version, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    fsdp["state_dict_type"] = "SHARDED_STATE_DICT"
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
        **given,
    }
    if version:
        options |= {"accelerator_config": {"use_configured_state": True}, "fsdp": True, "fsdp_config": fsdp}
    if own["dtype"]:
        options["model_init_kwargs"] = {"dtype": getattr(torch, own["dtype"])}
    if own["replicas"]:
        size = PartialState().num_processes // own["replicas"]
        options["parallelism_config"] = ParallelismConfig(dp_replicate_size=own["replicas"], dp_shard_size=size)
    more: dict[str, Any] = {}
    if own["lora"]:
        from peft import LoraConfig  # not among the extras

        task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
        adapted: dict[str, Any] = {"target_modules": ["q_proj", "up_proj", "down_proj"], "task_type": task}
        if own["lora"] == "head":
            adapted["modules_to_save"] = ["lm_head"]
        more["peft_config"] = LoraConfig(r=4, **adapted)
    if own["given"]:
        more["rollout_func"] = given_rollouts
    trainer = {"grpo": grpo, "dpo": dpo, "reward": reward, "sft": sft}[kind](options, more)
    if own["given"] == "sampled":
        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    forwards = Forwards(trainer.model)
    trainer.add_callback(forwards)
    if own["killed"] and own["killed"]["rank"] == PartialState().process_index:
        kill_itself(trainer, own["killed"]["in"], own["killed"]["step"])
    trainer.train(resume_from_checkpoint=f"{options['output_dir']}/checkpoint-2" if own["resumes"] else None)
    Path(f"forwards-{PartialState().process_index}.json").write_text(json.dumps(forwards.of_steps))
    if trainer.is_world_process_zero():
        Path("out.json").write_text(json.dumps(trainer.state.log_history))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


class Forwards(TrainerCallback):
    """Counts those that a backward follows."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.of_steps: list[int] = []
        self._count = 0
        module.register_forward_pre_hook(self._on_forward)

    def _on_forward(self, module: torch.nn.Module, _: Any) -> None:
        self._count += module.training and torch.is_grad_enabled()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.of_steps.append(self._count)
        self._count = 0


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


def given_rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions of 1 to 40 tokens, few of them long; some tokens are an environment's."""
    found: dict[str, Any] = {"prompt_ids": trainer.processing_class(prompts)["input_ids"]}
    found |= {"completion_ids": [], "logprobs": [], "env_mask": []}
    for i, prompt in enumerate(prompts):
        rng = np.random.default_rng([zlib.crc32(prompt.encode()), prompts[:i].count(prompt), trainer.state.global_step])
        length = int(np.clip(rng.lognormal(2.0, 1.2), 1, 40))
        completion = rng.integers(2, NUM_WORDS, length)
        completion[-1] = 1 if length < 40 else completion[-1]  # its end
        found["completion_ids"].append(completion.tolist())
        found["logprobs"].append(rng.normal(-np.log(NUM_WORDS), 0.1, length).tolist())
        found["env_mask"].append([1, *(rng.random(length - 1) < 0.9).astype(int).tolist()])
    return found


def kill_itself(trainer: Any, phase: str, step: int) -> None:
    """This process, in a phase of a step."""

    def killed(found: Callable[..., Any], phase_of: Callable[[], str] = lambda: phase) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if phase_of() == phase and trainer.state.global_step == step:
                Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return found(*args, **kwargs)

        return call

    if phase == "generation":
        trainer._generate = killed(trainer._generate)
    if phase in ("log-probabilities", "training"):
        trainer._get_per_token_logps_and_entropies = killed(
            trainer._get_per_token_logps_and_entropies,
            lambda: "training" if torch.is_grad_enabled() else "log-probabilities",
        )
    if phase == "exchange":
        dist.all_to_all_single = killed(dist.all_to_all_single)
    if phase == "step":
        trainer.callback_handler.on_pre_optimizer_step = killed(trainer.callback_handler.on_pre_optimizer_step)


def grpo(options: dict[str, Any], more: dict[str, Any]) -> Any:
    rng = np.random.default_rng(0)
    return GRPOTrainer(
        model=saved_model(),
        reward_funcs=reward_of,
        args=GRPOConfig(num_generations=4, max_completion_length=40, **options),
        train_dataset=Dataset.from_dict({"prompt": [words(rng, 2, 9) for _ in range(NUM_PROMPTS)]}),
        **more,
    )


def pairs(low: int = 4, high: int = 120) -> Dataset:
    rng = np.random.default_rng(0)
    rows = [
        {"prompt": words(rng, 2, 9), "chosen": " " + words(rng, low, high), "rejected": " " + words(rng, low, high)}
        for _ in range(NUM_PROMPTS)
    ]
    return Dataset.from_list(rows)


def dpo(options: dict[str, Any], more: dict[str, Any]) -> Any:
    return DPOTrainer(
        model=saved_model(),
        args=DPOConfig(max_length=None, **options),
        train_dataset=pairs(),
        eval_dataset=pairs().select(range(16)),
        processing_class=build_tokenizer(),
        **more,
    )


def reward(options: dict[str, Any], more: dict[str, Any]) -> Any:
    tokenizer = build_tokenizer()
    config = build_model(len(tokenizer)).config
    config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
    set_seed(0)
    dtype = options.pop("model_init_kwargs", {}).get("dtype", torch.float32)
    return RewardTrainer(
        model=Qwen2ForSequenceClassification(config).to(dtype),
        args=RewardConfig(max_length=None, disable_dropout=True, **options),
        train_dataset=pairs(),
        eval_dataset=pairs().select(range(16)),
        processing_class=tokenizer,
        **more,
    )


def sft(options: dict[str, Any], more: dict[str, Any]) -> Any:
    rng = np.random.default_rng(0)
    return SFTTrainer(
        model=saved_model(),
        args=SFTConfig(max_length=None, **options),
        train_dataset=Dataset.from_dict({"text": [words(rng, 4, 120) for _ in range(NUM_PROMPTS)]}),
        processing_class=build_tokenizer(),
        **more,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    time.sleep(0.2)  # for gloo's threads
