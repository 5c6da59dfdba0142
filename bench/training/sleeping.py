"""The device emulator: models that sleep where others compute, with real FSDP2 units or real exchanges around them.

:class:`SleepingModel` is for :mod:`.emulated` and the benchmarks that work like it. :class:`ModalityModel` is for
:mod:`.multimodal_emulated`, and records what a rank did.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from odc import ItemExchange
from odc.balance.checks import IntArray
from odc.balance.layout import microbatch_costs
from odc.balance.multimodal import Encoder, Phase
from odc.balance.multimodal.carriers import Cargo, Carrier, Mover
from odc.balance.multimodal.schedule import FORWARD_SHARE
from odc.bench.planning.multimodal_sizes import ModelSize
from odc.bench.training.bubble import Segment, cut
from odc.timeline import Span


class Clock:
    """Emulates compute by sleeping. If a sleep lasts too long, the next ones are shorter."""

    def __init__(self) -> None:
        self._owed_ns = 0
        self.slept_ns = 0
        """Since the last :meth:`take`."""
        self.meet: Callable[[], None] = lambda: None
        """Called before each forward and backward of a layer."""

    def compute(self, seconds: float) -> None:
        self._owed_ns += round(seconds * 1e9)
        if self._owed_ns <= 0:
            return
        started_ns = time.monotonic_ns()
        time.sleep(self._owed_ns * 1e-9)
        spent_ns = time.monotonic_ns() - started_ns
        self._owed_ns -= spent_ns
        self.slept_ns += spent_ns

    def take(self) -> int:
        """Nanoseconds slept since the last call. If the last sleep was too long, the next ones are not shorter for it
        any more."""
        spent_ns, self.slept_ns, self._owed_ns = self.slept_ns, 0, 0
        return spent_ns


class _Work(torch.autograd.Function):
    """Outputs of the given shapes, in whose backward ``compute`` is called and each input has a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[[], None],
        dtype: torch.dtype,
        shapes: Sequence[Sequence[int]],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.compute, ctx.inputs = compute, [(tensor.shape, tensor.dtype) for tensor in inputs]
        return tuple(torch.zeros(tuple(shape), dtype=dtype) for shape in shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.compute()
        return (None, None, None, *(torch.zeros(shape, dtype=dtype) for shape, dtype in ctx.inputs))


class SleepingLayer(nn.Module):
    """A layer with one weight of ``numel`` elements, and the time that it takes."""

    def __init__(self, numel: int, clock: Clock) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self.seconds = 0.0
        """Of a forward and backward."""
        self._clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._compute(FORWARD_SHARE * self.seconds)
        backward = partial(self._compute, (1 - FORWARD_SHARE) * self.seconds)
        out: torch.Tensor
        (out,) = _Work.apply(backward, x.dtype, [x.shape], x, self.weight)  # type: ignore[no-untyped-call]
        return out

    def _compute(self, seconds: float) -> None:
        self._clock.meet()
        self._clock.compute(seconds)


class SleepingModel(nn.Module):
    """Layers of equal cost, each a unit of FSDP2, as decoder layers usually are."""

    def __init__(self, num_layers: int, numel: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.clock = Clock()
        self._sleeping = [SleepingLayer(numel, self.clock) for _ in range(num_layers)]
        self.layers = nn.ModuleList(self._sleeping)
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)
        self._optimizer = torch.optim.SGD(self.parameters(), lr=1e-6)

    def step(self) -> None:
        """End a minibatch."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def microbatch(self, seconds: float) -> None:
        """Run a forward and backward that compute for ``seconds`` together."""
        for layer in self._sleeping:
            layer.seconds = seconds / len(self._sleeping)
        self(torch.zeros(1, requires_grad=True)).sum().backward()


# A model of several modalities, and what a rank did with it


DTYPE = torch.bfloat16
"""The dtype of the encoders' outputs and of their gradients."""


@dataclass
class RankRun:
    """One rank's run, untimed minibatches included."""

    spans: list[Span] = field(default_factory=list)
    """Spans of the kinds "minibatch"; inside it "load", "encode", "backward", "language", "move"; inside these "wait"
    and "compute"."""
    cost_s: list[float] = field(default_factory=list)
    """Seconds that each minibatch should compute, by the cost model. ``compute_ns`` is the time slept for them."""
    compute_ns: list[int] = field(default_factory=list)
    moving_cpu_ns: list[int] = field(default_factory=list)
    """CPU time of the thread that trains, while it moves tensors."""
    planning_s: list[float] = field(default_factory=list)
    num_bytes: list[dict[str, int]] = field(default_factory=list)
    """Bytes that came from other ranks in each minibatch, by kind of cargo."""


class ModalityModel:
    """The model of one rank: it sleeps instead of computing, and its tensors have the right sizes.

    Args:
        width: elements of a row of an encoder's output.
        lockstep: all ranks meet before each forward and backward, and behind the backward, of each microbatch.
    """

    def __init__(self, size: ModelSize, width: int, seconds_per_flop: float, *, lockstep: bool) -> None:
        self.run = RankRun()
        self.clock = Clock()
        self.cost_s = 0.0
        self.moving_cpu_ns = 0
        self.minibatch = 0
        self._size, self._width = size, width
        self._phases = {phase.name: phase for phase in (*size.phases, size.language)}
        self._seconds_per_flop, self._lockstep = seconds_per_flop, lockstep
        self._anchor = torch.zeros((), requires_grad=True)

    @contextmanager
    def span(self, kind: str, label: str) -> Iterator[None]:
        """Record a span of what is done inside."""
        start_ns, cpu_ns = time.monotonic_ns(), time.thread_time_ns()
        yield
        if kind == "move":
            self.moving_cpu_ns += time.thread_time_ns() - cpu_ns
        self.run.spans.append(Span(kind, label, start_ns, time.monotonic_ns(), self.minibatch))

    def meet(self, why: str) -> None:
        """Wait for all ranks."""
        with self.span("wait", why):
            dist.barrier()

    def encoders(self) -> dict[str, Encoder]:
        """The encoders, as :func:`run_minibatch` takes them."""

        def make(name: str, token_bytes: int) -> Encoder:
            return Encoder(
                lambda items: self._encode(name, [len(item) for (item,) in items]),
                self._width,
                DTYPE,
                dummy=lambda: (torch.zeros(1, token_bytes, dtype=torch.uint8),),
            )

        return {name: make(name, size.token_bytes) for name, size in self._size.encoders.items()}

    def _encode(self, name: str, tokens: Sequence[int]) -> list[torch.Tensor]:
        lengths = np.array(tokens, dtype=np.int64)
        seconds = self._seconds(self._phases[name], lengths)
        self.compute(name, FORWARD_SHARE * seconds)
        shapes = [(rows, self._width) for rows in self._size.rows(name, lengths).tolist()]
        return list(self._work(name, seconds, shapes))

    def language(
        self, texts: Sequence[Mapping[str, torch.Tensor]], outputs: Mapping[str, Sequence[torch.Tensor]]
    ) -> Any:
        """Run the language model; return the loss of a microbatch."""
        rest = {name: iter(found) for name, found in outputs.items()}
        lengths = []
        for text in texts:
            numbers = zip(rest.values(), text["num_items"].tolist(), strict=True)
            lengths.append(len(text["ids"]) + sum(len(next(items)) for items, number in numbers for _ in range(number)))
        seconds = self._seconds(self._phases["language"], np.array(lengths, dtype=np.int64))
        self.compute("language", FORWARD_SHARE * seconds)
        leaves = [leaf for found in outputs.values() for leaf in found]
        return self._work("language", seconds, [()], *leaves)[0]

    def _work(
        self, name: str, seconds: float, shapes: Sequence[tuple[int, ...]], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """What a forward gives that is a part of so many seconds; its backward is the rest of them."""
        backward = partial(self._backward, name, (1 - FORWARD_SHARE) * seconds)
        found: tuple[torch.Tensor, ...] = _Work.apply(backward, DTYPE, shapes, self._anchor, *inputs)  # type: ignore[no-untyped-call]
        return found

    def _seconds(self, phase: Phase, lengths: IntArray) -> float:
        together = [[list(range(lengths.size))]]
        costs = microbatch_costs(together, phase.cost(lengths), lengths, phase.layout)
        return self._seconds_per_flop * float(costs[0, 0])

    def compute(self, name: str, seconds: float) -> None:
        """Compute a forward or a backward."""
        if self._lockstep:
            self.meet(name)
        self.cost_s += seconds
        with self.span("compute", name):
            self.clock.compute(seconds)

    def _backward(self, name: str, seconds: float) -> None:
        self.compute(name, seconds)
        if self._lockstep:  # where gradients of parameters are reduced
            self.meet(name)


class Counting:
    """A mover that counts what comes from other ranks, and separates waiting for them from moving.

    Args:
        items: that of an :class:`OnDemand`, whose runtime records its waits.
    """

    def __init__(self, mover: Mover, rank: ModalityModel, items: ItemExchange | None) -> None:
        self.rank, self.moved = mover.rank, mover.moved
        self.num_bytes: Counter[str] = Counter()
        self._mover, self._model, self._items = mover, rank, items

    def carry(self, cargo: Cargo) -> Carrier:
        return _Counted(self._mover.carry(cargo), cargo, self)

    def abort(self, error: BaseException) -> None:
        self._mover.abort(error)

    def meet(self, channel: str) -> None:
        if self._items is None:
            self._model.meet(channel)

    @contextmanager
    def waits(self, channel: str) -> Iterator[None]:
        """Record a wait if what is done inside waits for another rank."""
        if self._items is None:
            yield
            return
        before, start_ns = self._items.stats.wait_s, time.monotonic_ns()
        yield
        waited_ns = round((self._items.stats.wait_s - before) * 1e9)
        if waited_ns:
            self._model.run.spans.append(Span("wait", channel, start_ns, start_ns + waited_ns, self._model.minibatch))


class _Counted(Carrier):
    def __init__(self, carrier: Carrier, cargo: Cargo, counting: Counting) -> None:
        self._carrier, self._channel, self._counting = carrier, cargo.channel, counting
        self._own = set(cargo.route.source[counting.rank].tolist())

    def put(self, part: int, tensors: Sequence[torch.Tensor]) -> None:
        with self._counting.waits(self._channel):
            self._carrier.put(part, tensors)

    def meet(self, problem: ValueError | None = None) -> None:
        self._counting.meet(self._channel)
        self._carrier.meet(problem)

    def get(self, items: Sequence[int]) -> list[torch.Tensor]:
        with self._counting.waits(self._channel):
            found = self._carrier.get(items)
        came = sum(tensor.nbytes for item, tensor in zip(items, found, strict=True) if item not in self._own)
        self._counting.num_bytes[self._channel] += came
        return found

    def close(self) -> None:
        self._carrier.close()


def segments(run: RankRun, minibatch: int) -> list[Segment]:
    """What a rank did in a minibatch, at each moment one thing: a phase by its name, "move", "wait", "load" or
    "other"."""
    spans = [span for span in run.spans if span.minibatch == minibatch]
    activities = {"minibatch": "other", "move": "move", "wait": "wait", "load": "load"}
    found = [(activities[span.kind], span) for span in spans if span.kind in activities]
    phases = [(span.label, span) for span in spans if span.kind == "compute"]
    return list(cut(found + phases, ("wait", *dict(phases), "move", "load", "other")))
