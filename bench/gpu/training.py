"""Checks ``sft`` and ``forms``, and what checks of training share: small models, either FSDP, one loop."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils._pytree import tree_map_only

import odc
from odc.bench.communication.memory import Block
from odc.bench.gpu.setting import CheckFailedError, Report, Setting, require, run_ranks
from odc.bench.harness.ranks import Rank
from odc.bench.proof import sharding
from odc.bench.proof.sharding import LanguageModel, blocks_of, by_unit, wrap_of

VOCABULARY = 17
_WIDTH = 13  # odd: no shard is without padding
FSDPS = ("fsdp2", "fsdp1")


class Perceptron(nn.Module):
    """A model of linear layers only: no layer makes a host wait for its device."""

    def __init__(self, width: int = 128, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def language_model() -> nn.Module:
    """The same weights in every process: a tiny Qwen2 if transformers is installed, else a small transformer."""
    torch.manual_seed(0)
    if importlib.util.find_spec("transformers"):
        return _qwen2()
    return LanguageModel(VOCABULARY, _WIDTH, (Block(_WIDTH) for _ in range(2)))


def _qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=136,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model: nn.Module = Qwen2ForCausalLM(config)
    return model


def logits_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of either of the two models."""
    out = model(tokens)
    logits: torch.Tensor = getattr(out, "logits", out)
    return logits


def mesh_of(rank: Rank, *, is_replicated: bool = False) -> DeviceMesh:
    """A mesh of all ranks on their devices; see :func:`odc.bench.proof.sharding.mesh_of`. Collective."""
    return sharding.mesh_of(rank.world_size, is_replicated=is_replicated, device_type=rank.device.type)


def shard(
    model: nn.Module, rank: Rank, fsdp: str = "fsdp2", precision: str = "fp32", is_replicated: bool = False
) -> nn.Module:
    """The model on its rank's device, one unit per layer and one for the rest. Collective."""
    mesh = mesh_of(rank, is_replicated=is_replicated)
    dtypes = (torch.bfloat16, torch.float32) if precision == "bf16" else None
    kind = "fsdp1-orig" if fsdp == "fsdp1" else fsdp
    return by_unit(model.to(rank.device), wrap_of(kind, mesh, dtypes=dtypes, device=rank.device))


# One loop, and the same in one process. In every step the ranks have one to three microbatches, and one has none


TIMEOUT_S = 60.0
End = Callable[[nn.Module, torch.optim.Optimizer], object]
"""The end of a step of the loop."""


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """End a step as most scripts do."""
    optimizer.step()
    optimizer.zero_grad()


def counts_of(step: int, world_size: int) -> list[int]:
    """Microbatches of each rank: 1 to 3, and none on one rank, which changes from step to step."""
    generator = random.Random(step)
    return [0 if rank == (step + 1) % world_size else generator.randint(1, 3) for rank in range(world_size)]


def tokens_of(step: int, rank: int, microbatch: int) -> torch.Tensor:
    return sharding.tokens_of(step, rank, microbatch, VOCABULARY, (2, 7 + 3 * microbatch))


def num_tokens(step: int, world_size: int) -> int:
    counts = counts_of(step, world_size)
    return sum(tokens_of(step, r, m)[:, 1:].numel() for r in range(world_size) for m in range(counts[r]))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The loss, summed over tokens."""
    logits = logits_of(model, tokens[:, :-1])
    wide = logits.float() if logits.dtype == torch.bfloat16 else logits
    return nn.functional.cross_entropy(wide.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, eps=1e-3)


def microbatches_of_all(world_size: int, steps: int) -> Iterator[tuple[list[torch.Tensor], int]]:
    """For each step the microbatches of all ranks, and the number by which their losses are divided."""
    for number in range(steps):
        counts = enumerate(counts_of(number, world_size))
        yield (
            [tokens_of(number, client, m) for client, count in counts for m in range(count)],
            num_tokens(number, world_size),
        )


def train_alone(
    model: nn.Module, minibatches: Iterable[tuple[Sequence[torch.Tensor], int]], end: End = step
) -> list[float]:
    """Train in one process in float64, without FSDP and without ODC; return the loss of every step."""
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
    """Train under ODC; return the loss of every step over all ranks. Collective."""
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


FORM_STEPS, QUICK_FORM_STEPS = 6, 3
_FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FLOAT8).max
_aten = torch.ops.aten


def offloaded(model: nn.Module, rank: Rank) -> nn.Module:
    mesh, policy = mesh_of(rank), CPUOffloadPolicy(pin_memory=rank.device.type == "cuda")
    return by_unit(model.to(rank.device), lambda module: fully_shard(module, mesh=mesh, offload_policy=policy))


@torch.no_grad()
def step_and_change(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """End a step and change all parameters, half of them by an operation that torch counts, half past its counter."""
    step(model, optimizer)
    for number, parameter in enumerate(model.parameters()):
        (parameter.data if number % 2 else parameter).mul_(0.99)


def on_two_meshes(model: nn.Module, rank: Rank) -> nn.Module:
    """Shard the model over all ranks, but its first layer over replicas."""
    replicas, everyone = mesh_of(rank, is_replicated=True), mesh_of(rank)
    model = model.to(rank.device)
    for modules, index in list(blocks_of(model)):
        fully_shard(modules[index], mesh=everyone if index else replicas)
    fully_shard(model, mesh=everyone)
    return model


def _rounded(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight * scale).clamp(-_LARGEST, _LARGEST).to(_FLOAT8)


class Float8(torch.Tensor):
    """A weight that travels in float8 with one scale for the whole tensor, as torchao's does."""

    high: torch.Tensor

    @staticmethod
    def __new__(cls, high: torch.Tensor) -> Float8:
        made = torch.Tensor._make_wrapper_subclass(
            cls, high.size(), strides=high.stride(), dtype=high.dtype, device=high.device
        )
        assert isinstance(made, cls)
        return made

    def __init__(self, high: torch.Tensor) -> None:
        self.high = high

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["high"], None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Float8({self.high})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Float8, lambda one: one.high, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, cls, result) if func in _KEPT else result

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
        largest = self.high.abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.get_group())
        scale = _LARGEST / largest
        return (_rounded(self.high, scale),), (scale,)

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        full = outputs[0].to(dtype) / metadata[0].to(dtype)
        if out is None:
            return full, (full,)
        with torch.no_grad(), torch.autograd.grad_mode._unsafe_preserve_version_counter(out):
            out.copy_(full)
        return None


_KEPT = {
    *(_aten.detach.default, _aten.clone.default, _aten.empty_like.default, _aten.new_zeros.default),
    *(_aten.view.default, _aten.as_strided.default, _aten.slice.Tensor, _aten.split.Tensor),
    *(_aten.copy_.default, _aten._to_copy.default),
}


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    """Inside the blocks."""
    return [m for modules, i in blocks_of(model) for m in modules[i].modules() if isinstance(m, nn.Linear)]


def in_float8(model: nn.Module, rank: Rank) -> nn.Module:
    model = model.to(rank.device)
    for module in _linear_layers(model):
        module.weight = nn.Parameter(Float8(module.weight.detach()))
    return shard(model, rank)


class _Rounding(nn.Module):
    """The same in one process: the forward has the rounded weight, the gradient is that weight's."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        scale = _LARGEST / weight.detach().abs().max()
        rounded = _rounded(weight.detach(), scale).to(weight.dtype) / scale
        return weight + (rounded - weight.detach())


def _round_weights(model: nn.Module) -> None:
    for module in _linear_layers(model):
        nn.utils.parametrize.register_parametrization(module, "weight", _Rounding())


def _as_it_is(model: nn.Module) -> None:
    pass


@dataclass(frozen=True)
class Form:
    """How a model is sharded and a step ended, and how the same is done in one process."""

    shard: Callable[[nn.Module, Rank], nn.Module]
    end: End = step
    end_alone: End = step
    alone: Callable[[nn.Module], object] = _as_it_is
    world_size: int = 2
    tolerance: float = 1e-5


FORMS = {
    "steps by unit": Form(shard, end=odc.step_by_unit),
    "changed between steps": Form(shard, end=step_and_change, end_alone=step_and_change),
    # A weight in the middle of two numbers of float8 may be rounded the other way.
    "float8 travels": Form(in_float8, alone=_round_weights, tolerance=1e-3),
    "parameters on the CPU": Form(offloaded),
    "replicas": Form(partial(shard, is_replicated=True), world_size=4),
    "two meshes": Form(on_two_meshes, world_size=4),
}


STEPS, QUICK_STEPS = 8, 3
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2}
SFT = {
    f"{fsdp} {precision}": Form(partial(shard, fsdp=fsdp, precision=precision), tolerance=tolerance)
    for fsdp in FSDPS
    for precision, tolerance in TOLERANCES.items()
}


def check_sft(setting: Setting) -> Report:
    """Check ``sft``: fine-tuning under ODC has the losses of one process that trains alone.

    A small language model, FSDP2 and FSDP1, fp32 and bf16 mixed precision. In every step the ranks have one to three
    microbatches each, and one of them has none. The reference trains in float64, without FSDP and without ODC, on the
    same microbatches.
    """
    steps = QUICK_STEPS if setting.quick else STEPS
    errors: dict[str, float] = {}
    for world_size in setting.worlds:
        for name, (error, wrong) in _compared(setting, world_size, SFT, steps).items():
            errors[f"{name}, {world_size} ranks"] = error
            require(not wrong, f"{name}, {world_size} ranks: {wrong}")
    worst = {p: max(error for key, error in errors.items() if f" {p}," in key) for p in TOLERANCES}
    text = f"largest relative error of a loss {worst['fp32']:.0e} in fp32, {worst['bf16']:.0e} in bf16"
    return Report(text, {"steps": steps, "errors": errors})


def check_forms(setting: Setting) -> Report:
    """Check ``forms``: further models and ways to end a step train under ODC as one process does.

    As ``sft``, each form for itself: steps by unit; parameters that a script changes between steps; weights of which
    float8 travels, by FSDP2's all-gather extension, with a collective in it; parameters that are kept on the CPU;
    replicas and several meshes of one model, both on four ranks.
    """
    steps = QUICK_FORM_STEPS if setting.quick else FORM_STEPS
    errors: dict[str, float] = {}
    failures: list[str] = []
    for name, form in FORMS.items():
        try:
            ((errors[name], wrong),) = _compared(setting, form.world_size, {name: form}, steps).values()
        except CheckFailedError as failure:
            wrong = str(failure)
        failures += [f"{name}: {wrong}"] * bool(wrong)
    data = {"steps": steps, "errors": errors}
    if failures:
        raise CheckFailedError("; ".join(failures), data)
    exact = max(error for name, error in errors.items() if FORMS[name].tolerance == Form.tolerance)
    figures = f"{len(errors)} forms; largest relative error of a loss {exact:.0e}"
    return Report(f"{figures}, with float8 {errors['float8 travels']:.0e}", data)


def _compared(setting: Setting, world_size: int, forms: Mapping[str, Form], steps: int) -> dict[str, tuple[float, str]]:
    """Of each form the largest relative error of a loss, and what is wrong about it, in words."""
    found = {}
    for name, (wanted, losses) in run_ranks(setting, world_size, train_forms, forms, steps)[0].items():
        error = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
        is_right = error <= forms[name].tolerance
        found[name] = error, "" if is_right else f"losses {losses}, reference {wanted}: off by {error:.1e}"
    return found


def train_forms(rank: Rank, forms: Mapping[str, Form], steps: int) -> dict[str, tuple[list[float], list[float]]]:
    """Train each form; return the losses of one process (rank 0 only), and of all ranks."""
    found = {}
    for name, form in forms.items():
        wanted = []
        if rank.rank == 0:
            model = language_model()
            form.alone(model)
            wanted = train_alone(model.to(rank.device), microbatches_of_all(rank.world_size, steps), form.end_alone)
        rank.meet()
        found[name] = wanted, train(rank, form.shard(language_model(), rank), steps, form.end)
        rank.meet()
    return found
