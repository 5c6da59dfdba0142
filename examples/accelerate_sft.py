"""Fine-tuning a small Llama with accelerate and FSDP, as a user would write it.

    torchrun --nproc-per-node 2 examples/accelerate_sft.py --fsdp-version 2 --log-json losses.json

It runs on CPU ranks (gloo). Weights and data are random and made here, so nothing is downloaded; both are the same on
every rank, and two runs print the same losses.

The loss of a step is the mean over its tokens on all ranks, as accelerate recommends for language models: batches hold
different numbers of tokens. With ``--balance lb-mini`` (under ``odc run``) one line takes the place of another, and
ranks run different numbers of packed microbatches of the same samples per step, with the same losses.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from trainer_parts import build_dataset, build_model, options, pad, use_cpu_ranks
from transformers import get_linear_schedule_with_warmup

ACCUMULATION_STEPS = 4


def main() -> None:
    args = parse_args()
    set_seed(0)
    if not torch.cuda.is_available():
        use_cpu_ranks()
    accelerator = Accelerator(fsdp_plugin=fsdp_plugin(args))

    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The prepared scheduler takes one step per rank and optimizer step.
    total = args.steps * accelerator.num_processes
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=total // 10, num_training_steps=total)
    num_samples = args.steps * ACCUMULATION_STEPS * args.per_device_batch_size * accelerator.num_processes
    loader = DataLoader(build_dataset(num_samples), args.per_device_batch_size, shuffle=True, collate_fn=pad)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    if args.balance or args.online:
        from odc.trainers import minibatches

        steps: Any = minibatches(
            accelerator,
            model,
            loader,
            ACCUMULATION_STEPS,
            policy=args.balance,
            online=args.online,
            max_tokens=args.max_tokens,
        )
    else:
        steps = in_steps(loader, ACCUMULATION_STEPS)

    losses: list[float] = []
    start = time.perf_counter()
    model.train()
    for batches in steps:
        num_tokens = torch.stack([(batch["labels"][:, 1:] != -100).sum() for batch in batches]).sum()
        num_tokens = accelerator.reduce(num_tokens.to(accelerator.device), "sum")
        loss_sum = torch.zeros((), device=accelerator.device)
        for batch in batches:
            # Gradients are reduced in the last batch only.
            with contextlib.nullcontext() if batch is batches[-1] else accelerator.no_sync(model):
                loss = model(**batch, num_items_in_batch=num_tokens).loss  # sum over tokens / num_tokens
                accelerator.backward(loss * accelerator.num_processes)  # FSDP divides by it
            loss_sum += loss.detach()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss_sum, "sum").item())
        accelerator.print(f"step {len(losses)}: loss {losses[-1]:.4f}")
    seconds = time.perf_counter() - start

    if accelerator.is_main_process and args.log_json:
        samples_per_s = num_samples / accelerator.num_processes / seconds
        args.log_json.write_text(json.dumps({"losses": losses, "samples_per_s": samples_per_s}))
    accelerator.wait_for_everyone()  # gloo may abort a process that ends too soon
    accelerator.end_training()


def in_steps(loader: Any, accumulation_steps: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    """The batches of one optimizer step together, fewer at the end of the epoch."""
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) == accumulation_steps:
            yield batches
            batches = []
    if batches:
        yield batches


def fsdp_plugin(args: argparse.Namespace) -> FullyShardedDataParallelPlugin:
    """One unit per decoder layer; for FSDP1 with the original parameters, as FSDP2 always has them."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=args.fsdp_version,
        auto_wrap_policy="transformer_based_wrap",
        use_orig_params=True if args.fsdp_version == 1 else None,
    )


def parse_args() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--balance", metavar="POLICY", help="balance minibatches by this policy of odc.balance")
    parser.add_argument("--online", action="store_true", help="balance them without known lengths; needs --max-tokens")
    parser.add_argument("--max-tokens", type=int, help="with --balance or --online: tokens of a microbatch")
    return parser.parse_args()


if __name__ == "__main__":
    main()
    time.sleep(0.2)  # for gloo's threads, which let go of their last results a moment later: see run_record.py
