"""Check ``host_time``: what gathers and pushes of decoder layers cost the host that asks for them.

A host that needs longer to ask than its device needs to compute holds the device up. What counts is the number of
calls, so the parameters are those of Qwen2.5's layers, by number and size. All owners are memory of one GPU: nothing
crosses a link, and a host does the same.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from odc.bench.gpu.device import on_a_stream
from odc.bench.gpu.setting import Report, Setting, require, run_ranks
from odc.bench.harness.benchmark import Column, Table, summary
from odc.bench.harness.ranks import Rank
from odc.cuda.runtime import CudaRuntime
from odc.engines.base import Engine, Part

LAYERS = {"1.5B": (1536, 256, 8960), "7B": (3584, 512, 18944), "32B": (5120, 1024, 27648)}
"""Widths of the model, of its keys and values, and of its MLP."""
OWNERS = (8, 16)
_OPERATIONS = ("gather", "push, clients add", "push, daemons add", "FSDP2's copies")
_TABLE = Table(
    "cells",
    "CPU us of the host for one layer, median (20th-80th percentile)",
    (Column("layer", "layer"), Column("owners", "owners")),
    [Column(name, name, ".0f") for name in _OPERATIONS],
)


def check(setting: Setting) -> Report:
    (cells,) = run_ranks(setting, 1, measure, 5 if setting.quick else 30)
    worst = max(cell["gather"]["median"] for cell in cells if cell["owners"] == OWNERS[0])
    return Report(
        f"a gather of a layer of {OWNERS[0]} owners takes {worst:.0f} us at most", {"cells": cells}, (_TABLE,)
    )


def measure(rank: Rank, repetitions: int) -> list[dict[str, Any]]:
    engine = CudaRuntime(rank.device).engine()
    bf16, fp32 = torch.bfloat16, torch.float32
    engine.prepare([(bf16, bf16, fp32)])
    with on_a_stream(rank.device):
        cells = [costs(engine, rank.device, name, owners, repetitions) for name in LAYERS for owners in OWNERS]
    engine.close()
    return cells


def parameters(layer: str) -> list[int]:
    """Elements of the parameters of a decoder layer: q, k, v with biases, o, the MLP's three, two norms."""
    width, keys, inner = LAYERS[layer]
    return [width * width, width, *[keys * width, keys] * 2, width * width, *[inner * width] * 3, width, width]


def costs(engine: Engine, device: torch.device, layer: str, num_owners: int, repetitions: int) -> dict[str, Any]:
    """The cell of a table: microseconds of this thread's CPU, for each operation. Gradients are bf16, sums fp32."""
    wholes = [torch.zeros(numel, dtype=torch.bfloat16, device=device) for numel in parameters(layer)]
    numels = [whole.numel() // num_owners for whole in wholes]
    sums = [torch.zeros(4 * sum(numels), dtype=torch.uint8, device=device) for _ in range(num_owners)]
    shards = [one[: 2 * sum(numels)].view(torch.bfloat16) for one in sums]
    lows = list(itertools.accumulate(numels[:-1], initial=0))
    slices = list(zip(wholes, lows, numels, strict=True))
    added, copied = ([Part(whole, size * low, numel) for whole, low, numel in slices] for size in (4, 2))
    staged = torch.zeros(num_owners, sum(numels), dtype=torch.bfloat16, device=device)
    rows, pieces = [whole.view(num_owners, -1) for whole in wholes], list(staged[0].split_with_sizes(numels))

    def copies_of_fsdp2() -> None:
        """Into the collective's input, and out of its output."""
        torch._foreach_copy_(pieces, [row[0] for row in rows])
        torch.split_with_sizes_copy(staged, numels, 1, out=rows)

    calls: tuple[Callable[[], None], ...] = (
        lambda: engine.read_rows(wholes, shards, 0, own_in_place=True),
        lambda: engine.add_rows(sums, added, 0),
        lambda: engine.write_rows(sums, copied, 0),
        copies_of_fsdp2,
    )
    samples: dict[str, list[float]] = {name: [] for name in _OPERATIONS}
    for repetition in range(-2, repetitions):
        for name, call in zip(_OPERATIONS, calls, strict=True):
            require(engine.synchronize(60.0), "the device has not come to an end within 60 s")
            started = time.thread_time_ns()
            call()
            if repetition >= 0:
                samples[name].append((time.thread_time_ns() - started) * 1e-3)
    return {"layer": layer, "owners": num_owners} | {name: summary(times) for name, times in samples.items()}
