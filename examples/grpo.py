"""Reinforcement learning (GRPO) of a small Qwen2 with FSDP2, over collectives or with ODC.

    torchrun --nproc-per-node 2 examples/grpo.py --comm collective --policy lb-micro --out runs/collective
    torchrun --nproc-per-node 2 examples/grpo.py --comm odc --policy lb-mini --out runs/odc

It runs on CPU ranks, or with a GPU for each, and downloads nothing. At each step every rank generates completions
with a copy of the model, whose lengths nobody knows before (1 to --max-completion tokens), and a rule scores them: the
part of a completion's tokens that have the prompt's remainder by 4. Then the rollouts of all ranks are shared out anew
and trained on. For one seed every run has the same rollouts, to rounding, whatever --comm and --policy are: rewards and
losses can be compared.

What ODC changes is in main(): odc.patch_fsdp, balance_batch, and the `with session.minibatch()` around microbatches.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import packed_attention
import torch
import torch.distributed as dist
from run_record import Formatter, Progress, RunRecord, add_output, check_model, check_run, leave, start_timeline
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

import odc
from odc.balance import BalancedBatch, TransformerCost, balance_batch, pack_collate

VOCABULARY, END, NUM_KINDS = 64, 0, 4
PROMPT = 4  # tokens
CLIP = 0.2
Rollout = dict[str, Any]


def main() -> None:
    args = parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    torch.manual_seed(args.seed)  # the same weights on every rank and in every run
    rank = dist.get_rank()

    model = build_model(args, packed_attention.register(), device, sharded=True)
    generator = build_model(args, "sdpa", device, sharded=False).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    cost = TransformerCost.from_config(model.config)

    session = odc.patch_fsdp(model) if args.comm == "odc" else None
    timeline = start_timeline(model, session) if args.timeline else None
    record = RunRecord(args.untimed, timeline, alone=True)
    rewards: list[float] = []
    moved: list[int] = []  # bytes of rollouts

    with Progress(args.minibatches) as progress:
        while len(record.losses) < args.minibatches:
            copy_weights(model, generator)
            rollouts = make_rollouts(args, generator, seed=[args.seed, len(rewards), rank])
            rewards.append(mean_of_all([rollout["reward"] for rollout in rollouts]))
            lengths = [rollout["input_ids"].numel() for rollout in rollouts]
            with record.minibatch_of(dist.get_world_size() * len(rollouts), sum(lengths)):
                with record.span("phase", "balance"):
                    batch = balance_batch(
                        rollouts,
                        lengths,
                        num_loss_tokens=[length - PROMPT for length in lengths],
                        cost=cost,
                        max_tokens=args.max_tokens,
                        policy=args.policy,
                    )
                moved.append(batch.sent_bytes)
                loss = torch.zeros((), device=device)
                with session.minibatch() if session else nullcontext():
                    for microbatch, weights in record.microbatches(weighted(batch)):
                        part = policy_loss(model, microbatch, weights, device)
                        part.backward()
                        loss += part.detach()
                with record.span("finish", "loss"):
                    dist.all_reduce(loss)
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            record.losses.append(loss.item() / dist.get_world_size())
            progress.show(record.losses)

    record.save(args.out)
    of_all = torch.tensor(moved)
    dist.all_reduce(of_all)
    if rank == 0:
        rollouts = {"rewards": rewards, "moved_bytes": of_all.tolist()}  # of each step
        (args.out / "rollouts.json").write_text(json.dumps(rollouts))
    if session:
        session.close()
    leave()


def weighted(batch: BalancedBatch[Rollout]) -> list[tuple[list[Rollout], torch.Tensor]]:
    """Microbatches, each with a factor for each of its rollouts: the mean over the tokens of the whole step."""
    return list(zip(batch.microbatches, batch.loss_weights("dapo"), strict=True))


def policy_loss(
    model: torch.nn.Module, microbatch: Sequence[Rollout], weights: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """PPO's clipped loss of the completions; 0 of a microbatch without rollouts."""
    packed = pack_collate(microbatch)
    del packed["labels"]
    lengths = packed.pop("cu_seqlens").tolist()  # a list, which FSDP does not move: it decides what is launched
    inputs = {name: tensor.to(device) for name, tensor in packed.items()}
    logits = model(**inputs, cu_seqlens=lengths, use_cache=False).logits[0].float()
    ids = inputs["input_ids"][0]
    logps = logits[:-1].log_softmax(dim=-1).gather(1, ids[1:, None])[:, 0]  # of all tokens but the first
    old, advantages, factors = (torch.zeros(ids.numel()) for _ in range(3))
    start = 0
    for rollout, weight in zip(microbatch, weights, strict=True):
        end = start + rollout["input_ids"].numel()
        completion = slice(start + PROMPT, end)
        old[completion], advantages[completion], factors[completion] = rollout["logps"], rollout["advantage"], weight
        start = end
    old, advantages, factors = (of_tokens[1:].to(device) for of_tokens in (old, advantages, factors))
    ratio = (logps - old).where(factors > 0, 0.0).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(gain * factors).sum() + 0.0 * logps.sum()


# Rollouts


def make_rollouts(args: argparse.Namespace, model: Qwen2ForCausalLM, seed: list[int]) -> list[Rollout]:
    """Of this rank: completions of a few prompts, a group for each, with their advantages in the group."""
    random = torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
    prompts = torch.randint(1, VOCABULARY, (args.prompts, PROMPT), generator=random)
    prompts = prompts.repeat_interleave(args.group_size, dim=0)
    rollouts = list(generate(model, prompts, args.max_completion, random))
    for first in range(0, len(rollouts), args.group_size):
        group = rollouts[first : first + args.group_size]
        rewards = torch.tensor([rollout["reward"] for rollout in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for rollout, advantage in zip(group, advantages.tolist(), strict=True):
            rollout["advantage"] = advantage
    return rollouts


@torch.no_grad()
def generate(
    model: Qwen2ForCausalLM, prompts: torch.Tensor, max_completion: int, random: torch.Generator
) -> Iterator[Rollout]:
    """A completion of each prompt, (num_prompts, PROMPT), until its end or ``max_completion`` tokens; in host memory.

    The random numbers are the host's: the same whatever device computes.
    """
    cache, given = DynamicCache(config=model.config), prompts
    tokens, logps = [], []
    is_done = torch.zeros(len(prompts), dtype=torch.bool)
    while len(tokens) < max_completion and not is_done.all():
        logits = model(given.to(model.device), past_key_values=cache, use_cache=True).logits[:, -1]
        of_all = logits.float().log_softmax(dim=-1).cpu()
        drawn = torch.rand(len(prompts), 1, generator=random, dtype=torch.float64)
        given = (of_all.double().exp().cumsum(dim=-1) < drawn).sum(dim=-1, keepdim=True).clamp(max=VOCABULARY - 1)
        tokens.append(given)
        logps.append(of_all.gather(1, given))
        is_done |= given[:, 0] == END
    for prompt, completion, mine in zip(prompts, torch.cat(tokens, dim=1), torch.cat(logps, dim=1), strict=True):
        ends = (completion == END).nonzero()
        length = int(ends[0]) + 1 if len(ends) else completion.numel()
        yield {
            "input_ids": torch.cat([prompt, completion[:length]]),
            "logps": mine[:length].clone(),
            "reward": reward_of(prompt, completion[:length]),
        }


def reward_of(prompt: torch.Tensor, completion: torch.Tensor) -> float:
    """The part of its tokens that have the remainder of the prompt's first token."""
    return float((completion % NUM_KINDS == prompt[0] % NUM_KINDS).double().mean())


def copy_weights(model: torch.nn.Module, generator: torch.nn.Module) -> None:
    """The whole parameters of the sharded model, on every rank, as an engine for rollouts gets them. Collective."""
    with torch.no_grad():
        for (name, source), (other, target) in zip(model.named_parameters(), generator.named_parameters(), strict=True):
            assert name == other
            target.copy_(source.full_tensor())


def mean_of_all(values: list[float]) -> float:
    """Over all ranks."""
    total = torch.tensor([sum(values), len(values)], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1])


# The model


def build_model(args: argparse.Namespace, attention: str, device: torch.device, *, sharded: bool) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.hidden_size // 32,
        num_key_value_heads=args.hidden_size // 64,
        max_position_embeddings=PROMPT + args.max_completion,
        tie_word_embeddings=False,
        attn_implementation=attention,
    )
    model = Qwen2ForCausalLM(config).to(device)
    if sharded:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def parse_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    how = parser.add_argument_group("how the ranks work together")
    how.add_argument(
        "--comm",
        choices=["collective", "odc"],
        default="odc",
        help="collective: FSDP2 as it is, all ranks meet at every layer of every microbatch. "
        "odc: each rank fetches parameters and pushes gradients by itself, ranks meet once per step",
    )
    how.add_argument(
        "--policy",
        choices=["none", "lb-micro", "lb-mini"],
        default="lb-mini",
        help="none: rollouts stay where they were generated, one a microbatch. lb-micro: as many rollouts and "
        "microbatches on every rank, of equal cost. lb-mini: equal cost on every rank, each packs for itself, so "
        "numbers of microbatches differ; needs --comm odc",
    )
    data = parser.add_argument_group("rollouts")
    data.add_argument("--minibatches", type=int, default=12, help="optimizer steps to run")
    data.add_argument("--prompts", type=int, default=3, help="prompts per rank and step")
    data.add_argument("--group-size", type=int, default=4, help="completions of a prompt")
    data.add_argument("--max-completion", type=int, default=252, help="most tokens of a completion")
    data.add_argument("--max-tokens", type=int, default=256, help="most tokens in a microbatch")
    model = parser.add_argument_group("model and optimizer")
    model.add_argument("--hidden-size", type=int, default=256, help="a multiple of 64")
    model.add_argument("--num-layers", type=int, default=4, help="decoder layers")
    model.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    model.add_argument("--seed", type=int, default=0, help="of the weights and of the rollouts")
    add_output(parser, "runs/grpo", "rollouts.json")
    args = parser.parse_args(words)
    _check(parser, args)
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    check_model(parser, args)
    if args.max_tokens < PROMPT + args.max_completion:
        parser.error(f"--max-tokens {args.max_tokens}: expected at least {PROMPT} more than --max-completion")
    if args.group_size < 2:
        parser.error(f"--group-size {args.group_size}: expected at least 2, whose rewards are compared")
    local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if 0 < num_gpus <= local_rank:
        parser.error(
            f"rank {local_rank} of this host, which has {num_gpus} GPUs: start as many ranks, or hide the GPUs by "
            "CUDA_VISIBLE_DEVICES="
        )
    check_run(parser, args)


if __name__ == "__main__":
    main()
