"""A plain FSDP script for the tests of ``odc run``: it knows nothing of ODC, but in the modes "by-itself".

Arguments: kinds ("2", "1", "1o": FSDP2, FSDP1, FSDP1 with use_orig_params; separated by commas) and a mode.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.utils import clip_grad_norm_

import odc

STEPS = 3
MICROBATCHES = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(11, 22)
        self.down = nn.Linear(22, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(11, 5))
    if kind == "2":
        for block in model[:2]:
            fully_shard(block)
        return fully_shard(model)
    options = {"device_id": torch.device("cpu"), "use_orig_params": kind == "1o"}
    return FullyShardedDataParallel(
        nn.Sequential(*[FullyShardedDataParallel(layer, **options) for layer in model]), **options
    )


def build_parts() -> nn.Module:
    """Two models in one module, whose own forward nobody calls."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def data(step: int, rank: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 100 + rank * 10 + microbatch)
    return torch.randn(3 + microbatch, 11, generator=generator)


def without_sync(model: nn.Module, kind: str, wanted: bool):  # type: ignore[no-untyped-def]
    if kind == "2":
        model.set_requires_gradient_sync(not wanted)
        return nullcontext()
    return model.no_sync() if wanted else nullcontext()


def train(kind: str, mode: str) -> None:
    rank = dist.get_rank()
    model = build_parts() if mode == "parts" else build(kind)
    if mode.startswith("by-itself"):
        odc.patch_fsdp(model, deterministic=True)
    reference = build(kind).requires_grad_(False) if mode.startswith("reference") and kind == "2" else None
    parameters = list(model.parameters())
    if mode == "optimizers":
        optimizers = [torch.optim.AdamW(parameters[:2], lr=1e-2), torch.optim.SGD(parameters[2:], lr=1e-2)]
    elif mode == "lbfgs":
        optimizers = [torch.optim.LBFGS(parameters)]
    else:
        optimizers = [torch.optim.AdamW(parameters, lr=1e-2)]
    schedulers = [torch.optim.lr_scheduler.LinearLR(optimizer, 0.5) for optimizer in optimizers]
    if mode == "hook":
        model.set_all_reduce_hook(lambda gradient: None)
    total = 0.0

    def microbatches(step: int) -> float:
        loss_sum = 0.0
        idle = step == 0 and rank == 1
        if idle and mode.endswith("none-first"):
            return 0.0  # only one synchronization per minibatch lets a rank do nothing
        for m in range(MICROBATCHES):
            with without_sync(model, kind, mode == "accumulate" and m < MICROBATCHES - 1):
                x = data(step, rank, m)
                target = reference(x).detach() * 0.5 if reference is not None else 0.0
                output = model[1](model[0](x)) if mode == "parts" else model(x)
                loss = (output - target).pow(2).mean() / MICROBATCHES
                (loss * 0.0 if idle and mode.endswith("zero-first") else loss).backward()
                loss_sum += 0.0 if idle else float(loss)
        return loss_sum

    def closure(step: int) -> float:
        optimizers[0].zero_grad()
        return microbatches(step)

    def update() -> None:
        if not mode.startswith("reference"):
            _ = clip_grad_norm_(parameters, 0.5) if kind == "2" else model.clip_grad_norm_(0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    if mode == "compiled":
        update = torch.compile(update, backend="eager")
    for step in range(STEPS):
        if mode in ("closure", "lbfgs"):
            total = optimizers[0].step(lambda now=step: closure(now))
        else:
            total = microbatches(step)
            if mode == "misuse" and rank == 1:
                parameters[0].grad = None
            update()
        for scheduler in schedulers:
            scheduler.step()
        mean = torch.tensor([total])
        dist.all_reduce(mean)
        if rank == 0:
            print(kind, mode, step, f"{mean.item() / dist.get_world_size():.6f}")
        if mode == "raise" and rank == 1 and step == 1:
            raise ValueError("rank 1 has had enough")
    with torch.no_grad():
        output = (model[1](model[0](data(99, 0, 0))) if mode == "parts" else model(data(99, 0, 0))).sum()
    if rank == 0:
        print(kind, mode, "trained to", f"{output.item():.5f}")
    if mode == "exit":
        dist.barrier()  # a rank that exits while another one still trains is an error there
        sys.exit(3)
    if mode == "exit-0":
        sys.exit(0)


def main() -> None:
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo")
    for kind in sys.argv[1].split(","):
        train(kind, sys.argv[2])
    if ours:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
