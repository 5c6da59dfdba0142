"""What plans should count with, measured while ranks train: how fast each is, and what a microbatch takes beside its
samples. So a slow device gets less, and nobody cuts small what costs more in pieces. (Needs torch.)

All ranks have to plan with the same numbers, though each is at another point of its own. So one of them works out, from
what all have left in the store, what holds some minibatches later; whoever plans one of those first lays down what was
found by then, and all others take that.
"""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import Store

from odc.balance.checks import FloatArray

logger = logging.getLogger("odc")

NUM_TIMES = 64
"""Microbatches whose times tell how fast a rank is."""
LEAST_TIMES = 16
"""Of them, to tell what a microbatch takes beside its samples; the costliest at least twice as costly as the least."""
MINIBATCHES_ALIKE = 4
"""Minibatches in a row that are planned with the same numbers."""
LEAST_DIFFERENCE = 0.05
"""From the median speed, and from the last one; and of what a microbatch takes, of all of it. Less is noise."""


class Times:
    """What the last microbatches of this rank took.

    On a GPU a host is ahead of its device. So the next microbatch is bound when the device has begun the last one, not
    when that was submitted.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=NUM_TIMES)
        """Cost of samples, seconds."""
        self._submitted: deque[tuple[float, Any, Any]] = deque()
        self._running: tuple[float, Any] | None = None
        self._microbatch_cost = 0.0

    def begin(self, cost: float, microbatch_cost: float = 0.0) -> None:
        """A microbatch is handed out, whose samples cost this; what it takes beside them by its plan."""
        self._running, self._microbatch_cost = (cost, self._mark()), microbatch_cost

    def end(self) -> None:
        """All of it is submitted."""
        if self._running is None:
            return
        (cost, begun), self._running = self._running, None
        ended = self._mark()
        self._submitted.append((cost, begun, ended))
        while len(self._submitted) > isinstance(ended, torch.cuda.Event):
            cost, begun, ended = self._submitted.popleft()
            if isinstance(ended, torch.cuda.Event):
                ended.synchronize()
                seconds = 1e-3 * begun.elapsed_time(ended)
            else:
                seconds = ended - begun
            if cost and seconds > 0:
                self._seen.append((cost, seconds))

    @property
    def is_idle(self) -> bool:
        """Whether the device is through with all that was submitted."""
        return all(ended.query() for _, _, ended in self._submitted)

    @property
    def rate(self) -> float:
        """Cost per second, the median; 0: not known."""
        return statistics.median((cost + self._microbatch_cost) / s for cost, s in self._seen) if self._seen else 0.0

    def tell(self) -> list[float]:
        """Rate; what a microbatch takes beside its samples, as a cost; all of an average one. Nothing: not known."""
        if not self._seen:
            return []
        beside = self._beside_samples()
        return [self.rate, beside, beside + statistics.fmean(cost for cost, _ in self._seen)]

    def _beside_samples(self) -> float:
        """By least squares of relative errors; what the plan says if there is too little to tell by."""
        costs, seconds = np.array(self._seen).T
        if len(costs) < LEAST_TIMES or costs.max() < 2 * costs.min():
            return self._microbatch_cost
        rows = np.stack([costs / costs.mean(), np.ones_like(costs)], axis=1) / seconds[:, None]
        (samples_s, fixed_s), *_ = np.linalg.lstsq(rows, np.ones_like(costs))  # of an average microbatch
        return float(max(fixed_s, 0.0) / samples_s * costs.mean()) if samples_s > 0 else self._microbatch_cost

    def _mark(self) -> Any:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


@dataclass(frozen=True)
class Estimates:
    """What a plan counts with."""

    speeds: FloatArray
    """Of the ranks, (world_size,); 1 is the median."""
    microbatch_cost: float

    def encode(self) -> str:
        return json.dumps([self.speeds.tolist(), self.microbatch_cost])

    @staticmethod
    def decode(text: str) -> Estimates:
        speeds, microbatch_cost = json.loads(text)
        return Estimates(np.array(speeds), microbatch_cost)


class LearnedEstimates:
    """Those that the ranks of one loader plan with.

    Args:
        rank, world_size: of this process among those that have different samples.
        store: of all ranks.
        speeds: what the plan begins with, (world_size,); None: all are equally fast.
        microbatch_cost: likewise.
        report: told what was learned, in words.
        learns_speeds: whether plans can give ranks more or less by their speeds.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        speeds: FloatArray | None,
        microbatch_cost: float = 0.0,
        report: Callable[[str], object] = lambda text: None,
        *,
        learns_speeds: bool = True,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._report = report
        self._learns_speeds = learns_speeds
        self.now = Estimates(np.ones(world_size) if speeds is None else speeds / np.median(speeds), microbatch_cost)
        """Of the minibatch planned last."""

    def tell(self, times: Times) -> None:
        """Leave there what this rank has measured."""
        if found := times.tell():
            self._store.set(f"times/{self._rank}", json.dumps(found))

    def plan_with(self, epoch: int, minibatch: int) -> Estimates:
        """For a minibatch, the same on all ranks that ask."""
        block = minibatch // MINIBATCHES_ALIKE
        if block % self._world_size == self._rank and minibatch % MINIBATCHES_ALIKE == 0:
            self._lay_down(epoch, block + 2, self._measured())
        before, self.now = self.now, self._lay_down(epoch, block, self.now)
        self._say(before, minibatch)
        return self.now

    def _say(self, before: Estimates, minibatch: int) -> None:
        now, changed = self.now, np.flatnonzero(self.now.speeds != before.speeds).tolist()
        for rank in changed if self._rank == 0 else ():
            logger.info(
                "odc: rank %d computes at %.2f of the usual speed, measured while training (so far: %.2f); plans count "
                "with that from minibatch %d on",
                *(rank, now.speeds[rank], before.speeds[rank], minibatch),
            )
        if now.microbatch_cost != before.microbatch_cost and self._rank == 0:
            logger.info(
                "odc: a microbatch takes %.3g beside its samples, in the unit of their costs, measured while training "
                "(so far: %.3g); plans count with that from minibatch %d on",
                *(now.microbatch_cost, before.microbatch_cost, minibatch),
            )
        if changed or now.microbatch_cost != before.microbatch_cost:
            ranks = ", ".join(f"rank {rank} {now.speeds[rank]:.2f}" for rank in np.flatnonzero(now.speeds != 1.0))
            self._report(
                f"measured while training: speeds {ranks or 'alike'}; a microbatch takes {now.microbatch_cost:.3g} "
                "beside the costs of its samples. The last plans counted with that."
            )

    def _lay_down(self, epoch: int, block: int, estimates: Estimates) -> Estimates:
        """What a block is planned with: ``estimates``, or what another rank was faster to lay down. They seldom change:
        each is kept once."""
        text = estimates.encode()
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._store.set(f"estimates/{digest}", text)
        found = self._store.compare_set(f"estimates/{epoch}.{block}", "", digest).decode()
        return estimates if found == digest else Estimates.decode(self._store.get(f"estimates/{found}").decode())

    def _measured(self) -> Estimates:
        words = [self._store.compare_set(f"times/{rank}", "", "") for rank in range(self._world_size)]
        if not all(words):
            return self.now
        rates, beside, of_all = np.array([json.loads(word) for word in words]).T
        speeds = rates / np.median(rates)
        speeds = np.where(abs(speeds - 1.0) < LEAST_DIFFERENCE, 1.0, speeds.round(2))
        now = self.now
        speeds = np.where(abs(speeds - now.speeds) < LEAST_DIFFERENCE * now.speeds, now.speeds, speeds)
        if not self._learns_speeds:
            speeds = now.speeds
        cost = float(f"{np.median(beside):.3g}")
        is_noise = abs(cost - now.microbatch_cost) < LEAST_DIFFERENCE * float(np.median(of_all))
        return Estimates(speeds, now.microbatch_cost if is_noise else cost)
