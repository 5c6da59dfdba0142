"""What the examples with trainers have in common: a small model, samples, and how ranks go without a GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

VOCAB_SIZE = 512


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


def build_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def counting(num_samples: int, vocab_size: int) -> list[np.ndarray[Any, Any]]:
    """Samples of 8 to 400 tokens, log-normal; each counts up in its own stride, so one can learn."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(mean=4.0, sigma=1.0, size=num_samples), 8, 400).astype(int)
    starts, strides = rng.integers(0, vocab_size, num_samples), rng.integers(1, 4, num_samples)
    return [
        (start + stride * np.arange(n)) % vocab_size for n, start, stride in zip(lengths, starts, strides, strict=True)
    ]


def build_dataset(num_samples: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.tensor(ids)} for ids in counting(num_samples, VOCAB_SIZE)]


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch padded on the right; padding has no loss."""
    ids = [sample["input_ids"] for sample in samples]
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
    input_ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return {"input_ids": input_ids, "attention_mask": mask, "labels": input_ids.masked_fill(mask == 0, -100)}


def options(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fsdp-version", type=int, choices=[1, 2], default=2)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--per-device-batch-size", type=int, default=2, help="samples per rank and microbatch")
    parser.add_argument("--log-json", type=Path, help="file for the losses and rank 0's samples/s")
    return parser


def end(trainer: Trainer, result: Any, args: argparse.Namespace) -> None:
    """Write what a training by a trainer has shown, and go."""
    if trainer.is_world_process_zero() and args.log_json:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        samples_per_s = result.metrics["train_samples_per_second"] / trainer.args.world_size
        args.log_json.write_text(json.dumps({"losses": losses, "samples_per_s": samples_per_s}))
    trainer.accelerator.wait_for_everyone()  # gloo may abort a process that ends too soon
    trainer.accelerator.end_training()
