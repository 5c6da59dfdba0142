"""Which rank gets which new batch, so that little crosses between nodes (OrchMLLM, section 5.2.2, algorithm 3)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from odc.balance.checks import MAX_COUNT, IntArray, as_count
from odc.balance.layout import split

# The exact search goes through so many pairs of a set of batches and a set for the next node, at once: all divisions
# of up to 12 ranks, 16 ranks on two nodes.
_MAX_PAIRS = 2**20
_MAX_SETS = 2**14
# Steps of the search beyond, and how many without a better maximum end it: what later steps still found was less than
# 0.5 % of it. No clock: all ranks must find the same.
_NUM_STEPS = 3000
_PATIENCE = 300
# It aims this far below the best maximum so far, and weighs what each rank sends above that.
_AIM = 0.01
# A batch that was moved stays for at least so many steps.
_TENURE = 3
# Swaps of one step times ranks of a node: above, only those of the batches of which the rank has least and most.
_MAX_COMPARISONS = 2**15
# Nodes larger than any: which of their ranks gets which batch is then chosen greedily.
_MAX_EXACT_NODE = 256
# More than any volume, and small enough that a sum of two is an integer.
_NEVER = 2**60


def place_on_nodes(volume: npt.ArrayLike, ranks_per_node: int) -> list[int]:
    """Assign each new batch to a rank so that the largest amount that a rank sends to other nodes is small (equation
    5).

    Ranks ``0 .. ranks_per_node - 1`` are on the first node, and so on. For up to 12 ranks, or up to 16 on two nodes,
    the result is optimal: the smallest possible maximum and, with this maximum, the least total volume between nodes.
    An exhaustive search over the sets of batches of the first nodes finds it. For more ranks, batches first go where
    most of their volume is. Then up to 3,000 steps of tabu search each swap two batches to relieve the rank that sends
    most, until 300 steps in a row have not lowered the maximum. The result is never worse than leaving batch j on rank
    j. Within a node, batches go to the ranks that already hold most of them (optimal in total on nodes of up to 256
    ranks).

    Deterministic: there is no solver and no time limit, and volumes are converted to integers (rounded to about 1e-9 of
    the largest). All ranks get the same result for the same volumes.

    Args:
        volume: (num_ranks, num_ranks), numbers of at least 0: ``volume[i, j]`` is the amount of new batch j on rank i.
        ranks_per_node: a divisor of ``num_ranks``.

    Returns:
        The rank of each new batch: a permutation of all ranks.

    Raises:
        ValueError: an argument is invalid.

    Example:
        >>> place_on_nodes([[0, 0, 9, 0], [0, 9, 0, 0], [9, 0, 0, 0], [0, 0, 0, 9]], ranks_per_node=2)
        [2, 1, 0, 3]
    """
    array = np.asarray(volume)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or not array.size:
        raise ValueError(f"volume has shape {array.shape}: expected (num_ranks, num_ranks), with at least one rank")
    if array.dtype.kind not in "iuf":
        raise ValueError(f"volume has dtype {array.dtype}: expected numbers, integers or floats")
    if (bad := np.argwhere(~(np.isfinite(array) & (array >= 0)))).size:
        i, j = bad[0].tolist()
        raise ValueError(f"volume[{i}, {j}] is {array[i, j]}: expected a finite number of at least 0")
    ranks, batches = np.nonzero(array)
    return place_items(ranks, batches, array[ranks, batches], len(array), ranks_per_node)


def place_items(
    ranks: IntArray, batches: IntArray, amounts: npt.NDArray[Any], num_ranks: int, ranks_per_node: int
) -> list[int]:
    """:func:`place_on_nodes`, given in parts what ranks have of batches: rank ``ranks[i]`` has ``amounts[i]``, a finite
    number of at least 0, of batch ``batches[i]``. Several may be of one pair."""
    ranks_per_node = as_count(ranks_per_node, "ranks_per_node", maximum=None)
    if num_ranks % ranks_per_node:
        raise ValueError(
            f"ranks_per_node={ranks_per_node} with {num_ranks} ranks: expected a divisor of the number of ranks, since "
            "all nodes have as many"
        )
    num_nodes = num_ranks // ranks_per_node
    nodes = np.arange(num_ranks) // ranks_per_node
    volumes = _Volumes(ranks, batches, amounts, num_ranks, ranks_per_node)
    if num_nodes > 1:
        if (found := _exact(volumes.table.T, ranks_per_node)) is None:
            found = _search(volumes, _fullest_first(volumes))
        nodes = min(found, nodes, key=volumes.quality)
    placed = np.zeros(num_ranks, dtype=np.int64)
    of_node = np.argsort(nodes, kind="stable").reshape(num_nodes, ranks_per_node)
    for node, mine in enumerate(of_node):
        first = node * ranks_per_node
        placed[mine] = first + _within_node(volumes.table[mine, first : first + ranks_per_node].T)
    return placed.tolist()


class _Volumes:
    """What each rank has of each batch, as integers of at most 2**53 in all, in another unit if need be: those that are
    not 0, of few pairs where there are many ranks, by rank and batch; and ``table``, (batch, rank)."""

    def __init__(
        self, ranks: IntArray, batches: IntArray, amounts: npt.NDArray[Any], num_ranks: int, ranks_per_node: int
    ) -> None:
        self.num_ranks, self.ranks_per_node = num_ranks, ranks_per_node
        pairs = ranks * num_ranks + batches
        if (pairs[1:] <= pairs[:-1]).any():  # given in parts
            pairs, which = np.unique(pairs, return_inverse=True)
            amounts = np.bincount(which, amounts)
        volumes = _as_integers(amounts, num_ranks**2)
        self.ranks, self.batches = np.divmod(pairs[volumes > 0], num_ranks)
        self.volumes = volumes[volumes > 0]
        self.table = np.zeros((num_ranks, num_ranks), dtype=np.int64)
        self.table[self.batches, self.ranks] = self.volumes

    def sent(self, nodes: IntArray) -> IntArray:
        """What each rank sends to other nodes if batch j is on ``nodes[j]``."""
        elsewhere = self.ranks // self.ranks_per_node != nodes[self.batches]
        return _sums(self.ranks[elsewhere], self.volumes[elsewhere], self.num_ranks)

    def quality(self, nodes: IntArray) -> tuple[int, int]:
        """Smaller is better."""
        sent = self.sent(nodes)
        return int(sent.max()), int(sent.sum())

    def least_sent(self) -> int:
        """No placement lets the rank that sends most send less: it keeps at most its largest volumes."""
        order = np.lexsort((-self.volumes, self.ranks))
        starts = np.searchsorted(self.ranks, np.arange(self.num_ranks))
        leaves = np.arange(order.size) - starts[self.ranks] >= self.ranks_per_node
        return int(_sums(self.ranks[leaves], self.volumes[order][leaves], self.num_ranks).max())


def _sums(of: IntArray, volumes: IntArray, number: int) -> IntArray:
    """The volumes of each, (number,); as floats on the way, which are exact."""
    return np.bincount(of, volumes, minlength=number).astype(np.int64)


def _as_integers(amounts: npt.NDArray[Any], num_pairs: int) -> IntArray:
    with np.errstate(over="ignore"):
        total = amounts.sum(dtype=np.float64)
    if total <= MAX_COUNT and (amounts.dtype.kind != "f" or (amounts == np.rint(amounts)).all()):
        return amounts.astype(np.int64)
    # By a power of two, below the largest one that cannot overflow: a sum of floats would depend on its order.
    shares = amounts.astype(np.float64) / float(amounts.max())
    return np.rint(np.ldexp(shares, 52 - math.ceil(math.log2(num_pairs)))).astype(np.int64)


def _exact(volumes: IntArray, ranks_per_node: int) -> IntArray | None:
    """The node of each batch, optimal; None if there are too many sets of batches.

    What the ranks of a node send depends only on the set of batches that the node gets. So for each set that the first
    nodes can have together, the best way to divide it follows from those of one node less.
    """
    num_ranks = len(volumes)
    num_nodes = num_ranks // ranks_per_node
    num_sets = math.comb(num_ranks, ranks_per_node)
    if num_sets > _MAX_SETS:
        return None
    most = max((math.comb(num_ranks, ranks_per_node * n) for n in range(1, num_nodes - 1)), default=0)
    if most * num_sets > _MAX_PAIRS:
        return None
    sets = np.array(list(itertools.combinations(range(num_ranks), ranks_per_node)))
    kept = np.zeros((num_ranks, len(sets)), dtype=np.int64)
    for column in sets.T:
        kept += volumes[:, column]
    sent = (volumes.sum(axis=1)[:, None] - kept).reshape(num_nodes, ranks_per_node, len(sets))
    bits = (1 << sets).sum(axis=1)
    largest = sent.max(axis=1)
    smallest = int(_best_divisions(largest, bits, np.maximum)[-1][-1])
    # Of those with the smallest maximum, the least in total.
    totals = np.where(largest <= smallest, sent.sum(axis=1), _NEVER)
    best = _best_divisions(totals, bits, np.add)
    nodes, left = np.zeros(num_ranks, dtype=np.int64), (1 << num_ranks) - 1
    for node in range(num_nodes - 1, -1, -1):
        before = best[node][left & ~bits] if node else np.zeros(len(bits), dtype=np.int64)
        fits = ((left & bits) == bits) & (node > 0 or bits == left)
        chosen = int(np.argmin(np.where(fits, before + totals[node], 2 * _NEVER)))
        nodes[sets[chosen]] = node
        left &= ~int(bits[chosen])
    return nodes


def _best_divisions(values: IntArray, bits: IntArray, combine: np.ufunc) -> list[IntArray]:
    """The best value of each set of batches (its bits are the index) divided over the first 0, 1, ... nodes.

    Args:
        values: of each set on each node, (num_nodes, num_sets).
        bits: the batches of each set, (num_sets,).
        combine: the value of a division from those of its nodes.
    """
    num_nodes = len(values)
    everything = int(np.bitwise_or.reduce(bits))
    best = [np.full(everything + 1, _NEVER) for _ in range(num_nodes + 1)]
    best[0][0] = 0
    for node in range(num_nodes):
        taken = np.flatnonzero(best[node] < _NEVER)
        if node == num_nodes - 1:
            # The last node gets what is left.
            chosen = np.argsort(bits)[np.searchsorted(np.sort(bits), everything & ~taken)]
            before = taken
        else:
            rows, chosen = np.nonzero((taken[:, None] & bits) == 0)
            before = taken[rows]
        found = np.minimum(combine(best[node][before], values[node, chosen]), _NEVER)
        np.minimum.at(best[node + 1], before | bits[chosen], found)
    return best


def _fullest_first(volumes: _Volumes) -> IntArray:
    """The node of each batch: of all pairs of a node and a batch, that of the largest volume first."""
    num_ranks, ranks_per_node = volumes.num_ranks, volumes.ranks_per_node
    num_nodes = num_ranks // ranks_per_node
    pairs, which = np.unique(volumes.ranks // ranks_per_node * num_ranks + volumes.batches, return_inverse=True)
    by_volume = pairs[np.argsort(-_sums(which, volumes.volumes, pairs.size), kind="stable")]
    nodes, room = [-1] * num_ranks, [ranks_per_node] * num_nodes
    for node, batch in zip(*(each.tolist() for each in np.divmod(by_volume, num_ranks)), strict=True):
        if room[node] and nodes[batch] < 0:
            nodes[batch] = node
            room[node] -= 1
    found = np.array(nodes)
    found[found < 0] = np.repeat(np.arange(num_nodes), room)  # the others go where there is room
    return found


def _search(volumes: _Volumes, nodes: IntArray) -> IntArray:
    """Tabu search: each step swaps a batch of the rank that sends most for one of another node of which it has more.

    The swap is that after which the ranks of both nodes send least above the aim, squared and summed; it may make
    things worse, so that the search goes on from where no swap helps.
    """
    num_ranks, ranks_per_node = volumes.num_ranks, volumes.ranks_per_node
    num_nodes = num_ranks // ranks_per_node
    of_batch = volumes.table.reshape(-1, ranks_per_node)  # row b * num_nodes + n: of batch b, on the ranks of node n
    sent = volumes.sent(nodes).reshape(-1, ranks_per_node)
    bound = volumes.least_sent()
    starts = np.searchsorted(volumes.ranks, np.arange(num_ranks + 1))
    has, amounts = split(volumes.batches, starts), split(volumes.volumes, starts)
    members = np.argsort(nodes, kind="stable").reshape(-1, ranks_per_node)
    largest = int(_sums(volumes.ranks, volumes.volumes, num_ranks).max())
    shift = max(0, largest.bit_length() - 24)  # so that sums of squares are integers

    def excess(amounts: IntArray) -> IntArray:
        above: IntArray = np.maximum((amounts >> shift) - (aim >> shift), 0)
        squares: IntArray = np.einsum("...r,...r", above, above)
        return squares

    nodes, best, best_nodes, best_step = nodes.copy(), int(sent.max()), nodes, 0
    free_from = np.zeros(num_ranks, dtype=np.int64)
    for step in range(_NUM_STEPS):
        if step - best_step > _PATIENCE:
            break
        rank = int(np.argmax(sent))
        home = rank // ranks_per_node
        aim = best - int(best * _AIM)
        mine = np.sort(members[home])
        elsewhere = nodes[has[rank]] != home
        given, taken = _useful_swaps(mine, volumes.table[mine, rank], has[rank][elsewhere], amounts[rank][elsewhere])
        free = (free_from[given] <= step) & (free_from[taken] <= step)
        given, taken = given[free], taken[free]
        if not given.size:
            # All that would help have just been moved: let them go.
            if not (free_from > step).any():
                break
            free_from[:] = 0
            continue
        others = nodes[taken]
        gives, takes = given * num_nodes, taken * num_nodes
        rows = np.concatenate([gives + home, takes + others, takes + home, gives + others])
        moved = of_batch.take(rows, axis=0).reshape(2, -1, ranks_per_node)
        now = sent[np.concatenate([np.full(given.size, home), others])]
        after = now + moved[0] - moved[1]
        at_home, there, before = excess(np.concatenate([after, now[given.size :]])).reshape(3, -1)
        chosen = int(np.argmin(at_home + there - before))
        other = int(others[chosen])
        sent[home], sent[other] = after[chosen], after[given.size + chosen]
        members[home, members[home] == given[chosen]] = taken[chosen]
        members[other, members[other] == taken[chosen]] = given[chosen]
        nodes[given[chosen]], nodes[taken[chosen]] = other, home
        free_from[given[chosen]] = free_from[taken[chosen]] = step + 1 + _TENURE + step % 5
        if (largest := int(sent.max())) < best:
            best, best_nodes, best_step = largest, nodes.copy(), step
            if best <= bound:
                break
    return best_nodes


def _useful_swaps(
    mine: IntArray, amounts: IntArray, theirs: IntArray, their_amounts: IntArray
) -> tuple[IntArray, IntArray]:
    """Pairs of a batch ``mine`` and one of ``theirs`` of which a rank has more; the amounts are what it has of them."""
    more = their_amounts > amounts.min()
    theirs, their_amounts = theirs[more], their_amounts[more]
    most = _MAX_COMPARISONS // mine.size
    if mine.size * theirs.size > most:
        fewest = np.argsort(amounts, kind="stable")[: math.isqrt(most) + 1]
        mine, amounts = mine[fewest], amounts[fewest]
        largest = np.argsort(-their_amounts, kind="stable")[: most // mine.size + 1]
        theirs, their_amounts = theirs[largest], their_amounts[largest]
    first, second = np.nonzero(their_amounts > amounts[:, None])
    return mine[first], theirs[second]


def _within_node(volumes: IntArray) -> IntArray:
    """The rank within a node for each of its batches, (ranks_per_node,), so that in total most stays where it is.

    The assignment problem by shortest augmenting paths (Kuhn, Munkres), (rank, batch) volumes as gains.
    """
    size = len(volumes)
    if size > _MAX_EXACT_NODE:
        ranks, batches = np.nonzero(volumes)
        return _fullest_first(_Volumes(ranks, batches, volumes[ranks, batches], size, 1))
    costs = (int(volumes.max()) - volumes.T).tolist()
    # Row and column 0 are none; ranks and batches are numbered from 1. Lists, as most nodes have few ranks.
    of_batch, of_rank, batch_of = ([0] * (size + 1) for _ in range(3))
    for batch in range(1, size + 1):
        batch_of[0], rank = batch, 0
        least, came_from, left = [_NEVER] * (size + 1), [0] * (size + 1), list(range(1, size + 1))
        done = [0]
        while row := batch_of[rank]:
            line, paid = costs[row - 1], of_batch[row]
            step, following = _NEVER, 0
            for each in left:
                slack = line[each - 1] - paid - of_rank[each]
                if slack < least[each]:
                    least[each], came_from[each] = slack, rank
                if least[each] < step:
                    step, following = least[each], each
            for each in done:
                of_batch[batch_of[each]] += step
                of_rank[each] -= step
            for each in left:
                least[each] -= step
            left.remove(following)
            done.append(following)
            rank = following
        while rank:
            before = came_from[rank]
            batch_of[rank] = batch_of[before]
            rank = before
    ranks = np.zeros(size, dtype=np.int64)
    ranks[np.array(batch_of[1:]) - 1] = np.arange(size)
    return ranks
