"""One rank's end of on-demand communication where units are on several meshes: experts beside the rest of a model, say.

Each mesh has a runtime. That of the first one leads: it is the one that a session knows, and has the others beside it.
They have one failure, one set of counters, and hear of the same ranks, so that what fails on one mesh fails on all. A
minibatch begins and ends on all of them at once (see PROTOCOL.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from odc.config import RuntimeConfig
from odc.liveness.leaving import Closable
from odc.minibatch.partners import Counts
from odc.minibatch.protocol import End
from odc.minibatch.runtime import Runtime
from odc.minibatch.state import JointState, Phase
from odc.setup.agreement import Exchange, raise_together
from odc.timeline import Stats, Timeline
from odc.transports.base import Transport
from odc.units import Destination, Rows, UnitSpec


class Mesh(NamedTuple):
    """A mesh, as one of its ranks sees it."""

    units: Sequence[UnitSpec]
    exchange: Exchange
    """Between the ranks of its shard group."""
    replicas: Exchange | None = None
    """See :meth:`odc.minibatch.runtime.Runtime.create`."""


class JointRuntime(Runtime):
    """The runtime of the first mesh, with those of the others. Units are numbered mesh by mesh."""

    def __init__(
        self,
        transport: Transport,
        config: RuntimeConfig,
        units: Sequence[UnitSpec],
        prefers_daemon: bool = False,
        stats: Stats | None = None,
        leader: Runtime | None = None,
    ) -> None:
        self._others: list[Runtime] = []
        super().__init__(transport, config, units, prefers_daemon, stats, leader)
        self._places: list[tuple[Runtime, int]] = [(self, unit) for unit in range(len(units))]

    def add(self, meshes: Sequence[Mesh]) -> None:
        """Connect the ranks of other meshes, too. Collective over them and over the first; what fails, fails on all."""
        for units, exchange, replicas in meshes:
            problem: Exception | None = None
            try:
                device = self._transport.device
                one = Runtime.create(exchange, units, self.config, device=device, replicas=replicas, leader=self)
                self._others.append(one)
                if one._finalizer is not None:
                    one._finalizer.detach()  # this one's is for both
            except Exception as error:  # whatever it is, the other groups must not wait for this one
                problem = error
            raise_together(self._transport.exchange, problem)
        for one in self._others:
            self.units += one.units
            self._places += [(one, unit) for unit in range(len(one.units))]
        self._protocol.others = [one._protocol for one in self._others]
        self.state = JointState([one._protocol.state for one in self.meshes])

    @property
    def meshes(self) -> Sequence[Runtime]:
        return [self, *self._others]

    # Its life

    def _parts(self) -> list[Closable]:
        return [part for parts in (super()._parts(), *(one._parts() for one in self._others)) for part in parts]

    def _transports(self) -> list[Transport]:
        return [*super()._transports(), *(one for other in self._others for one in other._transports())]

    def _let_go(self) -> None:
        super()._let_go()
        for one in self._others:
            one._let_go()

    def close(self) -> None:
        for one in self._others:
            one._closed = True
        super().close()

    # Operations on one unit

    def published_shard(self, unit: int) -> torch.Tensor:
        one, number = self._places[unit]
        return Runtime.published_shard(one, number)

    def publish(self, unit: int, fill: Callable[[torch.Tensor], object] | None) -> None:
        one, number = self._places[unit]
        Runtime.publish(one, number, fill)

    def gather(self, unit: int, out: torch.Tensor | Destination, *, own_in_place: bool = False) -> None:
        one, number = self._places[unit]
        Runtime.gather(one, number, out, own_in_place=own_in_place)

    def scatter_accumulate(
        self, unit: int, grads: torch.Tensor | Sequence[Rows], *, present: Sequence[bool] | None = None
    ) -> None:
        one, number = self._places[unit]
        Runtime.scatter_accumulate(one, number, grads, present=present)

    def gradient(self, unit: int) -> tuple[torch.Tensor, list[bool]] | None:
        one, number = self._places[unit]
        return Runtime.gradient(one, number)

    # On all of them

    def begin(self) -> None:
        for one in self.meshes:
            Runtime.begin(one)

    def open_sums(self) -> None:
        for one in self.meshes:
            if one._protocol.state.phase is Phase.FINISHED:  # else all units of that mesh are published
                Runtime.open_sums(one)

    @property
    def ends(self) -> list[End]:
        """As each rank of each mesh has ended it, those of the first mesh first."""
        return [end for one in self.meshes for end in one._protocol.ends]

    # Observation

    @property
    def transport_name(self) -> str:
        return " and ".join(dict.fromkeys(one._transport.name for one in self.meshes))

    def record_in(self, timeline: Timeline) -> Timeline:
        for one in self.meshes:
            Runtime.record_in(one, timeline)
        return timeline

    def memory(self) -> dict[str, int]:
        each = [Runtime.memory(one) for one in self.meshes]
        return {purpose: sum(one[purpose] for one in each) for purpose in each[0]}


def connect_meshes(
    meshes: Sequence[Mesh],
    config: RuntimeConfig,
    *,
    device: torch.device,
    partners: Sequence[tuple[Exchange, Counts]],
    end_collectives: Callable[[], object] | None,
    stats: Stats | None,
) -> Runtime:
    """One runtime for one mesh or several. Collective over each; the rest as :meth:`Runtime.create` has it."""
    (units, exchange, replicas), *others = meshes
    rest: dict[str, Any] = {
        "device": device,
        "replicas": replicas,
        "partners": partners,
        "end_collectives": end_collectives,
        "stats": stats,
    }
    if not others:
        return Runtime.create(exchange, units, config, **rest)
    return JointRuntime.create(exchange, units, config, **rest, then=lambda runtime: runtime.add(others))
