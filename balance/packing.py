"""Pack the samples of one rank into microbatches that keep the token limit."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from odc.balance.checks import FloatArray, IntArray
from odc.balance.differencing import Parts
from odc.balance.partition import balance, canonical, fill_empty
from odc.balance.refine import Limit, refine


def pack(lengths: IntArray, costs: FloatArray, max_tokens: int) -> Parts:
    """Pack samples into few microbatches of at most ``max_tokens`` tokens and of similar cost.

    Paper appendix C, Listing 1: split into k microbatches of similar cost, accept the split only if each keeps
    the limit, else raise k. Differences: k starts at a lower bound instead of 1, and a k at which the
    cost-balanced split fails is given two more chances, see :func:`pack_into`.

    Returns:
        Lists of indices into ``lengths``, none empty, together every index once.
    """
    num_microbatches = min_microbatches(lengths, max_tokens)
    while True:
        parts = pack_into(lengths, costs, num_microbatches, max_tokens)
        if parts is not None:
            return parts
        num_microbatches += 1


def pack_together(
    lengths: Sequence[IntArray], costs: Sequence[FloatArray], max_tokens: int
) -> list[Parts]:
    """:func:`pack` for several ranks that must all have the same number of microbatches (LB-Micro).

    The number is the smallest at which every rank's packing succeeds. A rank with fewer samples than that gets
    empty microbatches, the last ones; no other rank gets any.
    """
    num_microbatches = max(min_microbatches(mine, max_tokens) for mine in lengths)
    while True:
        packed = []
        for mine, my_costs in zip(lengths, costs, strict=True):
            parts = pack_into(mine, my_costs, num_microbatches, max_tokens)
            if parts is None:
                break
            packed.append(parts)
        else:
            return packed
        num_microbatches += 1


def pack_into(lengths: IntArray, costs: FloatArray, num_microbatches: int, max_tokens: int) -> Parts | None:
    """Pack samples into exactly ``num_microbatches``, or return None if no packing was found.

    Tried in this order: a split of similar costs; one of similar token counts; first-fit-decreasing. The last
    two are then balanced by cost as far as the limit allows. A packing is always found if ``num_microbatches``
    is at least the number of bins that first-fit-decreasing needs, thus at the latest with one sample in each.
    """
    parts = balance(costs, num_microbatches, equal_size=False)
    if fits(lengths, parts, max_tokens):
        return parts
    parts = balance(lengths.astype(np.float64), num_microbatches, equal_size=False)
    if not fits(lengths, parts, max_tokens):
        parts = first_fit_decreasing(lengths, max_tokens)
        if len(parts) > num_microbatches:
            return None
        parts += [[] for _ in range(num_microbatches - len(parts))]
    parts = refine(costs, parts, equal_size=False, limit=Limit(lengths, max_tokens))
    fill_empty(costs, parts)
    return canonical(parts)


def fits(lengths: IntArray, parts: Parts, max_tokens: int) -> bool:
    """Whether every part has at most ``max_tokens`` tokens."""
    return all(int(lengths[part].sum()) <= max_tokens for part in parts)


def min_microbatches(lengths: IntArray, max_tokens: int) -> int:
    """A lower bound on the number of microbatches: by the sum, and by the samples no two of which fit together.

    For each threshold t up to half the limit: samples longer than ``max_tokens - t`` share with none of at
    least t tokens, and two samples longer than half the limit do not share (Martello and Toth's bound L2).
    """
    if lengths.size == 0:
        return 0
    bound = -(-int(lengths.sum()) // max_tokens)
    for threshold in np.unique(np.append(lengths[2 * lengths <= max_tokens], 0)):
        alone = lengths > max_tokens - threshold
        large = (2 * lengths > max_tokens) & ~alone
        small = (2 * lengths <= max_tokens) & (lengths >= threshold)
        room = int(large.sum()) * max_tokens - int(lengths[large].sum())
        overflow = max(0, int(lengths[small].sum()) - room)
        bound = max(bound, int(alone.sum()) + int(large.sum()) + -(-overflow // max_tokens))
    return bound


def first_fit_decreasing(lengths: IntArray, max_tokens: int) -> Parts:
    """Bins of at most ``max_tokens``: each sample, the longest first, goes into the first bin with room."""
    parts: Parts = []
    room = np.zeros(lengths.size, dtype=np.int64)
    for sample in np.argsort(-lengths, kind="stable"):
        open_room = room[: len(parts)] >= lengths[sample]
        bin_number = int(np.argmax(open_room)) if open_room.any() else len(parts)
        if bin_number == len(parts):
            parts.append([])
            room[bin_number] = max_tokens
        parts[bin_number].append(int(sample))
        room[bin_number] -= lengths[sample]
    return parts
