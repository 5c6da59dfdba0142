"""The training loop that checks share, and the same in one process.

In every step the ranks have one to three microbatches each, and one of them has none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

import odc
from odc.bench.gpu.models import VOCABULARY, logits_of
from odc.bench.harness.ranks import Rank

TIMEOUT_S = 60.0
End = Callable[[nn.Module, torch.optim.Optimizer], object]
"""What ends a step of the loop."""


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As most scripts end it."""
    optimizer.step()
    optimizer.zero_grad()


def counts_of(step: int, world_size: int) -> list[int]:
    """Microbatches per rank: 1 to 3, and none on one rank, which changes from step to step."""
    generator = random.Random(step)
    return [0 if rank == (step + 1) % world_size else generator.randint(1, 3) for rank in range(world_size)]


def tokens_of(step: int, rank: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10007 * step + 101 * rank + microbatch)
    return torch.randint(0, VOCABULARY, (2, 7 + 3 * microbatch), generator=generator)


def num_tokens(step: int, world_size: int) -> int:
    counts = counts_of(step, world_size)
    return sum(tokens_of(step, r, m)[:, 1:].numel() for r in range(world_size) for m in range(counts[r]))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Sum over tokens."""
    logits = logits_of(model, tokens[:, :-1])
    wide = logits.float() if logits.dtype == torch.bfloat16 else logits
    return nn.functional.cross_entropy(wide.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, eps=1e-3)


def microbatches_of_all(world_size: int, steps: int) -> Iterator[tuple[list[torch.Tensor], int]]:
    """Those of all ranks in each step, and by how much their losses are to be divided."""
    for number in range(steps):
        counts = enumerate(counts_of(number, world_size))
        yield (
            [tokens_of(number, client, m) for client, count in counts for m in range(count)],
            num_tokens(number, world_size),
        )


def train_alone(
    model: nn.Module, minibatches: Iterable[tuple[Sequence[torch.Tensor], int]], end: End = step
) -> list[float]:
    """The loss of every step of one process in float64, without FSDP and without ODC."""
    model = model.double()
    device = next(model.parameters()).device
    optimizer, losses = optimizer_of(model), []
    for microbatches, count in minibatches:
        total = torch.zeros((), dtype=torch.float64)
        for tokens in microbatches:
            loss = loss_of(model, tokens.to(device))
            (loss / count).backward()  # type: ignore[no-untyped-call]
            total += loss.detach().cpu()
        end(model, optimizer)
        losses.append(float(total) / count)
    return losses


def train(rank: Rank, model: nn.Module, steps: int, end: End = step) -> list[float]:
    """The loss of every step over all ranks, under ODC. Collective."""
    optimizer, losses = optimizer_of(model), []
    with odc.patch_fsdp(model, transport=rank.place.transport, timeout_s=TIMEOUT_S):
        for number in range(steps):
            total, count = torch.zeros((), dtype=torch.float64), num_tokens(number, rank.world_size)
            own: list[torch.Tensor] = []
            for microbatch in range(counts_of(number, rank.world_size)[rank.rank]):
                loss = loss_of(model, tokens_of(number, rank.rank, microbatch).to(rank.device))
                (loss * (rank.world_size / count)).backward()  # type: ignore[no-untyped-call]
                own.append(loss.detach())
            end(model, optimizer)
            total += sum(float(loss) for loss in own)
            dist.all_reduce(total)
            losses.append(float(total) / count)
    return losses
