"""Makes a cost model in seconds and a memory estimate from command-line options."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from odc.balance import (
    ActivationMemory,
    LinearCost,
    QuadraticCost,
    ShardedState,
    TransformerCost,
    TransformerShape,
    fit_cost,
    preset_names,
)
from odc.balance.checks import FloatArray
from odc.balance.costs.context_parallel import ContextParallel
from odc.balance.costs.devices import DEVICES, Device
from odc.balance.plan import Comm
from odc.cli.lengths import MOST_TOKENS, check_ends
from odc.errors import shorten, shown

_LARGEST_FILE = 2**26  # bytes of what is read whole
PARAM_BYTES, REDUCED_BYTES = 2, 4
"""Of a parameter as it is gathered, bf16, and of a gradient as it is reduced, float32."""
HOST_RANKS = 8
"""Ranks that NVLink connects."""
LINK_SHARE = 350 / 450
"""Of the data sheet's bandwidth, what collectives reach: nccl-tests' 345 to 370 GB/s of 450 on 8 H100."""


@dataclass(frozen=True)
class TimedTransformer:
    """Seconds of a transformer on a device: its FLOPs at a constant rate; layer by layer, as it is."""

    flops: TransformerCost
    flops_per_s: float

    def __call__(self, lengths: npt.ArrayLike, /) -> FloatArray:
        return self.flops(lengths) / self.flops_per_s

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of layers of each kind."""
        return self.flops.counts

    def by_group(self, lengths: npt.ArrayLike, /) -> FloatArray:
        """Seconds of one layer of each kind, (num_kinds, num_samples)."""
        return self.flops.by_group(lengths) / self.flops_per_s


SecondsCost = TimedTransformer | QuadraticCost | LinearCost


@dataclass(frozen=True)
class Training:
    """What is trained on what: costs in seconds, and memory."""

    cost: SecondsCost
    microbatch_s: float
    """Seconds of a microbatch besides its samples."""

    about: str
    """Where the costs come from, for people."""

    shape: TransformerShape
    activations: ActivationMemory
    """Of a device, per token of its slices."""

    state: ShardedState
    device: Device
    recompute: bool
    transfers_s: tuple[float, float] = (0.0, 0.0)
    """To gather a layer, and to reduce-scatter its gradients, with collectives."""
    group: ContextParallel | None = None
    """Devices that compute microbatches together; None: each computes its own."""

    @property
    def group_size(self) -> int:
        return self.group.size if self.group else 1

    @property
    def exchange_s(self) -> float:
        """Seconds of the exchange of keys and values, of a token in all layers."""
        return self.group.exchange_s * self.group.num_layers if self.group else 0.0

    def state_bytes(self, comm: Comm = "odc") -> int:
        """Of parameters, gradients and Adam's state on a device, and of what ODC keeps for the other ranks."""
        return self.state.bytes + (self.state.on_demand_bytes if comm == "odc" else 0)

    def memory_bytes(self, peak_tokens: int, comm: Comm = "odc") -> int:
        """Peak per device when the largest microbatch has so many tokens."""
        return self.state_bytes(comm) + self.activations.bytes(-(-peak_tokens // self.group_size))

    def most_tokens(self, comm: Comm = "odc") -> int:
        """The largest microbatch that fits; 0 if the model itself does not."""
        left = self.device.memory_bytes - self.state_bytes(comm)
        if left < self.activations.bytes(1):
            return 0
        return self.group_size * self.activations.max_tokens(left)

    def on_groups(self, size: int, bytes_per_s: float) -> Training:
        """The same on groups of ``size`` devices with such a link between them."""
        group, cost = ContextParallel.from_config(self.shape, size, bytes_per_s), self.cost
        if isinstance(cost, TimedTransformer):
            cost = replace(cost, flops=group.flops(cost.flops, cost.flops_per_s))
        else:
            cost = group.seconds(cost)
        return replace(self, cost=cost, activations=group.activations(self.activations), group=group)


def make_training(
    model: str,
    device: str,
    mfu: float,
    world_size: int,
    *,
    recompute: bool,
    timings: Path | None,
    microbatch_cost: float | None = None,
    transfers_ms: tuple[float | None, float | None] = (0.0, 0.0),
    hosts: int = 1,
) -> Training:
    """Cost and memory of a model on a kind of device.

    Args:
        model: preset or path of a config.json.
        device: one of :data:`~odc.balance.costs.devices.DEVICES`.
        mfu: model FLOPs utilization: achieved over peak FLOPs, recomputation not counted as achieved.
        world_size: number of ranks that share parameters, gradients and optimizer state.
        recompute: the backward computes activations anew.
        timings: a CSV of lengths and seconds to fit the costs to, instead of FLOPs.
        microbatch_cost: seconds that a microbatch takes besides its samples; None: what timings say, else nothing.
        transfers_ms: to gather a layer and to reduce-scatter its gradients; None: what their bytes take over NVLink, in
            bf16 and in float32. Nothing for more ranks than it connects, and beside timings, which may have them.
        hosts: over which the ranks are; what crosses between these is not counted here.

    Raises:
        ValueError: something cannot be read or is not known.
    """
    _check_model(model)
    hardware = DEVICES[device]
    cost: SecondsCost = TimedTransformer(TransformerCost.from_config(model), mfu * hardware.flops_per_s)
    about, microbatch_s = f"FLOPs of {model} at {mfu:.0%} of the peak of one {device.upper()}", 0.0
    if timings is not None:
        fit = fit_cost(*read_timings(timings))
        cost, microbatch_s = fit.cost, fit.microbatch_s
        about = f"fitted to {timings} ({'; '.join(fit.explain().splitlines())})"
    if microbatch_cost is not None:
        microbatch_s, about = (
            microbatch_cost,
            f"{about}, and {microbatch_cost:g} s for each microbatch (microbatch-cost)",
        )
    shape = TransformerShape.from_config(model)
    gather_ms, scatter_ms = transfers_ms
    layer_s = _layer_s(shape, hardware, world_size // hosts) if timings is None else 0.0
    transfers_s = (
        PARAM_BYTES * layer_s if gather_ms is None else gather_ms / 1e3,
        REDUCED_BYTES * layer_s if scatter_ms is None else scatter_ms / 1e3,
    )
    if any(transfers_s):
        gather, scatter = (f"{1e3 * seconds:.3g}" for seconds in transfers_s)
        where = " within a host" if hosts > 1 else ""
        about += (
            f", and {gather} ms to gather a layer and {scatter} to push its gradients{where}, unless compute hides it"
        )
    return Training(
        cost,
        microbatch_s,
        about,
        shape,
        ActivationMemory.from_config(model, recompute=recompute, logits="chunked"),
        ShardedState.from_config(model, world_size, num_sharing=world_size // hosts),
        hardware,
        recompute,
        transfers_s,
    )


def _layer_s(shape: TransformerShape, device: Device, world_size: int) -> float:
    """For all ranks but one to send a rank their parts of a layer, of a byte for each parameter, over NVLink."""
    others = (world_size - 1) / world_size if world_size <= HOST_RANKS else 0.0
    return others * sum(shape.layer_parameters) / shape.num_layers / (LINK_SHARE * device.links["nvlink"])


def _check_model(model: str) -> None:
    path = Path(model)
    if model.lower() in preset_names():
        return
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ValueError(f"--model {model} is a folder without a config.json: there is no {path / 'config.json'}")
        path = path / "config.json"
    elif not path.exists():
        raise ValueError(
            f"--model {shown(model)} is neither a file nor a preset: give the path of a config.json, or one of "
            f"{', '.join(preset_names())}"
        )
    _check_size(path, "a model's config.json")


def _check_size(path: Path, expected: str) -> None:
    """Refuse what is too large to be what is expected, before it is read."""
    check_ends(path)
    if path.stat().st_size > _LARGEST_FILE:
        raise ValueError(f"{shown(str(path))} has {path.stat().st_size:,} bytes: expected {expected}")


def read_timings(path: Path) -> tuple[list[int], list[float]]:
    """Pairs of length and seconds from a CSV with two columns; a first line that starts with a name is skipped.

    Raises:
        ValueError: the file is missing or not text, or a line is not such a pair.
        OSError: the file cannot be read.
    """
    if not path.exists():
        raise ValueError(f"there is no file {shown(str(path))}: expected a CSV of measured lengths and seconds")
    _check_size(path, "a CSV of measured lengths and seconds")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [(number, row) for number, row in enumerate(csv.reader(file), 1) if row]
    except (UnicodeDecodeError, csv.Error):
        raise ValueError(f"{path} is not text: expected a CSV of measured lengths and seconds") from None
    if rows and not _is_number(rows[0][1][0]):
        rows = rows[1:]
    pairs = [_as_pair(row, f"{path}, line {number}") for number, row in rows]
    return [length for length, _ in pairs], [seconds for _, seconds in pairs]


def _as_pair(row: list[str], where: str) -> tuple[int, float]:
    if len(row) != 2 or not all(map(_is_number, row)):
        raise ValueError(f"{where}: {','.join(row)[:40]!r} is not 'length,seconds'")
    length, seconds = map(float, row)
    if not length.is_integer() or not 1 <= length <= MOST_TOKENS:
        raise ValueError(f"{where}: the length is {shorten(row[0].strip())}, expected an integer of at least 1")
    if not 0 < seconds < np.inf:
        raise ValueError(f"{where}: the time is {shorten(row[1].strip())}, expected a finite number of seconds above 0")
    return int(length), seconds


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
