"""Policies that run one sample a microbatch."""

from __future__ import annotations

import numpy as np

from odc.balance.checks import IntArray
from odc.balance.partition.differencing import Parts
from odc.balance.policies.base import Job, Policy


class NoBalance(Policy):
    """Rank r gets samples r, r + world_size, ... in that order, one a microbatch: a plain distributed sampler.

    Every rank has the same number of microbatches; if the samples cannot be dealt out evenly, the last ones
    of the ranks with one sample less are empty.
    """

    name = "none"

    def assign(self, job: Job) -> list[Parts]:
        num_microbatches = -(-job.lengths.size // job.world_size)
        ranks = [self.order(np.arange(r, job.lengths.size, job.world_size), job) for r in range(job.world_size)]
        return [
            [[sample] for sample in mine.tolist()] + [[] for _ in range(num_microbatches - mine.size)] for mine in ranks
        ]

    def order(self, samples: IntArray, job: Job) -> IntArray:
        """The samples of one rank in the order in which it runs them."""
        return samples


class LocalSort(NoBalance):
    """Like "none", but every rank sorts its samples, the longest first (LongAlign; paper section 5.1)."""

    name = "local-sort"

    def order(self, samples: IntArray, job: Job) -> IntArray:
        return samples[np.argsort(-job.lengths[samples], kind="stable")]
