"""Named streams of a rank, slow work on them, comparisons without a waiting host; and random minibatches on streams.

On a GPU these are torch's streams. On a CPU the transport's engine may have streams of its own (``bench/fake``); work
then goes through ``engine.run`` and happens later, in the order of its stream.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from odc import Runtime, RuntimeConfig
from odc.bench.gpu.device import cycles_per_s, new_stream, seconds_between, spin, timing_event
from odc.bench.harness import units
from odc.bench.harness.ranks import Rank
from odc.engines.base import Engine

SYNCHRONIZE_LIMIT_S = 60.0


class Streams:
    """Streams of an engine that poses as a GPU's. If the engine has none, everything happens within the call."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def on(self, name: str) -> AbstractContextManager[object]:
        """Inside, this thread's work goes to the stream of that name."""
        enter: Callable[[str], AbstractContextManager[object]] | None = getattr(self.engine, "on", None)
        return nullcontext() if enter is None else enter(name)

    def delay(self, seconds: float) -> None:
        """Keep the current stream busy for about so long."""
        self.engine.run(lambda: time.sleep(seconds))

    def mark(self) -> Callable[[], bool]:
        """A question to ask later: has the current stream done all it was given so far?"""
        done = threading.Event()
        self.engine.run(done.set)
        return done.is_set

    def stamp(self) -> Callable[[], float]:
        """Ask later for the time at which the current stream has come to this point, in seconds since a fixed moment of
        this rank."""
        times: list[float] = []
        self.engine.run(lambda: times.append(time.perf_counter()))
        return lambda: times[0]

    def synchronize(self) -> None:
        """As ``torch.cuda.synchronize()``: the host waits for all streams of this rank."""
        if not self.engine.synchronize(SYNCHRONIZE_LIMIT_S):
            raise TimeoutError(f"streams were not idle after {SYNCHRONIZE_LIMIT_S:g} s")


class CudaStreams(Streams):
    """The same with torch's streams."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        super().__init__(engine)
        self._device = device
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._first: torch.cuda.Event | None = None  # from which stamps count

    def on(self, name: str) -> AbstractContextManager[object]:
        if name not in self._streams:
            self._streams[name] = new_stream(self._device)
        return torch.cuda.stream(self._streams[name])

    def delay(self, seconds: float) -> None:
        spin(int(seconds * cycles_per_s()))

    def mark(self) -> Callable[[], bool]:
        event = torch.cuda.current_stream(self._device).record_event()
        return lambda: bool(event.query())

    def stamp(self) -> Callable[[], float]:
        event = timing_event()
        event.record()
        first = self._first = self._first or event
        return lambda: seconds_between(first, event)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def streams_of(engine: Engine, device: torch.device) -> Streams:
    """The streams of a rank that computes on ``device``."""
    if device.type != "cuda":
        return Streams(engine)
    cycles_per_s()  # now: it waits for the GPU
    return CudaStreams(engine, device)


class Verdicts:
    """Comparisons that a rank's streams make, and that are read at the end."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._flags: list[tuple[str, torch.Tensor]] = []
        self.count = 0

    def expect(self, what: str, found: torch.Tensor, wanted: torch.Tensor | float) -> None:
        """Compare ``found`` with ``wanted`` when the current stream comes to this point. ``wanted`` must not change
        later."""
        self.count += 1
        self._streams.engine.run(lambda: self._flags.append((what, torch.ne(found, wanted).any())))

    def failures(self) -> list[str]:
        """What differed or was never compared. The host waits for the streams."""
        self._streams.synchronize()
        lost = self.count - len(self._flags)
        missing = [f"{lost} comparisons were not made"] if lost else []
        return missing + [what for what, differs in self._flags if bool(differs)]


# Random minibatches over one runtime


MODES = {"daemon": ("daemon", False), "direct": ("direct", False), "deterministic": ("auto", True)}
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Case:
    """One random run. ``counts[minibatch][rank]`` are numbers of microbatches."""

    counts: tuple[tuple[int, ...], ...]
    mode: str = "daemon"
    num_units: int = 2
    numel: int = 40
    blind: bool = False
    """Pushes come without gathers before them."""
    seed: int = 0
    longest_delay_s: float = 1e-3
    slow_rank: int = -1
    """This rank's streams are always busy for the longest delay, the others' never; -1: all at random."""

    @classmethod
    def draw(cls, generator: random.Random, world_size: int, mode: str, numels: tuple[int, ...]) -> Case:
        return cls(
            counts=tuple(
                tuple(generator.randint(0, 3) for _ in range(world_size)) for _ in range(generator.randint(2, 4))
            ),
            mode=mode,
            num_units=generator.randint(1, 3),
            numel=generator.choice(numels),
            blind=generator.random() < 0.5,
            seed=generator.randrange(10**6),
        )


def version(minibatch: int, unit: int) -> float:
    """What a shard of this version holds, except for the owner's number."""
    return minibatch * 100.0 + unit * 10.0


def contribution(minibatch: int, unit: int, client: int, microbatch: int) -> float:
    """What a push holds, except for 1000 times the owner's number."""
    return float(((minibatch * 7 + unit * 5 + client * 3 + microbatch) % 1000) + 1)


def create_runtime(rank: Rank, mode: str, numel: int, num_units: int = 1) -> tuple[Runtime, Streams]:
    """A runtime on the transport of the setting, for units of one parameter, with its streams. Collective."""
    accumulate, deterministic = MODES[mode]
    options = RuntimeConfig(
        transport=rank.place.transport, accumulate=accumulate, deterministic=deterministic, timeout_s=TIMEOUT_S
    )
    runtime = units.create_runtime(rank, options, numel, num_units)
    transport: Any = runtime._transport
    return runtime, streams_of(transport.engine, rank.device)


class RandomRun:
    """One rank's part of a case."""

    def __init__(self, case: Case, rank: Rank) -> None:
        self.case, self.rank = case, rank
        self.random = random.Random(case.seed * 31 + rank.rank)
        self.runtime, self.streams = create_runtime(rank, case.mode, case.numel, case.num_units)
        self.verdicts = Verdicts(self.streams)
        owners = torch.arange(rank.world_size, dtype=torch.float32, device=rank.device)
        self.owners = owners.repeat_interleave(case.numel)
        self.streams.synchronize()  # from here on every stream may read it
        self._after_push: Callable[[], object] = lambda: None

    def run(
        self, before_finish: Callable[[], object] = lambda: None, after_push: Callable[[], object] = lambda: None
    ) -> list[str]:
        """Run the case; return what went wrong. Collective. The callbacks stand for code of a user at these points."""
        self._after_push = after_push
        with self.runtime:
            for minibatch, counts in enumerate(self.case.counts, start=1):
                self._publish(minibatch)
                self.runtime.begin()
                for microbatch in range(counts[self.rank.rank]):
                    self._microbatch(minibatch, microbatch)
                before_finish()
                self.runtime.finish()
                for unit in self._order():
                    self._check_sum(minibatch, unit, counts)
            return self.verdicts.failures()

    def _order(self) -> list[int]:
        return self.random.sample(range(self.case.num_units), self.case.num_units)

    def _delay(self) -> None:
        if self.case.slow_rank < 0:
            self.streams.delay(self.random.random() * self.case.longest_delay_s)
        elif self.case.slow_rank == self.rank.rank:
            self.streams.delay(self.case.longest_delay_s)

    def _publish(self, minibatch: int) -> None:
        for unit in self._order():
            self._delay()
            value = version(minibatch, unit) + self.rank.rank
            self.runtime.publish(unit, lambda shard, value=value: shard.fill_(value))  # type: ignore[misc]

    def _microbatch(self, minibatch: int, microbatch: int) -> None:
        order = self._order()
        with self.streams.on("gather"):
            for unit in order if not self.case.blind else ():
                self._delay()
                out = torch.full_like(self.owners, -1.0)
                self.runtime.gather(unit, out)
                wanted = self.owners + version(minibatch, unit)
                self.verdicts.expect(f"gather of unit {unit}, minibatch {minibatch}", out, wanted)
        with self.streams.on("push"):
            for unit in reversed(order):
                self._push(unit, contribution(minibatch, unit, self.rank.rank, microbatch))

    def _push(self, unit: int, value: float) -> None:
        grads, rows = torch.zeros_like(self.owners), self.owners * 1000.0 + value
        self._delay()
        self.streams.engine.run(lambda: grads.copy_(rows))  # computed on the stream, long after the call below
        self.runtime.scatter_accumulate(unit, grads)
        self.streams.engine.run(lambda: grads.fill_(float("nan")))  # may be reused, in the order of the stream
        self._after_push()

    def _check_sum(self, minibatch: int, unit: int, counts: tuple[int, ...]) -> None:
        pushes = [(client, m) for client in range(self.rank.world_size) for m in range(counts[client])]
        result = self.runtime.gradient(unit)
        if result is None or not pushes:
            if (result is None) == bool(pushes):
                raise ValueError(f"unit {unit}, minibatch {minibatch}: {result} after {len(pushes)} pushes")
            return
        wanted = sum(1000.0 * self.rank.rank + contribution(minibatch, unit, client, m) for client, m in pushes)
        self._delay()
        self.verdicts.expect(f"sum of unit {unit}, minibatch {minibatch}", result[0], wanted)
