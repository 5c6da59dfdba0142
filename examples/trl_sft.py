"""Fine-tuning a small Qwen2 with TRL's SFTTrainer and FSDP, as a user would write it.

    torchrun --nproc-per-node 2 examples/trl_sft.py --fsdp-version 2 --log-json losses.json

It runs on CPU ranks (gloo). Weights, tokenizer and text are made here, so nothing is downloaded; they are the same on
every rank, and two runs print the same losses.
"""

from __future__ import annotations

import os
import tempfile
import time

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL reports its use otherwise

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer_parts import counting, end, fsdp_config, options, use_cpu_ranks
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

NUM_WORDS = 510
ACCUMULATION_STEPS = 4


def main() -> None:
    args = options(__doc__).parse_args()
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
    end(trainer, trainer.train(), args)


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
    """Texts of as many words as the samples of the other examples have tokens."""
    return Dataset.from_dict({"text": [" ".join(map(str, sample)) for sample in counting(num_samples, NUM_WORDS)]})


if __name__ == "__main__":
    main()
    time.sleep(0.2)  # for gloo's threads, which let go of their last results a moment later: see run_record.py
