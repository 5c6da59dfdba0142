"""Layer 3: ranks as processes. FSDP2 without staging, with staging, and one float64 process train to the same numbers:
for parameters of every kind, and for the options and habits of FSDP2 scripts.

Sums are deterministic: with and without staging they are equal to the bit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from process_ranks import run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from training import TOLERANCE, WAYS, communicating, full_parameters, largest_difference, optimizer_of, use_up

import odc
from odc.fsdp_patch.compat import torch_version

WIDTH, WORDS, STEPS = 12, 7, 2
COUNTS = [3, 2, 1, 2]


class Odd(nn.Module):
    """A block with parameters of many shapes: few rows, fewer than ranks, of several dimensions, frozen ones between,
    and one that not every microbatch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 5)
        self.frozen = nn.Parameter(torch.randn(3, WIDTH) / 4, requires_grad=False)
        self.down = nn.Linear(5, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.cube = nn.Parameter(torch.randn(2, 4, WIDTH) / 4)
        self.sometimes = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, uses_all: bool = True) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x)))) * self.scale
        frozen = self.frozen.to(x.dtype)
        y = y + (x @ frozen.T) @ frozen
        y = y + torch.einsum("bi,kji->bi", y, self.cube)
        if uses_all:
            y = y + torch.tanh(y.T.flip(0).T @ self.sometimes)
        return x + y


class Model(nn.Module):
    """With tied weights."""

    has_gaps: bool

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Odd() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor, uses_all: bool = True) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x, uses_all or not self.has_gaps)
        return self.head(x)


def build(dtype: torch.dtype, has_gaps: bool) -> Model:
    torch.manual_seed(0)
    model = Model().to(dtype)
    model.has_gaps = has_gaps
    return model


def loss_of(model: nn.Module, step: int, rank: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 1009 + rank * 101 + microbatch)
    words = torch.randint(0, WORDS, (6,), generator=generator)
    logits = model(words, uses_all=(rank + microbatch + step) % 3 != 0)
    if logits.dtype == torch.bfloat16:
        logits = logits.float()
    return nn.functional.cross_entropy(logits, words.roll(1), reduction="sum") / 20


Hook = Callable[[Any, int, int], None]
"""Called with the model, the microbatch and how many there are."""


def nothing(model: Any, microbatch: int, count: int) -> None:
    return


def train(model: nn.Module, ranks: Sequence[int], session: odc.Session | None, before: Hook = nothing) -> None:
    """The microbatches of ``ranks``, for each step."""
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        with session.minibatch() if session is not None else nullcontext():
            for rank in ranks:
                for m in range(COUNTS[rank]):
                    before(model, m, COUNTS[rank])
                    loss_of(model, step, rank, m).backward()
        use_up(optimizer)


def reference(world_size: int, has_gaps: bool) -> dict[str, torch.Tensor]:
    model = build(torch.float64, has_gaps)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        for rank in range(world_size):
            for m in range(COUNTS[rank]):
                (loss_of(model, step, rank, m) / world_size).backward()
        use_up(optimizer)
    return dict(model.named_parameters())


def columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(parameter.ndim - 1) if parameter.ndim > 1 and parameter.shape[-1] == WIDTH else None


def accumulating(model: Any, microbatch: int, count: int) -> None:
    model.set_requires_gradient_sync(microbatch == count - 1)


def by_hand(model: Any, microbatch: int, count: int) -> None:
    handle = model.blocks[0].unshard(async_op=True)
    model.blocks[1].unshard()
    if microbatch % 2:
        handle.wait()
    if microbatch == 1:
        model.blocks[1].reshard()


def evaluating(mode: Callable[[], Any], model: Any, microbatch: int, count: int) -> None:
    if microbatch == 0:
        with mode():
            loss_of(model, 0, 0, 1)


def prefetching(model: Any) -> None:
    units = [model, *model.blocks]
    for before, after in itertools.pairwise(units):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])


def unused_too(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reduce_scatter_unused_params(True)


def frozen_in_float64(model: Any) -> None:
    for block in model.blocks:
        block.frozen.data = block.frozen.data.double()


def one_unit_frozen(model: Any) -> None:
    model.blocks[1].requires_grad_(False)


def checkpointed(model: Any) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)


@dataclass(frozen=True)
class Case:
    options: dict[str, Any] = field(default_factory=dict)
    """Of fully_shard."""
    before: Hook = nothing
    prepare: Callable[[Any], None] | None = None
    """The model, before it is sharded."""
    after: Callable[[Any], None] | None = None
    """Behind that."""
    session: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    tolerance: float = TOLERANCE
    has_gaps: bool = True
    """FSDP2 itself refuses a push of gradients that were accumulated in float32 and others that were not."""
    mesh: tuple[int, ...] = ()
    hosts: int = 1
    staged: str = ""
    """Why, if a unit is staged anyway."""
    ways: tuple[str, ...] = ("in place", "staged")


BF16 = torch.bfloat16
MIXED = {"mp_policy": MixedPrecisionPolicy(BF16, torch.float32)}
COLUMNS = {"shard_placement_fn": columns}
CASES = {
    "plain": Case(ways=WAYS),
    "columns": Case(COLUMNS),
    "bf16-columns": Case({**MIXED, **COLUMNS}, tolerance=0.1),
    "bf16-wire-of-fp32": Case({"mp_policy": MixedPrecisionPolicy(None, BF16)}, tolerance=0.1),
    "accumulating": Case(before=accumulating),
    "by-hand": Case(before=by_hand),
    "prefetching": Case(after=prefetching),
    "checkpointed": Case(prepare=checkpointed),
    "daemon": Case({**MIXED, **COLUMNS}, session={"accumulate": "daemon"}, tolerance=0.1),
    "hosts": Case(COLUMNS, hosts=2),
    "float64": Case(dtype=torch.float64, staged="with gradients in torch.float64", ways=("in place",)),
    "offload": Case(
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, staged="with CPU offload", ways=("in place",)
    ),
}
if torch_version() >= (2, 10):  # before, padded shards get their tensors in the first forward: no training in these
    CASES["inference"] = Case(before=functools.partial(evaluating, torch.inference_mode), ways=("in place", "small"))
if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
    CASES["unused-too"] = Case(after=unused_too, tolerance=torch.inf)  # decay of what got zeros: not the reference's
FURTHER = {
    "two-dtypes": Case(prepare=frozen_in_float64, staged="with several compute dtypes in a unit"),
    "one-unit-frozen": Case(prepare=one_unit_frozen, tolerance=torch.inf, ways=WAYS),
    "no-reshard": Case({"reshard_after_forward": False}, ways=WAYS),
    "no-grad": Case(before=functools.partial(evaluating, torch.no_grad), ways=WAYS),
    "bf16-compute": Case(MIXED, tolerance=0.1, ways=WAYS),
    "bf16-wire": Case({"mp_policy": MixedPrecisionPolicy(BF16)}, tolerance=0.1, ways=WAYS),
    "bf16-wire-columns": Case({"mp_policy": MixedPrecisionPolicy(BF16), **COLUMNS}, tolerance=0.1, ways=WAYS),
    "float64-fp32-wire": Case({"mp_policy": MixedPrecisionPolicy(None, torch.float32)}, dtype=torch.float64, ways=WAYS),
    "accumulating-bf16": Case(MIXED, before=accumulating, has_gaps=False, tolerance=0.1, ways=WAYS),
    "accumulating-bf16-gaps": Case(MIXED, before=accumulating, tolerance=0.1, ways=("in place", "small")),
    "daemon-plain": Case(session={"accumulate": "daemon"}, ways=WAYS),
    "hosts-bf16": Case(MIXED, hosts=2, tolerance=0.1, ways=WAYS),
}
OF_FOUR = {
    "hybrid": Case(COLUMNS, mesh=(2, 2)),
    "subgroups": Case({"reshard_after_forward": 2}, ways=WAYS),
}
FURTHER_OF_FOUR = {
    "plain": Case(ways=WAYS),
    "hybrid-bf16": Case(MIXED, mesh=(2, 2), tolerance=0.1, ways=WAYS),
    "hosts": Case(hosts=2, ways=WAYS),
    "accumulating": Case(COLUMNS, before=accumulating, ways=WAYS),
}


def run_case(rank: int, world_size: int, case: Case, way: str) -> dict[str, Any]:
    model: Any = build(case.dtype, case.has_gaps)
    if case.prepare is not None:
        case.prepare(model)
    if case.mesh:
        mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **case.options)
    fully_shard(model, mesh=mesh, **case.options)
    if case.after is not None:
        case.after(model)
    with communicating(way), pytest.MonkeyPatch.context() as patch:
        if case.hosts > 1:
            patch.setenv("ODC_HOST_ID", f"host{rank * case.hosts // world_size}")
        with odc.patch_fsdp(model, deterministic=True, **case.session) as session:
            why = {unit.why_staged() for unit in session._units}  # type: ignore[attr-defined]
            assert case.staged in why <= {"", case.staged}
            for unit in session._units:
                assert (unit.in_place is None) == (way == "staged" or bool(unit.why_staged()))  # type: ignore[attr-defined]
            train(model, [rank], session, case.before)
    return {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in full_parameters(model).items()}


ALL = {**CASES, **FURTHER}, {**OF_FOUR, **FURTHER_OF_FOUR}
Found = dict[str, dict[str, dict[str, Any]]]


def run_cases(rank: int, world_size: int, names: Sequence[str]) -> Found:
    cases = ALL[world_size > 3]
    return {name: {way: run_case(rank, world_size, cases[name], way) for way in cases[name].ways} for name in names}


def check(found: dict[str, dict[str, Any]], case: Case, world_size: int) -> None:
    first, *others = found.values()
    for other in others:
        for name, value in first.items():
            assert (value == other[name]).all(), name
    expected = {name: p.detach() for name, p in reference(world_size, case.has_gaps).items()}
    assert largest_difference(first, expected) < case.tolerance


@pytest.fixture(scope="module")
def of_two() -> Found:
    return run_ranks(2, run_cases, list(CASES))[0]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(name: str, of_two: Found) -> None:
    check(of_two[name], CASES[name], 2)


@pytest.fixture(scope="module")
def of_four() -> Found:
    return run_ranks(4, run_cases, list(OF_FOUR))[0]


@pytest.mark.parametrize("name", OF_FOUR)
def test_four_ranks(name: str, of_four: Found) -> None:
    check(of_four[name], OF_FOUR[name], 4)


@pytest.mark.extended
@pytest.mark.parametrize("name", FURTHER)
def test_further_options_of_two_ranks(name: str) -> None:
    check(run_ranks(2, run_cases, [name])[0][name], FURTHER[name], 2)


@pytest.mark.extended
@pytest.mark.parametrize("name", FURTHER_OF_FOUR)
def test_further_options_of_four_ranks(name: str) -> None:
    check(run_ranks(4, run_cases, [name])[0][name], FURTHER_OF_FOUR[name], 4)


@pytest.mark.extended
@pytest.mark.parametrize("name", [name for name in ALL[0] if name != "hosts"])
def test_three_ranks(name: str) -> None:
    check(run_ranks(3, run_cases, [name])[0][name], ALL[0][name], 3)
