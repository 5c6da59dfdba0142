"""Layer 3: ranks as processes. Context parallelism: ranks that share the tokens of a sample, in FSDP2's shard group.

FSDP2 shards over "dp" and "cp", flattened to one dimension, and attention meets the ranks of "cp" in five ways; "torch"
is torch's own ``context_parallel``. On CPUs that knows no sharding of the kernel that causal attention takes there
("aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy registered"), and with the
mathematical one it cannot mix its mask with DTensors ("aten.add.Tensor got mixed torch.Tensor and DTensor"): so it is
tried without a mask, and its causal ring is written by hand.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from process_ranks import RankResult, run_ranks, start_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from training import full_parameters, largest_difference, use_up, wrap

import odc
from odc.bench.proof.chaos.script import AllTokens
from odc.fsdp_patch.compat import torch_version

DIM, HEADS, TOKENS, NUM_BLOCKS, WORLD_SIZE, STEPS = 8, 2, 8, 2, 4, 2
TOLERANCE = 1e-9 if torch_version() >= (2, 10) else 1e-7  # plain FSDP2 of 2.9 is as far from one process
EXTENDED = pytest.mark.extended
WAYS = ("gather", "functional", "ulysses", "ring", "torch")
ALL_GATHER = getattr(functional, "all_gather_single_autograd", functional.all_gather_tensor_autograd)  # torch 2.13
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Queries, keys and values of this rank's tokens (rows, heads, tokens, features); what its tokens have seen."""


class Ulysses(torch.autograd.Function):
    """All of some dimension for a part of another one: what was divided along ``join`` is divided along ``split``."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, split: int, join: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.back = join, split, group
        mine = torch.stack(part.chunk(group.size(), split))
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=group)
        return torch.cat(theirs.unbind(), join)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return Ulysses.apply(grad, *ctx.back), None, None, None


class Rotate(torch.autograd.Function):
    """Of the rank before this one in the ring; ``steps`` of -1: behind it."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, steps: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.back = -steps, group
        targets = [(rank + steps) % group.size() for rank in range(group.size())]
        return functional.wait_tensor(functional.permute_tensor(mine.flatten(), targets, group)).view(mine.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return Rotate.apply(grad, *ctx.back), None, None


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: int = 0) -> torch.Tensor:
    """``place``: of the queries among parts of as many tokens."""
    seen = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None] + place * q.shape[2]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def without_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)  # which torch replaces meanwhile


def attention(way: str, group: dist.ProcessGroup) -> Attend:
    def gather(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return causal(q, *(AllTokens.apply(x, 2, group) for x in (k, v)), group.rank())

    def by_functional_collectives(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return causal(q, *(ALL_GATHER(x.contiguous(), 2, group) for x in (k, v)), group.rank())  # 2.9 wants dense ones

    def ulysses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return Ulysses.apply(causal(*(Ulysses.apply(x, 1, 2, group) for x in (q, k, v))), 2, 1, group)

    def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rotated = [torch.stack([k, v])]
        for _ in range(1, group.size()):
            rotated.append(Rotate.apply(rotated[-1], 1, group))
        in_order = [rotated[(group.rank() - rank) % group.size()] for rank in range(group.size())]
        return causal(q, *torch.cat(in_order, 3), group.rank())

    ways = {"gather": gather, "functional": by_functional_collectives, "ulysses": ulysses, "ring": ring}
    return ways.get(way, without_mask)


class Block(nn.Module):
    attend: Attend = staticmethod(causal)

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(
            DIM, 3 * DIM, bias=False
        )  # keys have no use for one, and Adam makes steps of mere rounding
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(rows, tokens, DIM))


def build(way: str, group: dist.ProcessGroup | None = None, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """``group``: that shares each sample; None: this process has all of it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS))).to(dtype)
    for block in model:
        block.attend = without_mask if way == "torch" else causal
        if group is not None:
            block.attend = attention(way, group)
    return model


@functools.cache
def make_mesh(shape: tuple[int, ...]) -> tuple[DeviceMesh, DeviceMesh]:
    """And what FSDP2 shards over. Of one dimension: both."""
    if len(shape) == 1:
        return (init_device_mesh("cpu", shape, mesh_dim_names=("cp",)),) * 2
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
    return mesh, mesh["dp", "cp"]._flatten("dp_cp")


def sharded(way: str, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (2, 2)) -> nn.Module:
    """``way`` "fsdp1": as verl does, Ulysses over a mesh of its own, and FSDP1 over all ranks."""
    mesh, over = make_mesh(shape)
    if way == "fsdp1":
        own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
        model = wrap(build("ulysses", own.get_group("sp")), auto_wrap_policy=ModuleWrapPolicy({Block}))
    else:
        model = build(way, mesh.get_group("cp"), dtype)
        for block in model:
            fully_shard(block, mesh=over)
        fully_shard(model, mesh=over)
    model.cp = mesh["cp"]  # type: ignore[assignment]
    return model


def backward(model: Any, way: str, x: torch.Tensor, is_shared: bool) -> None:
    target = x.roll(1, 1).clone()
    if is_shared and way == "torch":
        with (
            sdpa_kernel(SDPBackend.MATH),
            context_parallel(model.cp, buffers=[x, target], buffer_seq_dims=[1, 1]),
        ):
            ((model(x) - target).square().sum() / 10).backward()
        return
    if is_shared:
        x, target = (whole.chunk(model.cp.size(), 1)[model.cp.get_local_rank()] for whole in (x, target))
    ((model(x) - target).square().sum() / 10).backward()


def train(model: nn.Module, way: str, counts: Sequence[int], groups: Sequence[int], steps: int, is_shared: bool) -> Any:
    """Clip norms, and what is left. ``groups``: whose microbatches these are, of ``counts`` by group."""
    optimizer, norms = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), []
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        for group in groups:
            for m in range(counts[group]):
                generator = torch.Generator().manual_seed(1000 * step + 100 * group + m)
                backward(model, way, torch.randn(2, TOKENS, DIM, generator=generator).to(dtype), is_shared)
        if getattr(model, "logs", False):
            dist.all_reduce(torch.zeros(1))
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        use_up(optimizer)
    return {f"norm {step}": getattr(norm, "full_tensor", lambda norm=norm: norm)() for step, norm in enumerate(norms)}


CASES = {
    "idle": ("gather", (0, 2), None),
    "functional": ("functional", (2, 1), None),
    "shared samples on one host": ("ulysses", (1, 3), (0, 0, 1, 1)),
    "shared samples across hosts": ("ring", (1, 2), (0, 1, 0, 1)),
    "torch": ("torch", (3, 1), None),
    "all ranks share each sample": ("functional", (2,), None),
}
"""With uneven numbers of microbatches: how, how many of each group, and the hosts on which ranks pose to be."""


def run(rank: int, way: str, counts: Sequence[int], steps: int, dtype: torch.dtype, use_odc: bool = True) -> Any:
    size = WORLD_SIZE // len(counts)
    model, group = sharded(way, dtype, (len(counts), size)), rank // size
    with odc.patch_fsdp(model) if use_odc else nullcontext() as session:
        found = train(model, way, counts, [group], steps, True)
        assert session is None or (session.stats().pushes > 0) == (counts[group] > 0)
    return {**{name: norm.numpy() for name, norm in found.items()}, **full_parameters(model)}


def from_plain(rank: int, world_size: int) -> dict[str, float]:
    """How far the same training is from plain torch's."""
    found = {}
    for way in WAYS:
        theirs, ours = (run(rank, way, (1, 1), STEPS, torch.float32, use_odc) for use_odc in (False, True))
        found[way] = largest_difference(ours, theirs)
    return found


def uneven_runs(rank: int, world_size: int) -> dict[str, Any]:
    uneven = {}
    for name, (way, counts, hosts) in CASES.items():
        os.environ["ODC_HOST_ID"] = f"host-{hosts[rank] if hosts else 0}"
        uneven[name] = run(rank, way, counts, STEPS, torch.float64)
    return uneven


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(WORLD_SIZE, uneven_runs, timeout_s=180)


@EXTENDED  # every run has the same ways beside one process
def test_ranks_that_share_samples_train_as_under_plain_fsdp2() -> None:
    for differences in run_ranks(WORLD_SIZE, from_plain, timeout_s=180):
        assert max(differences.values()) < 1e-6, differences


@pytest.mark.parametrize("case", CASES)
def test_uneven_groups_that_share_samples_train_as_one_process(case: str, found: Any) -> None:
    way, counts, _ = CASES[case]
    model = build(way, dtype=torch.float64)
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad / WORLD_SIZE)  # as FSDP divides
    norms = train(model, way, counts, range(len(counts)), STEPS, False)
    expected = {name: value.detach().numpy() for name, value in {**norms, **dict(model.named_parameters())}.items()}
    for uneven in found:
        assert largest_difference(uneven[case], expected) < TOLERANCE


# Failures


def fail(*args: Any) -> None:
    raise RuntimeError("out of luck")


Happens = Callable[[nn.Module, list[int]], None]


def ending(rank: int, world_size: int, way: str, happens: Happens, shape: tuple[int, ...] = (2, 2)) -> None:
    """What ``happens`` before the second step does something to the last rank: to its model, or its microbatches.
    The error that follows says how long after that it came."""
    model, counts, began = sharded(way, shape=shape), [2, 2], 0.0
    group = 0 if shape[-1] == world_size else rank // 2
    try:
        with odc.patch_fsdp(model):
            train(model, way, counts, [group], 1, True)
            dist.barrier()
            began = time.monotonic()
            if happens is differs_and_logs:
                model.logs = True  # type: ignore[assignment]
            if rank == world_size - 1:
                happens(model, counts)
            train(model, way, counts, [group], 1, True)
    except Exception as error:
        error.args = (f"{error} (after {time.monotonic() - began:.1f} s)",)
        raise


def in_forward(model: nn.Module, counts: list[int]) -> None:
    model[1].register_forward_pre_hook(fail)  # type: ignore[index]


def in_backward(model: nn.Module, counts: list[int]) -> None:
    model[1].register_full_backward_hook(fail)  # type: ignore[index]


def differs(model: nn.Module, counts: list[int]) -> None:
    counts[-1] = counts[0] = 1


def differs_and_logs(model: nn.Module, counts: list[int]) -> None:
    """Before it ends the minibatch it waits for all in a collective of the script."""
    differs(model, counts)


def without_a_backward(model: nn.Module, counts: list[int]) -> None:
    """The last one, as where the loss of its own tokens is not finite."""
    once = iter([torch.Tensor.backward])
    torch.Tensor.backward = lambda loss: next(once, lambda loss: None)(loss)  # type: ignore[method-assign]


def check(results: Sequence[RankResult], *words: str) -> None:
    for result in results:
        assert result.error is not None
        first_line = result.error.splitlines()[0]
        assert all(word in first_line for word in words), first_line
        assert float(first_line.rpartition("(after ")[2].partition(" s)")[0]) < 5, first_line


PAIRS, BESIDE_ONE, ALONE = (2, 2), (1, 2), (2,)
"""Meshes. In the latter two the dimension "cp" has all ranks: so has what FSDP2 shards over, and torch takes the same
group for both."""


@pytest.mark.parametrize(
    ("way", "happens", "shape"),
    [
        ("functional", in_backward, PAIRS),  # which waits where nobody looks on
        ("gather", in_backward, ALONE),
        *(pytest.param(way, in_forward, PAIRS, marks=EXTENDED) for way in WAYS),
        *(pytest.param(way, in_backward, PAIRS, marks=EXTENDED) for way in WAYS if way != "functional"),
        pytest.param("functional", in_forward, BESIDE_ONE, marks=EXTENDED),
    ],
)
def test_all_hear_who_has_failed_while_they_meet_it_in_attention(way: str, happens: Any, shape: Any) -> None:
    num_ranks = math.prod(shape)
    *others, _ = start_ranks(num_ranks, ending, way, happens, shape).join(60)
    check(others, f"rank {num_ranks - 1}", "out of luck")


@pytest.mark.parametrize(
    ("way", "happens", "shape"),
    [
        ("ulysses", differs_and_logs, PAIRS),
        ("gather", differs, BESIDE_ONE),
        ("functional", differs_and_logs, ALONE),
        ("functional", without_a_backward, BESIDE_ONE),
        *(pytest.param(way, differs, PAIRS, marks=EXTENDED) for way in (*WAYS, "fsdp1")),
        *(pytest.param(way, without_a_backward, PAIRS, marks=EXTENDED) for way in WAYS[:4]),
        pytest.param("gather", differs, ALONE, marks=EXTENDED),
        pytest.param("functional", differs_and_logs, BESIDE_ONE, marks=EXTENDED),
        pytest.param("functional", without_a_backward, ALONE, marks=EXTENDED),
    ],
)
def test_who_leaves_the_others_of_a_sample_is_named(way: str, happens: Any, shape: Any) -> None:
    num_ranks = math.prod(shape)
    results = start_ranks(num_ranks, ending, way, happens, shape).join(60)
    did = "is in another collective in" if happens is differs_and_logs else "has ended"
    words = (f"rank {num_ranks - 2}", f"rank {num_ranks - 1} {did} minibatch 2 after 1")
    check(results, "have different numbers of microbatches", *words)


def logging_between(rank: int, world_size: int) -> None:
    """Ranks by turns wait for the other in a collective between a forward and its backward, and then have it wait in
    that backward."""
    model = sharded("functional", shape=(world_size,))
    with odc.patch_fsdp(model):
        for number in range(3):
            x = torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(number))
            is_early = rank == number % world_size
            model(x.chunk(world_size, 1)[rank])
            time.sleep(0.0 if is_early else 1.2)
            dist.all_reduce(torch.zeros(1))
            time.sleep(1.2 if is_early else 0.0)
            backward(model, "functional", x, True)
            dist.all_reduce(torch.zeros(1))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_nobody_is_named_who_logs_between_microbatches() -> None:
    """In the group in which ranks share samples."""
    run_ranks(2, logging_between)
