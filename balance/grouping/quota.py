"""What a rank takes from its pool for one minibatch, so that it takes as long as every other rank.

Where ranks need not run in step, nothing has to be aligned but the end of a minibatch: it is enough that all spend the
same cost until then. So they agree on a number, and no sample moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odc.balance.checks import FloatArray, IntArray, as_cost, as_costs, as_count
from odc.balance.partition import split_by_cost

_TRIED = 8
"""First samples of triples that are tried: more take longer, and fill a quota hardly better."""


@dataclass(frozen=True)
class Offer:
    """What a rank says of its pool before a minibatch."""

    oldest_cost: float
    """Of the sample that has waited longest; 0 if the pool is empty."""

    seen_cost: float
    """Of all samples that have ever been in the pool."""

    num_seen: int
    """How many these are."""


@dataclass
class Quotas:
    """What every rank may spend in each minibatch: worked out by each rank from the offers of all, so the same on all.

    On average that is ``minibatch_size`` samples of average cost, where the average is that of what was seen so far. It
    is never less than the dearest of the ranks' oldest samples, which must go, nor less than half of that; what was
    granted too much comes off the next ones.
    """

    minibatch_size: int
    granted: float = 0.0
    """All quotas so far."""

    num_granted: int = 0
    usual: float = 0.0
    """What ``minibatch_size`` samples of average cost were when the last one was granted."""

    def __post_init__(self) -> None:
        as_count(self.minibatch_size, "minibatch_size")

    def grant(self, offers: Sequence[Offer]) -> float:
        """The quota of the next minibatch; 0 if no rank has a sample."""
        num_seen = sum(offer.num_seen for offer in offers)
        dearest = max(offer.oldest_cost for offer in offers)
        if not num_seen or not dearest:
            return 0.0
        self.usual = self.minibatch_size * sum(offer.seen_cost for offer in offers) / num_seen
        self.num_granted += 1
        quota = max(self.num_granted * self.usual - self.granted, dearest, self.usual / 2)
        self.granted += quota
        return quota


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
    pools = [as_costs(mine) for mine in costs]
    owned = [(position, rank) for rank, mine in enumerate(pools) for position in range(mine.size)]
    owned.sort()  # by age, as far as ranks can compare
    values = np.array([pools[rank][position] for position, rank in owned])
    parts = split_by_cost(values, len(pools), equal_size=False)
    if max(map(len, parts)) > pool_size:
        filled_up = np.concatenate([values, np.zeros(-values.size % len(pools))])
        parts = [[i for i in part if i < values.size] for part in split_by_cost(filled_up, len(pools), equal_size=True)]
    return [[(owned[i][1], owned[i][0]) for i in sorted(part)] for part in parts]


def fill_quota(costs: npt.ArrayLike, quota: float, usual: float = float("inf")) -> list[int]:
    """Choose samples of a pool whose costs add up to a quota, or to little less.

    The oldest sample is always chosen, so none waits for longer than it takes to come to the front. Next come those
    that fit and cost more than the usual quota: what one rank's oldest sample makes larger for all is used by the
    others for samples of theirs that would make a later one larger. The others are chosen in the order of their age,
    those that fit, until room for about two is left; one, two or three samples that fill it best, whatever their age,
    are the last.

    Args:
        costs: of each sample of the pool, the oldest first, (num_samples,).
        quota: what they may cost together.
        usual: see :class:`Quotas`.

    Returns:
        Indices into ``costs``, ascending, none if the pool is empty. Their costs add up to at most ``quota``, unless
        the oldest sample alone costs more.

    Raises:
        ValueError: a cost or the quota is out of range.
    """
    values = as_costs(costs)
    left = as_cost(quota, "quota")
    if not values.size:
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
        if cost <= left if cost > usual else left >= 2.5 * mean and cost <= left - 1.5 * mean:
            chosen.append(sample)
            left -= cost
        else:
            waiting.append(sample)
    last = _best_end(np.array(waiting, dtype=np.int64), values, left)
    left -= float(values[last].sum())
    for sample in waiting:  # many small ones may fit where three could not fill the room
        if each[sample] <= left and sample not in last:
            chosen.append(sample)
            left -= each[sample]
    return sorted(chosen + last)


def _best_end(waiting: IntArray, values: FloatArray, room: float) -> list[int]:
    """Up to three samples that fill the room best; of equally good ones the fewest."""
    waiting = waiting[values[waiting] <= room]
    order = waiting[np.argsort(values[waiting], kind="stable")]
    ascending = values[order]
    best: list[int] = []
    rest = room
    if order.size:
        best, rest = [int(order[-1])], room - float(ascending[-1])
    for first in (None, *_spread(order.size)):
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
