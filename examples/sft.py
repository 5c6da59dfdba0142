"""Supervised fine-tuning of a small Qwen2 with FSDP2, over collectives or with ODC.

    torchrun --nproc-per-node 2 examples/sft.py --comm collective --policy lb-micro --out runs/collective
    torchrun --nproc-per-node 2 examples/sft.py --comm odc --policy lb-mini --out runs/odc
    torchrun --nproc-per-node 2 examples/sft.py --comm odc --stream minibatch --out runs/stream

It runs on CPU ranks. The weights are random and the text is the standard library of the running Python, so
nothing is downloaded. For one seed every run starts from the same weights and sees the same minibatches,
whatever --comm and --policy are, so their losses can be compared. With --stream no length is known before a sample is
read, and minibatches are others.

What ODC changes is in main(): the line with odc.patch_fsdp, and the `with session.minibatch()` around the
microbatches of a minibatch.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import packed_attention
import sft_data
import torch
import torch.distributed as dist
import torch.nn.functional as F
from run_record import (
    Formatter,
    Progress,
    RunRecord,
    add_output,
    check_model,
    check_run,
    endless,
    leave,
    start_timeline,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR
from transformers import Qwen2Config, Qwen2ForCausalLM

import odc
from odc.balance import (
    AlignedGroups,
    EqualMinibatches,
    EqualSteps,
    Grouping,
    MinibatchLoader,
    MinibatchSampler,
    Order,
    StreamLoader,
    TransformerCost,
    count_loss_tokens,
    pack_collate,
)

PADDED = ("dgap", "steps")
"""Streams of padded microbatches, as many on every rank; "minibatch" is packed."""


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)  # the same weights on every rank and in every run

    model = build_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup_steps))
    minibatches = endless(build_loader(args, model.config))

    session = odc.patch_fsdp(model) if args.comm == "odc" else None
    timeline = start_timeline(model, session) if args.timeline else None
    warm_up(model, session, args.max_tokens)
    record = RunRecord(args.untimed, timeline)

    with Progress(args.minibatches) as progress:
        for minibatch in itertools.islice(minibatches, args.minibatches):
            with record.minibatch(minibatch):
                loss_sum = torch.zeros(())
                with session.minibatch() if session else nullcontext():
                    for microbatch in record.microbatches(minibatch.microbatches):
                        loss = answer_loss(model, microbatch)
                        (loss * minibatch.loss_scale).backward()
                        loss_sum += loss.detach()
                with record.span("finish", "loss"):
                    dist.all_reduce(loss_sum)
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            record.losses.append(loss_sum.item() / minibatch.num_loss_tokens)
            progress.show(record.losses)
            if args.samples and record.num_samples >= args.samples:
                break

    minibatches.close()
    record.save(args.out)
    if session:
        session.close()
    leave()


def answer_loss(model: torch.nn.Module, microbatch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sum of the losses of the answers' tokens; labels of prompts are -100. 0 for a dummy microbatch."""
    labels = microbatch["labels"]
    logits = model(**{k: v for k, v in microbatch.items() if k != "labels"}, use_cache=False).logits.float()
    predicted, expected = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(predicted, expected, ignore_index=sft_data.IGNORED, reduction="sum")


def warm_up(model: torch.nn.Module, session: odc.Session | None, num_tokens: int) -> None:
    """Run the largest microbatch there can be, without a gradient: if memory is short, it shows now.

    And the heap grows now: else the first large microbatch would be slow, whenever that happened to come.
    """
    tokens = torch.zeros(1, num_tokens, dtype=torch.int64)
    with session.minibatch() if session else nullcontext():
        (answer_loss(model, {"input_ids": tokens, "labels": tokens}) * 0).backward()
    model.zero_grad()


def build_model(args: argparse.Namespace, *, sharded: bool = True) -> Qwen2ForCausalLM:
    """A Qwen2 with random weights; ``sharded``: each decoder layer and the root over all ranks."""
    config = Qwen2Config(
        vocab_size=sft_data.DataConfig.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.hidden_size // 32,
        num_key_value_heads=args.hidden_size // 64,
        max_position_embeddings=args.max_tokens,
        tie_word_embeddings=False,
        attn_implementation="sdpa" if args.stream in PADDED else packed_attention.register(),
    )
    model = Qwen2ForCausalLM(config)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    if not sharded:
        model.forward = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)(model.forward)
        return model
    mesh, policy = init_device_mesh("cpu", (dist.get_world_size(),)), MixedPrecisionPolicy(dtype, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def build_loader(
    args: argparse.Namespace, config: Qwen2Config, comm: Literal["auto", "odc", "collective"] = "auto"
) -> MinibatchLoader[Any, Any] | StreamLoader[Any, Any]:
    """Minibatches, planned so that the ranks' costs are balanced as --policy says, or streamed as --stream does."""
    if dist.get_rank() == 0:
        sft_data.prepare(args.data, sft_data.DataConfig(max_length=args.max_tokens))
    dist.barrier()
    dataset = sft_data.load(args.data)
    rank, world_size, cost = dist.get_rank(), dist.get_world_size(), TransformerCost.from_config(config)
    if args.stream:
        is_padded = args.stream in PADDED
        aligned = {
            "dgap": AlignedGroups(),
            "steps": EqualSteps(cost),
            "minibatch": EqualMinibatches(args.minibatch_size, cost),
        }
        return StreamLoader(
            dataset,
            sft_data.pad_collate if is_padded else pack_collate,
            rank,
            world_size,
            length=lambda sample: sample["input_ids"].size,
            num_loss_tokens=lambda sample: count_loss_tokens(sample["labels"]),
            grouping=Grouping("token-budget" if is_padded else "pack", args.max_tokens, args.pool_size),
            align=aligned[args.stream],
            order=Order(seed=args.seed),
        )
    sampler = MinibatchSampler(
        dataset.lengths,
        world_size=world_size,
        minibatch_size=args.minibatch_size,
        cost=cost,
        policy=args.policy,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    return MinibatchLoader(dataset, sampler, pack_collate, rank, num_loss_tokens=dataset.num_loss_tokens, comm=comm)


def parse_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    how = parser.add_argument_group("how the ranks work together")
    how.add_argument(
        "--comm",
        choices=["collective", "odc"],
        default="odc",
        help="collective: FSDP2 as it is, all ranks meet at every layer of every microbatch. "
        "odc: each rank fetches parameters and pushes gradients by itself, ranks meet once per minibatch",
    )
    how.add_argument(
        "--policy",
        choices=["local-sort", "lb-micro", "lb-mini"],
        default="lb-micro",
        help="local-sort: no packing, samples sorted by length on each rank. lb-micro: packed, as many "
        "microbatches on every rank. lb-mini: the whole minibatch's cost is balanced, each rank packs for "
        "itself, so numbers of microbatches differ; needs --comm odc",
    )
    how.add_argument(
        "--stream",
        choices=["dgap", "steps", "minibatch"],
        help="in place of --policy: lengths show when samples are read. dgap: equal steps of padded microbatches "
        "(online dynamic batching). steps: the same, at equal cost. minibatch: packed, equal cost per minibatch; needs "
        "--comm odc",
    )
    data = parser.add_argument_group("data")
    data.add_argument("--minibatches", type=int, default=20, help="optimizer steps to run")
    data.add_argument("--minibatch-size", type=int, default=3, help="samples per rank and optimizer step")
    data.add_argument("--samples", type=int, help="stop after so many samples, all ranks together, if that is earlier")
    data.add_argument("--pool-size", type=int, default=64, help="with --stream, samples of a rank to choose from")
    data.add_argument("--max-tokens", type=int, default=512, help="most tokens in one sample or microbatch")
    data.add_argument(
        "--data", type=Path, default=Path("runs/data"), help="folder of the tokenized data, made if it is not there"
    )
    model = parser.add_argument_group("model and optimizer")
    model.add_argument("--hidden-size", type=int, default=256, help="a multiple of 64")
    model.add_argument("--num-layers", type=int, default=4, help="decoder layers")
    model.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="what the model computes in")
    model.add_argument("--lr", type=float, default=1e-3, help="learning rate after the warm-up")
    model.add_argument("--warmup-steps", type=int, default=5, help="steps of linear learning-rate warm-up")
    model.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the samples")
    add_output(parser, "runs/sft")
    args = parser.parse_args(words)
    _check(parser, args)
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    check_model(parser, args)
    if args.comm == "collective" and args.stream == "minibatch":
        parser.error(
            "--stream minibatch gives the ranks different numbers of microbatches, so with --comm collective "
            "some would wait forever in a collective: use --comm odc, or --stream steps"
        )
    check_run(parser, args)


if __name__ == "__main__":
    main()
