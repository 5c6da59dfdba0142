"""Groupings of a stream: ways to cut a rank's pool of samples into groups.

Functions from lists to lists. They do not read data, communicate or keep state.
"""

from odc.balance.grouping.alignment import AlignedGroups, EqualMinibatches, EqualSteps, Unaligned
from odc.balance.grouping.best_fit import best_fit_batches
from odc.balance.grouping.methods import Grouping
from odc.balance.grouping.pool_sort import pool_sort
from odc.balance.grouping.sketch import LengthSketch, sketch_lengths
from odc.balance.grouping.token_budget import align_groups, token_budget_groups

__all__ = [
    "AlignedGroups",
    "EqualMinibatches",
    "EqualSteps",
    "Grouping",
    "LengthSketch",
    "Unaligned",
    "align_groups",
    "best_fit_batches",
    "pool_sort",
    "sketch_lengths",
    "token_budget_groups",
]
