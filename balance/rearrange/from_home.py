"""Plans of a policy for samples that ranks already have, with little movement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from odc.balance.checks import IntArray
from odc.balance.layout import by_rank, permuted
from odc.balance.partition.differencing import Parts
from odc.balance.plan import PackedOnDemand, Plan
from odc.balance.policies.base import Job, Policy
from odc.balance.policies.mini import LBMini, packed_on_demand
from odc.balance.rearrange.nodes import place_items
from odc.balance.rearrange.rearrangement import owners
from odc.balance.rearrange.rebalance import rebalanced


def plan_from_home(policy: Policy, job: Job, home: Sequence[IntArray], ranks_per_node: int) -> Plan:
    """A plan of ``policy`` for samples of which rank r has ``home[r]``.

    LB-Mini may share out as it likes, as long as costs are even: so ranks keep what they have but for what is too much
    (:func:`~odc.balance.rebalance`). What other policies make, goes to the ranks that have most of it.
    """
    if type(policy) is LBMini:
        # As in the policy itself, a cost per microbatch is spread over tokens.
        costs = job.costs + job.microbatch_cost / job.max_tokens * job.lengths
        ranks = rebalanced(costs, home, ranks_per_node=ranks_per_node)
        return policy.to_plan(job, packed_on_demand(job, [mine.tolist() for mine in ranks]))
    plan = policy.plan_job(job)
    placed = place_items(owners(home), owners(samples_of(plan)), job.lengths, job.world_size, ranks_per_node)
    return replace(plan, microbatches=permuted(plan.microbatches, placed))


def samples_of(plan: Plan) -> list[IntArray]:
    """Of each rank; does not pack for those that pack for themselves."""
    if isinstance(plan.microbatches, PackedOnDemand):
        return [np.array(mine, dtype=np.int64) for mine in plan.microbatches.ranks]
    return by_rank(plan.microbatches)


class FromHome(Policy):
    """``policy`` for minibatches whose sample i is on rank ``i % world_size`` before, as rollouts may be.

    Args:
        policy: of one level.
        ranks_per_node: default: all ranks are one node.
    """

    def __init__(self, policy: Policy, ranks_per_node: int | None = None) -> None:
        self.policy = policy
        self.name = policy.name  # type: ignore[misc]
        self.equal_counts = policy.equal_counts  # type: ignore[misc]
        self._ranks_per_node = ranks_per_node

    def assign(self, job: Job) -> Sequence[Parts]:
        home = [np.arange(rank, job.lengths.size, job.world_size) for rank in range(job.world_size)]
        return plan_from_home(self.policy, job, home, self._ranks_per_node or job.world_size).microbatches
