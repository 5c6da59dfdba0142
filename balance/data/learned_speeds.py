"""How fast ranks are, measured while they train, so that a slow device gets less. (Needs torch.)

All ranks have to plan with the same numbers, though each is at another point of its own. So one of them works out, from
the rates that all have left in the store, what holds some minibatches later; whoever plans one of those first lays down
what was found by then, and all others take that.
"""

from __future__ import annotations

import hashlib
import json
import logging

import numpy as np
from torch._C._distributed_c10d import Store

from odc.balance.checks import FloatArray

logger = logging.getLogger("odc")

MINIBATCHES_ALIKE = 4
"""Minibatches in a row that are planned with the same speeds."""
LEAST_DIFFERENCE = 0.05
"""From the median speed, and from the last one: less is noise."""


class LearnedSpeeds:
    """The speeds that the ranks of one loader plan with.

    Args:
        rank, world_size: of this process among those that have different samples.
        store: of all ranks.
        speeds: what the plan begins with, (world_size,); None: all are equally fast.
    """

    def __init__(self, rank: int, world_size: int, store: Store, speeds: FloatArray | None) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self.now = np.ones(world_size) if speeds is None else speeds / np.median(speeds)
        """Of the minibatch planned last, (world_size,); 1 is the median."""

    def tell(self, rate: float) -> None:
        """Leave there what this rank computes in a second, in the unit of costs; 0: nothing is known."""
        if rate:
            self._store.set(f"rate/{self._rank}", repr(rate))

    def plan_with(self, epoch: int, minibatch: int) -> FloatArray:
        """The speeds of a minibatch, the same on all ranks that ask."""
        block = minibatch // MINIBATCHES_ALIKE
        if block % self._world_size == self._rank and minibatch % MINIBATCHES_ALIKE == 0:
            self._lay_down(epoch, block + 2, self._measured())
        before, self.now = self.now, self._lay_down(epoch, block, self.now)
        for rank in np.flatnonzero(self.now != before).tolist() if self._rank == 0 else ():
            logger.info(
                "odc: rank %d computes at %.2f of the usual speed, measured while training (so far: %.2f); plans count "
                "with that from minibatch %d on",
                *(rank, self.now[rank], before[rank], minibatch),
            )
        return self.now

    def _lay_down(self, epoch: int, block: int, speeds: FloatArray) -> FloatArray:
        """``speeds`` of a block, or what another rank was faster to lay down. They seldom change: each is kept once."""
        text = json.dumps(speeds.tolist())
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._store.set(f"speeds/{digest}", text)
        found = self._store.compare_set(f"speeds/{epoch}.{block}", "", digest).decode()
        return speeds if found == digest else np.array(json.loads(self._store.get(f"speeds/{found}")))

    def _measured(self) -> FloatArray:
        words = [self._store.compare_set(f"rate/{rank}", "", "") for rank in range(self._world_size)]
        rates = np.array([float(word or 0.0) for word in words])
        if not rates.all():
            return self.now
        speeds = rates / np.median(rates)
        speeds = np.where(abs(speeds - 1.0) < LEAST_DIFFERENCE, 1.0, speeds.round(2))
        return np.where(abs(speeds - self.now) < LEAST_DIFFERENCE * self.now, self.now, speeds)
