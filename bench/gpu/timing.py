"""Times of operations side by side: interleaved repetitions, medians, spread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from odc.bench.gpu.device import seconds_between, spin, timing_event
from odc.bench.harness.benchmark import summary

_LEAD_CYCLES = 2_000_000  # the GPU is busy so long that the host has queued a whole repetition meanwhile


Operation = Callable[[int], object]
"""Called with the number of the repetition, so that it can take turns among buffers."""


def interleaved(
    operations: Mapping[str, Operation], repetitions: int, device: torch.device
) -> dict[str, dict[str, float]]:
    """Every operation once per repetition, in turn, after two repetitions that warm up.

    On a GPU by events, with the launches queued beforehand, so that the host's speed is not part of the time.
    """
    measure = _by_events if device.type == "cuda" else _by_clock
    samples: dict[str, list[float]] = {name: [] for name in operations}
    for repetition in range(-2, repetitions):
        for name, seconds in measure(operations, repetition + 2).items():
            if repetition >= 0:
                samples[name].append(seconds)
    return {name: summary(seconds) for name, seconds in samples.items()}


def _by_events(operations: Mapping[str, Operation], repetition: int) -> dict[str, float]:
    spin(_LEAD_CYCLES)
    events = []
    for name, operation in operations.items():
        start, end = timing_event(), timing_event()
        start.record()
        operation(repetition)
        end.record()
        events.append((name, start, end))
    torch.cuda.synchronize()
    return {name: seconds_between(start, end) for name, start, end in events}


def _by_clock(operations: Mapping[str, Operation], repetition: int) -> dict[str, float]:
    seconds = {}
    for name, operation in operations.items():
        started = time.perf_counter()
        operation(repetition)
        seconds[name] = time.perf_counter() - started
    return seconds
