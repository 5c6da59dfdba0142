"""LB-Mini: balance the minibatch, let every rank pack for itself."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from odc.balance.checks import FloatArray
from odc.balance.partition import split_by_cost
from odc.balance.partition.differencing import Parts
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

    def assign(self, job: Job) -> list[Parts]:
        plain = self._assign(job, job.costs)
        if job.microbatch_cost == 0:
            return plain
        spread = self._assign(job, job.costs + job.microbatch_cost / job.max_tokens * job.lengths)
        return min(plain, spread, key=lambda microbatches: self.to_plan(job, microbatches).makespan("odc"))

    def ranks(self, job: Job) -> Parts:
        """Which rank gets which samples."""
        return split_by_cost(job.costs, job.world_size, equal_size=False, speeds=job.speeds)

    def _assign(self, job: Job, costs: FloatArray) -> list[Parts]:
        microbatches: list[Parts] = []
        for mine in self.ranks(job.with_costs(costs)):
            samples = np.array(mine, dtype=np.int64)
            parts = pack(job.lengths[samples], job.costs[samples], job.max_tokens)
            microbatches.append(costliest_first(renumber(parts, samples), job.costs))
        return microbatches


class LBMiniEqual(LBMini):
    """LB-Mini with equally many samples per rank, which RL frameworks ask for (section 5.2: verl).

    The numbers differ by at most one if the samples cannot be dealt out evenly.
    """

    name: ClassVar[str] = "lb-mini-equal"

    def ranks(self, job: Job) -> Parts:
        return equally_many(job)
