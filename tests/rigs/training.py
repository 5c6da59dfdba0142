"""Small models and training loops that the process tests share, and their single-process float64 reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import pytest
import torch
from on_device import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import odc
from odc.fsdp_patch import fsdp2_in_place
from odc.fsdp_patch.pending import settled

WIDTH = 13  # odd: shards are uneven and padded on 2 and on 4 ranks
STEPS = 20
# [fp32 against fp32 with sums in another order] after so many Adam steps of several microbatches
TOLERANCE = 1e-5


class Block(nn.Module):
    """A residual block with a norm, so that a unit has parameters of several shapes."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def alone(self, x: torch.Tensor) -> torch.Tensor:
        """The forward by another name, for scripts that make a method one."""
        return self.forward(x)


class Net(nn.Module):
    """Embedding, blocks, head: the shape of a language model."""

    def __init__(self, num_blocks: int = 2, width: int = WIDTH, vocabulary: int = 17) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, vocabulary)

    def forward(
        self, tokens: torch.Tensor, skip: Sequence[int] = (), order: Sequence[int] | None = None
    ) -> torch.Tensor:
        x = self.embed(tokens)
        for index in range(len(self.blocks)) if order is None else order:
            if index not in skip:
                x = self.blocks[index](x)
        return self.head(x)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """The forward by another name, for scripts that make a method one."""
        return self.forward(tokens)


def build(dtype: torch.dtype = torch.float32, **options: Any) -> Net:
    """The same weights in every process, whatever the dtype."""
    torch.manual_seed(0)
    return Net(**options).to(dtype)


def shard(model: Net, world_size: int, **options: Any) -> Net:
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def wrap(model: nn.Module, **options: Any) -> FullyShardedDataParallel:
    """The same units as :func:`shard`, by FSDP1."""
    chosen = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "device_id": DEVICE, **options}
    return FullyShardedDataParallel(model, **chosen)


def sharded_by(kind: str, model: Net, world_size: int, **of_fsdp1: Any) -> Any:
    """By FSDP2 ("fsdp2"), or by FSDP1 with parameters as they are ("fsdp1", "fsdp1-orig") or flat ("fsdp1-flat")."""
    if kind == "fsdp2":
        return shard(model, world_size)
    return wrap(model, use_orig_params=kind != "fsdp1-flat", **of_fsdp1)


WAYS = ("in place", "small", "staged")
BOTH = ("small", "staged")
"""The default, for parameters of these sizes, and the other one."""
Result = TypeVar("Result")


@contextlib.contextmanager
def communicating(way: str) -> Iterator[None]:
    """Sessions that are opened inside: without staging, each parameter by itself or all that are small together, as
    these here are; or through FSDP2's flat buffers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ODC_STAGING", "on" if way == "staged" else "auto")
        patch.setattr(fsdp2_in_place, "SMALL_NUMEL", 0 if way == "in place" else 4096)
        yield


def each_way(ways: Sequence[str], run: Callable[..., Result], *arguments: Any) -> list[Result]:
    """What ``run`` returns under each of the ways of :func:`communicating`."""
    found = []
    for way in ways:
        with communicating(way):
            found.append(run(*arguments))
    return found


def gradient_now(parameter: torch.Tensor) -> torch.Tensor | None:
    """What there is of ``.grad``, without waiting for the end of the minibatch as who uses it does."""
    return settled(parameter.grad)


def read_at_once(flag: torch.Tensor) -> Callable[[], bool]:
    """A verdict of :class:`odc.fsdp_patch.guard.DeviceComparison` that the host waits for."""
    found = bool(flag)
    return lambda: found


def tokens(step: int, rank: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 10007 + rank * 101 + microbatch)
    return torch.randint(0, 17, (2, 5 + microbatch), generator=generator)


def loss_of(model: nn.Module, data: torch.Tensor, **options: Any) -> torch.Tensor:
    """Sum of token losses (not the mean: the weight of a microbatch must not depend on the packing)."""
    logits = model(data[:, :-1], **options)
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float() if logits.dtype == torch.bfloat16 else logits.flatten(0, 1),
        data[:, 1:].flatten(),
        reduction="sum",
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # Fused: one operation for all parameters. DTensor works out the sharding of each anew in each process.
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01, fused=True)


def start(world_size: int, **options: Any) -> tuple[Any, odc.Session, torch.optim.Optimizer]:
    """What many scripts begin with: a model, its session and its optimizer."""
    model = shard(build(**options), world_size)
    return model, odc.patch_fsdp(model), optimizer_of(model)


def clip(model: Any, max_norm: float = 0.5) -> torch.Tensor:
    """As either FSDP wants it; the norm."""
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(max_norm)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def use_up(optimizer: torch.optim.Optimizer, model: nn.Module | None = None) -> None:
    """As most loops do; the gradients of ``model`` are clipped first, by torch's function."""
    if model is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def evaluated(model: nn.Module, rank: int = 0, *, reshards: bool = False) -> torch.Tensor:
    """The loss of data that nobody trains on, in a forward without a graph; ``reshards`` the root behind it."""
    loss = loss_of(model, tokens(99, rank, 0))
    if reshards:
        reshard(model)
    return loss


def reshard(model: Any) -> None:
    """FSDP leaves a root gathered behind a forward without a graph, and would go on with what it was."""
    if not isinstance(model, FullyShardedDataParallel):
        model.reshard()
    elif model._handle is not None:
        model._handle.reshard(True)


@torch.no_grad()
def multiply(model: nn.Module, factor: float) -> None:
    """All parameters, by hand."""
    for parameter in model.parameters():
        parameter.mul_(factor)


def train(
    model: nn.Module,
    session: odc.Session | None,
    rank: int,
    world_size: int,
    counts: Sequence[int],
    steps: int = STEPS,
    microbatch_options: Callable[[int, int, int], dict[str, Any]] = lambda step, rank, m: {},
    *,
    clips: bool = True,
) -> None:
    """``counts[rank]`` microbatches per step; Adam, clipping; the loss is the mean over all tokens of the step. Without
    a session, a model that is patched has its minibatches ended by clipping, or by the step."""
    optimizer = optimizer_of(model)
    for step in range(steps):
        scale = world_size / num_tokens(step, counts)
        with session.minibatch() if session else nullcontext():
            for m in range(counts[rank]):
                options = microbatch_options(step, rank, m)
                (loss_of(model, tokens(step, rank, m), **options) * scale).backward()
        if clips:
            clip(model)
        use_up(optimizer)


def num_tokens(step: int, counts: Sequence[int]) -> int:
    return sum(tokens(step, r, m)[:, 1:].numel() for r, count in enumerate(counts) for m in range(count))


def reference(
    counts: Sequence[int],
    steps: int = STEPS,
    microbatch_options: Callable[[int, int, int], dict[str, Any]] = lambda step, rank, m: {},
    *,
    clips: bool = True,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """The same training in one process in float64, without FSDP and without ODC."""
    model = build(torch.float64, **options)
    optimizer = optimizer_of(model)
    for step in range(steps):
        scale = 1.0 / num_tokens(step, counts)
        for rank, count in enumerate(counts):
            for m in range(count):
                (loss_of(model, tokens(step, rank, m), **microbatch_options(step, rank, m)) * scale).backward()
        use_up(optimizer, model if clips else None)
    return dict(model.state_dict())


def full_parameters(model: nn.Module) -> dict[str, Any]:
    """Unsharded parameters as numpy arrays, under either FSDP. Collective."""
    if isinstance(model, FullyShardedDataParallel):
        return full_parameters_of_fsdp1(model)
    return {name: p.full_tensor().detach().numpy() for name, p in model.named_parameters()}  # type: ignore[attr-defined]


def full_parameters_of_fsdp1(model: nn.Module) -> dict[str, Any]:
    """As :func:`full_parameters`, of a model that has such of FSDP1 in it. Collective."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {
            name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", ""): (
                p.detach().float() if p.dtype == torch.bfloat16 else p.detach().clone()
            ).numpy()
            for name, p in model.named_parameters()
        }


def largest_difference(left: dict[str, Any], right: dict[str, Any]) -> float:
    """Largest difference of a parameter relative to the largest value of its tensor."""
    assert set(left) == set(right)
    worst = 0.0
    for name in left:
        a = torch.as_tensor(left[name], dtype=torch.float64)
        b = torch.as_tensor(right[name], dtype=torch.float64)
        difference = float((a - b).abs().max())
        if difference != 0.0:  # NaN is the largest of all
            relative = difference / float(b.abs().max() or 1e-30)
            worst = worst if relative <= worst else relative
    return worst


def mixed_modules(step: int, rank: int, microbatch: int) -> dict[str, Any]:
    """Fault test 16: other modules per rank and microbatch: an unused block, the opposite order, a skipped sample."""
    if rank == 0 and microbatch == 0:
        return {"skip": [1]}
    if rank == 1:
        return {"order": [1, 0]}
    if rank == 2:
        return {"order": [0, 0]}  # one unit used twice, one never
    return {}
