"""What it costs to notice parameters that were changed by hand: gathers and pushes with that guard on and off.

Two CPU ranks train a stack of equal blocks (twelve parameters each, one unit each; float32 parameters that compute in
bfloat16) under FSDP2 and under FSDP1. What is timed is a call of FSDP's own all-gather and reduce-scatter of a block,
with everything that on-demand communication does in it. The guard is on in every other minibatch and off in those
between, so that a drift of the machine's speed meets both. The ranks start each minibatch together, after all have
published, so that nothing waits. The table shows medians over the calls of both ranks, the 20th and 80th percentile,
and the median time within the guard itself, which is measured in the same calls: on a busy machine the difference of
"on" and "off" says less.

- "first gather", "later gather": of a unit in the forwards of a minibatch. The first is that of the first forward.
- "backward gather": under FSDP2 no look is due, the push comes next.
- "first push", "later push": the first one in a minibatch begins it, which looks at all units.
- "first eval", "later evaluation": gathers of a unit under ``no_grad``, behind a step.
- "publish": a unit after the step, with what the guard notes then; there is no "off".

Not covered: GPUs, where the comparisons are launches whose answers come later; units of very many parameters.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import odc
from odc.bench.harness.benchmark import Benchmark, Column, Entries, Run, Table, summary
from odc.bench.harness.ranks import Rank

NUM_RANKS = 2
NUM_BLOCKS = 4
NUM_MICROBATCHES = 3
WIDTHS = {"1M": 288, "10k": 28}
"""Of a block of so many parameters."""

FSDPS = ("FSDP2", "FSDP1")
OPERATIONS = (
    "first gather",
    "later gather",
    "backward gather",
    "first push",
    "later push",
    "first eval",
    "later eval",
    "publish",
)

Key = tuple[str, bool]  # operation, whether the guard was on
Sample = tuple[float, float]  # seconds of a call, and of these in the guard


class Block(nn.Module):
    """12 * width^2 parameters in twelve tensors, as in a transformer's layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.qkv(self.norm(x)).chunk(3, -1)[0])
        result: torch.Tensor = x + self.down(torch.tanh(self.up(self.second_norm(x))))
        return result


def build(fsdp: str, width: int) -> Any:
    """A sharded stack of blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(width) for _ in range(NUM_BLOCKS)], nn.Linear(width, 8))
    if fsdp == "FSDP1":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        )
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*list(model)[:NUM_BLOCKS], model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


class Stopwatch:
    """Times FSDP's collectives of the blocks, from where FSDP calls them."""

    def __init__(self, session: odc.Session) -> None:
        self.samples: defaultdict[Key, list[Sample]] = defaultdict(list)
        self._in_guard_s = 0.0
        self._is_guarded = self._is_evaluation = False
        self._seen: set[object] = set()
        self._publisher: Any = session._publisher
        # "guard_before.json" is of a time when one method of the publisher did all of this.
        self._guard: Any = getattr(session, "_guard", self._publisher)
        names = ("check_gather", "check_push", "compare", "check_unchanged")
        self._checks = {name: self._measured(getattr(self._guard, name, None)) for name in names}
        self._watch_publications()
        for index, unit in list(enumerate(session._units))[1:]:  # the first is the root, which is small
            self._enter(index, unit)

    def start(self, *, is_guarded: bool, is_evaluation: bool) -> None:
        """The next minibatch, or the evaluation in its place."""
        self._seen.clear()
        self._is_guarded, self._is_evaluation = is_guarded, is_evaluation
        for name, check in self._checks.items():
            setattr(self._guard, name, check if is_guarded else lambda *args, **kwargs: None)

    def _measured(self, check: Any) -> Callable[..., None]:
        def measured(*args: Any, **kwargs: Any) -> None:
            before_s, start = self._in_guard_s, time.perf_counter()
            check(*args, **kwargs)
            self._in_guard_s = before_s + time.perf_counter() - start  # what it calls of itself is within

        return measured

    def _enter(self, index: int, unit: Any) -> None:
        if isinstance(unit.module, FullyShardedDataParallel):
            methods, hook = vars(unit.handle), unit.module._comm_hook
            assert hook is not None, "a patched unit has one"
            methods["_all_gather_flat_param"] = self._timed(index, "gather", methods["_all_gather_flat_param"])
            unit.module._comm_hook = self._timed(index, "push", hook)
            return
        gather: Any = unit.group._all_gather_comm
        push: Any = unit.group._reduce_scatter_comm
        unit.group._all_gather_comm = _Timed(gather, self._timed(index, "gather", gather))
        unit.group._reduce_scatter_comm = _Timed(push, self._timed(index, "push", push))

    def _timed(self, unit: int, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._in_guard_s, start = 0.0, time.perf_counter()
            result = call(*args, **kwargs)
            self._add((time.perf_counter() - start, self._in_guard_s), unit, kind)
            return result

        return timed

    def _add(self, sample: Sample, unit: int, kind: str) -> None:
        name = "eval" if self._is_evaluation else kind
        if kind == "gather" and torch._C._current_graph_task_id() != -1:
            self.samples["backward gather", self._is_guarded].append(sample)
            return
        place = name if kind == "push" else (name, unit)
        which = "later" if place in self._seen else "first"
        self._seen.add(place)
        self.samples[f"{which} {name}", self._is_guarded].append(sample)

    def _watch_publications(self) -> None:
        publish = self._publisher._publish

        def timed(index: int) -> None:
            start = time.perf_counter()
            publish(index)
            if index > 0:
                self.samples["publish", True].append((time.perf_counter() - start, 0.0))

        self._publisher._publish = timed


class _Timed:
    """In the place of one of FSDP2's communication objects."""

    def __init__(self, inner: Any, call: Callable[..., Any]) -> None:
        self.allocate = inner.allocate
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def samples_of(fsdp: str, width: int, num_rounds: int) -> dict[Key, list[Sample]]:
    """This rank's samples."""
    model = build(fsdp, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(8, width)
    with odc.patch_fsdp(model) as session:
        stopwatch = Stopwatch(session)
        for index in range(num_rounds + 1):
            if index == 1:  # the first round has warmed up
                stopwatch.samples.clear()
            for is_evaluation, is_guarded in itertools.product((False, True), (False, True)):
                stopwatch.start(is_guarded=is_guarded, is_evaluation=is_evaluation)
                dist.barrier()
                for _ in range(NUM_MICROBATCHES):
                    with torch.set_grad_enabled(not is_evaluation):
                        loss = model(x).float().sum()
                    if not is_evaluation:
                        loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return dict(stopwatch.samples)


def measure_rank(me: Rank, num_rounds: int) -> list[tuple[str, str, dict[Key, list[Sample]]]]:
    """A rank's samples of every combination."""
    found = []
    for fsdp, unit in itertools.product(FSDPS, WIDTHS):
        found.append((fsdp, unit, samples_of(fsdp, WIDTHS[unit], num_rounds)))
        me.report(1.0 if me.rank == 0 else 0.0)
    return found


def measure(
    run: Run,
    rounds: Annotated[
        int, typer.Option(min=1, help="Of four minibatches: guarded and not, two of them evaluate.")
    ] = 50,
) -> Entries:
    run.begin(len(FSDPS) * len(WIDTHS), "combinations")
    rows = []
    for answers in zip(*run.ranks(NUM_RANKS, measure_rank, rounds), strict=True):
        fsdp, unit, samples = answers[0]
        for operation in (name for name in OPERATIONS if (name, True) in samples):
            row: dict[str, Any] = {"fsdp": fsdp, "unit": unit, "operation": operation}
            for name, is_guarded in (("off", False), ("on", True)):
                if (operation, is_guarded) in samples:
                    calls = [sample for answer in answers for sample in answer[2][operation, is_guarded]]
                    row[f"{name}_s"] = summary([seconds for seconds, _ in calls])
                    row["in_guard_s"], row["num_samples"] = statistics.median(guard for _, guard in calls), len(calls)
            if "off_s" in row:
                row["share"] = row["in_guard_s"] / row["off_s"]["median"]
            rows.append(row)
    return {"rows": rows}


BENCHMARK = Benchmark(
    measure,
    "1 min, quick 50 s",
    (
        Table(
            "rows",
            f"the guard against changed parameters, {NUM_RANKS} ranks, us",
            (Column("FSDP", "fsdp"), Column("unit", "unit"), Column("operation", "operation")),
            (
                Column("off", "off_s", ".1f", 1e6),
                Column("on", "on_s", ".1f", 1e6),
                Column("guard", "in_guard_s", ".1f", 1e6),
                Column("of it", "share", ".0%"),
            ),
        ),
    ),
    quick={"rounds": 5},
)
