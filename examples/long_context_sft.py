"""Supervised fine-tuning on long conversations: FSDP2, bfloat16, packing, LB-Mini, with ODC or without.

    odc doctor     # what this machine can do
    torchrun --nproc-per-node 8 examples/long_context_sft.py --weights models/qwen2.5-1.5b --data chats.jsonl
    torchrun --nproc-per-node 2 examples/long_context_sft.py --tiny   # two CPU cores, no file, no download

What ODC changes is the line with odc.patch_fsdp. With --no-odc the script trains on the same minibatches over FSDP2's
collectives, packed so that all ranks have as many microbatches (LB-Micro). What the options mean, how to size
--max-tokens and the forms of data: docs/long_context.md.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import time
from collections.abc import Callable, Generator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import chat_data
import packed_attention
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import init_empty_weights
from long_context_options import TINY_MODEL, parse_args
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from training_files import Checkpoints, RunLog
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import odc
from odc.balance import (
    ActivationMemory,
    EqualMinibatches,
    Grouping,
    Minibatch,
    MinibatchLoader,
    MinibatchSampler,
    Order,
    ReadOptions,
    ShardedState,
    StreamLoader,
    TransformerCost,
    count_loss_tokens,
    pack_collate,
    preset,
)

LOSS_CHUNK = 2048  # tokens whose logits are there at once: those of 32k tokens and 152k words would take 20 GB
PREPARATION_LIMIT = timedelta(hours=2)  # most time that rank 0 may tokenize
GIB = 2**30


def main() -> None:
    args = parse_args(__doc__)
    if "RANK" not in os.environ:
        raise SystemExit(
            "no ranks: start it with torchrun --nproc-per-node 2 examples/long_context_sft.py, then options"
        )
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS is used
        torch.use_deterministic_algorithms(True, warn_only=True)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl", timeout=PREPARATION_LIMIT)
    train(args, device)
    dist.destroy_process_group()
    time.sleep(0.2)  # for gloo's threads, which let go of their last results a moment later: see run_record.py


def train(
    args: argparse.Namespace, device: torch.device, on_step: Callable[[Mapping[str, float]], None] | None = None
) -> dict[str, Any]:
    """Train as the options say; returns what ``result.json`` has. The process group is there.

    Args:
        on_step: called on each rank after each step, with what ``steps.jsonl`` has of it.
    """
    config = AutoConfig.from_pretrained(args.weights) if args.weights else AutoConfig.for_model(**model_fields(args))
    loader, evaluation = build_loaders(args, config)
    model = build_model(args, config, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=device.type == "cuda"
    )
    scheduler = LambdaLR(optimizer, partial(learning_rate, warmup=args.warmup_steps, total=args.steps))
    checkpoints = Checkpoints(args.out, args.keep)

    step, epoch = 0, 0
    if path := checkpoint_to_resume(args, checkpoints):
        saved = checkpoints.load(path, model, optimizer)
        scheduler.load_state_dict(saved["scheduler"])
        loader.load_state_dict(saved["loader"])
        step, epoch = saved["step"], saved["loader"]["epoch"]

    session = (
        odc.patch_fsdp(model, deterministic=args.deterministic, share_in_host=args.share_in_host) if args.odc else None
    )

    log = RunLog(args.out, vars(args), step)
    log.say(f"resumed from {path}" if path else "starting at the beginning")
    log.say(f"ODC: {session.describe()}" if session else "collectives of FSDP2")
    log.say(say_memory(args, config, device))
    warm_up(model, args.max_tokens, config.vocab_size, device)
    start, num_tokens = time.perf_counter(), 0
    last = min(args.steps, args.stop_after or args.steps)
    minibatches = endless(loader, epoch)
    for minibatch in itertools.islice(minibatches, last - step):
        started = time.perf_counter()
        loss_sum = torch.zeros((), device=device)
        counts = torch.tensor([len(minibatch.microbatches), sum(map(num_tokens_of, minibatch.microbatches))])
        for index, microbatch in enumerate(minibatch.microbatches):
            if args.hybrid and not args.odc:  # ODC sums over hosts once a step by itself
                cast(FSDPModule, model).set_requires_all_reduce(index == len(minibatch.microbatches) - 1)
            loss = model(**on_device(microbatch, device))
            (loss * minibatch.loss_scale).backward()
            loss_sum += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss_sum)
        dist.all_reduce(counts)

        step += 1
        num_tokens += int(counts[1])
        row = {
            "step": step,
            "loss": loss_sum.item() / max(minibatch.num_loss_tokens, 1),
            "grad_norm": norm.full_tensor().item(),
            "lr": scheduler.get_last_lr()[0],
            "microbatches": int(counts[0]),
            "tokens": int(counts[1]),
            "seconds": time.perf_counter() - started,
        }
        scheduler.step()
        if evaluation and (step == last or (args.eval_every and step % args.eval_every == 0)):
            row["eval_loss"] = evaluate(model, evaluation, device)
        log.step(row, args.steps)
        if args.save_every and (step % args.save_every == 0 or step == last):
            own = {"scheduler": scheduler.state_dict(), "loader": loader.state_dict()}
            checkpoints.save(step, model, optimizer, own)
        if on_step:
            on_step(row)

    minibatches.close()
    loader.close()
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None
    seconds = time.perf_counter() - start
    own = session.memory().overhead / GIB if session else 0.0  # most of it beside what torch has allocated
    result = log.finish({"tokens_per_s": num_tokens / seconds, "seconds": seconds, "peak_gib": peak, "odc_gib": own})
    if session:
        session.close()
    return result


class LossModel(nn.Module):
    """A causal language model whose output is the summed loss: the logits are never there all at once."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, labels: torch.Tensor, predicting: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """0-d float32.

        Args:
            labels: (num_loss_tokens,), the tokens that have a loss.
            predicting: (num_loss_tokens,), the places in the row from which each is predicted.
            inputs: of the model, for one packed row.
        """
        hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state[0][predicting]
        loss = hidden.sum() * 0.0  # a dummy has a gradient as well, of zeros: collectives wait for it
        for part, expected in zip(hidden.split(LOSS_CHUNK), labels.split(LOSS_CHUNK), strict=True):
            loss = loss + checkpoint(self._loss_of, part, expected, use_reentrant=False)
        return loss

    def _loss_of(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model.lm_head(hidden).float(), labels, reduction="sum")


def on_device(microbatch: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, Any]:
    """The arguments of :class:`LossModel` for a packed row. ``cu_seqlens`` stay on the host, as a list, which FSDP does
    not move: they decide what is launched."""
    labels = microbatch["labels"][0, 1:]
    predicting = (labels != chat_data.IGNORED).nonzero()[:, 0]  # found here, where nothing waits for the device
    moved = {"input_ids": microbatch["input_ids"], "position_ids": microbatch["position_ids"]}
    moved |= {"labels": labels[predicting], "predicting": predicting}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in moved.items()} | {
        "cu_seqlens": microbatch["cu_seqlens"].tolist()
    }


def num_tokens_of(microbatch: Mapping[str, torch.Tensor]) -> int:
    """0 for a dummy, which has no loss."""
    return microbatch["input_ids"].numel() if bool((microbatch["labels"] != chat_data.IGNORED).any()) else 0


@torch.no_grad()
def evaluate(model: nn.Module, loader: MinibatchLoader[Any, Any], device: torch.device) -> float:
    """Mean loss of a token."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for minibatch in loader:
        for microbatch in minibatch.microbatches:
            inputs = on_device(microbatch, device)
            sums += torch.tensor([model(**inputs).item(), inputs["labels"].numel()])
    dist.all_reduce(sums)
    model.train()
    return float(sums[0] / sums[1])


def warm_up(model: nn.Module, num_tokens: int, vocab_size: int, device: torch.device) -> None:
    """Run the largest microbatch there can be, and throw its gradient away: if memory is short, it shows now."""
    tokens = torch.randint(vocab_size, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    whole = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(num_tokens)[None]}
    whole["cu_seqlens"] = torch.tensor([0, num_tokens], dtype=torch.int32)
    try:
        model(**on_device(whole, device)).backward()
    except torch.cuda.OutOfMemoryError as error:
        raise SystemExit(
            f"a microbatch of --max-tokens {num_tokens} does not fit: lower it, or add ranks. {error}"
        ) from None
    model.zero_grad()


def say_memory(args: argparse.Namespace, config: Any, device: torch.device) -> str:
    """What a rank is expected to need; ``odc plan`` says the same before there is a GPU."""
    size = 4 if compute_dtype(args, device) == torch.float32 else 2
    activations = ActivationMemory.from_config(
        config, dtype_bytes=size, recompute=args.checkpointing, logits="chunked", chunk_tokens=LOSS_CHUNK
    ).bytes(args.max_tokens)
    here, everywhere = ranks_per_host(), dist.get_world_size()
    over = here if args.hybrid else everywhere
    sharing = over if args.share_in_host == "off" else here
    found = ShardedState.from_config(config, over, param_bytes=size, num_sharing=sharing)
    state = found.bytes + (found.on_demand_bytes if args.odc else 0)
    there = f", of {torch.cuda.get_device_properties(device).total_memory / GIB:.1f}" if device.type == "cuda" else ""
    return (
        f"expected memory of a rank: {state / GIB:.2f} GiB of model and optimizer, {activations / GIB:.2f} GiB of "
        f"activations at {args.max_tokens} tokens{there}"
    )


def model_fields(args: argparse.Namespace) -> dict[str, Any]:
    fields = dict(TINY_MODEL if args.tiny else preset(args.model))
    return fields | {"max_position_embeddings": max(args.max_tokens, 32_768)}


def ranks_per_host() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def compute_dtype(args: argparse.Namespace, device: torch.device) -> torch.dtype:
    name = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def build_model(args: argparse.Namespace, config: Any, device: torch.device) -> LossModel:
    """Each decoder layer and the root sharded over all ranks, or those of a host. The weights come from rank 0, which
    alone has them whole.

    The optimizer keeps float32; layers compute in ``--dtype``, gradients are summed in float32.
    """
    config._attn_implementation = packed_attention.register(args.attention, compute_dtype(args, device))
    if dist.get_rank() == 0:
        torch.manual_seed(args.seed)
        made = (
            AutoModelForCausalLM.from_pretrained(args.weights, config=config, dtype=torch.float32)
            if args.weights
            else AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        )
        weights = {f"model.{name}": tensor for name, tensor in made.state_dict().items()}
    else:
        with init_empty_weights(include_buffers=False):
            made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for module in made.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty_like(parameter, device="cpu")))  # memory once it is used
        made.tie_weights()
        weights = {}
    if args.checkpointing:
        enable = getattr(made, "activation_checkpointing_enable", made.gradient_checkpointing_enable)  # its former name
        enable({"use_reentrant": False})
    model = LossModel(made.train())
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if args.hybrid:
        here = ranks_per_host()
        mesh = init_device_mesh(device.type, (dist.get_world_size() // here, here), mesh_dim_names=("hosts", "ranks"))
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype(args, device), reduce_dtype=torch.float32)
    for layer in made.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model


def build_loaders(
    args: argparse.Namespace, config: Any
) -> tuple[MinibatchLoader[Any, Any] | StreamLoader[Any, Any], MinibatchLoader[Any, Any] | None]:
    """For training and for evaluation. What has known lengths is tokenized by rank 0, into ``--out``."""
    tokenizer = open_tokenizer(args)
    if len(tokenizer) > config.vocab_size:
        raise SystemExit(f"the tokenizer has {len(tokenizer)} tokens, the model {config.vocab_size}: they do not fit")
    records = {"train": chat_data.tiny_records() if args.tiny else chat_data.open_records(args.data)}
    if args.tiny:
        records["eval"] = records["train"][:16]
        del records["train"][:16]
    elif args.eval_data:
        records["eval"] = chat_data.open_records(args.eval_data)
    if args.online:
        training: Any = stream(args, records.pop("train"), tokenizer, config)
    tokenized = {}
    for name, found in records.items():
        folder = args.out / "data" / name
        if dist.get_rank() == 0:
            source = source_of(args.data if name == "train" else args.eval_data)
            chat_data.prepare(folder, found, tokenizer, args.max_tokens, source)
        dist.barrier()
        tokenized[name] = chat_data.TokenizedDataset(folder)
    if not args.online:
        training = planned(args, tokenized["train"], config, policy=args.policy, minibatch_size=args.minibatch_size)
        if not len(training):
            raise SystemExit(
                f"{len(tokenized['train'])} samples of at most {args.max_tokens} tokens are less than one step of "
                f"{dist.get_world_size()} ranks with --minibatch-size {args.minibatch_size}"
            )
    evaluation = tokenized.get("eval")
    if evaluation is None:
        return training, None
    return training, planned(
        args, evaluation, config, policy="lb-micro", minibatch_size=4, shuffle=False, drop_last=False
    )


def planned(args: argparse.Namespace, dataset: chat_data.TokenizedDataset, config: Any, **options: Any) -> Any:
    sampler = MinibatchSampler(
        dataset.lengths,
        world_size=dist.get_world_size(),
        cost=TransformerCost.from_config(config),
        max_tokens=args.max_tokens,
        seed=args.seed,
        **options,
    )
    return MinibatchLoader(
        dataset,
        sampler,
        pack_collate,
        dist.get_rank(),
        num_loss_tokens=dataset.num_loss_tokens,
        read=ReadOptions(num_workers=args.workers, pin_memory=torch.cuda.is_available()),
    )


def stream(args: argparse.Namespace, records: Any, tokenizer: Any, config: Any) -> StreamLoader[Any, Any]:
    """Samples beyond ``--max-tokens`` are cut: how long one is, shows too late to leave it out."""
    return StreamLoader(
        records,
        pack_collate,
        dist.get_rank(),
        dist.get_world_size(),
        transform=partial(chat_data.encode, tokenizer=tokenizer, max_tokens=args.max_tokens),
        length=lambda sample: sample["input_ids"].size,
        num_loss_tokens=lambda sample: count_loss_tokens(sample["labels"]),
        grouping=Grouping("pack", args.max_tokens, args.pool_size),
        align=EqualMinibatches(args.minibatch_size, cost=TransformerCost.from_config(config)),
        order=Order(seed=args.seed),
        read=ReadOptions(num_workers=args.workers),
    )


def open_tokenizer(args: argparse.Namespace) -> Any:
    tokenizer = chat_data.ByteTokenizer() if args.tokenizer is None else AutoTokenizer.from_pretrained(args.tokenizer)
    if args.chat_template:
        tokenizer.chat_template = None if args.chat_template == "chatml" else Path(args.chat_template).read_text()
    return tokenizer


def source_of(paths: list[str] | None) -> str:
    """What the data is known by: a file that has changed is tokenized anew."""
    if paths is None:
        return "tiny"
    changed = [f"{path} {os.stat(path).st_size} {os.stat(path).st_mtime_ns}" for path in paths if os.path.exists(path)]
    return "; ".join(changed or paths)


def endless(loader: Any, epoch: int) -> Generator[Minibatch[Any], None, None]:
    """Epoch after epoch, each in its own order."""
    for number in itertools.count(epoch):
        loader.set_epoch(number)
        yield from loader


def learning_rate(step: int, warmup: int, total: int) -> float:
    """Part of the highest one: a line up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(total - warmup, 1)))


def checkpoint_to_resume(args: argparse.Namespace, checkpoints: Checkpoints) -> Path | None:
    if args.resume is None:
        return None
    return checkpoints.newest() if args.resume == "latest" else Path(args.resume)


if __name__ == "__main__":
    main()
