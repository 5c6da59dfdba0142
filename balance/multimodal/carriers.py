"""Moves of data between the phases of a minibatch: by all-to-all, or by reads from the producer. (Needs torch.)

OrchMLLM moves everything by collectives. Under ODC ranks do not meet in collectives; instead a rank publishes its
results in memory that others read. This is the idea of parameters on demand, applied to activations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from odc.balance.multimodal.schedule import MinibatchSchedule
from odc.balance.rearrange.exchange import Received, devices_of
from odc.balance.rearrange.rearrangement import Rearrangement, owners

Parts = Sequence[list[list[int]]]
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
    width: int | None = None
    """Elements of a row: items are (rows, width). None: they are flat."""

    def like(self, item: int, device: torch.device) -> torch.Tensor:
        """Memory for an item."""
        numel = self.num_bytes[item] // self.dtype.itemsize
        shape = (numel,) if self.width is None else (numel // self.width, self.width)
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


@dataclass
class Moved:
    """What one rank has moved so far."""

    cargoes: Counter[str] = field(default_factory=Counter)
    """How many, by channel."""

    received_bytes: Counter[str] = field(default_factory=Counter)
    """From other ranks, by channel."""

    def count(self, cargo: Cargo, rank: int) -> None:
        """Note a cargo that has begun to move."""
        own = set(cargo.route.source[rank].tolist())
        self.cargoes[cargo.channel] += 1
        self.received_bytes[cargo.channel] += sum(
            cargo.num_bytes[item] for item in cargo.route.target[rank].tolist() if item not in own
        )


class Mover(Protocol):
    """How a minibatch's cargoes are moved."""

    rank: int
    moved: Moved

    def carry(self, cargo: Cargo) -> Carrier:
        """Begin to move a cargo. All ranks do, in the same order."""

    def abort(self, error: BaseException) -> None:
        """This rank cannot go on with the minibatch. Others are told, if anything that they wait in can be told."""


class InStep:
    """Cargoes move by all-to-all of a process group: all ranks wait for all (OrchMLLM section 5.2.1).

    A rank in a collective cannot be told that another one has failed; a session of the model ends its collectives, and
    without one the end of the failing process does.

    Args:
        group: the ranks of the minibatch; default: all of ``torch.distributed``.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.moved = Moved()

    def carry(self, cargo: Cargo) -> Carrier:
        """
        Raises:
            ValueError: the minibatch is one of other ranks than the group has.
        """
        size = dist.get_world_size(self.group) if dist.is_initialized() else 1
        if cargo.route.num_ranks != size:
            raise ValueError(
                f"a minibatch of {cargo.route.num_ranks} ranks, and a process group of {size}: pass "
                "mover=InStep(group), the group of the ranks that share the minibatch"
            )
        self.moved.count(cargo, self.rank)
        return _InStepCarrier(cargo, self)

    def abort(self, error: BaseException) -> None:
        """Nothing."""


class _InStepCarrier(Carrier):
    def __init__(self, cargo: Cargo, mover: InStep) -> None:
        self._cargo, self._mover = cargo, mover
        self._put: dict[int, torch.Tensor] = {}
        self._got: dict[int, torch.Tensor] = {}

    def put(self, part: int, tensors: Sequence[torch.Tensor]) -> None:
        self._put.update(zip(self._cargo.parts[self._mover.rank][part], tensors, strict=True))

    def meet(self, problem: ValueError | None = None) -> None:
        route, rank = self._cargo.route, self._mover.rank
        if route.num_ranks == 1:
            if problem is not None:
                raise problem
            self._got = self._put
            return
        devices = devices_of(self._mover.group)
        kinds = [device.type for device in devices]
        with torch.no_grad():
            mine = [self._put[item] for item in route.source[rank].tolist()] if problem is None else []
            # Bytes are made in host memory, where a group of a device alone cannot take them.
            mine = [t if t.device.type in kinds else t.to(devices[0]) for t in mine]
            received = Received.of_group(self._mover.group, mine, route, problem)
        self._got = dict(zip(route.target[rank].tolist(), received, strict=True))
        self._put = {}

    def get(self, items: Sequence[int]) -> list[torch.Tensor]:
        return [self._got[item] for item in items]

    def close(self) -> None:
        self._put, self._got = {}, {}


class Rounds(Protocol):
    """What moves items one-sidedly: an :class:`odc.ItemExchange`, made with :func:`channels_of` an orchestrator."""

    @property
    def device(self) -> torch.device:
        """Where items are."""

    def begin(self, channel: str, routes: Sequence[Sequence[Sequence[tuple[int, int, int]]]]) -> Any:
        """A round of a channel: of each rank and part its items, each with its bytes and its reader."""

    def abort(self, error: BaseException) -> None:
        """End the exchange on all ranks."""


def channels_of(modalities: Sequence[str]) -> list[str]:
    """Every road that a minibatch of these modalities can take."""
    return ["samples", *(f"{name}/{what}" for what in ("inputs", "outputs", "gradients") for name in modalities)]


class OnDemand:
    """Cargoes are published by who has them, and read when they are needed: no rank waits for one whose items it does
    not need. What stays on its rank is not copied.

    Args:
        items: an :class:`odc.ItemExchange` between the same ranks, with the channels of :func:`channels_of`.
        rank: of this process in it.
    """

    def __init__(self, items: Rounds, rank: int) -> None:
        self.items, self.rank = items, rank
        self.moved = Moved()

    def carry(self, cargo: Cargo) -> Carrier:
        self.moved.count(cargo, self.rank)
        return _OnDemandCarrier(cargo, self)

    def abort(self, error: BaseException) -> None:
        self.items.abort(error)


class _OnDemandCarrier(Carrier):
    def __init__(self, cargo: Cargo, mover: OnDemand) -> None:
        self._cargo, self._mover = cargo, mover
        consumers = owners(cargo.route.target).tolist()
        self._leaves = [
            [[item for item in part if consumers[item] != rank] for part in parts]
            for rank, parts in enumerate(cargo.parts)
        ]
        routes = [[[(i, cargo.num_bytes[i], consumers[i]) for i in part] for part in parts] for parts in self._leaves]
        self._round = mover.items.begin(cargo.channel, routes)
        self._own: dict[int, torch.Tensor] = {}

    def put(self, part: int, tensors: Sequence[torch.Tensor]) -> None:
        rank = self._mover.rank
        given = dict(zip(self._cargo.parts[rank][part], tensors, strict=True))
        self._round.publish(part, [given.pop(item) for item in self._leaves[rank][part]])
        self._own.update(given)

    def meet(self, problem: ValueError | None = None) -> None:
        if problem is not None:
            self._mover.items.abort(problem)
            raise problem

    def get(self, items: Sequence[int]) -> list[torch.Tensor]:
        others = [item for item in items if item not in self._own]
        read = {item: self._cargo.like(item, self._mover.items.device) for item in others}
        if read:
            self._round.read_many(others, list(read.values()))
        return [self._own[item] if item in self._own else read[item] for item in items]

    def close(self) -> None:
        self._own = {}
        self._round.done()


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
