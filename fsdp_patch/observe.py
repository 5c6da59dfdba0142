"""Watch the collectives of plain FSDP2: what a model would gain, measured before anything is patched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from odc.fsdp_patch.fsdp2.find import find_fsdp2_units
from odc.fsdp_patch.fsdp2.unit import Fsdp2Unit
from odc.timeline import Timeline


class _Timed:
    """Wraps one of FSDP's communication objects and records each call as a span."""

    def __init__(self, inner: Any, timeline: Timeline, kind: str, label: str) -> None:
        self._inner = inner
        self._timeline = timeline
        self._kind = kind
        self._label = label

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        tensor: torch.Tensor = self._inner.allocate(size, dtype=dtype, device=device)
        return tensor

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        with self._timeline.span(self._kind, self._label):
            work: dist.Work | None = self._inner(*args, **kwargs)
        return work


class Observation:
    """Timed collectives in one model, until :meth:`close`."""

    def __init__(self, units: Sequence[Fsdp2Unit], timeline: Timeline) -> None:
        self._undo: list[Callable[[], None]] = []
        for unit in units:
            self._undo.append(
                unit.swap_comms(
                    _Timed(unit.group._all_gather_comm, timeline, "gather", unit.name),
                    _Timed(unit.group._reduce_scatter_comm, timeline, "scatter", unit.name),
                )
            )

    def close(self) -> None:
        """Take the timers out again. Idempotent."""
        for undo in self._undo:
            undo()
        self._undo.clear()


def observe_fsdp(model: nn.Module, timeline: Timeline) -> Observation:
    """Record every all-gather ("gather") and reduce-scatter ("scatter") of an FSDP2 model in ``timeline``.

    Raises:
        ValueError: the model has no FSDP2 modules.
    """
    units = find_fsdp2_units(model)
    if not units:
        raise ValueError(f"{type(model).__name__} has no FSDP2 modules to observe: call fully_shard first")
    return Observation(units, timeline)
