"""Even out the loads of ranks by exchanges of single items: from those that have too much to those that have room.

Plain Python on sorted lists. There are about as many exchanges as ranks, and each looks at two ranks only.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from odc.balance.checks import FloatArray, IntArray
from odc.balance.layout import split
from odc.balance.rearrange.rearrangement import batches, owners

# An exchange must bring the giving rank down by this part of the goal: less could be rounding, and go on forever.
_MIN_GAIN = 1e-6
# A rank that can give nothing to so many others, those with the most room, is left as it is.
_MAX_PARTNERS = 4


class Loads:
    """What ranks have, as it changes; ``goal`` is what each shall have, within ``tolerance``.

    Args:
        costs: of each item, (num_items,).
        home: the items of each rank.
        beside: what each rank has to compute besides, (num_ranks,).
    """

    def __init__(
        self, costs: FloatArray, home: Sequence[IntArray], beside: FloatArray, goal: float, tolerance: float
    ) -> None:
        self.goal = goal
        self.tolerance = tolerance
        self._owners, items = owners(home), np.concatenate(home)
        ends, of_items = np.cumsum([0, *map(len, home)]), costs[items]
        # Of each rank from the cheapest on. Lists of numbers: small tuples would keep the garbage collector busy.
        order = np.concatenate([mine.argsort(kind="stable") for mine in split(of_items, ends)])
        order += np.repeat(ends[:-1], np.diff(ends))
        self._costs: list[list[float]] = [mine.tolist() for mine in split(of_items[order], ends)]
        self._items: list[list[int]] = [mine.tolist() for mine in split(items[order], ends)]
        self.loads: list[float] = (np.bincount(self._owners, costs, minlength=len(home)) + beside).tolist()

    def parts(self) -> list[IntArray]:
        """The items of each rank, ascending."""
        return batches(self._owners, len(self.loads))

    def even_out_nodes(self, ranks_per_node: int) -> None:
        """Exchange between nodes until the ranks of each have the goal on average, or nothing helps.

        The heaviest rank of the heaviest node gives to the lightest of the lightest one: what has to leave a node, and
        a rank, is the same then.
        """
        num_nodes = len(self.loads) // ranks_per_node
        ranks = [range(node * ranks_per_node, (node + 1) * ranks_per_node) for node in range(num_nodes)]
        excess = [math.fsum(self.loads[rank] - self.goal for rank in mine) for mine in ranks]
        enough = ranks_per_node * self.tolerance / 2
        heaviest = [(-each, node) for node, each in enumerate(excess)]
        lightest = [(each, node) for node, each in enumerate(excess)]
        heapq.heapify(heaviest)
        heapq.heapify(lightest)
        while heaviest and lightest:
            (above, node), (below, other) = heaviest[0], lightest[0]
            if -above != excess[node]:
                heapq.heappop(heaviest)
                continue
            if below != excess[other]:
                heapq.heappop(lightest)
                continue
            if excess[node] <= enough or excess[other] >= 0:
                break
            giver = max(ranks[node], key=self.loads.__getitem__)
            taker = min(ranks[other], key=self.loads.__getitem__)
            wanted = min(excess[node], -excess[other])
            wanted = min(wanted, self.loads[giver] - self.goal, self.goal - self.loads[taker])
            given = self._exchange(giver, taker, wanted - self.tolerance / 2, wanted + self.tolerance / 2)
            if not given:
                heapq.heappop(heaviest)
                continue
            excess[node] -= given
            excess[other] += given
            for each in (node, other):
                heapq.heappush(heaviest, (-excess[each], each))
                heapq.heappush(lightest, (excess[each], each))

    def even_out(self, ranks: Sequence[int]) -> None:
        """Exchange between these until none has more than the goal and the tolerance, or nothing helps."""
        loads, most = self.loads, self.goal + self.tolerance
        if max(loads[rank] for rank in ranks) <= most:
            return
        heaviest, lightest = [(-loads[rank], rank) for rank in ranks], [(loads[rank], rank) for rank in ranks]
        heapq.heapify(heaviest)
        heapq.heapify(lightest)
        while heaviest and -heaviest[0][0] > most:
            above, giver = heapq.heappop(heaviest)
            if -above != loads[giver]:
                continue
            tried = list[tuple[float, int]]()
            while lightest and len(tried) < _MAX_PARTNERS:
                below, taker = heapq.heappop(lightest)
                if below != loads[taker] or taker == giver:
                    continue
                least, room = loads[giver] - most, most - below
                wanted = min(least, room - 2 * self.tolerance), min(room, least + 2 * self.tolerance)
                if self._exchange(giver, taker, *wanted):
                    for rank in (giver, taker):
                        heapq.heappush(heaviest, (-loads[rank], rank))
                        heapq.heappush(lightest, (loads[rank], rank))
                    break
                tried.append((below, taker))
            for entry in tried:
                heapq.heappush(lightest, entry)

    def _exchange(self, giver: int, taker: int, least: float, most: float) -> float:
        """Move an item, or swap two, so that about ``least`` to ``most`` of cost changes hands.

        Of those that do, the one that moves least; else what comes closest. Nothing that leaves the taker where the
        giver was.

        Returns:
            What the giver has less; 0 if nothing suits.
        """
        mine, theirs = self._costs[giver], self._costs[taker]
        smallest = _MIN_GAIN * self.goal
        limit = self.loads[giver] - self.loads[taker] - smallest
        if limit < smallest:
            return 0.0
        least = min(max(least, smallest), limit)
        most = min(max(most, least), limit)
        best, closest = (-1, -1), float("inf")
        # Items of the giver from the cheapest on that will do, and for each the cheapest one of the taker's that makes
        # up for what is too much: both rise. Place 0 there is none, i is the one before i, and the last one is endless.
        first = bisect_left(mine, least)
        if first and smallest <= mine[first - 1] <= limit:
            best, closest = (first - 1, 0), least - mine[first - 1]
        if first < len(mine) and mine[first] <= most:
            best = first, 0
        else:
            back, other, before = [0.0, *theirs, float("inf")], 1, -1.0
            for index in range(first, len(mine)):
                cost = mine[index]
                if cost == before:  # as the one before
                    continue
                before = cost
                while cost - back[other] > most:
                    other += 1
                given = cost - back[other - 1]
                if given - most < closest and given <= limit:
                    best, closest = (index, other - 1), given - most
                given = cost - back[other]
                if given >= least:
                    best = index, other
                    break
                if least - given < closest and given >= smallest:
                    best, closest = (index, other), least - given
        index, other = best
        if index < 0:
            return 0.0
        item = self._items[giver].pop(index)
        given = mine.pop(index)
        if other:
            cost = theirs.pop(other - 1)
            self._put(giver, self._items[taker].pop(other - 1), cost)
            self._put(taker, item, given)
            given -= cost
        else:
            self._put(taker, item, given)
        self.loads[giver] -= given
        self.loads[taker] += given
        return given

    def _put(self, rank: int, item: int, cost: float) -> None:
        at = bisect_right(self._costs[rank], cost)
        self._costs[rank].insert(at, cost)
        self._items[rank].insert(at, item)
        self._owners[item] = rank
