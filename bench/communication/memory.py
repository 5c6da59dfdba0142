"""Peak memory of a rank in a training step of an FSDP2 model: collectives, ODC staged, in place, by unit.

The model is a stack of transformer blocks (attention with one head, a feed-forward layer of four times the width, two
norms), each a unit, in float32, trained by AdamW. A microbatch is a few tokens, so activations are small beside a unit.
A step has two microbatches: during the last one all gradients that a way keeps exist. The ways:

    FSDP2           FSDP2 as it is, with gloo's collectives
    ODC staged      with ODC_STAGING=on: through FSDP2's flat buffers
    ODC in place    gathers write the parameters, pushes read the gradients
    ODC by unit     as in place, with odc.step_by_unit instead of the optimizer's step: of the gradients that the script
                    holds, only those of one unit exist at a time. They are counted in "rest"

The first table divides the memory at the peak:

    parameters, gradients, AdamW    the rank's shards, as the script holds them
    published, sums                 what ODC adds: the shard that others read, and the sum that others add to. Both are
                                    shared memory, counted at its owner, not where others map it
    other shared                    signals, and rounding to pages
    rest                            the peak less all of these: gathered parameters, unsharded gradients, buffers,
                                    activations. A way that makes its gradients after the backward can have none

The second table shows, for each phase of the step, the peak without parameters, AdamW's state and the gradients that
the script holds in this phase, in units. In a backward one unit of gathered parameters and one of gradients are needed.
The phase "end" is the optimizer's step with what ODC does before it. The last column is the largest single buffer: in
place no buffer is as large as a unit.

How the peak is found: the kernel keeps the high water mark of resident memory (VmHWM), which is reset before each phase
(/proc/self/clear_refs). So no peak is missed between two samples, and memory is seen whatever has allocated it; torch's
own counters would not see gloo's buffers. Three things are subtracted: resident shared memory and files, which do not
change within a phase, and the memory that the process had before it made the model. (A shorter model has trained a step
by then, so that libraries have made their own buffers.) malloc is told to return pieces from 64 KiB on to the kernel at
once, or the mark would include what malloc keeps. Ranks are forks; pages that a fork shares with its parent count for
it before and after. The kernel may be wrong by some hundred KiB, since it sums up its counters now and then.

The largest buffer comes from torch's profiler, which sees each allocation on the CPU, in a step of its own.

Of the steps after the first the one with the lowest peak counts, because libraries allocate for themselves now and
then. Of the ranks the one with the highest peak counts.

Not covered: GPUs, whose allocator keeps freed memory; bfloat16; units that are not resharded after the forward (FSDP2
does so with the outermost unit, here a norm).
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from odc import patch_fsdp, step_by_unit
from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Numbers, Run, Table, numbers
from odc.bench.harness.ranks import NotRunError, Rank
from odc.config import STAGING
from odc.fsdp_patch.pending import settled

FSDP2, STAGED, IN_PLACE, BY_UNIT = "FSDP2", "ODC staged", "ODC in place", "ODC by unit"
WAYS = {FSDP2: None, STAGED: "on", IN_PLACE: "auto", BY_UNIT: "auto"}
"""The ways, and the value of ODC_STAGING for each; None is FSDP2 without ODC."""
PHASES = ("forward", "backward", "end")
MILLIONS, RANKS = Numbers(25, 100), Numbers(2, 4)
MB = 1e-6


@dataclass(frozen=True)
class Settings:
    """What one run measures."""

    way: str
    width: int
    num_blocks: int = 8
    num_tokens: int = 4
    steps: int = 2
    """Measured steps; one more comes first."""


class Block(nn.Module):
    """A transformer block of 12 parameters, with about 12 times the square of the width as elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        hidden: torch.Tensor = self.up(self.norm2(x)).relu()
        return x + self.down(hidden)  # type: ignore[no-any-return]


def width_of(millions: int, num_blocks: int) -> int:
    """The width, a multiple of 64, with which ``num_blocks`` blocks have about ``millions`` million parameters."""
    return 64 * max(1, round(math.sqrt(millions * 1e6 / (12 * num_blocks)) / 64))


# What a process holds

_M_MMAP_THRESHOLD, _THRESHOLD_BYTES = -3, 1 << 16  # malloc.h


def keep_nothing_freed() -> None:
    """Have malloc return freed memory to the system from now on."""
    if not ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES):
        raise NotRunError("malloc of this system has no M_MMAP_THRESHOLD: freed memory would be counted")


def return_freed() -> None:
    """Return garbage, and the small pieces that malloc keeps, to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def status_bytes(field: str) -> int:
    """The size under ``field`` in /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise NotRunError(f"/proc/self/status of this system has no {field}")


def begin_peak() -> None:
    """Reset the high water mark to the present memory."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise NotRunError(f"this system does not reset the high water mark of memory: {error}") from None


def private_peak() -> int:
    """The largest anonymous memory since :func:`begin_peak`, in bytes."""
    return status_bytes("VmHWM") - status_bytes("RssFile") - status_bytes("RssShmem")


def shared_bytes(world_size: int) -> int:
    """Bytes of ODC's shared memory of this rank. A rank maps the memory of all ranks, whose sizes are equal."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:odc-" in line:
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            total += high - low
    return total // world_size


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the tensors' memory, or of this rank's parts of it. Memory that several tensors share counts once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        if tensor is not None:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            storages[storage.data_ptr()] = int(storage.nbytes())
    return sum(storages.values())


# A rank


class _Training:
    """A model, its steps, and what it holds."""

    def __init__(self, me: Rank, settings: Settings) -> None:
        torch.manual_seed(0)
        width, mesh = settings.width, init_device_mesh("cpu", (me.world_size,))
        blocks = [Block(width) for _ in range(settings.num_blocks)]
        self._model = nn.Sequential(*blocks, nn.LayerNorm(width))
        self.unit_bytes = storage_bytes(blocks[0].parameters())
        self.num_parameters = sum(p.numel() for p in self._model.parameters())
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._data = torch.randn(1, settings.num_tokens, width)
        self._loss: torch.Tensor | None = None
        self._is_by_unit = settings.way == BY_UNIT

    def patched(self, way: str) -> AbstractContextManager[Any]:
        """The session of a way of ODC's; for FSDP2 alone a context of None."""
        staging = WAYS[way]
        if staging is None:
            return nullcontext()
        os.environ[STAGING] = staging
        return patch_fsdp(self._model)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that exist now, without waiting for gradients to come."""
        return storage_bytes(settled(parameter.grad) for parameter in self._model.parameters())

    @property
    def parameter_bytes(self) -> int:
        return storage_bytes(self._model.parameters())

    @property
    def state_bytes(self) -> int:
        states = self._optimizer.state.values()
        return storage_bytes(value for state in states for value in state.values() if isinstance(value, torch.Tensor))

    def parts(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """The phases of a step, one after the other, with what each does."""
        for _ in range(2):
            yield "forward", self._forward
            yield "backward", self._backward
        yield "end", self._end

    def clear(self) -> None:
        """Clear gradients after a step."""
        self._optimizer.zero_grad()

    def _end(self) -> None:
        if self._is_by_unit:
            step_by_unit(self._model, self._optimizer)
        else:
            self._optimizer.step()

    def _forward(self) -> None:
        self._loss = self._model(self._data).square().mean()

    def _backward(self) -> None:
        assert self._loss is not None
        self._loss.backward()  # type: ignore[no-untyped-call]
        self._loss = None


Peaks = dict[str, dict[str, int]]
"""Largest values by phase, in bytes: private memory (``peak``), ``gradients`` that the script held before or after the
phase, and private memory ``beside`` these."""


def measure_rank(me: Rank, settings: Settings) -> dict[str, Any]:
    """Measure this rank: the bytes that it holds, and its peaks in each step."""
    keep_nothing_freed()
    _warm_up(me, replace(settings, num_blocks=2))
    return_freed()
    begin_peak()
    before, training = private_peak(), _Training(me, settings)
    with training.patched(settings.way) as session:
        steps = []
        for step in range(settings.steps + 1):
            peaks = _peaks_of_a_step(training, before)
            if step:  # the first makes AdamW's state
                steps.append(peaks)
            me.report(1.0 if me.rank == 0 else 0.0)
        found = {
            "num_parameters": training.num_parameters,
            "unit": training.unit_bytes,
            "parameters": training.parameter_bytes,
            "gradients": steps[-1]["end"]["gradients"],
            "state": training.state_bytes,
            "shared": shared_bytes(me.world_size),
            "published": session.memory().published_shards if session else 0,
            "sums": session.memory().sums if session else 0,
            "steps": steps,
            "largest_buffer": max(_allocations(training)),
        }
        me.report(1.0 if me.rank == 0 else 0.0)
    return found


def _warm_up(me: Rank, settings: Settings) -> None:
    """Libraries load what they need."""
    training = _Training(me, settings)
    with training.patched(settings.way):
        for _, part in training.parts():
            part()
        training.clear()


def _peaks_of_a_step(training: _Training, before: int) -> Peaks:
    return_freed()
    found: Peaks = {phase: {"peak": 0, "gradients": 0, "beside": 0} for phase in PHASES}
    for phase, part in training.parts():
        held = training.gradient_bytes
        begin_peak()
        part()
        peak = private_peak() - before
        held = max(held, training.gradient_bytes)
        for name, value in (("peak", peak), ("gradients", held), ("beside", peak - held)):
            found[phase][name] = max(found[phase][name], value)
    training.clear()
    return found


def _allocations(training: _Training) -> list[int]:
    """Sizes of the buffers that torch allocates in a step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _, part in training.parts():
            part()
    training.clear()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]"]


# The result


def summarize(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The row of one way, in bytes and in units: that of the rank with the largest peak."""
    return max((_row_of(rank) for rank in ranks), key=lambda row: row["peak"])


def _row_of(rank: Mapping[str, Any]) -> dict[str, Any]:
    names = ("parameters", "gradients", "state", "published", "sums")
    row: dict[str, Any] = {"num_parameters": rank["num_parameters"], "unit": rank["unit"]}
    row |= {name: rank[name] for name in names}
    row["other_shared"] = rank["shared"] - rank["published"] - rank["sums"]
    row["private_peak"] = min(max(step[phase]["peak"] for phase in PHASES) for step in rank["steps"])
    row["peak"] = row["private_peak"] + rank["shared"]
    row["rest"] = row["peak"] - sum(row[name] for name in (*names, "other_shared"))
    row["peak_units"] = row["peak"] / rank["unit"]
    always = rank["parameters"] + rank["state"]
    for phase in PHASES:
        row[f"{phase}_units"] = (min(step[phase]["beside"] for step in rank["steps"]) - always) / rank["unit"]
    row["largest_buffer_units"] = rank["largest_buffer"] / rank["unit"]
    return row


def compare(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """Add the comparison with FSDP2's peak to the rows, which are keyed by way. Return what is wrong with ODC in
    place."""
    plain, ours = rows[FSDP2], rows[IN_PLACE]
    for row in rows.values():
        row["ratio"] = row["peak"] / plain["peak"]
        row["more"] = row["peak"] - plain["peak"]
    missed = []
    if ours["more"] >= ours["published"] + ours["sums"]:
        missed.append(f"its peak is {ours['more'] * MB:.0f} MB above FSDP2's, which is not less than its shared memory")
    if ours["backward_units"] > 2.5:
        missed.append(f"a backward needs {ours['backward_units']:.2f} units beside what the script holds, not 2")
    if ours["largest_buffer_units"] > 0.9:
        missed.append(f"there is a buffer of {ours['largest_buffer_units']:.2f} units")
    return missed


def measure(
    run: Run,
    parameters: Annotated[Numbers, typer.Option(parser=numbers, help="Of the model, in millions.")] = MILLIONS,
    ranks: Annotated[Numbers, typer.Option(parser=numbers, help="Numbers of ranks, of one host, at least 2.")] = RANKS,
    blocks: Annotated[int, typer.Option(min=3, help="Units.")] = Settings.num_blocks,
    tokens: Annotated[int, typer.Option(min=1, help="Of a microbatch.")] = Settings.num_tokens,
    steps: Annotated[int, typer.Option(min=1, help="One more first.")] = Settings.steps,
) -> Entries:
    # Its profiler would say on standard error that it begins, and of what it has not seen the beginning.
    os.environ |= {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    found: list[dict[str, Any]] = []
    run.begin(len(parameters) * len(ranks) * len(WAYS) * (steps + 2))
    for millions, num_ranks in itertools.product(parameters, ranks):
        rows = {}
        for way in WAYS:
            run.describe(f"{millions}M, {num_ranks} ranks, {way}")
            settings = Settings(way, width_of(millions, blocks), blocks, tokens, steps)
            about = {"millions": millions, "ranks": num_ranks, "way": way}
            rows[way] = {**about, **summarize(run.ranks(num_ranks, measure_rank, settings))}
        for text in compare(rows):
            run.miss(f"{millions}M, {num_ranks} ranks, {IN_PLACE}: {text}")
        found += rows.values()
        run.keep({"results": found})
    return {"results": found}


def figures(result: Entries) -> Figures:
    for row in result["results"]:
        names = ("parameters", "gradients", "state", "published", "sums", "rest", "peak")
        mb = " | ".join(f"{row[name] * MB:.0f}" for name in names)
        units = " | ".join(f"{row[f'{phase}_units']:.1f}" for phase in ("forward", "backward"))
        yield (
            f"| {row['millions']}M, {row['ranks']} ranks | {row['way']} |",
            f" {mb} | {row['ratio']:.2f}x | {units} | {row['largest_buffer_units']:.2f} |",
        )


_KEYS = (Column("M", "millions"), Column("ranks", "ranks"), Column("way", "way"))

BENCHMARK = Benchmark(
    measure,
    (
        Table(
            "results",
            "what the peak of a rank's memory in a step is, MB",
            _KEYS,
            (
                *(
                    Column(heading, key, ".1f", MB)
                    for heading, key in (
                        ("parameters", "parameters"),
                        ("gradients", "gradients"),
                        ("AdamW", "state"),
                        ("published", "published"),
                        ("sums", "sums"),
                        ("other shared", "other_shared"),
                        ("rest", "rest"),
                        ("peak", "peak"),
                    )
                ),
                Column("x", "ratio", ".2f"),
            ),
        ),
        Table(
            "results",
            "in units: the peak; by phase, beside what the script holds; the largest buffer",
            _KEYS,
            (
                Column("unit MB", "unit", ".1f", MB),
                Column("peak", "peak_units", ".2f"),
                *(Column(phase, f"{phase}_units", ".2f") for phase in PHASES),
                Column("largest buffer", "largest_buffer_units", ".2f"),
            ),
        ),
    ),
    quick={"parameters": Numbers(25), "ranks": Numbers(2), "steps": 1},
    figures=(("docs/performance.md", figures, ["memory"]),),
)
