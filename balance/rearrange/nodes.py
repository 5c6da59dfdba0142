"""Which rank gets which new batch, so that little crosses between nodes (OrchMLLM, section 5.2.2, algorithm 3)."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt

from odc.balance.checks import MAX_COUNT, IntArray, as_count

# The exact search goes through so many pairs of a set of batches and a set for the next node, at once: all divisions
# of up to 12 ranks, 16 ranks on two nodes.
_MAX_PAIRS = 2**20
_MAX_SETS = 2**14
# Steps of the search beyond. No clock: all ranks must find the same.
_NUM_STEPS = 3000
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
    """Give each new batch to a rank, so that the most that a rank sends to other nodes is little (equation 5).

    Ranks ``0 .. ranks_per_node - 1`` are on the first node, and so on. Up to 12 ranks, and up to 16 on two nodes, the
    maximum is the smallest possible, and of all such placements the one with the least volume between nodes in total is
    taken: this goes through the sets of batches that the first nodes can have. Beyond, batches go where most of their
    volume is, and 3,000 steps of tabu search swap two batches each to relieve the rank that sends most. The result is
    never worse than leaving batch j on rank j. Among the ranks of a node, batches go to those that hold most of them
    already (on nodes of up to 256 ranks as much in total as is possible).

    No solver and no clock: all numbers are integers inside (volumes that are not are rounded to about 1e-9 of the
    largest), so every rank that calls this with the same volumes gets the same.

    Args:
        volume: (num_ranks, num_ranks), numbers of at least 0: ``volume[i, j]`` is what rank i has of new batch j.
        ranks_per_node: from 1 to ``num_ranks``, of which it is a divisor.

    Returns:
        For each new batch the rank that gets it: a permutation of all ranks.

    Raises:
        ValueError: an argument is not as described.
    """
    volumes = _as_volumes(volume)
    num_ranks = len(volumes)
    ranks_per_node = as_count(ranks_per_node, "ranks_per_node", maximum=None)
    if num_ranks % ranks_per_node:
        raise ValueError(
            f"ranks_per_node={ranks_per_node} with {num_ranks} ranks: expected a divisor of the number of ranks, since "
            "all nodes have as many"
        )
    num_nodes = num_ranks // ranks_per_node
    nodes = np.arange(num_ranks) // ranks_per_node
    if num_nodes > 1:
        if (found := _exact(volumes, ranks_per_node)) is None:
            found = _search(volumes, _fullest_first(volumes, ranks_per_node), ranks_per_node)
        nodes = min(found, nodes, key=lambda each: _quality(volumes, each, ranks_per_node))
    placed = np.zeros(num_ranks, dtype=np.int64)
    for node in range(num_nodes):
        batches = np.flatnonzero(nodes == node)
        ranks = slice(node * ranks_per_node, (node + 1) * ranks_per_node)
        placed[batches] = node * ranks_per_node + _within_node(volumes[ranks, batches])
    return [int(rank) for rank in placed]


def _as_volumes(volume: npt.ArrayLike) -> IntArray:
    """``volume``, checked, as integers of at most 2**53 in all, in another unit if need be."""
    array = np.asarray(volume)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or not array.size:
        raise ValueError(f"volume has shape {array.shape}: expected (num_ranks, num_ranks), with at least one rank")
    if array.dtype.kind not in "iuf":
        raise ValueError(f"volume has dtype {array.dtype}: expected numbers, integers or floats")
    if (bad := np.argwhere(~(np.isfinite(array) & (array >= 0)))).size:
        i, j = bad[0].tolist()
        raise ValueError(f"volume[{i}, {j}] is {array[i, j]}: expected a finite number of at least 0")
    with np.errstate(over="ignore"):
        total = array.sum(dtype=np.float64)
    if total <= MAX_COUNT and (array.dtype.kind != "f" or (array == np.rint(array)).all()):
        return array.astype(np.int64)
    # By a power of two, below the largest one that cannot overflow: a sum of floats would depend on its order.
    shares = array.astype(np.float64) / float(array.max())
    return np.rint(np.ldexp(shares, 52 - math.ceil(math.log2(array.size)))).astype(np.int64)


def _sent(volumes: IntArray, nodes: IntArray, ranks_per_node: int) -> IntArray:
    """What each rank sends to other nodes if batch j is on ``nodes[j]``."""
    elsewhere = (np.arange(len(volumes)) // ranks_per_node)[:, None] != nodes
    sent: IntArray = np.where(elsewhere, volumes, 0).sum(axis=1)
    return sent


def _quality(volumes: IntArray, nodes: IntArray, ranks_per_node: int) -> tuple[int, int]:
    """Smaller is better."""
    sent = _sent(volumes, nodes, ranks_per_node)
    return int(sent.max()), int(sent.sum())


def _exact(volumes: IntArray, ranks_per_node: int) -> IntArray | None:
    """The node of each batch, optimal; None if there are too many sets of batches.

    What the ranks of a node send depends only on the set of batches that the node gets. So for each set that the first
    nodes can have together, the best way to divide it follows from those of one node less.
    """
    num_ranks = len(volumes)
    num_nodes = num_ranks // ranks_per_node
    num_sets = math.comb(num_ranks, ranks_per_node)
    most = max((math.comb(num_ranks, ranks_per_node * n) for n in range(1, num_nodes - 1)), default=0)
    if num_sets > _MAX_SETS or most * num_sets > _MAX_PAIRS:
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


def _fullest_first(volumes: IntArray, ranks_per_node: int) -> IntArray:
    """The node of each batch: of all pairs of a node and a batch, that of the largest volume first."""
    num_ranks = len(volumes)
    num_nodes = num_ranks // ranks_per_node
    by_node = volumes.reshape(num_nodes, ranks_per_node, num_ranks).sum(axis=1)
    nodes, room, left = [-1] * num_ranks, [ranks_per_node] * num_nodes, num_ranks
    for pair in np.argsort(-by_node, axis=None, kind="stable").tolist():
        node, batch = divmod(pair, num_ranks)
        if room[node] and nodes[batch] < 0:
            nodes[batch] = node
            room[node] -= 1
            left -= 1
            if not left:
                break
    return np.array(nodes)


def _search(volumes: IntArray, nodes: IntArray, ranks_per_node: int) -> IntArray:
    """Tabu search: each step swaps a batch of the rank that sends most for one of another node of which it has more.

    The swap is that after which the ranks of both nodes send least above the aim, squared and summed; it may make
    things worse, so that the search goes on from where no swap helps.
    """
    num_ranks = len(volumes)
    by_node = volumes.reshape(-1, ranks_per_node, num_ranks)
    sent = _sent(volumes, nodes, ranks_per_node).reshape(-1, ranks_per_node)
    # No rank can keep more than its largest volumes.
    keeps = np.partition(volumes, num_ranks - ranks_per_node, axis=1)[:, num_ranks - ranks_per_node :].sum(axis=1)
    bound = int((volumes.sum(axis=1) - keeps).max())
    shift = max(0, int(volumes.sum(axis=1).max()).bit_length() - 24)  # so that sums of squares are integers

    def excess(amounts: IntArray, axis: int) -> IntArray:
        above: IntArray = np.maximum((amounts >> shift) - (aim >> shift), 0)
        squares: IntArray = (above * above).sum(axis=axis)
        return squares

    nodes, best, best_nodes = nodes.copy(), int(sent.max()), nodes
    free_from = np.zeros(num_ranks, dtype=np.int64)
    for step in range(_NUM_STEPS):
        rank = int(np.argmax(sent))
        home = rank // ranks_per_node
        aim = best - int(best * _AIM)
        given, taken = _useful_swaps(volumes[rank], nodes == home)
        free = (free_from[given] <= step) & (free_from[taken] <= step)
        given, taken = given[free], taken[free]
        if not given.size:
            # All that would help have just been moved: let them go.
            if not (free_from > step).any():
                break
            free_from[:] = 0
            continue
        others = nodes[taken]
        at_home = sent[home][:, None] + by_node[home][:, given] - by_node[home][:, taken]
        elsewhere = sent[others] + by_node[others, :, taken] - by_node[others, :, given]
        change = excess(at_home, 0) + excess(elsewhere, 1) - excess(sent, 1)[others]
        chosen = int(np.argmin(change))
        other = int(others[chosen])
        sent[home], sent[other] = at_home[:, chosen], elsewhere[chosen]
        nodes[given[chosen]], nodes[taken[chosen]] = other, home
        free_from[given[chosen]] = free_from[taken[chosen]] = step + 1 + _TENURE + step % 5
        if (largest := int(sent.max())) < best:
            best, best_nodes = largest, nodes.copy()
            if best <= bound:
                break
    return best_nodes


def _useful_swaps(amounts: IntArray, here: npt.NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """Pairs of a batch ``here`` and one elsewhere of which a rank that has these ``amounts`` of them has more."""
    mine, theirs = np.flatnonzero(here), np.flatnonzero(~here)
    theirs = theirs[amounts[theirs] > amounts[mine].min()]
    most = _MAX_COMPARISONS // mine.size
    if mine.size * theirs.size > most:
        mine = mine[np.argsort(amounts[mine], kind="stable")[: math.isqrt(most) + 1]]
        theirs = theirs[np.argsort(-amounts[theirs], kind="stable")[: most // mine.size + 1]]
    more = np.nonzero(amounts[theirs] > amounts[mine][:, None])
    return mine[more[0]], theirs[more[1]]


def _within_node(volumes: IntArray) -> IntArray:
    """The rank within a node for each of its batches, (ranks_per_node,), so that in total most stays where it is.

    The assignment problem by shortest augmenting paths (Kuhn, Munkres), (rank, batch) volumes as gains.
    """
    size = len(volumes)
    if size > _MAX_EXACT_NODE:
        return _fullest_first(volumes, 1)
    costs = int(volumes.max()) - volumes.T
    # Row and column 0 are none; ranks and batches are numbered from 1.
    of_batch, of_rank = np.zeros(size + 1, dtype=np.int64), np.zeros(size + 1, dtype=np.int64)
    batch_of = np.zeros(size + 1, dtype=np.int64)
    for batch in range(1, size + 1):
        batch_of[0], rank = batch, 0
        least = np.full(size + 1, _NEVER)
        came_from = np.zeros(size + 1, dtype=np.int64)
        done = np.zeros(size + 1, dtype=bool)
        while batch_of[rank]:
            done[rank] = True
            row = batch_of[rank]
            slack = costs[row - 1] - of_batch[row] - of_rank[1:]
            better = ~done[1:] & (slack < least[1:])
            least[1:][better] = slack[better]
            came_from[1:][better] = rank
            following = int(np.argmin(np.where(done, _NEVER, least)))
            step = least[following]
            of_batch[batch_of[done]] += step
            of_rank[done] -= step
            least[~done] -= step
            rank = following
        while rank:
            before = came_from[rank]
            batch_of[rank] = batch_of[before]
            rank = before
    ranks = np.zeros(size, dtype=np.int64)
    ranks[batch_of[1:] - 1] = np.arange(size)
    return ranks
