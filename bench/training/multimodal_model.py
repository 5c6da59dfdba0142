"""A model of several modalities that sleeps, for :mod:`.multimodal_emulated`, and what a rank did with it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from odc import ItemExchange
from odc.balance.checks import IntArray
from odc.balance.layout import microbatch_costs
from odc.balance.multimodal import Encoder, Phase
from odc.balance.multimodal.carriers import Cargo, Carrier, Mover
from odc.balance.multimodal.schedule import FORWARD_SHARE
from odc.bench.planning.multimodal_sizes import ModelSize
from odc.bench.training.bubble import Segment, cut
from odc.bench.training.emulated_model import Clock
from odc.timeline import Span

DTYPE = torch.bfloat16
"""Of what encoders give, and its gradients."""


@dataclass
class RankRun:
    """One rank's run, untimed minibatches included."""

    spans: list[Span] = field(default_factory=list)
    """Kinds: "minibatch"; within, "load", "encode", "backward", "language", "move"; within these, "wait", "compute"."""
    cost_s: list[float] = field(default_factory=list)
    """Of each minibatch, by the cost model of what came; ``compute_ns``: what was slept of it."""
    compute_ns: list[int] = field(default_factory=list)
    moving_cpu_ns: list[int] = field(default_factory=list)
    """Of the thread that trains."""
    planning_s: list[float] = field(default_factory=list)
    num_bytes: list[dict[str, int]] = field(default_factory=list)
    """That came from other ranks, of each cargo."""


class SleepingModel:
    """The model of one rank: sleeps, and memory of the right sizes.

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
        """Record what is done inside."""
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
        """As :func:`run_minibatch` wants them."""

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
        return list(_Work.apply(self, name, (1 - FORWARD_SHARE) * seconds, shapes, self._anchor))  # type: ignore[no-untyped-call]

    def language(
        self, texts: Sequence[Mapping[str, torch.Tensor]], outputs: Mapping[str, Sequence[torch.Tensor]]
    ) -> Any:
        """The loss of a microbatch."""
        rest = {name: iter(found) for name, found in outputs.items()}
        lengths = []
        for text in texts:
            numbers = zip(rest.values(), text["num_items"].tolist(), strict=True)
            lengths.append(len(text["ids"]) + sum(len(next(items)) for items, number in numbers for _ in range(number)))
        seconds = self._seconds(self._phases["language"], np.array(lengths, dtype=np.int64))
        self.compute("language", FORWARD_SHARE * seconds)
        leaves = [leaf for found in outputs.values() for leaf in found]
        (loss,) = _Work.apply(  # type: ignore[no-untyped-call]
            self, "language", (1 - FORWARD_SHARE) * seconds, [()], self._anchor, *leaves
        )
        return loss

    def _seconds(self, phase: Phase, lengths: IntArray) -> float:
        together = [[list(range(lengths.size))]]
        costs = microbatch_costs(together, phase.cost(lengths), lengths, phase.layout)
        return self._seconds_per_flop * float(costs[0, 0])

    def compute(self, name: str, seconds: float) -> None:
        """A forward or a backward."""
        if self._lockstep:
            self.meet(name)
        self.cost_s += seconds
        with self.span("compute", name):
            self.clock.compute(seconds)

    def end_of_backward(self, name: str) -> None:
        """Where gradients of parameters are reduced."""
        if self._lockstep:
            self.meet(name)


class _Work(torch.autograd.Function):
    """Outputs of the given shapes, whose backward is a sleep that gives each of the inputs a gradient of its shape."""

    @staticmethod
    def forward(
        ctx: Any,
        rank: SleepingModel,
        name: str,
        seconds: float,
        shapes: Sequence[tuple[int, ...]],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.rank, ctx.name, ctx.seconds = rank, name, seconds
        ctx.inputs = [(tensor.shape, tensor.dtype) for tensor in inputs]
        return tuple(torch.zeros(shape, dtype=DTYPE) for shape in shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.rank.compute(ctx.name, ctx.seconds)
        ctx.rank.end_of_backward(ctx.name)
        return (None, None, None, None, *(torch.zeros(shape, dtype=dtype) for shape, dtype in ctx.inputs))


class Counting:
    """A mover that counts what comes from other ranks, and tells waiting for them from moving.

    Args:
        items: that of an :class:`OnDemand`, whose runtime records its waits.
    """

    def __init__(self, mover: Mover, rank: SleepingModel, items: ItemExchange | None) -> None:
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
        """Around what may wait for another rank by itself."""
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
    """What a rank did in a minibatch, for :func:`.plots.plot_timelines`: the phases by name, "move", "wait",
    and "other"."""
    spans = [span for span in run.spans if span.minibatch == minibatch]
    activities = {"minibatch": "other", "move": "move", "wait": "wait"}
    found = [(activities[span.kind], span) for span in spans if span.kind in activities]
    phases = [(span.label, span) for span in spans if span.kind == "compute"]
    return list(cut(found + phases, ("wait", *dict(phases), "move", "other")))
