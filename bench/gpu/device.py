"""The calls of torch.cuda that have no types, with types."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

import torch

_CALIBRATION_CYCLES = 20_000_000


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """One of torch's pool of streams."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def on_a_stream(device: torch.device) -> AbstractContextManager[object]:
    """Inside, the current stream is not the default one, which takes no batches of copies; nor is it where FSDP
    communicates."""
    return torch.cuda.stream(new_stream(device)) if device.type == "cuda" else nullcontext()


def timing_event() -> torch.cuda.Event:
    """An event that notes the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def seconds_between(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Both events have been reached."""
    return float(start.elapsed_time(end)) * 1e-3


def spin(cycles: int) -> None:
    """Keep the current stream, and nothing else of the GPU, busy."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


@functools.cache
def cycles_per_s() -> float:
    """How many cycles of :func:`spin` the current GPU makes in a second. Waits for it, the first time."""
    start, end = timing_event(), timing_event()
    spin(_CALIBRATION_CYCLES)  # the clocks rise
    start.record()
    spin(_CALIBRATION_CYCLES)
    end.record()
    torch.cuda.synchronize()
    return _CALIBRATION_CYCLES / seconds_between(start, end)
