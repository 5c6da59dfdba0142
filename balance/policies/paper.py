"""The policies of the ODC paper."""

from __future__ import annotations

import numpy as np

from odc.balance.checks import FloatArray, IntArray
from odc.balance.partition.differencing import Parts
from odc.balance.partition.kway import balance
from odc.balance.policies.base import Policy
from odc.balance.policies.packing import Packer, min_microbatches, pack, pack_together


class LocalSort(Policy):
    """Rank r gets samples r, r + world_size, ...; longest first, one a microbatch, not packed (section 5.1).

    Every rank has the same number of microbatches; if the samples cannot be dealt out evenly, the last ones
    of the ranks with one sample less are empty.
    """

    name = "local-sort"

    def assign(self, lengths: IntArray, costs: FloatArray, world_size: int, max_tokens: int) -> list[Parts]:
        num_microbatches = -(-lengths.size // world_size)
        microbatches: list[Parts] = []
        for rank in range(world_size):
            samples = np.arange(rank, lengths.size, world_size)
            longest_first = samples[np.argsort(-lengths[samples], kind="stable")].tolist()
            num_empty = num_microbatches - len(longest_first)
            microbatches.append([[sample] for sample in longest_first] + [[] for _ in range(num_empty)])
        return microbatches


class LBMicro(Policy):
    """LB-Micro, the paper's strong baseline for collectives (section 5.1, appendix C, Listing 1).

    The cost is balanced over ranks that get equally many samples (differing by at most one if they cannot be
    dealt out evenly). Then every rank packs into the same number of microbatches, the smallest that suits all
    of them. A microbatch is empty only if its rank has fewer samples than that.
    """

    name = "lb-micro"

    def assign(self, lengths: IntArray, costs: FloatArray, world_size: int, max_tokens: int) -> list[Parts]:
        ranks = [np.array(mine, dtype=np.int64) for mine in _equally_many(costs, world_size)]
        packed = pack_together([lengths[mine] for mine in ranks], [costs[mine] for mine in ranks], max_tokens)
        return [_costliest_first(_renumber(parts, mine), costs) for parts, mine in zip(packed, ranks, strict=True)]


class LBMicroGlobal(Policy):
    """Not in the paper: pack the whole minibatch first, then let microbatches of similar cost run together.

    All samples are packed into world_size * k microbatches, k as small as possible. In the order of their
    cost they are dealt out world_size at a time, one to each rank, the costliest to the rank with the least
    so far. Under collectives this idles less than :class:`LBMicro`, under ODC more than :class:`LBMini`.
    """

    name = "lb-micro-global"

    def assign(self, lengths: IntArray, costs: FloatArray, world_size: int, max_tokens: int) -> list[Parts]:
        microbatches: list[Parts] = [[] for _ in range(world_size)]
        loads = np.zeros(world_size)
        parts = _costliest_first(_pack_multiple(lengths, costs, world_size, max_tokens), costs)
        for start in range(0, len(parts), world_size):
            lightest_first = np.argsort(loads, kind="stable").tolist()
            for rank, part in zip(lightest_first, parts[start : start + world_size], strict=True):
                microbatches[rank].append(part)
                loads[rank] += costs[part].sum()
        return microbatches


class LBMini(Policy):
    """LB-Mini (section 4): balance the whole minibatch's cost over the ranks; each rank packs for itself.

    Ranks may end with different numbers of microbatches, and with none if there are fewer samples than ranks.
    Only for ODC: under collectives a rank would wait forever for one that has fewer.
    """

    name = "lb-mini"

    def assign(self, lengths: IntArray, costs: FloatArray, world_size: int, max_tokens: int) -> list[Parts]:
        microbatches: list[Parts] = []
        for part in balance(costs, world_size, equal_size=False):
            mine = np.array(part, dtype=np.int64)
            parts = pack(lengths[mine], costs[mine], max_tokens)
            microbatches.append(_costliest_first(_renumber(parts, mine), costs))
        return microbatches


def _renumber(parts: Parts, samples: IntArray) -> Parts:
    """Turn positions within a rank's ``samples`` into samples."""
    return [samples[part].tolist() for part in parts]


def _costliest_first(parts: Parts, costs: FloatArray) -> Parts:
    """In the order of cost, empty ones last: the least sum over positions of the maximum over ranks."""
    return sorted(parts, key=lambda part: (not part, -float(costs[part].sum())))


def _equally_many(costs: FloatArray, world_size: int) -> Parts:
    """Balance over ranks whose numbers of samples differ by at most one."""
    num_missing = -costs.size % world_size
    padded = np.concatenate([costs, np.zeros(num_missing)])
    with_padding = balance(padded, world_size, equal_size=True)
    ranks = [[sample for sample in mine if sample < costs.size] for mine in with_padding]
    # One rank may have got several of the padding items.
    while max(map(len, ranks)) - min(map(len, ranks)) > 1:
        largest, smallest = max(ranks, key=len), min(ranks, key=len)
        cheapest = min(largest, key=lambda sample: (costs[sample], sample))
        largest.remove(cheapest)
        smallest.append(cheapest)
    return ranks


def _pack_multiple(lengths: IntArray, costs: FloatArray, world_size: int, max_tokens: int) -> Parts:
    """Pack into a multiple of ``world_size`` microbatches, the smallest at which a packing is found."""
    packer = Packer(lengths, costs, max_tokens)
    num_each = -(-min_microbatches(lengths, max_tokens) // world_size)
    while (parts := packer.into(num_each * world_size)) is None:
        num_each += 1
    return parts
