"""Fine-tuning a small Qwen2 with TRL's SFTTrainer and FSDP, as a user would write it.

    torchrun --nproc-per-node 2 examples/trl_sft.py --fsdp-version 2 --log-json losses.json

It runs on CPU ranks (gloo). Weights, tokenizer and text are made here, so nothing is downloaded; they are the same on
every rank, and two runs print the same losses.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL reports its use otherwise

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

NUM_WORDS = 510
ACCUMULATION_STEPS = 4


def main() -> None:
    args = parse_args()
    set_seed(0)
    cpu = not torch.cuda.is_available()
    if cpu:
        use_cpu_ranks()
    training = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=args.steps,
        per_device_train_batch_size=args.per_device_batch_size,
        gradient_accumulation_steps=ACCUMULATION_STEPS,
        learning_rate=1e-3,
        warmup_steps=args.steps // 10,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        max_length=None,
        bf16=False,
        activation_checkpointing=False,
        use_cpu=cpu,
        accelerator_config={"use_configured_state": cpu},
        fsdp=True,
        fsdp_config=fsdp_config(args),
    )
    num_samples = args.steps * ACCUMULATION_STEPS * args.per_device_batch_size * training.world_size
    tokenizer = build_tokenizer()
    trainer = SFTTrainer(
        model=build_model(len(tokenizer)),
        args=training,
        train_dataset=build_dataset(num_samples),
        processing_class=tokenizer,
    )
    result = trainer.train()

    if trainer.is_world_process_zero() and args.log_json:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        samples_per_s = result.metrics["train_samples_per_second"] / training.world_size
        args.log_json.write_text(json.dumps({"losses": losses, "samples_per_s": samples_per_s}))
    trainer.accelerator.wait_for_everyone()  # gloo may abort a process that ends too soon
    trainer.accelerator.end_training()


def fsdp_config(args: argparse.Namespace) -> dict[str, Any]:
    """One unit per decoder layer. FSDP1 would broadcast the weights of rank 0; here they are equal already."""
    config: dict[str, Any] = {"version": args.fsdp_version, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    if args.fsdp_version == 1:
        config["sync_module_states"] = False
    return config


def use_cpu_ranks() -> None:
    """Make accelerate use FSDP without a GPU: it does so for several accelerators only, so call the CPU ranks that."""
    state = PartialState(cpu=True)
    state.device = torch.device("cpu")  # without an index, as FSDP1 wants it
    state.distributed_type = DistributedType.MULTI_GPU


def build_model(vocab_size: int) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word."""
    words = ["<pad>", "<eos>", *map(str, range(NUM_WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def build_dataset(num_samples: int) -> Dataset:
    """Texts of 8 to 400 words, log-normal; each counts up in its own stride, so one can learn."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(mean=4.0, sigma=1.0, size=num_samples), 8, 400).astype(int)
    starts, strides = rng.integers(0, NUM_WORDS, num_samples), rng.integers(1, 4, num_samples)
    words = [
        (start + stride * np.arange(n)) % NUM_WORDS for n, start, stride in zip(lengths, starts, strides, strict=True)
    ]
    return Dataset.from_dict({"text": [" ".join(map(str, sample)) for sample in words]})


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fsdp-version", type=int, choices=[1, 2], default=2)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--per-device-batch-size", type=int, default=2, help="samples per rank and microbatch")
    parser.add_argument("--log-json", type=Path, help="file for the losses and rank 0's samples/s")
    return parser.parse_args()


if __name__ == "__main__":
    main()
    time.sleep(0.2)  # for gloo's threads, which let go of their last results a moment later: see the end of sft.py
