"""What moves between the phases of a minibatch, and how: by all-to-all, or read from its producer. (Needs torch.)"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from odc.balance.multimodal.orchestrator import MinibatchSchedule
from odc.balance.rearrange.exchange import Received
from odc.balance.rearrange.rearrangement import Rearrangement

Parts = list[list[list[int]]]
"""``parts[rank][p]``: the items that a rank has ready at the same time."""


@dataclass(frozen=True)
class Cargo:
    """What is to be moved; the same on every rank."""

    channel: str
    """Name of the road: one rearrangement of a minibatch."""

    route: Rearrangement
    parts: Parts
    """Of the items of each rank of the source, in the order in which they become ready; together ``route.source``."""

    num_bytes: Sequence[int]
    """Of each item."""

    dtype: torch.dtype = torch.uint8
    width: int = 1
    """Elements of a row; items are (rows, width), or (num_bytes,) where this is 1."""

    def like(self, item: int, device: torch.device) -> torch.Tensor:
        """Memory for an item."""
        numel = self.num_bytes[item] // self.dtype.itemsize
        shape = (numel,) if self.width == 1 else (numel // self.width, self.width)
        return torch.empty(shape, dtype=self.dtype, device=device)


class Carrier(ABC):
    """Moves one cargo, once. A rank puts its parts, meets the others, and gets what it needs."""

    @abstractmethod
    def put(self, part: int, tensors: Sequence[torch.Tensor]) -> None:
        """This rank's part is ready: a tensor for each of its items, which are not changed any more."""

    @abstractmethod
    def meet(self, problem: ValueError | None = None) -> None:
        """All parts of this rank are put, or cannot be. Where ranks move in step, they do it here.

        Raises:
            ValueError: this rank has a ``problem``. Others are told.
        """

    @abstractmethod
    def get(self, items: Sequence[int]) -> list[torch.Tensor]:
        """These items, all of which the route has for this rank; waits for those who make them."""

    @abstractmethod
    def close(self) -> None:
        """This rank gets no more of this cargo."""


class Mover(Protocol):
    """How a minibatch's cargoes are moved."""

    rank: int

    def carry(self, cargo: Cargo) -> Carrier:
        """Begin to move a cargo. All ranks do, in the same order."""
        ...


class InStep:
    """Cargoes move by all-to-all of a process group: all ranks wait for all (OrchMLLM section 5.2.1).

    Args:
        group: default: all of ``torch.distributed``.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0

    def carry(self, cargo: Cargo) -> Carrier:
        return _InStepCarrier(cargo, self)


class _InStepCarrier(Carrier):
    def __init__(self, cargo: Cargo, mover: InStep) -> None:
        self._cargo, self._mover = cargo, mover
        self._put: dict[int, torch.Tensor] = {}
        self._got: dict[int, torch.Tensor] = {}

    def put(self, part: int, tensors: Sequence[torch.Tensor]) -> None:
        items = self._cargo.parts[self._mover.rank][part]
        self._put.update(zip(items, tensors, strict=True))

    def meet(self, problem: ValueError | None = None) -> None:
        route, rank = self._cargo.route, self._mover.rank
        if route.num_ranks == 1:
            if problem is not None:
                raise problem
            self._got = self._put
            return
        with torch.no_grad():
            mine = [self._put[item] for item in route.source[rank].tolist()] if problem is None else []
            received = Received.of_group(self._mover.group, mine, route, problem)
        self._got = dict(zip(route.target[rank].tolist(), received, strict=True))

    def get(self, items: Sequence[int]) -> list[torch.Tensor]:
        return [self._got[item] for item in items]

    def close(self) -> None:
        self._put, self._got = {}, {}


def output_cargo(schedule: MinibatchSchedule, name: str, width: int, dtype: torch.dtype) -> Cargo:
    """What an encoder makes, on its way to the language model; a part is a microbatch of the encoder."""
    return Cargo(
        f"{name}/outputs",
        schedule.outputs[name],
        schedule.encoders[name].microbatches,
        (schedule.lengths.items[name].output * width * dtype.itemsize).tolist(),
        dtype,
        width,
    )


def gradient_cargo(schedule: MinibatchSchedule, name: str, width: int, dtype: torch.dtype) -> Cargo:
    """The gradients of these outputs, on their way home; a part is a microbatch of the language model."""
    ranks = range(schedule.num_ranks)
    parts = [
        [schedule.items_of(name, rank, m) for m in range(schedule.language.num_microbatches[rank])] for rank in ranks
    ]
    there = output_cargo(schedule, name, width, dtype)
    return Cargo(f"{name}/gradients", there.route.inverse(), parts, there.num_bytes, dtype, width)


def whole_cargo(channel: str, route: Rearrangement, num_bytes: Any) -> Cargo:
    """Bytes that are all ready at once."""
    parts = [[items.tolist()] if len(items) else [] for items in route.source]
    return Cargo(channel, route, parts, [int(size) for size in num_bytes])
