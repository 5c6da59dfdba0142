"""A Lightning script for the tests of ``odc run``: it knows nothing of ODC, but for the loader of ``balanced``.

Arguments: a strategy ("fsdp1": FSDPStrategy, "fsdp2": ModelParallelStrategy, "tp": the same with tensor parallelism), a
mode, a folder. Modes:

accumulate: automatic optimization with microbatches, clipping and evaluations; then a resume from step 2.
balanced: manual optimization over minibatches of ``odc.balance``; a further argument is the policy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset

from odc.balance import Minibatch, MinibatchLoader, MinibatchSampler, QuadraticCost

STEPS = 4
MICROBATCHES = 3


class OnCpu(FSDPStrategy):
    """Lightning refuses FSDPStrategy itself without GPUs, and FSDP1 has to be told of CPUs. The rest is Lightning's."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        device = torch.device("cpu")
        return FullyShardedDataParallel(
            model, sharding_strategy=self.sharding_strategy, device_id=device, **self.kwargs
        )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(11, 24)
        self.down = nn.Linear(24, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Rows(Dataset[torch.Tensor]):
    """Batches of different sizes would be weighed differently: all have as many rows."""

    def __init__(self, count: int, seed: int) -> None:
        self.rows = torch.randn(count, 11, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Script(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.losses: list[float] = []
        self.evaluations: list[float] = []
        torch.manual_seed(0)
        self.model = nn.Sequential(Block(), Block(), nn.Linear(11, 8))

    def configure_model(self) -> None:
        if self.kind != "fsdp1" and not isinstance(next(self.parameters()), torch.distributed.tensor.DTensor):
            mesh = self.device_mesh["data_parallel"]
            if self.kind == "tp":
                tensors = self.device_mesh["tensor_parallel"]
                for block in self.model[:2]:
                    parallelize_module(block, tensors, {"up": ColwiseParallel(), "down": RowwiseParallel()})
                parallelize_module(self.model, tensors, {"2": ColwiseParallel(output_layouts=Replicate())})
            for block in self.model[:2]:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, 0.5)}

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss = self.model(batch).pow(2).mean()
        self.losses.append(mean_of_ranks(loss))
        return loss

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        self.evaluations.append(mean_of_ranks(self.model(batch).pow(2).mean()))


class Balanced(Script):
    """Steps by hand. A batch is a minibatch of ``odc.balance``, whose ranks have different numbers of microbatches."""

    def __init__(self, kind: str, policy: str) -> None:
        super().__init__(kind)
        self.automatic_optimization = False
        self.policy = policy
        self.num_microbatches: list[int] = []

    def train_dataloader(self) -> MinibatchLoader[torch.Tensor, torch.Tensor]:
        lengths = [1 + (7 * number) % 23 for number in range(16 * STEPS)]
        samples = Rows(sum(lengths), 3).rows.split(lengths)
        mesh = self.device_mesh["data_parallel"]
        sampler = MinibatchSampler(
            lengths,
            world_size=mesh.size(),
            minibatch_size=8,
            max_tokens=32,
            policy=self.policy,
            cost=QuadraticCost(1.0, 0.1),
        )
        return MinibatchLoader(samples, sampler, torch.cat, mesh=mesh, num_loss_tokens=lengths)

    def training_step(self, batch: Minibatch[torch.Tensor], number: int) -> None:
        total = torch.zeros(())
        for microbatch in batch.microbatches:
            loss = self.model(microbatch).pow(2).sum()
            self.manual_backward(loss * batch.loss_scale)
            total += loss.detach() * batch.loss_scale
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        self.losses.append(mean_of_ranks(total))
        self.num_microbatches.append(len(batch.microbatches))


def mean_of_ranks(loss: torch.Tensor) -> float:
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def trainer_of(kind: str, folder: Path, **options: Any) -> pl.Trainer:
    if kind == "fsdp1":  # a whole state dict on CPU ranks ends torch's own FSDP1 with a segmentation fault
        strategy: Any = OnCpu(auto_wrap_policy={Block}, state_dict_type="sharded")
    else:
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2 if kind == "tp" else 1)
    shown = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"max_steps": STEPS, "default_root_dir": folder, **shown, **options}
    return pl.Trainer(accelerator="cpu", devices=4 if kind == "tp" else 2, strategy=strategy, **options)


def accumulate(kind: str, folder: Path) -> dict[str, Any]:
    """11 batches of a rank are three steps of three, and one of two. A resume takes the data from its beginning."""
    results: dict[str, Any] = {}
    checkpoints = folder / "checkpoints"
    for name, where in (("whole", None), ("resumed", checkpoints / "step=2.ckpt")):
        model = Script(kind)
        trainer = trainer_of(
            kind,
            folder,
            accumulate_grad_batches=MICROBATCHES,
            gradient_clip_val=0.02 if kind == "fsdp1" else 0.5,
            gradient_clip_algorithm="value" if kind == "fsdp1" else "norm",  # Lightning has no other with FSDP1
            val_check_interval=6,
            callbacks=[ModelCheckpoint(checkpoints, "{step}", every_n_train_steps=2, save_top_k=-1)],
        )
        training, evaluation = DataLoader(Rows(88, 1), 4), DataLoader(Rows(16, 2), 4)
        trainer.fit(model, training, evaluation, ckpt_path=where)
        results[name] = {"losses": model.losses, "evaluations": model.evaluations, "steps": trainer.global_step}
    return results


def balanced(kind: str, folder: Path, policy: str) -> dict[str, Any]:
    model = Balanced(kind, policy)
    trainer_of(kind, folder, use_distributed_sampler=False, enable_checkpointing=False).fit(model)
    return {"losses": model.losses, "microbatches": model.num_microbatches}


def main(kind: str, mode: str, folder: Path, *more: str) -> None:
    results = {"accumulate": accumulate, "balanced": balanced}[mode](kind, folder, *more)
    (folder / f"result-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
