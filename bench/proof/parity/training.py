"""The generated script. :func:`train` marks what differs between plain FSDP and ODC."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import odc
from odc.bench.proof.parity.cases import Case
from odc.bench.proof.sharding import (
    LanguageModel,
    as_if_trained,
    by_unit,
    clip,
    full_parameters,
    local_gradients,
    synchronized,
    tokens_of,
    wrap_of,
)
from odc.timeline import Stats

STEPS = 4
VOCABULARY = 12
WIDTHS = {"even": 12, "odd": 13, "small": 3}
LARGEST_NORM = 0.05  # below every norm, so that clipping always clips
LARGEST_VALUE = 0.003
SCALE = 0.1
# About the size of the gradients. With torch's 1e-8 Adam makes a whole step of any gradient, also of mere rounding.
EPSILON = 1e-2
# Small: rounding in a gradient then seldom changes a parameter, hence no later gradient.
_LEARNING_RATE = 2e-3
_GRAD: Any = torch.Tensor.grad  # the attribute itself, past ODC's own door to it


class Block(nn.Module):
    """A residual block with parameters of several shapes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=0.1)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.gate = nn.Parameter(torch.ones(1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch: torch.Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + self.gate * branch


class Net(LanguageModel):
    """A language model of which a step uses some blocks."""

    def __init__(self, case: Case) -> None:
        width, vocabulary = WIDTHS[case.shapes], VOCABULARY + (case.shapes != "even")
        super().__init__(vocabulary, width, (Block(width) for _ in range(case.num_blocks)))
        self.repeats = 2 if case.twice == "twice" else 1
        if case.tie == "tied":
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, used: Sequence[int] = ()) -> torch.Tensor:
        return self.logits(tokens, (self.blocks[i] for i in used for _ in range(self.repeats if i == 0 else 1)))


def build(case: Case) -> Net:
    """The model with the same weights on every rank, as if it were trained before: no tensor is constant."""
    torch.manual_seed(0)
    model = Net(case)
    as_if_trained(model)
    if case.frozen == "unit":
        model.blocks[0].requires_grad_(False)
    elif case.frozen == "some":
        model.head.bias.requires_grad_(False)
        for block in model.blocks:
            block.get_parameter("norm.weight").requires_grad_(False)
    return model


def shard(case: Case, model: Net, mesh: DeviceMesh) -> nn.Module:
    """Shard the model: one unit per block and one for the rest."""
    reshard: bool | int = {"yes": True, "no": False, "int": 2}[case.reshard]
    reduced = {"bf16": torch.float32, "bf16-reduced": torch.bfloat16}.get(case.precision)
    dtypes = None if reduced is None else (torch.bfloat16, reduced)
    return by_unit(model, wrap_of(case.fsdp, mesh, reshard=reshard, dtypes=dtypes))


class OwnOptimizer(torch.optim.SGD):
    """An optimizer that clears gradients in its own way."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.zero_()


def optimizers_of(case: Case, parameters: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """The optimizers. Each parameter is in one of them, frozen ones too."""
    half = len(parameters) // 2
    if case.optimizer == "two" and half:
        return [_adamw(parameters[:half]), torch.optim.SGD(parameters[half:], lr=_LEARNING_RATE)]
    if case.optimizer == "sgd":
        return [torch.optim.SGD(parameters, lr=_LEARNING_RATE, momentum=0.9)]
    return [OwnOptimizer(parameters, lr=_LEARNING_RATE)] if case.optimizer == "own" else [_adamw(parameters)]


def _adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=_LEARNING_RATE, weight_decay=0.01, eps=EPSILON)


@dataclass
class Run:
    """The results of one training on one rank."""

    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    """Losses, evaluations, norms and sums over ranks, by kind and time."""
    gradients: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    """This rank's part of every ``.grad``, as each step has used it."""
    seen: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    """What the script itself has read of gradients, or has kept of them over the next step."""
    clipped_to: dict[int, float] = field(default_factory=dict)
    """The factor by which each step's gradients were scaled down."""
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    description: str = ""
    """The session's description of itself."""
    stats: Stats | None = None
    """The session's counters on this rank."""


def train(case: Case, mesh: DeviceMesh, *, patch: bool) -> Run:
    """Train a new model the way of ``case``. Collective.

    Args:
        mesh: of one dimension; for replicas of two, replicas first.
        patch: communicate on demand instead of by FSDP's collectives. Then a rank has as many microbatches as the case
            says. Plain FSDP needs equally many on every rank: the missing ones have a loss of zero.
    """
    rank, run = dist.get_rank(), Run()
    model = shard(case, build(case), mesh)
    named = dict(model.named_parameters())
    optimizers = optimizers_of(case, list(model.parameters()))
    options: dict[str, Any] = {"daemon": {"accumulate": "daemon"}, "deterministic": {"deterministic": True}}
    session = odc.patch_fsdp(model, **options.get(case.sums, {})) if patch else None
    run.description = session.describe() if session else ""
    kept: dict[str, torch.Tensor] = {}

    # FSDP2 leaves the root whole after an evaluation, and gradients out of reach of who clears model.parameters(). ODC
    # finds them, but for who sets None by hand; and were that one rank only, plain FSDP, where all evaluate, is no
    # measure. Where the script uses gradients by hand ODC finds these as well.
    is_out_of_reach = {
        "model": not patch,
        "hand": case.evaluated_by == "one" or (not patch and case.gradients in ("scaled", "logged")),
    }
    is_forgotten = case.fsdp == "fsdp2" and case.evaluation == "uncleared" and is_out_of_reach.get(case.clearing, False)
    # Plain FSDP1 computes with old parameters where an evaluation has left a unit whole and no backward came by before
    # the step: in SHARD_GRAD_OP it is not gathered again.
    is_stale = not patch and case.fsdp != "fsdp2" and case.reshard == "no" and case.unused == "odd-steps"

    def evaluate(when: str, is_padding: bool = False) -> None:
        if patch and case.evaluated_by == "one" and rank != 0:
            return
        with torch.no_grad():
            loss = _loss(case, model, 99, 0, 0)
        if is_forgotten:
            _reshard(case, model)
        if is_stale:
            _reshard_fsdp1(model)
        if (case.evaluated_by == "all" or rank == 0) and not is_padding:
            run.losses[f"evaluation {when}"] = loss

    if case.evaluation == "first":
        evaluate("first")
    for step in range(STEPS):
        own = case.num_microbatches(step, rank)
        most = max(case.num_microbatches(step, r) for r in range(case.world_size))
        total = torch.zeros(())
        if case.clearing == "start":
            _zero_grad(optimizers)
        with session.minibatch() if session and case.end == "block" else nullcontext():
            for microbatch in range(own if patch else most):
                if case.clearing == "loop" and microbatch == 0 and own:
                    _zero_grad(optimizers)
                if case.evaluation == "inside" and microbatch == (own if patch else most) - 1:
                    evaluate(f"inside step {step}", is_padding=not own)
                is_last = microbatch == (own if patch else most) - 1
                with synchronized(model, is_last) if case.sync == "last" else nullcontext():
                    loss = _loss(case, model, step, rank, microbatch)
                    (loss * (1.0 if microbatch < own else 0.0)).backward()  # type: ignore[no-untyped-call]
                if microbatch < own:
                    run.losses[f"loss {step}.{microbatch}"] = loss.detach()
                    total += loss.detach()
        if case.reduction == "before":
            dist.all_reduce(total)
            run.losses[f"sum {step}"] = total
        _use_gradients(case, model, run, step)
        for optimizer in optimizers:
            optimizer.step()
        grads = local_gradients((name, _GRAD.__get__(parameter)) for name, parameter in named.items())
        run.gradients.update({(step, name): grad for name, grad in grads.items()})
        run.seen.update({(step, f"kept {name}"): view.clone() for name, view in kept.items()})
        kept = _views(model) if case.gradients == "kept" else {}
        if case.gradients == "logged-after":
            run.seen.update({(step, name): view.clone() for name, view in _views(model).items()})
        if case.evaluation == "uncleared":
            evaluate(f"after step {step}")
        _clear(case, model, optimizers)
        if case.evaluation == "between":
            evaluate(f"after step {step}")
        if case.reduction == "after":
            dist.all_reduce(total)
            run.losses[f"sum {step}"] = total
    if session is not None:
        dist.barrier()  # close() does not wait for the others, and one may still be evaluating
        run.stats = session.stats()
        session.close()
    if case.fsdp == "fsdp2":
        _reshard(case, model)
    run.parameters = full_parameters(model)
    return run


def _loss(case: Case, model: nn.Module, step: int, rank: int, microbatch: int) -> torch.Tensor:
    """The mean loss of its tokens, which every rank, step and microbatch has its own of."""
    tokens = tokens_of(step, rank, microbatch, VOCABULARY, (2, 6 + microbatch))
    used = [block for block in range(case.num_blocks) if case.uses(block, step)]
    logits = model(tokens[:, :-1], used).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _use_gradients(case: Case, model: nn.Module, run: Run, step: int) -> None:
    """What the script does with gradients before the step."""
    run.clipped_to[step] = 1.0
    if case.gradients == "norm":
        run.losses[f"norm {step}"] = clip(model, LARGEST_NORM)
        run.clipped_to[step] = min(1.0, LARGEST_NORM / float(run.losses[f"norm {step}"]))
    elif case.gradients == "value":
        torch.nn.utils.clip_grad_value_(model.parameters(), LARGEST_VALUE)
    elif case.gradients == "scaled":
        run.clipped_to[step] = SCALE
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(SCALE)
    elif case.gradients == "logged":
        run.seen.update({(step, name): view.clone() for name, view in _views(model).items()})


def _views(model: nn.Module) -> dict[str, torch.Tensor]:
    """The first elements of this rank's part of every ``.grad``, read as a script reads them."""
    views = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            views[name] = (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[:4]
    return views


def _clear(case: Case, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """As the script does behind the step."""
    if case.clearing in ("none", "zeros"):
        _zero_grad(optimizers, set_to_none=case.clearing == "none")
    elif case.clearing == "model":
        model.zero_grad()
    elif case.clearing == "hand":
        for parameter in model.parameters():
            parameter.grad = None


def _zero_grad(optimizers: Sequence[torch.optim.Optimizer], set_to_none: bool = True) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=set_to_none)


def _reshard(case: Case, model: nn.Module) -> None:
    """An evaluation leaves units of FSDP2 whole: the root, and others by their reshard_after_forward."""
    used = case.num_blocks - (case.unused == "always")
    for unit in [model, *(model.get_submodule(f"blocks.{index}") for index in range(used))]:
        unit.reshard()  # type: ignore[operator]


def _reshard_fsdp1(model: nn.Module) -> None:
    for module in FullyShardedDataParallel.fsdp_modules(model):
        if module._handle is not None:
            module._handle.reshard(True)
            module._handle.post_reshard()  # type: ignore[no-untyped-call]


def largest_terms(case: Case) -> dict[str, float]:
    """The largest element of any microbatch's gradient of each parameter, at the weights that training begins with.

    It is what the error of a sum has to be small against: terms may cancel. Computed by this process alone.
    """
    model = build(case).double()
    largest = {name: 0.0 for name, _ in model.named_parameters()}
    for step in range(STEPS):
        for rank in range(case.world_size):
            for microbatch in range(case.num_microbatches(step, rank)):
                model.zero_grad()
                (_loss(case, model, step, rank, microbatch) / case.world_size).backward()  # type: ignore[no-untyped-call]
                for name, parameter in model.named_parameters():
                    if parameter.grad is not None:
                        largest[name] = max(largest[name], float(parameter.grad.abs().max()))
    return largest


# ODC takes a `.grad` that is read in a module of its own package for its own business, and this is somebody's script.
__name__ = "generated_script"
