"""The training script, as a user would write it. The two runs of a cell differ in one line of it: ``patch_fsdp``."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import odc
from odc.bench.proof.conformance.cells import Cell
from odc.bench.proof.sharding import by_unit, clip, full_parameters, synchronized, wrap_of
from odc.timeline import Stats

STEPS = 10
NUM_BLOCKS = 2
WIDTH = 13  # odd sizes: no shard is without padding
VOCABULARY = 17
LARGEST_NORM = 0.1  # below the gradients' norm in every step, so that clipping always clips
# About the size of the gradients. With torch's 1e-8 Adam makes a whole step of any gradient, also of one that is mere
# rounding (plain FSDP2 in bf16 then differs by 7 % between reduction in bf16 and in fp32), and hides a wrong factor.
EPSILON = 1e-3


class Block(nn.Module):
    """Attention with one head and an MLP. No bias in front of a softmax: its gradient is nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.query_key_value(self.attention_norm(x)).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: torch.Tensor = x + self.down(torch.tanh(self.up(self.mlp_norm(x))))
        return y


class Net(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


@dataclass
class Run:
    """What one training leaves behind on one rank."""

    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    stats: Stats | None = None


def train(cell: Cell, mesh: DeviceMesh, *, patch: bool) -> Run:
    """Train a new model the way of ``cell``. Collective.

    Args:
        mesh: of one dimension; for a hybrid cell of two, replicas first.
        patch: communicate on demand instead of by FSDP's collectives.

    Returns:
        The mean loss of every step over all ranks; the norm of every step's gradients where the cell clips; this
        rank's part of the gradients that the first ``optimizer.step`` sees; the full parameters at the end.

    Raises:
        UnsupportedError: the cell is refused, on all ranks.
    """
    model = sharded_model(cell, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, eps=EPSILON)
    session = odc.patch_fsdp(model) if patch else None
    run = Run()
    for step in range(STEPS):
        run.losses.append(_accumulate(cell, model, step))
        if cell.clipping == "clip":
            run.norms.append(clip(model, LARGEST_NORM))
        elif session is not None and step == 0:
            session.finish()  # only because the gradients are looked at; the step would do it
        if step == 0:
            run.gradients = _local_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    if session is not None:
        run.stats = session.stats()
        session.close()
    run.parameters = full_parameters(model)
    return run


def sharded_model(cell: Cell, mesh: DeviceMesh) -> nn.Module:
    """The same weights for every cell and on every rank, one unit per block and one for the rest."""
    dtypes = (torch.bfloat16, torch.bfloat16) if cell.precision == "bf16" else None
    return by_unit(_trained_model(), wrap_of(cell.fsdp, mesh, reshard=cell.sharding != "grad-op", dtypes=dtypes))


def _trained_model() -> Net:
    """Weights as if trained before: no tensor is constant, in particular not zero."""
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _accumulate(cell: Cell, model: nn.Module, step: int) -> torch.Tensor:
    """Forward and backward of all microbatches of one step; the mean loss over microbatches and ranks."""
    total = torch.zeros(())
    for microbatch in range(cell.num_microbatches):
        tokens = _tokens(step, microbatch)
        with synchronized(model, microbatch >= cell.num_unsynchronized):
            logits = model(tokens[:, :-1]).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / cell.num_microbatches
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _tokens(step: int, microbatch: int) -> torch.Tensor:
    """Every rank has its own."""
    generator = torch.Generator().manual_seed(10007 * step + 101 * dist.get_rank() + microbatch)
    return torch.randint(0, VOCABULARY, (2, 6 + microbatch), generator=generator)


def _local_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of this rank's part of every ``.grad``; a parameter that has none is left out."""
    gradients = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None and parameter.numel():
            gradients[name] = (grad.to_local() if isinstance(grad, DTensor) else grad).clone()
    return gradients
