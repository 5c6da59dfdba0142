"""Check ``sft``: fine-tuning under ODC has the losses of one process that trains alone.

A small language model, FSDP2 and FSDP1, fp32 and bf16 mixed precision. In every step the ranks have one to three
microbatches each, and one of them has none. The reference trains in float64, without FSDP and without ODC, on the same
microbatches.
"""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from torch import nn

import odc
from odc.bench.gpu.models import FSDPS, PRECISIONS, VOCABULARY, language_model, logits_of, shard
from odc.bench.gpu.setting import Report, Setting, require, run_ranks
from odc.bench.harness.ranks import Rank

STEPS, QUICK_STEPS = 8, 3
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2}
_TIMEOUT_S = 60.0


def check(setting: Setting) -> Report:
    steps = QUICK_STEPS if setting.quick else STEPS
    errors: dict[str, float] = {}
    for world_size in setting.worlds:
        wanted, cells = run_ranks(setting, world_size, train_all, steps)[0]
        for name, losses in cells.items():
            key = f"{name}, {world_size} ranks"
            errors[key] = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
            limit = TOLERANCES[name.split()[1]]
            require(errors[key] <= limit, f"{key}: losses {losses}, reference {wanted}: off by {errors[key]:.1e}")
    worst = {p: max(error for key, error in errors.items() if f" {p}," in key) for p in PRECISIONS}
    text = f"largest relative error of a loss {worst['fp32']:.0e} in fp32, {worst['bf16']:.0e} in bf16"
    return Report(text, {"steps": steps, "errors": errors})


def counts_of(step: int, world_size: int) -> list[int]:
    """Microbatches per rank: 1 to 3, and none on one rank, which changes from step to step."""
    generator = random.Random(step)
    return [0 if rank == (step + 1) % world_size else generator.randint(1, 3) for rank in range(world_size)]


def _tokens(step: int, rank: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10007 * step + 101 * rank + microbatch)
    return torch.randint(0, VOCABULARY, (2, 7 + 3 * microbatch), generator=generator)


def _num_tokens(step: int, world_size: int) -> int:
    counts = counts_of(step, world_size)
    return sum(_tokens(step, r, m)[:, 1:].numel() for r in range(world_size) for m in range(counts[r]))


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Sum over tokens."""
    logits = logits_of(model, tokens[:, :-1])
    wide = logits.float() if logits.dtype == torch.bfloat16 else logits
    return nn.functional.cross_entropy(wide.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, eps=1e-3)


def train_all(rank: Rank, steps: int) -> tuple[list[float], dict[str, list[float]]]:
    """Losses of the reference (rank 0 only), and of each way to shard."""
    wanted = _train_alone(rank, steps) if rank.rank == 0 else []
    rank.meet()
    cells = {}
    for fsdp in FSDPS:
        for precision in PRECISIONS:
            cells[f"{fsdp} {precision}"] = _train(rank, fsdp, precision, steps)
            rank.meet()
    return wanted, cells


def _train_alone(rank: Rank, steps: int) -> list[float]:
    model = language_model().to(rank.device, torch.float64)
    optimizer, losses = _optimizer(model), []
    for step in range(steps):
        total, num_tokens = torch.zeros((), dtype=torch.float64), _num_tokens(step, rank.world_size)
        for client, count in enumerate(counts_of(step, rank.world_size)):
            for microbatch in range(count):
                loss = _loss(model, _tokens(step, client, microbatch).to(rank.device))
                (loss / num_tokens).backward()  # type: ignore[no-untyped-call]
                total += loss.detach().cpu()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total) / num_tokens)
    return losses


def _train(rank: Rank, fsdp: str, precision: str, steps: int) -> list[float]:
    """The loss of every step over all ranks."""
    model = shard(language_model(), fsdp, precision, rank.device, rank.world_size)
    optimizer, losses = _optimizer(model), []
    with odc.patch_fsdp(model, transport=rank.place.transport, timeout_s=_TIMEOUT_S):
        for step in range(steps):
            total, num_tokens = torch.zeros((), dtype=torch.float64), _num_tokens(step, rank.world_size)
            own: list[torch.Tensor] = []
            for microbatch in range(counts_of(step, rank.world_size)[rank.rank]):
                loss = _loss(model, _tokens(step, rank.rank, microbatch).to(rank.device))
                (loss * (rank.world_size / num_tokens)).backward()  # type: ignore[no-untyped-call]
                own.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            total += sum(float(loss) for loss in own)
            dist.all_reduce(total)
            losses.append(float(total) / num_tokens)
    return losses
