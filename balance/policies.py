"""Balancing policies by name: from the lengths of one minibatch to a plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from odc.balance.checks import FloatArray, IntArray, as_count, as_lengths, check_fit
from odc.balance.costs import CostModel, evaluate
from odc.balance.differencing import Parts
from odc.balance.packing import pack, pack_together
from odc.balance.partition import balance
from odc.balance.plan import Plan


class Policy(ABC):
    """Decides which rank trains on which samples, and packs them. Stateless and deterministic."""

    name: ClassVar[str]

    def plan(
        self, lengths: npt.ArrayLike, *, world_size: int, max_tokens: int, cost: CostModel
    ) -> Plan:
        """Plan one minibatch.

        Args:
            lengths: tokens of each sample of the global minibatch, integers of at least 1; may be empty.
            world_size: number of ranks.
            max_tokens: most tokens in one microbatch, what memory allows.
            cost: what a sample costs, see :mod:`odc.balance.costs`.

        Raises:
            ValueError: a sample is longer than ``max_tokens``, or an argument is out of range.
        """
        tokens = as_lengths(lengths)
        world_size, max_tokens = as_count(world_size, "world_size"), as_count(max_tokens, "max_tokens")
        check_fit(tokens, max_tokens)
        costs = evaluate(cost, tokens)
        microbatches = self.assign(tokens, costs, world_size, max_tokens)
        return Plan(microbatches, tokens, costs, max_tokens, self.name)

    @abstractmethod
    def assign(
        self, lengths: IntArray, costs: FloatArray, world_size: int, max_tokens: int
    ) -> list[Parts]:
        """``microbatches[rank][m]`` as lists of sample indices. The arguments are checked."""


class LocalSort(Policy):
    """Rank r gets samples r, r + world_size, ...; longest first, one a microbatch (paper section 5.1).

    If the samples cannot be dealt out evenly, ranks with one less end with an empty microbatch.
    """

    name = "local-sort"

    def assign(
        self, lengths: IntArray, costs: FloatArray, world_size: int, max_tokens: int
    ) -> list[Parts]:
        num_microbatches = -(-lengths.size // world_size)
        microbatches = []
        for rank in range(world_size):
            samples = np.arange(rank, lengths.size, world_size)
            longest_first = samples[np.argsort(-lengths[samples], kind="stable")]
            mine = [[sample] for sample in longest_first.tolist()]
            microbatches.append(mine + [[] for _ in range(num_microbatches - len(mine))])
        return microbatches


class LBMicro(Policy):
    """LB-Micro (paper section 5.1, appendix C): the same number of microbatches on every rank."""

    name = "lb-micro"

    def assign(
        self, lengths: IntArray, costs: FloatArray, world_size: int, max_tokens: int
    ) -> list[Parts]:
        ranks = _equal_ranks(costs, world_size)
        return _microbatches_together(ranks, lengths, costs, max_tokens)


class LBMicroFree(Policy):
    name = "lb-micro-free"

    def assign(
        self, lengths: IntArray, costs: FloatArray, world_size: int, max_tokens: int
    ) -> list[Parts]:
        ranks = balance(costs, world_size, equal_size=False)
        return _microbatches_together(ranks, lengths, costs, max_tokens)


class LBMicroGlobal(Policy):
    name = "lb-micro-global"

    def assign(
        self, lengths: IntArray, costs: FloatArray, world_size: int, max_tokens: int
    ) -> list[Parts]:
        from odc.balance.packing import min_microbatches, pack_into
        k = -(-min_microbatches(lengths, max_tokens) // world_size)
        while True:
            parts = pack_into(lengths, costs, k * world_size, max_tokens)
            if parts: break
            k += 1
        parts = _costliest_first(parts, costs)
        # snake
        out = [[] for _ in range(world_size)]
        load = np.zeros(world_size)
        for m in range(k):
            for p, r in zip(parts[m*world_size:(m+1)*world_size], np.argsort(load, kind="stable"), strict=True):
                out[r].append(p); load[r] += costs[p].sum()
        return [_costliest_first(mine, costs) for mine in out]


class LBMini(Policy):
    """LB-Mini (paper section 4): balance the cost of the whole minibatch over the ranks; each packs for itself.

    Ranks may end with different numbers of microbatches, and with none if there are fewer samples than ranks. Only
    for ODC: collectives would wait forever.
    """

    name = "lb-mini"

    def assign(
        self, lengths: IntArray, costs: FloatArray, world_size: int, max_tokens: int
    ) -> list[Parts]:
        microbatches = []
        for samples in map(_as_indices, balance(costs, world_size, equal_size=False)):
            parts = pack(lengths[samples], costs[samples], max_tokens) if samples.size else []
            microbatches.append(_costliest_first(_global(parts, samples), costs))
        return microbatches


def _as_indices(samples: list[int]) -> IntArray:
    return np.array(samples, dtype=np.int64)


def _global(parts: Parts, samples: IntArray) -> Parts:
    return [samples[part].tolist() for part in parts]


def _costliest_first(parts: Parts, costs: FloatArray) -> Parts:
    return sorted(parts, key=lambda part: (not part, -float(costs[part].sum())))


def _equal_ranks(costs: FloatArray, world_size: int) -> Parts:
    n = costs.size
    padded = np.concatenate([costs, np.zeros(-n % world_size)])
    return [[i for i in p if i < n] for p in balance(padded, world_size, equal_size=True)]


def _microbatches_together(ranks: Parts, lengths: IntArray, costs: FloatArray, max_tokens: int) -> list[Parts]:
    samples = [_as_indices(mine) for mine in ranks]
    packed = pack_together([lengths[mine] for mine in samples], [costs[mine] for mine in samples], max_tokens)
    return [
        _costliest_first(_global(parts, mine), costs) for parts, mine in zip(packed, samples, strict=True)
    ]


_POLICIES = {c.name: c for c in (LocalSort, LBMicro, LBMicroFree, LBMicroGlobal, LBMini)}
def get_policy(name): return _POLICIES[name]()
