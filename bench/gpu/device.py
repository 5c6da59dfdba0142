"""The GPU: calls of torch.cuda with types, times of operations side by side, and a description of the machine."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from odc.bench.gpu.setting import Report, Setting
from odc.bench.harness.benchmark import describe_environment, summary

_CALIBRATION_CYCLES = 20_000_000


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of torch's pool."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def on_a_stream(device: torch.device) -> AbstractContextManager[object]:
    """Inside, the current stream is neither the default one, which takes no batches of copies, nor one on which FSDP
    communicates."""
    return torch.cuda.stream(new_stream(device)) if device.type == "cuda" else nullcontext()


def timing_event() -> torch.cuda.Event:
    """An event that notes the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def seconds_between(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Seconds between two events, which have both been reached."""
    return float(start.elapsed_time(end)) * 1e-3


def spin(cycles: int) -> None:
    """Keep the current stream, and nothing else of the GPU, busy."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


@functools.cache
def cycles_per_s() -> float:
    """How many cycles of :func:`spin` the current GPU makes in a second. The first call waits for the GPU."""
    start, end = timing_event(), timing_event()
    spin(_CALIBRATION_CYCLES)  # the clocks rise
    start.record()
    spin(_CALIBRATION_CYCLES)
    end.record()
    torch.cuda.synchronize()
    return _CALIBRATION_CYCLES / seconds_between(start, end)


# Times of operations side by side: interleaved repetitions, medians, spread


_LEAD_CYCLES = 2_000_000  # the GPU is busy so long that the host has queued a whole repetition meanwhile


Operation = Callable[[int], object]
"""An operation is called with the number of the repetition, so that it can take turns among buffers."""


def interleaved(
    operations: Mapping[str, Operation], repetitions: int, device: torch.device
) -> dict[str, dict[str, float]]:
    """Time every operation once per repetition, in turn, after two repetitions that warm up.

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


# What the checks ran on, and what is missing on a machine without a usable GPU


_DRIVER = Path("/proc/driver/nvidia/version")
_PACKAGES = (
    "triton",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-nvshmem-cu12",
    "nvidia-nvshmem-cu13",
    "nvshmem4py-cu12",
    "nvshmem4py-cu13",
    "transformers",
)


def why_no_gpu() -> str | None:
    """What this machine lacks for any check, and what to do about it; None if there is a GPU."""
    if torch.cuda.is_available() and torch.cuda.device_count():
        return None
    if torch.version.cuda is None:
        cause = f"torch {torch.__version__} is built without CUDA: install one that is built with it"
    else:
        cause = (
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds none: is the NVIDIA driver there (odc doctor)"
        )
    return f"odc bench gpu needs at least one NVIDIA GPU, with the extra cuda12 or cuda13 installed. {cause}."


def describe(setting: Setting) -> Report:
    """A description of hardware, driver, versions and date. It runs as a check in its own process, because asking CUDA
    may make a context."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    environment = {
        **describe_environment(),
        "gpus": [_gpu(index) for index in range(count)],
        "peer_access": [
            [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)
        ],
        "driver": _driver(),
        "cuda_of_torch": torch.version.cuda,
        "nccl": _nccl() if count else None,
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }
    return Report("", environment)


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
    }


def _driver() -> str | None:
    """The version in the driver's own file."""
    found = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", _DRIVER.read_text()) if _DRIVER.exists() else None
    return found[1] if found else None


def _nccl() -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
