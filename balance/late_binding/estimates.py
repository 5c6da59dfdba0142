"""Estimates for plans, measured during training: the speed of each rank, and the fixed cost of a microbatch. So a slow
device gets fewer samples, and microbatches with a high fixed cost are not split. (Needs torch.)

All ranks must plan with the same numbers, although they are at different minibatches. So the numbers are one key in the
store, together with the last minibatch that any rank has planned. One rank computes new numbers from the measurements
of all ranks in the store; they are valid after that minibatch.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from odc.balance.checks import FloatArray

logger = logging.getLogger("odc")

NUM_TIMES = 64
"""Microbatches whose times tell how fast a rank is."""
LEAST_TIMES = 16
"""Of them, to tell what a microbatch takes beside its samples; the costliest at least twice as costly as the least."""
MINIBATCHES_ALIKE = 4
"""Minibatches in a row that are planned with the same numbers."""
MOST_CHANGES = 100
"""Of what plans count with, in a run: then it stays."""
SPEEDS = 0.1, 10.0
"""The least and the most that a rank is taken for: beyond that something else is wrong than a plan could mend."""
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

    def end(self, *, is_computed: bool = True) -> None:
        """All of it is submitted; or it was only looked at, and tells nothing."""
        running, self._running = self._running, None
        if running is None or not is_computed:
            return
        cost, begun = running
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


@dataclass
class _History:
    """What plans have counted with, by blocks of minibatches: (epoch, number)."""

    changes: list[Any]
    """Each: the first block; speeds that are not 1, by rank; microbatch cost."""
    planned: list[int]
    """The last block that any rank has planned."""

    def reach(self, block: list[int], world_size: int) -> Estimates:
        """Plan a block."""
        self.planned = max(self.planned, block)
        *_, (_, others, microbatch_cost) = (change for change in self.changes if change[0] <= block)
        speeds = np.ones(world_size)
        for rank, speed in others:
            speeds[rank] = speed
        return Estimates(speeds, microbatch_cost)

    def add(self, estimates: Estimates) -> None:
        """Count with these in all that nobody has planned yet."""
        epoch, number = self.planned
        others = [[rank, speed] for rank, speed in enumerate(estimates.speeds.tolist()) if speed != 1.0]
        change = [[epoch, number + 1], others, estimates.microbatch_cost]
        if not self.changes or (change[1:] != self.changes[-1][1:] and len(self.changes) < MOST_CHANGES):
            self.changes.append(change)


class LearnedEstimates:
    """Those that the ranks of one loader plan with.

    Args:
        rank, world_size: of this process among those that have different samples.
        store: of all ranks.
        prefix: of its keys, that these ranks' loaders have alone.
        speeds: what the plan begins with, (world_size,); None: all are equally fast.
        microbatch_cost: likewise.
        report: told what was learned, in words.
        learns_speeds: whether plans can give ranks more or less by their speeds.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Any,
        prefix: str,
        speeds: FloatArray | None,
        microbatch_cost: float = 0.0,
        report: Callable[[str], object] = lambda text: None,
        *,
        learns_speeds: bool = True,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._prefix = prefix
        self._block: list[int] = []
        self._report = report
        self._learns_speeds = learns_speeds
        self.now = Estimates(np.ones(world_size) if speeds is None else speeds / np.median(speeds), microbatch_cost)
        """Of the minibatch planned last."""

    def tell(self, times: Times) -> None:
        """Leave there what this rank has measured."""
        if found := times.tell():
            self._store.set(self._times_of(self._rank), json.dumps(found))

    def plan_with(self, epoch: int, minibatch: int) -> Estimates:
        """For a minibatch, the same on all ranks that ask."""
        block = [epoch, minibatch // MINIBATCHES_ALIKE]
        if block != self._block:
            before, self._block = self.now, block
            measured = self._measured() if block[1] % self._world_size == self._rank else None
            self.now = self._agreed(block, measured)
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

    def _agreed(self, block: list[int], measured: Estimates | None) -> Estimates:
        """What a block is planned with, on all ranks; what was measured holds behind it."""
        name = f"{self._prefix}/estimates"
        there = self._store.compare_set(name, "", "").decode()
        while True:
            history = _History(**json.loads(there)) if there else _History([], [-1, 0])
            if not there:
                history.add(self.now)
            found = history.reach(block, self._world_size)
            if measured is not None:
                history.add(measured)
            new = json.dumps(asdict(history))
            if new == there or (before := self._store.compare_set(name, there, new).decode()) == new:
                return found
            there = before

    def _times_of(self, rank: int) -> str:
        return f"{self._prefix}/times/{rank}"

    def _measured(self) -> Estimates | None:
        words = [self._store.compare_set(self._times_of(rank), "", "") for rank in range(self._world_size)]
        if not all(words):
            return None
        rates, beside, of_all = np.array([json.loads(word) for word in words]).T
        speeds = np.clip(rates / np.median(rates), *SPEEDS)
        speeds = np.where(abs(speeds - 1.0) < LEAST_DIFFERENCE, 1.0, speeds.round(2))
        now = self.now
        speeds = np.where(abs(speeds - now.speeds) < LEAST_DIFFERENCE * now.speeds, now.speeds, speeds)
        if not self._learns_speeds:
            speeds = now.speeds
        # Least squares may find no end of it.
        cost = float(f"{min(np.median(beside), np.median(of_all)):.3g}")
        is_noise = abs(cost - now.microbatch_cost) < LEAST_DIFFERENCE * float(np.median(of_all))
        return Estimates(speeds, now.microbatch_cost if is_noise else cost)
