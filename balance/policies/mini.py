"""LB-Mini: balance the minibatch, let every rank pack for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np

from odc.balance.checks import FloatArray
from odc.balance.partition import Parts, split_by_cost
from odc.balance.plan import PackedOnDemand
from odc.balance.policies.base import Job, Policy, costliest_first, renumber
from odc.balance.policies.micro import equally_many
from odc.balance.policies.packing import pack


class LBMini(Policy):
    """LB-Mini (section 4): balance the whole minibatch's cost over the ranks; each rank packs for itself.

    Ranks may end with different numbers of microbatches, and with none if there are fewer samples than ranks.
    Only for ODC: under collectives a rank would wait forever for one that has fewer.

    A cost per microbatch is spread over tokens while balancing: a rank needs about its tokens over
    ``max_tokens`` microbatches. Where ignoring it ends up better, the plan does.
    """

    name = "lb-mini"
    equal_counts = False

    def assign(self, job: Job) -> Sequence[Parts]:
        if job.microbatch_cost == 0:
            return self._assign(job, job.costs)
        # Which one ends earlier shows when all ranks have packed.
        spread = job.costs + job.microbatch_cost / job.max_tokens * job.lengths
        both = [list(self._assign(job, costs)) for costs in (job.costs, spread)]
        return min(both, key=lambda microbatches: self.to_plan(job, microbatches).makespan("odc"))

    def ranks(self, job: Job) -> Parts:
        """Which rank gets which samples."""
        return split_by_cost(job.costs, job.world_size, equal_size=False, speeds=job.speeds)

    def _assign(self, job: Job, costs: FloatArray) -> Sequence[Parts]:
        return packed_on_demand(job, self.ranks(replace(job, costs=costs)))


class LBMiniEqual(LBMini):
    """LB-Mini with equally many samples per rank, which RL frameworks ask for (section 5.2: verl).

    The numbers differ by at most one if the samples cannot be dealt out evenly.
    """

    name: ClassVar[str] = "lb-mini-equal"

    def ranks(self, job: Job) -> Parts:
        return equally_many(job)


def packed_on_demand(job: Job, ranks: Parts) -> PackedOnDemand:
    """The samples of each rank, which packs them itself."""
    return PackedOnDemand(ranks, partial(_packed, job))


def _packed(job: Job, mine: list[int]) -> Parts:
    """The samples of one rank in microbatches."""
    samples = np.array(mine, dtype=np.int64)
    parts = pack(job.lengths[samples], job.costs[samples], job.max_tokens)
    return costliest_first(renumber(parts, samples), job.costs)
