"""Policies that pack for collectives: every rank gets the same number of microbatches.

Among them the two-level policies of RL training with verl, as the paper describes them (appendix C.2 and C.3).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from odc.balance.partition import Parts, split_by_cost
from odc.balance.plan import PlannedMinibatch
from odc.balance.policies.base import Job, Policy, costliest_first, renumber
from odc.balance.policies.packing import Packer, min_microbatches, pack_together, smallest
from odc.balance.random_numbers import random_generator


class LBMicro(Policy):
    """LB-Micro, the paper's strong baseline for collectives (section 5.1, appendix C, Listing 1).

    The cost is balanced over ranks that get equally many samples (differing by at most one if they cannot be
    dealt out evenly). Then every rank packs into the same number of microbatches, the smallest that suits all
    of them. A microbatch is empty only if its rank has fewer samples than that.
    """

    name = "lb-micro"

    def assign(self, job: Job) -> list[Parts]:
        return pack_ranks(job, equally_many(job))


class VerlOptimized(LBMicro):
    """Cut the batch into minibatches, then balance each of them (Listing 3): LB-Micro by another name."""

    name = "verl-optimized"


class VerlNative(LBMicro):
    """Balance the batch over the ranks, then let every rank shuffle and cut its share (Listing 2).

    So the ranks' shares of the batch are balanced, their shares of a minibatch are not. Within a minibatch
    every rank packs into the same number of microbatches. For a batch of one minibatch it is LB-Micro.
    """

    name = "verl-native"
    two_level = True

    def plan_batch(self, job: Job, minibatch_size: int, seed: int, first: int = 0) -> Iterator[PlannedMinibatch]:
        # The shares of the batch are fixed at once, the microbatches of a minibatch when it is due.
        ranks = [_shuffled(mine, seed, rank) for rank, mine in enumerate(equally_many(job))]
        starts = range(first * minibatch_size, max(map(len, ranks)), minibatch_size)
        return (self._minibatch(job, [mine[start : start + minibatch_size] for mine in ranks]) for start in starts)

    def _minibatch(self, job: Job, shares: list[list[int]]) -> PlannedMinibatch:
        """The ranks' ``shares`` of the batch, each packed."""
        samples = np.array(sorted(sample for share in shares for sample in share), dtype=np.int64)
        own = job.of(samples)
        numbered = [np.searchsorted(samples, share).tolist() for share in shares]
        return PlannedMinibatch(samples, self.to_plan(own, pack_ranks(own, numbered)))


class LBMicroGlobal(Policy):
    """Not in the paper: pack the whole minibatch first, then let microbatches of similar cost run together.

    All samples are packed into world_size * k microbatches, k as small as possible. In the order of their
    cost they are dealt out world_size at a time, one to each rank, the costliest to the rank that would be
    done with it first. Under collectives this idles less than :class:`LBMicro`, under ODC more than
    :class:`~odc.balance.policies.mini.LBMini`.
    """

    name = "lb-micro-global"

    def assign(self, job: Job) -> list[Parts]:
        world_size = job.world_size
        speeds = np.ones(world_size) if job.speeds is None else job.speeds
        microbatches: list[Parts] = [[] for _ in range(world_size)]
        loads = np.zeros(world_size)
        packer = Packer(job.lengths, job.costs, job.max_tokens)
        # A multiple of world_size microbatches, the smallest at which a packing is found.
        fewest = -(-min_microbatches(job.lengths, job.max_tokens) // world_size)
        packed = smallest(fewest, -(-packer.enough // world_size), lambda each: packer.into(each * world_size))
        parts = costliest_first(packed, job.costs)
        for start in range(0, len(parts), world_size):
            free = np.ones(world_size, dtype=bool)
            for part in parts[start : start + world_size]:
                cost = job.costs[part].sum()
                rank = int(np.argmin(np.where(free, (loads + cost) / speeds, np.inf)))
                microbatches[rank].append(part)
                loads[rank] += cost
                free[rank] = False
        return microbatches


def _shuffled(samples: list[int], seed: int, rank: int) -> list[int]:
    keys = random_generator("share", seed, rank).random_raw(len(samples))
    return [samples[i] for i in np.argsort(keys, kind="stable")]


def equally_many(job: Job) -> Parts:
    """Balance the cost over ranks whose numbers of samples differ by at most one."""
    return split_by_cost(job.costs, job.world_size, equal_size=True, speeds=job.speeds)


def pack_ranks(job: Job, ranks: Parts) -> list[Parts]:
    """Pack the samples of each rank; all ranks get the same number of microbatches."""
    chosen = [np.array(mine, dtype=np.int64) for mine in ranks]
    jobs = [job.of(mine) for mine in chosen]
    packed = pack_together([mine.lengths for mine in jobs], [mine.costs for mine in jobs], job.max_tokens)
    return [costliest_first(renumber(parts, mine), job.costs) for parts, mine in zip(packed, chosen, strict=True)]
