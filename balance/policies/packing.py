"""Pack the samples of one rank into microbatches that keep the token limit."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from odc.balance.checks import FloatArray, IntArray
from odc.balance.partition.differencing import Parts
from odc.balance.partition.kway import canonical, fill_empty, split_by_cost
from odc.balance.partition.refine import Limit, refine

T = TypeVar("T")

# So many numbers of microbatches are tried one by one: most often the first or second works.
_TRIES_FROM_BELOW = 4


def pack(lengths: IntArray, costs: FloatArray, max_tokens: int) -> Parts:
    """Pack the samples of one rank into few microbatches of similar cost that keep the token limit.

    Paper appendix C, Listing 1: split into k microbatches of similar cost, accept the split only if each
    keeps the limit, else raise k. Differences: k starts at a lower bound instead of 1, and a k at which the
    cost-balanced split fails is given two more chances, see :class:`Packer`.

    Returns:
        Lists of indices into ``lengths``, none empty, together every index once.
    """
    return pack_together([lengths], [costs], max_tokens)[0]


def pack_together(lengths: Sequence[IntArray], costs: Sequence[FloatArray], max_tokens: int) -> list[Parts]:
    """:func:`pack` for several ranks that must all have the same number of microbatches (LB-Micro).

    The number is the smallest at which every rank's packing is found, see :func:`smallest`. A rank with fewer
    samples than that gets empty microbatches, the last ones; no other rank gets any.
    """
    packers = [Packer(*mine, max_tokens) for mine in zip(lengths, costs, strict=True)]

    def into(num_microbatches: int) -> list[Parts] | None:
        found = []
        for packer in packers:
            parts = packer.into(num_microbatches)
            if parts is None:
                return None
            found.append(parts)
        return found

    return smallest(
        max(min_microbatches(mine, max_tokens) for mine in lengths), max(packer.enough for packer in packers), into
    )


def smallest(low: int, high: int, attempt: Callable[[int], T | None]) -> T:
    """The result of ``attempt`` for the smallest number from ``low`` to ``high`` at which it finds one.

    It must find one at ``high``. After a few numbers from ``low`` on, the rest are bisected, as if one found
    at a number meant one at every larger number; that is nearly so.
    """
    for number in range(low, min(low + _TRIES_FROM_BELOW, high)):
        if (found := attempt(number)) is not None:
            return found
    low, best = min(low + _TRIES_FROM_BELOW, high), None
    while low < high:
        middle = (low + high) // 2
        found = attempt(middle)
        if found is None:
            low = middle + 1
        else:
            high, best = middle, found
    if best is None:
        best = attempt(high)
    assert best is not None
    return best


class Packer:
    """Packs the samples of one rank into a given number of microbatches.

    Tried in this order: a split of similar costs; one of similar token counts; best-fit-decreasing. The last
    two are then balanced by cost as far as the limit allows. ``lengths`` are at most ``max_tokens`` each.
    """

    def __init__(self, lengths: IntArray, costs: FloatArray, max_tokens: int) -> None:
        self._lengths = lengths
        self._costs = costs
        self._max_tokens = max_tokens
        self._best_fit = best_fit_decreasing(lengths, max_tokens)

    @property
    def enough(self) -> int:
        """A number of microbatches for which a packing is always found."""
        return len(self._best_fit)

    def into(self, num_microbatches: int) -> Parts | None:
        """A packing into exactly ``num_microbatches``, or None if none was found.

        One is always found if best-fit-decreasing needs no more, thus at the latest with one sample in each.
        """
        parts = split_by_cost(self._costs, num_microbatches, equal_size=False, thorough=False)
        if self._fits(parts):
            return parts
        parts = split_by_cost(self._lengths.astype(np.float64), num_microbatches, equal_size=False)
        if not self._fits(parts):
            num_empty = num_microbatches - len(self._best_fit)
            if num_empty < 0:
                return None
            parts = [list(part) for part in self._best_fit] + [[] for _ in range(num_empty)]
            fill_empty(self._costs, parts)
        limit = Limit(self._lengths, self._max_tokens)
        parts = refine(self._costs, parts, equal_size=False, limit=limit)
        return canonical(parts)

    def _fits(self, parts: Parts) -> bool:
        return all(int(self._lengths[part].sum()) <= self._max_tokens for part in parts)


def min_microbatches(lengths: IntArray, max_tokens: int) -> int:
    """A lower bound on the number of microbatches (Martello and Toth's L2): no packing needs fewer.

    Two samples longer than half the limit never share. For a threshold t up to half the limit, those longer
    than ``max_tokens - t`` share with no sample of at least t tokens; what the rest of the long ones leave
    free takes samples of t tokens and up to half the limit, and what remains of these needs microbatches of
    its own. t = 0 gives at least the sum of all tokens over the limit. And no microbatch holds more samples
    than fit of the shortest ones.
    """
    if lengths.size == 0:
        return 0
    ordered = np.sort(lengths)
    sums = np.concatenate([[0], np.cumsum(ordered)])
    num_short = int(np.searchsorted(2 * ordered, max_tokens, side="right"))
    num_long = lengths.size - num_short
    thresholds = np.concatenate([[0], ordered[:num_short]])
    # Short samples of at least t tokens are first : num_short, long ones that can share num_short : last.
    first = np.searchsorted(ordered, thresholds)
    last = np.searchsorted(ordered, max_tokens - thresholds, side="right")
    needed = sums[num_short] - sums[first]
    free = (last - num_short) * max_tokens - (sums[last] - sums[num_short])
    overflow = np.maximum(needed - free, 0)
    most_together = int(np.searchsorted(sums, max_tokens, side="right")) - 1
    return max(num_long + int((-(-overflow // max_tokens)).max()), -(-lengths.size // most_together))


def best_fit_decreasing(lengths: IntArray, max_tokens: int) -> Parts:
    """Bins of at most ``max_tokens``: each sample, the longest first, goes into the fullest bin with room for it, of
    equally full ones the first."""
    parts: Parts = []
    rooms: list[tuple[int, int]] = []  # what is left in each bin, and its number; ascending
    values = lengths.tolist()
    for sample in np.argsort(-lengths, kind="stable").tolist():
        place = bisect.bisect_left(rooms, (values[sample], 0))
        if place == len(rooms):
            room, number = max_tokens, len(parts)
            parts.append([])
        else:
            room, number = rooms.pop(place)
        parts[number].append(sample)
        bisect.insort(rooms, (room - values[sample], number))
    return parts
