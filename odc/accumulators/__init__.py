"""Where pushed gradients are summed at their owner.

Three stores share one interface; :class:`StorePlan` chooses. In none of them does a push that was begun by a client
that then died, or that was interrupted, get into a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from odc.accumulators.atomic import AtomicStore
from odc.accumulators.base import AccumulatorStore
from odc.accumulators.per_client import PerClientStore
from odc.accumulators.shared import SharedStore
from odc.config import RuntimeConfig
from odc.endpoint import Endpoint
from odc.engine import Engine
from odc.errors import ConfigError
from odc.transports.base import aligned
from odc.units import UnitSpec

__all__ = ["AccumulatorStore", "AtomicStore", "PerClientStore", "SharedStore", "StorePlan"]


@dataclass(frozen=True)
class StorePlan:
    """Which store, and whether clients add to it themselves."""

    kind: type[AtomicStore] | type[PerClientStore] | type[SharedStore]
    is_direct: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, config: RuntimeConfig, engine: Engine, num_hosts: int) -> StorePlan:
        """On host memory "auto" is direct: one pass less over the gradient. On a device it is the daemon: an owner's
        addition stays in its own memory, where it is fastest, and a push is one plain copy. So it is between hosts,
        where nobody else can add.

        Raises:
            ConfigError: "direct" was asked for where it cannot be: between hosts, or on a device in float64.
        """
        if config.accumulate == "direct" and num_hosts > 1:
            raise ConfigError(
                f"accumulate='direct' adds in the owner's memory, which the ranks of {num_hosts} hosts do not share: "
                "use 'daemon' or 'auto'"
            )
        if config.accumulate == "direct" and engine.has_streams and config.accumulate_dtype != torch.float32:
            raise ConfigError(
                f"accumulate='direct' on a device adds float32 atomically, not {config.accumulate_dtype}: use 'daemon'"
            )
        suits = not engine.has_streams and num_hosts == 1
        is_direct = config.accumulate == "direct" or (config.accumulate == "auto" and suits)
        if config.deterministic:
            return cls(PerClientStore, is_direct, config.accumulate_dtype)
        # A lock of the host cannot keep two devices apart that do their work later.
        by_atomics = is_direct and engine.has_streams
        return cls(AtomicStore if by_atomics else SharedStore, is_direct, config.accumulate_dtype)

    def num_locks(self, units: Sequence[UnitSpec]) -> int:
        return self.kind.num_locks(units)

    def make(self, end: Endpoint, units: Sequence[UnitSpec]) -> AccumulatorStore:
        return self.kind(end, units, self.dtype, self.is_direct)

    def shared_bytes(self, units: Sequence[UnitSpec]) -> int:
        """What :meth:`make` will ask of ``Transport.allocate``, at most."""
        if not self.is_direct:
            return 0
        sums = [unit.grad_numel for unit in units]
        spares = set(sums)
        return sum(aligned(numel * self.dtype.itemsize) for numel in [*sums, *spares])
