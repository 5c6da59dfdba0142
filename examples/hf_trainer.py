"""Fine-tuning a small Llama with the Hugging Face Trainer and FSDP, as a user would write it.

    torchrun --nproc-per-node 2 examples/hf_trainer.py --fsdp-version 2 --log-json losses.json

It runs on CPU ranks (gloo). Weights and data are random and made here, so nothing is downloaded; both are the same on
every rank, and two runs print the same losses.
"""

from __future__ import annotations

import tempfile
import time

import torch
from trainer_parts import build_dataset, build_model, end, fsdp_config, options, pad, use_cpu_ranks
from transformers import Trainer, TrainingArguments, set_seed

ACCUMULATION_STEPS = 4


def main() -> None:
    args = options(__doc__).parse_args()
    set_seed(0)
    cpu = not torch.cuda.is_available()
    if cpu:
        use_cpu_ranks()
    training = TrainingArguments(
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
        use_cpu=cpu,
        accelerator_config={"use_configured_state": cpu},
        fsdp=True,
        fsdp_config=fsdp_config(args),
    )
    num_samples = args.steps * ACCUMULATION_STEPS * args.per_device_batch_size * training.world_size
    trainer = Trainer(model=build_model(), args=training, train_dataset=build_dataset(num_samples), data_collator=pad)
    end(trainer, trainer.train(), args)


if __name__ == "__main__":
    main()
    time.sleep(0.2)  # for gloo's threads, which let go of their last results a moment later: see run_record.py
