"""What ODC adds to FSDP2's own host time, for each unit and microbatch, part by part; copying bytes is apart.

On a GPU the host has to launch all work in less time than the work takes. This benchmark measures the Python time that
FSDP2 needs for launching, and what ODC needs in addition. Units pose as decoder layers: of 12 parameters seven are
matrices of 256 elements and five are vectors of 16, which ODC treats as large and small parameters. The layers compute
nothing, and their gradients are empty tensors, so no time goes into arithmetic or bytes.

A microbatch is one forward and backward. Three kinds of model take turns: one without FSDP; one sharded by FSDP2 whose
collectives are replaced by transfers that do nothing; and one patched by ODC, some of whose operations do nothing.
Ranks take turns, too: while one computes, the others wait in a receive of gloo, which takes no core. The figure is the
CPU time of the thread that trains, divided by the number of units. The parts are differences of such figures:

    FSDP2's own     FSDP2 with transfers that do nothing, less the model without FSDP, while no model is patched
    other models    what a model that is not patched needs more while another model is patched
    staging         a part of FSDP2's own: the three functions that copy through its flat buffers, except for
                    allocating parameters. ODC in place does not call these functions
    interception    what ODC does in place of these functions, while its transfers and its guard do nothing: entering
                    FSDP2, allocating parameters, keeping pending gradients, joining small parameters
    guard           the check whether the script has changed parameters after they were published
    transfers       two gathers (one with --keep) and one push, without copying and adding
    all of ODC      interception, guard and transfers, less staging
    bytes           copying and adding, to and from the shared memory of one host: a call of torch for each rank

The second table compares two ways of ODC, in place and through FSDP2's flat buffers (ODC_STAGING=on), by the sum of
FSDP2's own and all of ODC. It also shows a model whose parameters are all small, with copying and adding: in place,
small parameters travel together.

Differences are taken within a repetition, which has some rounds of all kinds, so that slow moments of the machine
affect all kinds alike. The tables show medians over repetitions and ranks, with the 20th and 80th percentile.

Not covered: what happens once per minibatch (its end, publishing), and GPUs.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as torch_group
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult

from odc import patch_fsdp
from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Numbers, Run, Table, numbers, summary
from odc.bench.harness.ranks import Rank, keep_from_collector
from odc.config import STAGING
from odc.engines.base import Engine
from odc.fsdp_patch import fsdp2_in_place
from odc.fsdp_patch.compat import reduced
from odc.fsdp_patch.fsdp2_in_place import SMALL_NUMEL
from odc.fsdp_patch.guard import Guard
from odc.fsdp_patch.unit import shadow
from odc.minibatch.runtime import Runtime

RANKS, PARAMETERS = Numbers(2), Numbers(12)
PLAIN, ALONE, FSDP2, UNSTAGED = "without FSDP", "FSDP2, nothing patched", "FSDP2", "FSDP2, staging nothing"
OWN = "FSDP2's own"
SWITCHED_OFF: dict[str, tuple[type, ...]] = {
    "intercepted": (Runtime, Guard),
    "guarded": (Runtime,),
    "moving nothing": (Engine,),
    "ODC": (),
}
"""Kinds of microbatch of the patched model, and the classes whose operations do nothing in them."""
STAGED: dict[str, tuple[type, ...]] = {"staged, moving nothing": (Engine,), "staged": ()}
"""The same for the model that is patched with ODC_STAGING=on."""
SMALL: dict[str, tuple[type, ...]] = {"all small": ()}
"""The same for a model whose parameters are all small."""
KINDS = (PLAIN, ALONE, FSDP2, UNSTAGED, *SWITCHED_OFF, *STAGED, *SMALL)
PARTS = {
    OWN: (ALONE, PLAIN),
    "other models": (FSDP2, ALONE),
    "staging": (FSDP2, UNSTAGED),
    "interception": ("intercepted", UNSTAGED),
    "guard": ("guarded", "intercepted"),
    "transfers": ("moving nothing", "guarded"),
    "all of ODC": ("moving nothing", FSDP2),
    "bytes": ("ODC", "moving nothing"),
}
"""Each part is the difference of two kinds."""
WAYS = {
    "": ("staged, moving nothing", "moving nothing"),
    "_small": ("staged", "all small"),
}
"""The staged kind and the kind in place of each comparison. The model without FSDP is subtracted from both."""


@dataclass(frozen=True)
class Settings:
    """Sizes and numbers of one measurement."""

    num_units: int = 24
    rounds: int = 8
    repetitions: int = 20
    keep: bool = False
    """Parameters stay unsharded between forward and backward (``reshard_after_forward=False``)."""
    num_parameters: int = 12
    """Parameters of a unit."""


class _Nothing(torch.autograd.Function):
    """Uses all parameters, computes nothing, and has a gradient for each."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.parameters = parameters
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (grads[0], *(torch.empty_like(p) for p in ctx.parameters))


SIDE = 16
"""Rows and columns of a matrix; length of a vector."""


class Layer(nn.Module):
    """The parameters of a decoder layer: matrices, biases, norms."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        shapes = [(SIDE, SIDE) if index % 12 < 7 else (SIDE,) for index in range(num_parameters)]
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


@contextmanager
def _unstaged() -> Iterator[None]:
    """FSDP2's three functions that stage do nothing, but for the memory of parameters."""

    def gather(params: Any, group: Any, is_async: Any, into: Any, over: Any, device: Any, comm: Any) -> Any:
        return AllGatherResult(comm, None, None, [], [], [])

    def copy_out(result: Any, params: Any, group: Any) -> None:
        for param in params:
            param.alloc_all_gather_outputs()

    def reduce(params: Any, grads: Any, group: Any, stream: Any, *args: Any, **kwargs: Any) -> Any:
        grads.clear()
        return reduced(stream, None)

    functions = {"foreach_all_gather": gather, "foreach_all_gather_copy_out": copy_out, "foreach_reduce": reduce}
    undo = shadow(torch_group, **functions)
    try:
        yield
    finally:
        undo()


_SWITCHES: dict[type, tuple[str, ...]] = {
    Runtime: ("gather", "scatter_accumulate"),
    Guard: ("check_gather", "check_push"),
    Engine: ("copy", "add"),
}


@contextmanager
def _switched_off(kinds: Sequence[type]) -> Iterator[None]:
    with ExitStack() as stack:
        for kind in kinds:
            nothing = dict.fromkeys(_SWITCHES[kind], staticmethod(lambda *args, **named: None))
            stack.callback(shadow(kind, **nothing))
        yield


def _patch_from_now_on(me: Rank, *, staging: str = "auto", all_small: bool = False) -> None:
    """How models of this process are to be patched."""
    os.environ[STAGING] = staging
    # Else a vector's slice is small, and no matrix's.
    fsdp2_in_place.SMALL_NUMEL = SMALL_NUMEL if all_small else -(-SIDE // me.world_size)


def _model(settings: Settings) -> nn.Sequential:
    return nn.Sequential(*(Layer(settings.num_parameters) for _ in range(settings.num_units)))


def _sharded(settings: Settings, world_size: int) -> nn.Sequential:
    model, mesh = _model(settings), init_device_mesh("cpu", (world_size,))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not settings.keep)
    fully_shard(model, mesh=mesh)
    return model


def measure_rank(me: Rank, settings: Settings) -> list[dict[str, float]]:
    """CPU time per unit, in us, of each kind of microbatch in each repetition."""
    plain, fsdp, ours = _model(settings), _sharded(settings, me.world_size), _sharded(settings, me.world_size)
    for layer in fsdp:
        assert isinstance(layer, FSDPModule)
        layer.set_custom_all_gather(_NoGather())
        layer.set_custom_reduce_scatter(_NoScatter())
    keep_from_collector()
    turns, found = _Turns(me.rank, me.world_size, settings), []
    for repetition in range(settings.repetitions + 1):
        row = turns.take({ALONE: (fsdp, nullcontext)})
        _patch_from_now_on(me)
        with patch_fsdp(ours) as session:
            unpatched: Kinds = {PLAIN: (plain, nullcontext), FSDP2: (fsdp, nullcontext), UNSTAGED: (fsdp, _unstaged)}
            row |= turns.take({**unpatched, **_switching_off(ours, SWITCHED_OFF)})
            session.discard()
        _patch_from_now_on(me, staging="on")
        with patch_fsdp(ours) as session:
            row |= turns.take(_switching_off(ours, STAGED))
            session.discard()
        _patch_from_now_on(me, all_small=True)
        with patch_fsdp(ours) as session:
            row |= turns.take(_switching_off(ours, SMALL))
            session.discard()
        if repetition:  # the first warms up
            found.append(row)
        me.report(1.0 if me.rank == 0 else 0.0)
    return found


Kinds = Mapping[str, tuple[nn.Module, Callable[[], AbstractContextManager[None]]]]


def _switching_off(model: nn.Module, kinds: Mapping[str, Sequence[type]]) -> Kinds:
    return {name: (model, functools.partial(_switched_off, off)) for name, off in kinds.items()}


class _Turns:
    def __init__(self, rank: int, world_size: int, settings: Settings) -> None:
        self._rank, self._world_size, self._settings = rank, world_size, settings
        self._token, self._input = torch.zeros(1), torch.zeros(8, requires_grad=True)

    def take(self, kinds: Kinds) -> dict[str, float]:
        """Take this rank's turn; return the median of each kind over the rounds. Collective."""
        dist.barrier()
        if self._rank:
            dist.recv(self._token, self._rank - 1)
        rounds = [self._round(kinds) for _ in range(self._settings.rounds + 1)]
        if self._rank + 1 < self._world_size:
            dist.send(self._token, self._rank + 1)
        dist.barrier()
        return {name: statistics.median(row[name] for row in rounds[1:]) for name in kinds}  # the first is another one

    def _round(self, kinds: Kinds) -> dict[str, float]:
        row, before = {}, None
        for name, (model, doing) in kinds.items():
            if model is not before:  # the caches hold another one
                self._microbatch(model, doing)
            row[name], before = self._microbatch(model, doing), model
        return row

    def _microbatch(self, model: nn.Module, doing: Callable[[], AbstractContextManager[None]]) -> float:
        with doing():
            started_ns = time.thread_time_ns()
            model(self._input).sum().backward()
            return (time.thread_time_ns() - started_ns) * 1e-3 / self._settings.num_units


def summarize(ranks: Sequence[Sequence[dict[str, float]]], about: Mapping[str, int]) -> Entries:
    """The rows of the three tables: parts in us and in percent of FSDP2's own, ways, and kinds in us. ``about`` begins
    each row."""
    kinds = {name: np.array([row[name] for rows in ranks for row in rows]) for name in KINDS}
    differences = {name: kinds[more] - kinds[less] for name, (more, less) in PARTS.items()}
    own = np.median(differences[OWN])
    ways: Entries = {**about}
    for suffix, (staged, in_place) in WAYS.items():
        both = kinds[staged] - kinds[PLAIN], kinds[in_place] - kinds[PLAIN]
        ways |= {f"staged{suffix}": summary(both[0]), f"in_place{suffix}": summary(both[1])}
        ways[f"ratio{suffix}"] = summary(both[1] / both[0])
    return {
        "parts": [
            {**about, "part": name, "us": summary(us), "percent": summary(100 * us / own)}
            for name, us in differences.items()
        ],
        "ways": [ways],
        "kinds": [{**about, "kind": name, "us": summary(us)} for name, us in kinds.items()],
    }


def measure(
    run: Run,
    ranks: Annotated[Numbers, typer.Option(parser=numbers, help="Numbers of ranks, of one host, at least 2.")] = RANKS,
    parameters: Annotated[Numbers, typer.Option(parser=numbers, help="Numbers of parameters of a unit.")] = PARAMETERS,
    units: Annotated[int, typer.Option(min=1, help="That pose as layers.")] = Settings.num_units,
    rounds: Annotated[int, typer.Option(min=1, help="Of a repetition, one more first.")] = Settings.rounds,
    repetitions: Annotated[int, typer.Option(min=1, help="One more first.")] = Settings.repetitions,
    keep: Annotated[bool, typer.Option("--keep", help="reshard_after_forward=False")] = False,
) -> Entries:
    found: Entries = {"parts": [], "ways": [], "kinds": []}
    run.begin(len(ranks) * len(parameters) * (repetitions + 1))
    for num_ranks, num_parameters in itertools.product(ranks, parameters):
        run.describe(f"{num_ranks} ranks, {num_parameters} parameters")
        settings = Settings(units, rounds, repetitions, keep, num_parameters)
        about = {"ranks": num_ranks, "parameters": num_parameters}
        for entry, rows in summarize(run.ranks(num_ranks, measure_rank, settings), about).items():
            found[entry] += rows
        run.keep(found)
    return found


def figures(result: Entries) -> Figures:
    rows = [row for row in result["parts"] if (row["ranks"], row["parameters"]) == (2, 12)]
    percent = {row["part"]: row["percent"]["median"] for row in rows}
    yield (
        "**What meets FSDP2.** ",
        f"Staging is {percent['staging']:.0f} % of FSDP2's own host time for a unit of 12 parameters and a microbatch; "
        "ODC avoids it. What ODC does instead takes, bytes aside, "
        f"{percent['interception']:.0f} % for interception, {percent['guard']:.1f} % for change detection, "
        f"{percent['transfers']:.0f} % for two gathers and a push",
    )
    for ranks in dict.fromkeys(row["ranks"] for row in result["ways"]):
        rows = [row for row in result["ways"] if row["ranks"] == ranks]
        yield f"| {ranks} ranks |", f" {' | '.join(format(row['ratio']['median'], '.2f') + 'x' for row in rows)} |"


_KEYS = (Column("ranks", "ranks"), Column("parameters", "parameters"))

BENCHMARK = Benchmark(
    measure,
    (
        Table(
            "parts",
            "host time of a unit and microbatch, CPU us of the training thread: median (20th-80th percentile)",
            (*_KEYS, Column("part", "part")),
            (Column("us", "us", ".1f"), Column("% of FSDP2's own", "percent", ".1f")),
        ),
        Table(
            "ways",
            "the same of FSDP2 and ODC together: staged, in place, and what in place needs of it",
            _KEYS,
            [
                Column(f"{heading}{words}", f"{key}{suffix}", form)
                for suffix, words in (("", ""), ("_small", ", all small"))
                for heading, key, form in (
                    ("staged", "staged", ".1f"),
                    ("in place", "in_place", ".1f"),
                    ("x", "ratio", ".3f"),
                )
            ],
        ),
        Table("kinds", "kinds of microbatch", (*_KEYS, Column("kind", "kind")), (Column("us", "us", ".1f"),)),
    ),
    quick={"units": 8, "rounds": 3, "repetitions": 4},
    figures=(("docs/performance.md", figures, ["fsdp_host_time"]),),
)
