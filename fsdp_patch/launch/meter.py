"""How long each microbatch of this rank took, without communication."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from odc.fsdp_patch.doors import untraced
from odc.stats import Stats

MAX_MICROBATCHES = 100_000
"""Kept for the report; the latest ones count."""


class Metered(Protocol):
    """What is used of a session."""

    on_finish: Callable[[], None] | None

    def stats(self) -> Stats: ...


class MicrobatchMeter:
    """Times microbatches from the root's forward to the next one, or to the end of the minibatch.

    Host time, on a GPU as on a CPU: what the rank spends outside ODC. A forward without a backward (an evaluation) is
    not a microbatch. One that keeps a graph but pushes nothing is the first part of the next microbatch: a model used
    twice per backward, or gradients accumulated without synchronization.
    """

    def __init__(self, model: nn.Module, session: Metered, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._clock = clock
        self._started_s: float | None = None
        self._keeps_graph = False
        self._communication_s = 0.0
        self._pushes = 0
        self._unpushed_s = 0.0
        self._current: list[float] = []
        self._kept = 0
        self.minibatches: list[list[float]] = []
        """Seconds per microbatch, minibatch by minibatch."""
        start = untraced(lambda module, args: self.start(), "the time of a microbatch is taken here")
        self._hook = model.register_forward_pre_hook(start, prepend=True)
        session.on_finish = self._end_minibatch

    def start(self) -> None:
        """A forward begins."""
        self._stop()
        stats = self._session.stats()
        self._started_s, self._communication_s, self._pushes = self._clock(), stats.communication_s, stats.pushes
        self._keeps_graph = torch.is_grad_enabled()

    def _stop(self) -> None:
        if self._started_s is None:
            return
        stats = self._session.stats()
        elapsed_s = self._clock() - self._started_s - (stats.communication_s - self._communication_s)
        if stats.pushes > self._pushes:
            self._current.append(self._unpushed_s + elapsed_s)
            self._unpushed_s = 0.0
        elif self._keeps_graph:
            self._unpushed_s += elapsed_s
        self._started_s = None

    def _end_minibatch(self) -> None:
        self._stop()
        self._unpushed_s = 0.0
        self.minibatches.append(self._current)
        self._kept += len(self._current)
        self._current = []
        while self._kept > MAX_MICROBATCHES:
            self._kept -= len(self.minibatches.pop(0))

    def close(self) -> None:
        """Take the hook out of the model. Idempotent."""
        self._hook.remove()
        self._session.on_finish = None
