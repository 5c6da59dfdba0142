"""Groups of about equally many padded tokens, and as many of them on every rank (Online Dynamic Batching)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from odc.balance.checks import as_count, as_lengths

Group = list[int]


def token_budget_groups(lengths: npt.ArrayLike, max_tokens: int) -> list[Group]:
    """Cut samples into groups of similar lengths that, padded to their longest, have about ``max_tokens`` tokens.

    ODB, section 2.2 and appendix D: from the longest sample to the shortest, a group is closed when it has as many
    samples as its threshold says. The first threshold is 1, the next one B(l) = max(max_tokens // l, 1) of the shortest
    sample of the group before, so a group never has more than ``max_tokens`` padded tokens, unless it is a single
    longer sample.

    Args:
        lengths: tokens of each sample, (num_samples,), at least 1 each.
        max_tokens: most tokens of a group, count x longest.

    Returns:
        Lists of indices into ``lengths``, none empty, together every index once. The group of the shortest samples
        comes first (it may be smaller than its threshold); within a group the shortest sample does, and of equal
        lengths the one that is given first.

    Raises:
        ValueError: lengths or ``max_tokens`` are out of range.

    Example:
        >>> token_budget_groups([100, 200, 500, 800], max_tokens=1000)
        [[0, 1], [2], [3]]
    """
    tokens = as_lengths(lengths)
    max_tokens = as_count(max_tokens, "max_tokens")
    ascending = np.argsort(tokens, kind="stable")
    groups: list[Group] = []
    end, size = tokens.size, 1
    while end > 0:
        group = ascending[max(end - size, 0) : end].tolist()
        groups.append(group)
        end -= len(group)
        size = max(max_tokens // int(tokens[group[0]]), 1)
    return groups[::-1]


def align_groups(
    groups: Sequence[Sequence[Sequence[int]]], capacities: Sequence[int]
) -> tuple[list[list[Group]], list[list[int]]]:
    """Give every rank that has groups the same number of them: some ranks split groups, others give some back.

    ODB, equation (3) and algorithm 1. The number is the largest that an active rank (one that has groups) has, but no
    more than the smallest capacity and the smallest number of samples of an active rank. A rank with fewer splits
    samples off: the last sample of the last group that has two or more becomes a group of its own. A rank with more
    keeps its largest groups, of equal ones the earlier, in their order.

    Args:
        groups: of each rank, lists of that rank's samples; none of them empty.
        capacities: microbatches that each rank may still emit, (world_size,); 0: no limit.

    Returns:
        The groups of each rank, equally many on all active ones and none on the others; a sample that was split off
        stands right behind the group that it comes from. And the samples that each rank takes back, group by group.

    Raises:
        ValueError: a group is empty, a capacity is negative, or there is not one capacity per rank.

    Example:
        >>> align_groups([[[0, 1], [2]], [[0]], []], capacities=[0, 0, 0])
        ([[[0, 1]], [[0]], []], [[2], [], []])
    """
    if len(capacities) != len(groups):
        raise ValueError(f"{len(capacities)} capacities for {len(groups)} ranks: expected one per rank")
    limits = [as_count(capacity, f"capacities[{rank}]", minimum=0) for rank, capacity in enumerate(capacities)]
    for rank, mine in enumerate(groups):
        for number, group in enumerate(mine):
            if not len(group):
                raise ValueError(f"group {number} of rank {rank} has no sample: expected at least one")
    active = [rank for rank, mine in enumerate(groups) if mine]
    if not active:
        return [[] for _ in groups], [[] for _ in groups]
    target = max(len(groups[rank]) for rank in active)
    target = min([target, *(limits[rank] for rank in active if limits[rank])])
    target = min([target, *(sum(map(len, groups[rank])) for rank in active)])
    aligned: list[list[Group]] = []
    returned: list[list[int]] = []
    for mine in groups:
        own = [list(group) for group in mine]
        kept, left = _largest(own, target) if len(own) > target else (own, [])
        if kept:
            _split(kept, target)
        aligned.append(kept)
        returned.append(left)
    return aligned, returned


def _largest(groups: list[Group], count: int) -> tuple[list[Group], list[int]]:
    """The ``count`` largest groups, in their order, and the samples of the others."""
    by_size = sorted(range(len(groups)), key=lambda number: -len(groups[number]))  # stable: earlier ones first
    kept = set(by_size[:count])
    left = [sample for number, group in enumerate(groups) if number not in kept for sample in group]
    return [groups[number] for number in sorted(kept)], left


def _split(groups: list[Group], count: int) -> None:
    """Split samples off until there are ``count`` groups, in place. There are at least that many samples."""
    at = len(groups) - 1
    while len(groups) < count:
        while len(groups[at]) < 2:
            at -= 1
        groups.insert(at + 1, [groups[at].pop()])
