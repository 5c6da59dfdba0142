"""Groups of samples whose lengths are known for a while only: what a rank's pool of a stream is cut into.

Lists in, lists out: nothing here reads data, communicates or keeps anything.
"""

from odc.balance.grouping.best_fit import best_fit_batches
from odc.balance.grouping.pool_sort import pool_sort
from odc.balance.grouping.sketch import LengthSketch, sketch_lengths
from odc.balance.grouping.token_budget import align_groups, token_budget_groups

__all__ = [
    "LengthSketch",
    "align_groups",
    "best_fit_batches",
    "pool_sort",
    "sketch_lengths",
    "token_budget_groups",
]
