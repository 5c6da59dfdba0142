"""What ODC adds to FSDP2's own host time, for each unit and microbatch, by what it goes into; bytes aside.

On a GPU the host has to launch all work in less time than the work takes. What FSDP2 needs for that, in Python, is
measured here, and what it needs in addition under ODC. Units pose as decoder layers: 12 parameters each, of 64 elements
at most, which nobody computes with; their gradients are made out of nothing. So no time goes into arithmetic or bytes.

Kinds of microbatch take turns, one forward and backward each: of the model without FSDP; sharded by FSDP2, with
transfers that do nothing in place of its collectives; and patched, with some of ODC doing nothing. Ranks take turns,
too: one computes, the others wait in a receive of gloo, which takes no core. The figure is the CPU time of the thread
that trains, over the units. From these:

    FSDP2's own     with transfers that do nothing, less the same model without FSDP; while nothing is patched
    other models    what a model that is not patched needs more while another one is
    interception    what ODC does between FSDP2 and its transfers and guard, which do nothing here: how it enters,
                    whose turn it is in the minibatch, gradients that are pending
    guard           looks whether the script has changed parameters behind a publication
    transfers       two gathers (or one with --keep) and one push, but for what they copy and add
    all of ODC      the last three
    bytes           what they copy and add, to and from the shared memory of one host: a call of torch for each rank

Differences are taken within a repetition, some rounds of all kinds, so that a machine that is slower for a while is so
for all; shown are the medians over repetitions and ranks, with the 20th and 80th percentile. What a minibatch costs
once (the end, publishing) is in ``odc bench host-time``. Not covered: GPUs.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from odc import patch_fsdp
from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Run, Table, summary
from odc.bench.harness.ranks import Rank
from odc.engines.base import Engine
from odc.fsdp_patch.guard import Guard
from odc.minibatch.runtime import Runtime

NUM_PARAMETERS = 12
ALONE, OWN = "FSDP2, nothing patched", "FSDP2's own"
SWITCHED_OFF: dict[str, tuple[type, ...]] = {
    "intercepted": (Runtime, Guard),
    "guarded": (Runtime,),
    "moving nothing": (Engine,),
    "ODC": (),
}
"""Of the patched model: whose operations do nothing."""
KINDS = ("without FSDP", ALONE, "FSDP2", *SWITCHED_OFF)
PARTS = {
    OWN: (1, 0),
    "other models": (2, 1),
    "interception": (3, 2),
    "guard": (4, 3),
    "transfers": (5, 4),
    "all of ODC": (5, 2),
    "bytes": (6, 5),
}
"""Each the difference of two kinds."""


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    num_units: int = 24
    rounds: int = 8
    repetitions: int = 20
    keep: bool = False
    """Parameters stay unsharded between forward and backward (``reshard_after_forward=False``)."""


class _Nothing(torch.autograd.Function):
    """Uses all parameters, computes nothing, and has a gradient for each."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.parameters = parameters
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (grads[0], *(torch.empty_like(p) for p in ctx.parameters))


class Layer(nn.Module):
    """The parameters of a decoder layer: matrices, biases, norms."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(8, 8) if index < 7 else (8,) for index in range(NUM_PARAMETERS)]
        self.weights = nn.ParameterList(torch.ones(shape) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Nothing.apply(x, *self.weights)  # type: ignore[no-untyped-call]
        return out


class _NoGather(AllGather):
    """In place of FSDP2's all-gather."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


class _NoScatter(ReduceScatter):
    """In place of FSDP2's reduce-scatter."""

    allocate = _NoGather.allocate

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


def _model(settings: Settings) -> nn.Sequential:
    return nn.Sequential(*(Layer() for _ in range(settings.num_units)))


def _sharded(settings: Settings, world_size: int) -> nn.Sequential:
    model, mesh = _model(settings), init_device_mesh("cpu", (world_size,))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not settings.keep)
    fully_shard(model, mesh=mesh)
    return model


def measure_rank(me: Rank, settings: Settings) -> list[dict[str, float]]:
    """CPU us by unit of each kind of microbatch, for each repetition."""
    plain, fsdp, ours = _model(settings), _sharded(settings, me.world_size), _sharded(settings, me.world_size)
    for layer in fsdp:
        assert isinstance(layer, FSDPModule)
        layer.set_custom_all_gather(_NoGather())
        layer.set_custom_reduce_scatter(_NoScatter())
    gc.collect()
    gc.freeze()  # or the collector would look at all that was imported, whenever it runs
    turns, found = _Turns(me.rank, me.world_size, settings), []
    for repetition in range(settings.repetitions + 1):
        row = turns.take({ALONE: (fsdp, ())})
        with patch_fsdp(ours) as session:
            patched = {name: (ours, off) for name, off in SWITCHED_OFF.items()}
            row |= turns.take({KINDS[0]: (plain, ()), "FSDP2": (fsdp, ()), **patched})
            session.discard()
        if repetition:  # the first warms up
            found.append(row)
        me.report(1.0 if me.rank == 0 else 0.0)
    return found


_SWITCHES: dict[type, tuple[str, ...]] = {
    Runtime: ("gather", "scatter_accumulate"),
    Guard: ("check_gather", "check_push"),
    Engine: ("copy", "add"),
}


@contextmanager
def _switched_off(kind: type) -> Iterator[None]:
    originals = {name: vars(kind)[name] for name in _SWITCHES[kind]}
    for name in originals:
        setattr(kind, name, lambda *args, **named: None)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(kind, name, original)


Kinds = dict[str, tuple[nn.Module, tuple[type, ...]]]


class _Turns:
    def __init__(self, rank: int, world_size: int, settings: Settings) -> None:
        self._rank, self._world_size, self._settings = rank, world_size, settings
        self._token, self._input = torch.zeros(1), torch.zeros(8, requires_grad=True)

    def take(self, kinds: Kinds) -> dict[str, float]:
        """This rank's turn: the median of each kind over the rounds. Collective."""
        dist.barrier()
        if self._rank:
            dist.recv(self._token, self._rank - 1)
        rounds = [{name: self._microbatch(*kind) for name, kind in kinds.items()} for _ in range(self._num_rounds)]
        if self._rank + 1 < self._world_size:
            dist.send(self._token, self._rank + 1)
        dist.barrier()
        return {name: statistics.median(row[name] for row in rounds[1:]) for name in kinds}  # the first is another one

    @property
    def _num_rounds(self) -> int:
        return self._settings.rounds + 1

    def _microbatch(self, model: nn.Module, off: tuple[type, ...]) -> float:
        with ExitStack() as stack:
            for kind in off:
                stack.enter_context(_switched_off(kind))
            started_ns = time.thread_time_ns()
            model(self._input).sum().backward()
            return (time.thread_time_ns() - started_ns) * 1e-3 / self._settings.num_units


def summarize(ranks: Sequence[Sequence[dict[str, float]]]) -> Entries:
    """The kinds in us, and the parts in us and in per cent of FSDP2's own."""
    kinds = np.array([[row[name] for name in KINDS] for rows in ranks for row in rows])
    own = np.median(kinds[:, 1] - kinds[:, 0])
    parts = []
    for name, (more, less) in PARTS.items():
        difference = kinds[:, more] - kinds[:, less]
        parts.append({"part": name, "us": summary(difference), "percent": summary(100 * difference / own)})
    return {"parts": parts, "kinds": [{"kind": name, "us": summary(kinds[:, i])} for i, name in enumerate(KINDS)]}


def measure(
    run: Run,
    ranks: Annotated[int, typer.Option(min=2, help="Of one host.")] = 2,
    units: Annotated[int, typer.Option(min=1, help="That pose as layers.")] = Settings.num_units,
    rounds: Annotated[int, typer.Option(min=1, help="Of a repetition, one more first.")] = Settings.rounds,
    repetitions: Annotated[int, typer.Option(min=1, help="One more first.")] = Settings.repetitions,
    keep: Annotated[bool, typer.Option("--keep", help="reshard_after_forward=False")] = False,
) -> Entries:
    run.begin(repetitions + 1, f"{ranks} ranks")
    return summarize(run.ranks(ranks, measure_rank, Settings(units, rounds, repetitions, keep)))


def figures(result: Entries) -> Figures:
    parts = {row["part"]: row for row in result["parts"]}
    percent = {name: row["percent"]["median"] for name, row in parts.items()}
    yield (
        "**What of that meets FSDP2?** ",
        f"For a unit of 12 parameters and a microbatch FSDP2 itself needs {parts[OWN]['us']['median']:.0f} us of the "
        f"host; ODC adds {percent['all of ODC']:.0f} %, bytes aside: {percent['interception']:.1f} % by standing "
        f"between, {percent['guard']:.1f} % by looking whether parameters were changed, {percent['transfers']:.1f} % "
        "by two gathers and a push",
    )


def figures_before(result: Entries) -> Figures:
    percent = {row["part"]: row["percent"]["median"] for row in result["parts"]}
    yield (
        "while `.grad` was watched by an attribute of its own, ",
        f"it was {percent['all of ODC']:.0f} %, and models that are not patched paid {percent['other models']:.0f} %",
    )


BENCHMARK = Benchmark(
    measure,
    "1 min, quick 40 s",
    (
        Table(
            "parts",
            "host time of a unit and microbatch, CPU us of the training thread: median (20th-80th percentile)",
            (Column("part", "part"),),
            (Column("us", "us", ".1f"), Column("% of FSDP2's own", "percent", ".1f")),
        ),
        Table("kinds", "kinds of microbatch", (Column("kind", "kind"),), (Column("us", "us", ".1f"),)),
    ),
    quick={"units": 8, "rounds": 3, "repetitions": 4},
    figures=(
        ("docs/performance.md", figures, ["fsdp_host_time"]),
        ("docs/performance.md", figures_before, ["fsdp_host_time_before"]),
    ),
)
