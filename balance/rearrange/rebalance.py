"""Even out the loads of ranks by moving few items.

OrchMLLM divides a batch from scratch and then assigns the new batches to ranks, so almost every item moves. But ranks
have drawn their samples at random, so their loads differ by about ten percent, and no more than this needs to move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from odc.balance.checks import FloatArray, IntArray, as_costs, as_count
from odc.balance.layout import permuted
from odc.balance.partition import Parts, split_beside, split_by_cost
from odc.balance.partition.bounds import lower_bound
from odc.balance.partition.refine import refine
from odc.balance.rearrange.levelling import Loads
from odc.balance.rearrange.nodes import place_items
from odc.balance.rearrange.rearrangement import Items, as_ranks, batches, owners

_EVEN_ENOUGH = 5e-4
"""So much later (relative) than the least possible nobody waits for: no cost model is that exact."""

_AIM = 3e-4
"""What exchanges of single items aim at."""

_WORTH_MOVING = 2e-3
"""Batches shared out from nothing are taken where they end by more than this (relative) earlier."""


def rebalance(
    costs: npt.ArrayLike,
    home: Sequence[Items],
    *,
    loads: npt.ArrayLike | None = None,
    ranks_per_node: int | None = None,
) -> Parts:
    """Give each rank about the same total cost, and leave most items on their ranks.

    The most loaded rank gives to the least loaded one: the item, or the swap of two items, that evens them out with the
    least movement. First nodes are balanced against each other, then the ranks of each node, until no rank exceeds a
    lower bound of the maximum by more than 0.03 %. So little more moves than the excess of ranks, and between nodes
    little more than the excess of nodes. If this stops at more than 0.05 %, it continues with moves and swaps between
    all pairs. If a few large items are badly placed, items are divided from scratch, and each batch goes to the rank
    that has most of it.

    Args:
        costs: cost of each item, (num_items,), 0 or at least 1e-140.
        home: the items that each rank has; each item occurs once.
        loads: further cost of each rank that cannot move, (num_ranks,); default: none.
        ranks_per_node: ranks 0 .. ranks_per_node - 1 are on one node, and so on; default: all ranks are on one node.

    Returns:
        The items of each rank, ascending. The result depends only on the arguments.

    Raises:
        ValueError: an argument is invalid.

    Example:
        >>> rebalance([5, 4, 3, 2], home=[[0, 1, 2], [3]])  # one item moves
        [[1, 2], [0, 3]]
    """
    return [mine.tolist() for mine in rebalanced(costs, home, loads=loads, ranks_per_node=ranks_per_node)]


def rebalanced(
    costs: npt.ArrayLike,
    home: Sequence[Items],
    *,
    loads: npt.ArrayLike | None = None,
    ranks_per_node: int | None = None,
) -> list[IntArray]:
    """:func:`rebalance`, as arrays: of thousands of ranks, lists take longer to make."""
    values = as_costs(costs)
    num_ranks = len(home)
    beside = np.zeros(num_ranks) if loads is None else as_costs(loads, "loads")
    if beside.size != num_ranks:
        raise ValueError(f"loads has {beside.size} entries: expected one for each of {num_ranks} ranks")
    if ranks_per_node is not None and num_ranks % as_count(ranks_per_node, "ranks_per_node"):
        raise ValueError(f"{num_ranks} ranks on nodes of ranks_per_node={ranks_per_node}: expected full nodes")
    has = as_ranks(home, "home")
    num_items = sum(map(len, home))
    if values.size != num_items:
        raise ValueError(f"{values.size} costs for {num_items} items: expected one per item")
    if not num_items:
        return list(has)
    bound = _bound(values, beside)
    target = bound * (1 + _EVEN_ENOUGH)
    moved = _evened_out(values, has, beside, ranks_per_node or num_ranks, bound)
    if max(moved.loads) <= target:
        return moved.parts()
    stuck = refine(values, [mine.tolist() for mine in moved.parts()], equal_size=False, loads=beside, target=target)
    makespan = _makespan(values, stuck, beside)
    if makespan > bound * (1 + _WORTH_MOVING):
        anew = split_beside(values, beside) if beside.any() else split_by_cost(values, num_ranks, equal_size=False)
        if _makespan(values, anew, beside) * (1 + _WORTH_MOVING) < makespan:
            if not beside.any():
                placed = place_items(owners(has), owners(anew), values, num_ranks, ranks_per_node or num_ranks)
                anew = permuted(anew, placed)
            return batches(owners(anew), num_ranks)
    return batches(owners(stuck), num_ranks)


def _evened_out(
    values: FloatArray, has: Sequence[IntArray], beside: FloatArray, ranks_per_node: int, bound: float
) -> Loads:
    """By exchanges between nodes, then within them, then wherever it helps."""
    loads = Loads(values, has, beside, bound, bound * _AIM)
    ranks = range(len(has))
    if 1 < ranks_per_node < len(ranks):
        loads.even_out_nodes(ranks_per_node)
        for first in ranks[::ranks_per_node]:
            loads.even_out(ranks[first : first + ranks_per_node])
    loads.even_out(ranks)
    return loads


def _makespan(values: FloatArray, parts: Parts, beside: FloatArray) -> float:
    totals: FloatArray = np.bincount(owners(parts), values, minlength=beside.size) + beside
    return float(totals.max())


def _bound(values: FloatArray, beside: FloatArray) -> float:
    """No sharing out ends earlier."""
    if not beside.any():
        return lower_bound(values, beside.size, equal_size=False, speeds=None)
    return max(float(beside.max()), math.fsum([*values.tolist(), *beside.tolist()]) / beside.size, float(values.max()))
