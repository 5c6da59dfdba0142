"""Post-balancing: one batch per rank out of the samples that all ranks have drawn (OrchMLLM, section 5.1)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from odc.balance.checks import MAX_PARTS, IntArray, as_count, as_lengths
from odc.balance.costs.models import CostModel, QuadraticCost, attention_costs, evaluate
from odc.balance.layout import FlatMicrobatches, Layout, as_layout, microbatch_costs
from odc.balance.partition.kway import fill_empty, split_by_cost
from odc.balance.rearrange.padded_batches import Items, best_runs, few_batches
from odc.balance.rearrange.rearrangement import batches, owners
from odc.errors import shown


def post_balance(lengths: npt.ArrayLike, num_ranks: int, *, cost: CostModel, layout: Layout) -> list[list[int]]:
    """Divide items into one batch per rank so that the costliest batch is cheap (the paper's equation 2).

    The cost of a batch depends on the layout:

    - "packed": the sum of ``cost`` of its items. This is :func:`odc.balance.karmarkar_karp` on the costs, for the
      paper's algorithms 1 (no attention) and 4 (with attention, there compared within a tolerance set by hand).
    - "padded": the number of items times the cost of the longest. The result is optimal, see below.
    - "padded-attention": only attention is padded, ``b * sum(l) + a * n * max(l)**2`` for n items and a
      :class:`~odc.balance.QuadraticCost` of ``a`` and ``b``. Not optimal in every case, but on small instances nearly
      always. (The paper's algorithm 5 says nothing of the bound that it fills batches up to; this searches for it.)

    "padded": batches may be taken to be runs of the items sorted by length. Given any batches, let b_1, b_2, ... be
    their sizes in the order of their longest items m_1 >= m_2 >= ... Deal the items, the longest first, out to runs of
    these sizes in this order. Run k starts behind b_1 + ... + b_(k-1) items. The batches from k on hold b_k + b_(k+1)
    + ... items, none longer than m_k, so at most b_1 + ... + b_(k-1) items are longer than m_k, and none of them is in
    run k or behind. So each run has as many items as its batch, the longest of them no longer: none costs more. The
    best runs are then found exactly (:func:`~odc.balance.rearrange.padded_batches.contiguous_batches`). The paper's
    algorithm 2 goes through the items from the shortest on, bisects integers up to ``l_min * (d/2 + 1)``, which may be
    less than the longest item alone takes, and returns the batches of the last bound tried, which may be more than d.

    Args:
        lengths: tokens of each item, integers of at least 1, at most 2**53 in all; may be empty.
        num_ranks: from 1 to 2**20.
        cost: cost model of an item without padding. For "padded" it must not fall with the length; for
            "padded-attention" it must be a :class:`~odc.balance.QuadraticCost` or a :class:`~odc.balance.LinearCost`.
        layout: whether the items of a batch are packed or padded.

    Returns:
        ``num_ranks`` lists of indices, each ascending; together every index once. They are ordered by their lowest
        index; empty ones come last, and there are some only if there are fewer items than ranks. Depends on nothing but
        the arguments, and never costs more than dealing the items out in turn.

    Raises:
        ValueError: an argument is invalid.

    Example:
        >>> post_balance([100, 10, 90, 20], 2, cost=LinearCost(), layout="padded")  # like lengths go together
        [[0, 2], [1, 3]]
    """
    return [batch.tolist() for batch in post_balanced(lengths, num_ranks, cost=cost, layout=layout)]


def post_balanced(lengths: npt.ArrayLike, num_ranks: int, *, cost: CostModel, layout: Layout) -> list[IntArray]:
    """:func:`post_balance`, as arrays: of thousands of ranks, lists take longer to make."""
    tokens = as_lengths(lengths)
    num_ranks = as_count(num_ranks, "num_ranks", maximum=MAX_PARTS)
    layout = as_layout(layout)
    with np.errstate(over="ignore", invalid="ignore"):  # refused as infinite
        costs = evaluate(cost, tokens)
    attention = attention_costs(cost, tokens) if layout == "padded-attention" else None
    longest_first = np.argsort(-tokens, kind="stable")
    if layout == "padded" and (rising := np.flatnonzero(np.diff(costs[longest_first]) > 0)).size:
        more, less = longest_first[rising[0] : rising[0] + 2].tolist()
        raise ValueError(
            f"cost={shown(cost)}: {costs[more]} for {tokens[more]} tokens, {costs[less]} for {tokens[less]}: expected "
            "no less for more tokens, where the longest item sets the cost of all; use a cost that does not fall, or "
            "layout='packed'"
        )
    if tokens.size <= num_ranks:
        return batches(np.arange(tokens.size), num_ranks)
    batch = np.empty(tokens.size, dtype=np.int64)  # of each item
    if layout == "packed" or (attention is not None and not attention.any()):
        batch = owners(split_by_cost(costs, num_ranks, equal_size=False))
    else:
        ordered = tokens[longest_first]
        if attention is None:
            # What the longest item costs is all there is.
            starts = best_runs(Items(ordered, costs[longest_first], 0.0, num_ranks))
            batch[longest_first] = np.repeat(np.arange(len(starts)), np.diff([*starts, tokens.size]))
        else:
            assert isinstance(cost, QuadraticCost)
            batch[longest_first] = owners(few_batches(Items(ordered, attention[longest_first], cost.b, num_ranks)))
        if not np.bincount(batch, minlength=num_ranks).all():
            # A batch that gives an item away costs less, a new one of one item no more than where it was.
            parts = [mine.tolist() for mine in batches(batch, num_ranks)]
            fill_empty(costs, parts)
            batch = owners(parts)
        batch = _by_lowest_item(batch, num_ranks)

    def makespan(found: list[IntArray]) -> float:
        one_each = FlatMicrobatches.one_each(found, keep_empty=True)
        return float(microbatch_costs(one_each, costs, tokens, layout, attention).max())

    dealt_out = np.arange(tokens.size) % num_ranks
    return min(batches(batch, num_ranks), batches(dealt_out, num_ranks), key=makespan)


def _by_lowest_item(batch: IntArray, num_batches: int) -> IntArray:
    """The batch of each item, numbered anew in the order of their lowest items; none is empty."""
    lowest = np.empty(num_batches, dtype=np.int64)
    lowest[batch[::-1]] = np.arange(batch.size)[::-1]  # of several the last one
    number = np.empty(num_batches, dtype=np.int64)
    number[np.argsort(lowest)] = np.arange(num_batches)
    return number[batch]
