"""Which benchmarks there are. A new one: its module in a room, and its name here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

from odc.bench.harness.benchmark import Benchmark

ROOMS = {
    "communication": ("primitives", "fsdp_host_time", "memory", "uneven", "links"),
    "training": (
        *("demo", "demo_rl", "multimodal", "vlm", "stream_training", "trainers"),
        *("emulated", "late_binding", "context_parallel", "multimodal_emulated"),
    ),
    "batching": ("batching",),
    "planning": (*("planning", "tables", "partition_quality", "post_balance", "multimodal_simulated"),),
    "proof": ("conformance", "parity", "chaos"),
    "gpu": ("gpu",),
}


def module_of(name: str) -> ModuleType:
    """The module of a benchmark; hyphens and underscores are the same.

    Raises:
        ValueError: there is no such benchmark.
    """
    wanted = name.replace("-", "_")
    for room, names in ROOMS.items():
        if wanted in names:
            module = importlib.import_module(f"odc.bench.{room}.{wanted}")
            # One of several modules is a folder.
            return importlib.import_module(f"{module.__name__}.benchmark") if hasattr(module, "__path__") else module
    known = ", ".join(written(each) for names in ROOMS.values() for each in names)
    raise ValueError(f"there is no benchmark {name!r}: expected one of {known}")


def find(name: str) -> Benchmark:
    """A benchmark by its name.

    Raises:
        ValueError: there is none of that name.
    """
    found: Benchmark = module_of(name).BENCHMARK
    return found


def written(name: str) -> str:
    """The name as it is typed."""
    return name.replace("_", "-")


def all_of_them() -> Iterator[tuple[str, str, Benchmark]]:
    """(room, name, benchmark). Imports them all."""
    for room, names in ROOMS.items():
        for name in names:
            yield room, name, find(name)
