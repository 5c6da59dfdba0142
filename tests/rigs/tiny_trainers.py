"""Trainers of a training library on one tiny model, for tests in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from odc.trainers import balance

VOCAB_SIZE = 64


def model(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            **options,
        )
    )


_SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_OTHERS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "BambaForCausalLM": (
        transformers.BambaConfig,
        {
            "attn_layer_indices": [1],
            "num_key_value_heads": 2,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            **_SIZES,
        },
    ),
    "BertForMaskedLM": (transformers.BertConfig, _SIZES),
    "GPT2LMHeadModel": (
        transformers.GPT2Config,
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    ),
    "Lfm2ForCausalLM": (
        transformers.Lfm2Config,
        {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2, **_SIZES},
    ),
    "LlamaForTokenClassification": (transformers.LlamaConfig, {"num_labels": 3, **_SIZES}),
    "MixtralForCausalLM": (
        transformers.MixtralConfig,
        {"num_local_experts": 4, "num_key_value_heads": 2, **_SIZES},
    ),
    "OPTForCausalLM": (
        transformers.OPTConfig,
        {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0, **_SIZES},
    ),
    "RobertaForMaskedLM": (transformers.RobertaConfig, _SIZES),
}


def other_model(name: str) -> Any:
    """Of another architecture, as tiny."""
    torch.manual_seed(0)
    config, options = _OTHERS[name]
    return getattr(transformers, name)(config(vocab_size=VOCAB_SIZE, **options))


def samples(count: int) -> list[dict[str, list[int]]]:
    """Of 4 to 40 tokens."""
    rng = np.random.default_rng(0)
    return [{"input_ids": rng.integers(2, VOCAB_SIZE, rng.integers(4, 41)).tolist()} for _ in range(count)]


def pad(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    ids = [torch.tensor(sample["input_ids"], dtype=torch.int64) for sample in batch]
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
    input_ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return {"input_ids": input_ids, "attention_mask": mask, "labels": input_ids.masked_fill(mask == 0, -100)}


def options(folder: Path, **changed: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "seed": 1,
        **changed,
    }


def hf_trainer(
    folder: Path,
    *,
    count: int = 37,
    dataset: Any = None,
    collate: Callable[..., Any] = pad,
    cls: type[Trainer] = Trainer,
    built: Any = None,
    extra: dict[str, Any] | None = None,
    **changed: Any,
) -> Trainer:
    """37 samples are 19 batches: 4 full steps per epoch and one of three batches, the last of them a single sample."""
    return cls(
        model=built or model(),
        args=TrainingArguments(**options(folder, **changed)),
        train_dataset=samples(count) if dataset is None else dataset,
        eval_dataset=samples(5),
        data_collator=collate,
        **(extra or {}),
    )


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", *map(str, range(2, VOCAB_SIZE))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def sft_trainer(folder: Path, *, count: int = 37, built: Any = None, **changed: Any) -> SFTTrainer:
    texts = [" ".join(map(str, sample["input_ids"])) for sample in samples(count)]
    arguments = options(folder, bf16=False, max_length=None, activation_checkpointing=False, **changed)
    return SFTTrainer(
        model=built or model(),
        args=SFTConfig(**arguments),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
    )


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_pair(folder: Path, make: Callable[..., Trainer], **changed: Any) -> tuple[Trainer, Trainer]:
    """The same training twice, the second one balanced."""
    plain, ours = make(folder / "plain", **changed), make(folder / "ours", **changed)
    balance(ours, "lb-mini", max_tokens=64)
    for trainer in (plain, ours):
        transformers.set_seed(1)  # some samplers draw from the global random state
        trainer.train()
    return plain, ours


class Recorder(TrainerCallback):
    """Takes down the samples of each step on this rank, by their tokens, from the packed rows that a model gets."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.steps: list[list[list[int]]] = []
        self._samples: list[list[int]] = []
        module.register_forward_pre_hook(self._on_forward, with_kwargs=True)

    def _on_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if module.training:
            self._samples += samples_in(kwargs)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(self._samples)
        self._samples = []


def samples_in(row: Any) -> list[list[int]]:
    """The tokens of each sample of a packed row; none of a row without loss, or that is not packed."""
    if "position_ids" not in row or (row["labels"] == -100).all():
        return []
    starts = (row["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    tokens = row["input_ids"][0].tolist()
    return [tokens[a:b] for a, b in zip(starts, [*starts[1:], len(tokens)], strict=True)]


def losses_of(folder: Path, steps: list[list[list[int]]], num_planned: int) -> list[float]:
    """Of a fresh model on these samples in these steps, each in a forward of its own, in a loop without a trainer."""
    trainer = hf_trainer(folder)
    trainer.create_optimizer_and_scheduler(num_training_steps=num_planned)
    assert isinstance(trainer.model, torch.nn.Module)
    made = trainer.model.train()
    found = []
    for step in steps:
        count = sum(len(tokens) - 1 for tokens in step)
        parts = [made(**pad([{"input_ids": tokens}]), num_items_in_batch=count).loss for tokens in step]
        sum(parts).backward()
        found.append(float(sum(part.item() for part in parts)))
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        made.zero_grad()
    return found
