"""Quotas: a rank fills a minibatch from its pool up to a cost that is the same on all ranks.

If ranks need not synchronize at microbatches, only the end of a minibatch must be aligned, so equal total costs are
enough. Ranks agree on one number, and no sample moves.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from odc.balance.checks import FloatArray, IntArray, as_cost, as_costs, as_count
from odc.balance.partition import split_by_cost
from odc.balance.random_numbers import random_generator

_TRIED = 8
"""First samples of triples that are tried: more take longer, and fill a quota hardly better."""

_MOST_AHEAD = 8
"""Minibatches whose samples may be trained on before their time, where dear samples make quotas large."""


@dataclass(frozen=True)
class Offer:
    """What a rank says of its pool before a minibatch."""

    oldest_cost: float
    """Of the sample that has waited longest; 0 if the pool is empty."""

    seen_cost: float
    """Of all samples that have ever been in the pool."""

    num_seen: int
    """How many these are."""

    pooled_cost: float
    """Of those that are in the pool."""

    num_pooled: int


class Grant(NamedTuple):
    """What a rank may take for a minibatch."""

    quota: float
    """Cost, the same for every rank."""

    usual: float
    """Cost of ``minibatch_size`` samples of average cost."""

    most: list[int]
    """Samples of each rank."""

    least: list[int]
    """Samples of each rank, whatever they cost."""


@dataclass
class Quotas:
    """What every rank may spend in each minibatch: worked out by each rank from the offers of all, so the same on all.

    On average that is ``minibatch_size`` samples of average cost, where the average is that of what was seen so far. It
    is never less than the dearest of the ranks' oldest samples, which must go, nor less than half of that; what was
    spent too much comes off the next ones. And on average it is ``minibatch_size`` samples: ranks that have spent more
    of them than is due, by eight minibatches, take no more than are due. (That is where there are few in a minibatch,
    and quotas are those of the dearest samples most of the time.)

    Args:
        minibatch_size: samples of a rank in a minibatch, on average.
        num_samples: of all ranks, all of which are to be used up after :meth:`num_minibatches`; None: without end.
        num_granted: minibatches so far.
    """

    minibatch_size: int
    num_samples: int | None = None
    num_granted: int = 0

    def __post_init__(self) -> None:
        as_count(self.minibatch_size, "minibatch_size")

    def num_left(self, world_size: int) -> int:
        """Minibatches that are still to come, of an epoch that has an end; at least 1."""
        assert self.num_samples is not None
        return max(num_minibatches(self.num_samples, world_size, self.minibatch_size) - self.num_granted, 1)

    def grant(self, offers: Sequence[Offer]) -> Grant:
        """For the next minibatch. Nothing, if no rank has a sample."""
        num_seen, pooled = sum(offer.num_seen for offer in offers), [offer.num_pooled for offer in offers]
        if not any(pooled):
            return Grant(0.0, 0.0, [0] * len(offers), [0] * len(offers))
        world_size, dearest = len(offers), max(offer.oldest_cost for offer in offers)
        seen_cost = sum(offer.seen_cost for offer in offers)
        spent = seen_cost - sum(offer.pooled_cost for offer in offers)
        usual = self.minibatch_size * seen_cost / num_seen
        quota = max((self.num_granted + 1) * usual - spent / world_size, dearest, usual / 2)
        at_once = world_size * self.minibatch_size
        used = num_seen - sum(pooled)
        ahead, kept, fewest = float(_MOST_AHEAD), 0, 0
        if self.num_samples is not None:
            num_left, left = self.num_left(world_size), self.num_samples - used
            ahead = min(ahead, num_left / 4)
            kept = num_left - 1
            # Where samples become cheaper all the time, as many are left in the end as quotas were too small for.
            if num_left == 1 or left > at_once * (1.25 * num_left - 0.25):
                fewest = -(-left // num_left)
        room = max(int(at_once * (self.num_granted + 1 + ahead)) - used, world_size)
        if kept:  # one sample at least for each minibatch to come
            room = max(min(room, left - kept), 1)
        self.num_granted += 1
        return Grant(quota, usual, deal(pooled, room), deal(pooled, fewest))


def deal(wanted: Sequence[int], left: int) -> list[int]:
    """What each rank gets of what it wants; the last samples are dealt out evenly."""
    if sum(wanted) <= left:
        return list(wanted)
    got = [0] * len(wanted)
    hungry = [rank for rank, number in enumerate(wanted) if number]
    while left and hungry:
        share, rest = divmod(left, len(hungry))
        for turn, rank in enumerate(hungry):
            number = min(wanted[rank] - got[rank], share + (turn < rest))
            got[rank] += number
            left -= number
        hungry = [rank for rank in hungry if got[rank] < wanted[rank]]
    return got


def num_minibatches(num_samples: int, world_size: int, minibatch_size: int) -> int:
    """Of an epoch with so many samples, all ranks together."""
    return -(-num_samples // (world_size * minibatch_size))


def plan_last(costs: Sequence[npt.ArrayLike], num_last: int) -> list[list[list[tuple[int, int]]]]:
    """Share out the samples of all ranks' last pools over the last minibatches.

    What is left is known to all ranks: samples are put into as many parts as there are minibatches times ranks, each of
    the same cost as far as samples allow, and parts of neighbouring costs make a minibatch. These come in random order,
    the same on all ranks.

    Args:
        costs: of the samples of each rank's pool, the oldest first, (num_samples,) each.
        num_last: minibatches, at least 1.

    Returns:
        ``[rank][minibatch]``: the samples that a rank is to have then, as (rank that has it, position in its pool). No
        minibatch is empty on all ranks, unless there are fewer samples than minibatches.
    """
    owned, values = _by_age(costs)
    num_parts = min(values.size, num_last * len(costs))
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [(0.0, number) for number in range(num_parts)]
    for sample in np.argsort(-values, kind="stable").tolist():  # the dearest first, each to what has least
        load, number = loads[0]
        heapq.heapreplace(loads, (load + float(values[sample]), number))
        parts[number].append(sample)
    descending = [parts[number] for _, number in sorted(loads, reverse=True)]
    cuts = [num_parts * i // num_last for i in range(num_last + 1)]
    minibatches = [descending[a:b] for a, b in itertools.pairwise(cuts)]
    # Not by cost or by age: an epoch would end with its dearest samples, few in each minibatch.
    order = np.argsort(random_generator("last minibatches", num_last).random_raw(num_last), kind="stable").tolist()
    minibatches = [minibatches[i] for i in order]
    ranks: list[list[list[tuple[int, int]]]] = [[] for _ in costs]
    numbers = [0] * len(costs)
    for minibatch in minibatches:
        larger_first = sorted(minibatch, key=len, reverse=True)
        by_number = sorted(range(len(costs)), key=numbers.__getitem__)
        for at, rank in enumerate(by_number):
            part = sorted(larger_first[at]) if at < len(larger_first) else []
            ranks[rank].append([owned[i] for i in part])
            numbers[rank] += len(part)
    return ranks


def even_out(costs: Sequence[npt.ArrayLike], pool_size: int) -> list[list[tuple[int, int]]]:
    """Deal the samples of all ranks' last pools out anew, so that what is left costs every rank the same.

    Once a source is at its end, pools of unequal costs would have some ranks go on alone.

    Args:
        costs: of the samples of each rank's pool, the oldest first, (num_samples,) each.
        pool_size: most samples that a rank has, before and after.

    Returns:
        For each rank, the samples that it is to have, as (rank that has it, position in its pool), those that have
        waited longest first.
    """
    owned, values = _by_age(costs)
    parts = split_by_cost(values, len(costs), equal_size=False)
    if max(map(len, parts)) > pool_size:
        filled_up = np.concatenate([values, np.zeros(-values.size % len(costs))])
        parts = [[i for i in part if i < values.size] for part in split_by_cost(filled_up, len(costs), equal_size=True)]
    return [[owned[i] for i in sorted(part)] for part in parts]


def _by_age(costs: Sequence[npt.ArrayLike]) -> tuple[list[tuple[int, int]], FloatArray]:
    """The samples of all pools, as (rank that has it, position in its pool), by age as far as ranks can compare; and
    what each costs."""
    pools = [as_costs(mine) for mine in costs]
    owned = [(rank, position) for rank, mine in enumerate(pools) for position in range(mine.size)]
    owned.sort(key=lambda sample: sample[::-1])
    return owned, np.array([pools[rank][position] for rank, position in owned])


def fill_quota(costs: npt.ArrayLike, quota: float, usual: float = float("inf"), most: int | None = None) -> list[int]:
    """Choose samples of a pool whose costs add up to a quota, or to little less.

    The oldest sample is always chosen, so none waits for longer than it takes to come to the front. Next come those
    that fit and cost more than the usual quota: what one rank's oldest sample makes larger for all is used by the
    others for samples of theirs that would make a later one larger. The others are chosen in the order of their age,
    those that fit, until room for about two is left; one, two or three samples that fill it best, whatever their age,
    are the last.

    Args:
        costs: of each sample of the pool, the oldest first, (num_samples,).
        quota: what they may cost together.
        usual: see :class:`Grant`.
        most: samples; default: any number.

    Returns:
        Indices into ``costs``, ascending, none if the pool is empty or ``most`` is 0. Their costs add up to at most
        ``quota``, unless the oldest sample alone costs more.

    Raises:
        ValueError: a cost or the quota is out of range.
    """
    values = as_costs(costs)
    left = as_cost(quota, "quota")
    most = values.size if most is None else min(most, values.size)
    if not most:
        return []
    chosen = [0]
    each = values.tolist()
    left -= each[0]
    mean = float(values.mean())
    is_dear = values[1:] > usual
    by_turns = [*(np.flatnonzero(is_dear) + 1).tolist(), *(np.flatnonzero(~is_dear) + 1).tolist()]
    waiting = []
    for sample in by_turns:
        cost = each[sample]
        # Two average samples stay to be chosen well. Less than that, and each sample decides too much.
        fits = cost <= left if cost > usual else left >= 2.5 * mean and cost <= left - 1.5 * mean
        if fits and len(chosen) < most - 1:
            chosen.append(sample)
            left -= cost
        else:
            waiting.append(sample)
    last = _best_end(np.array(waiting, dtype=np.int64), values, left, most - len(chosen))
    left -= float(values[last].sum())
    chosen += last
    for sample in waiting:  # many small ones may fit where three could not fill the room
        if each[sample] <= left and sample not in last and len(chosen) < most:
            chosen.append(sample)
            left -= each[sample]
    return sorted(chosen)


def _best_end(waiting: IntArray, values: FloatArray, room: float, most: int) -> list[int]:
    """Up to three samples that fill the room best, or up to ``most``; of equally good ones the fewest."""
    waiting = waiting[values[waiting] <= room]
    order = waiting[np.argsort(values[waiting], kind="stable")]
    ascending = values[order]
    best: list[int] = []
    rest = room
    if order.size and most:
        best, rest = [int(order[-1])], room - float(ascending[-1])
    if most < 2:
        return best
    for first in (None, *(_spread(order.size) if most > 2 else [])):
        free = room if first is None else room - float(ascending[first])
        found = _best_pair(ascending, free, first)
        if found is not None and (left := free - float(ascending[list(found)].sum())) < rest:
            best, rest = [int(order[i]) for i in (*found, *(() if first is None else (first,)))], left
    return best


def _spread(size: int) -> list[int]:
    return np.unique(np.linspace(0, size - 1, min(_TRIED, size)).astype(int)).tolist() if size else []


def _best_pair(ascending: FloatArray, room: float, without: int | None) -> tuple[int, int] | None:
    """Two different samples with the largest sum that fits."""
    lower = np.arange(ascending.size)
    upper = np.searchsorted(ascending, room - ascending, side="right") - 1
    if without is not None:
        upper = upper - (upper == without)
    possible = upper > lower
    if without is not None:
        possible &= lower != without
    if not possible.any():
        return None
    lower, upper = lower[possible], upper[possible]
    sums = ascending[lower] + ascending[upper]
    at = int(np.argmax(np.where(sums <= room, sums, -1.0)))
    return (int(lower[at]), int(upper[at])) if sums[at] <= room else None
