"""The two-level policies of RL training with verl, as the paper describes them (appendix C.2 and C.3)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from odc.balance.plan import PlannedMinibatch
from odc.balance.policies.base import Job
from odc.balance.policies.micro import LBMicro, equally_many, pack_ranks
from odc.balance.random_numbers import random_generator


class VerlOptimized(LBMicro):
    """Cut the batch into minibatches, then balance each of them (Listing 3): LB-Micro by another name."""

    name = "verl-optimized"


class VerlNative(LBMicro):
    """Balance the batch over the ranks, then let every rank shuffle and cut its share (Listing 2).

    So the ranks' shares of the batch are balanced, their shares of a minibatch are not. Within a minibatch
    every rank packs into the same number of microbatches. For a batch of one minibatch it is LB-Micro.
    """

    name = "verl-native"
    two_level = True

    def plan_batch(self, job: Job, minibatch_size: int, seed: int, first: int = 0) -> Iterator[PlannedMinibatch]:
        # The shares of the batch are fixed at once, the microbatches of a minibatch when it is due.
        ranks = [_shuffled(mine, seed, rank) for rank, mine in enumerate(equally_many(job))]
        starts = range(first * minibatch_size, max(map(len, ranks)), minibatch_size)
        return (self._minibatch(job, [mine[start : start + minibatch_size] for mine in ranks]) for start in starts)

    def _minibatch(self, job: Job, shares: list[list[int]]) -> PlannedMinibatch:
        """The ranks' ``shares`` of the batch, each packed."""
        samples = np.array(sorted(sample for share in shares for sample in share), dtype=np.int64)
        own = job.of(samples)
        numbered = [np.searchsorted(samples, share).tolist() for share in shares]
        return PlannedMinibatch(samples, self.to_plan(own, pack_ranks(own, numbered)))


def _shuffled(samples: list[int], seed: int, rank: int) -> list[int]:
    keys = random_generator("share", seed, rank).random_raw(len(samples))
    return [samples[i] for i in np.argsort(keys, kind="stable")]
