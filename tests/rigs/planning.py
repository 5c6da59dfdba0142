"""Plans to test with: one cost model, one token limit, random lengths."""

from __future__ import annotations

from hypothesis import strategies as st

from odc.balance import (
    Plan,
    QuadraticCost,
    get_policy,
    policy_names,
)

LIMIT = 1000
COST = QuadraticCost(1e-3, 1.0)
NAMES = policy_names()
EQUAL_COUNTS = [name for name in NAMES if get_policy(name).equal_counts]
# Of samples, on each rank. A new policy is free in this.
EQUAL_NUMBERS = frozenset(("none", "local-sort", "verl-native", "verl-optimized", "lb-micro", "lb-mini-equal"))
LENGTHS = st.lists(st.integers(1, LIMIT), max_size=30)
LONG_TAILED_COST = QuadraticCost(1.982122 / 32000**2, 2.611821 / 32000)


def make(name: str, lengths: list[int], world_size: int) -> Plan:
    return get_policy(name).plan(lengths, world_size=world_size, max_tokens=LIMIT, cost=COST)


def samples_of(plan: Plan) -> list[list[int]]:
    """The samples of each rank, ascending."""
    return [sorted(sample for part in mine for sample in part) for mine in plan.microbatches]


def same_microbatches(a: Plan, b: Plan) -> bool:
    return [{frozenset(part) for part in mine} for mine in a.microbatches] == [
        {frozenset(part) for part in mine} for mine in b.microbatches
    ]


def with_microbatch_cost(plan: Plan, microbatch_cost: float) -> Plan:
    """The same microbatches where each of them costs something."""
    return Plan(plan.microbatches, plan.lengths, plan.costs, plan.max_tokens, plan.policy, microbatch_cost, plan.speeds)
