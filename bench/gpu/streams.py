"""Streams of a rank by name, slow work on them, and comparisons that no host waits for.

On a GPU these are torch's streams. On a CPU the transport's engine may have streams of its own (a fake of the tests);
work then goes through ``engine.run`` and happens later, in the order of its stream.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from odc.bench.gpu.device import cycles_per_s, new_stream, spin
from odc.engines.base import Engine
from odc.minibatch.runtime import Runtime

SYNCHRONIZE_LIMIT_S = 60.0


class Streams(ABC):
    """What the checks do with streams."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @abstractmethod
    def on(self, name: str) -> AbstractContextManager[object]:
        """Inside, this thread's work goes to the stream of that name."""

    @abstractmethod
    def delay(self, seconds: float) -> None:
        """Keep the current stream busy for about so long."""

    @abstractmethod
    def mark(self) -> Callable[[], bool]:
        """A question to ask later: has the current stream done all it was given so far?"""

    @abstractmethod
    def stamp(self) -> Callable[[], float]:
        """When the current stream comes to this point, in seconds since some moment of this rank's; to be asked when it
        has."""

    @abstractmethod
    def synchronize(self) -> None:
        """As ``torch.cuda.synchronize()``: the host waits for all streams of this rank."""


class CudaStreams(Streams):
    """torch's."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        super().__init__(engine)
        self._device = device
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._first: Any = None  # event, from which stamps count

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
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        first = self._first = self._first or event
        return lambda: float(first.elapsed_time(event)) * 1e-3

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


class HostStreams(Streams):
    """Those of an engine that poses as a GPU's; or none, and everything happens within the call."""

    def on(self, name: str) -> AbstractContextManager[object]:
        enter: Callable[[str], AbstractContextManager[object]] | None = getattr(self.engine, "on", None)
        return nullcontext() if enter is None else enter(name)

    def delay(self, seconds: float) -> None:
        self.engine.run(lambda: time.sleep(seconds))

    def mark(self) -> Callable[[], bool]:
        done = threading.Event()
        self.engine.run(done.set)
        return done.is_set

    def stamp(self) -> Callable[[], float]:
        times: list[float] = []
        self.engine.run(lambda: times.append(time.perf_counter()))
        return lambda: times[0]

    def synchronize(self) -> None:
        if not self.engine.synchronize(SYNCHRONIZE_LIMIT_S):
            raise TimeoutError(f"streams were not idle after {SYNCHRONIZE_LIMIT_S:g} s")


def streams_of(engine: Engine, device: torch.device) -> Streams:
    """The streams of a rank that computes on ``device``."""
    if device.type != "cuda":
        return HostStreams(engine)
    cycles_per_s()  # now: it waits for the GPU
    return CudaStreams(engine, device)


def engine_of(runtime: Runtime) -> Engine:
    """What does the work of ``runtime``."""
    transport: Any = runtime._transport
    engine: Engine = transport.engine
    return engine


class Verdicts:
    """Comparisons made by a rank's streams, read at the end."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._flags: list[tuple[str, torch.Tensor]] = []
        self.count = 0

    def expect(self, what: str, found: torch.Tensor, wanted: torch.Tensor | float) -> None:
        """``found`` equals ``wanted`` when the current stream comes to this point. ``wanted`` is not changed later."""
        self.count += 1
        self._streams.engine.run(lambda: self._flags.append((what, torch.ne(found, wanted).any())))

    def failures(self) -> list[str]:
        """What differed, or was never compared. The host waits for the streams."""
        self._streams.synchronize()
        lost = self.count - len(self._flags)
        missing = [f"{lost} comparisons were not made"] if lost else []
        return missing + [what for what, differs in self._flags if bool(differs)]
