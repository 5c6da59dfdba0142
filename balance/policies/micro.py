"""Policies that pack for collectives: every rank gets the same number of microbatches."""

from __future__ import annotations

import numpy as np

from odc.balance.partition import Parts, split_by_cost
from odc.balance.policies.base import Job, Policy, costliest_first, renumber
from odc.balance.policies.packing import Packer, min_microbatches, pack_together, smallest


class LBMicro(Policy):
    """LB-Micro, the paper's strong baseline for collectives (section 5.1, appendix C, Listing 1).

    The cost is balanced over ranks that get equally many samples (differing by at most one if they cannot be
    dealt out evenly). Then every rank packs into the same number of microbatches, the smallest that suits all
    of them. A microbatch is empty only if its rank has fewer samples than that.
    """

    name = "lb-micro"

    def assign(self, job: Job) -> list[Parts]:
        return pack_ranks(job, equally_many(job))


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
        parts = costliest_first(_pack_multiple(job), job.costs)
        for start in range(0, len(parts), world_size):
            free = np.ones(world_size, dtype=bool)
            for part in parts[start : start + world_size]:
                cost = job.costs[part].sum()
                rank = int(np.argmin(np.where(free, (loads + cost) / speeds, np.inf)))
                microbatches[rank].append(part)
                loads[rank] += cost
                free[rank] = False
        return microbatches


def equally_many(job: Job) -> Parts:
    """Balance the cost over ranks whose numbers of samples differ by at most one."""
    return split_by_cost(job.costs, job.world_size, equal_size=True, speeds=job.speeds)


def pack_ranks(job: Job, ranks: Parts) -> list[Parts]:
    """Pack the samples of each rank; all ranks get the same number of microbatches."""
    chosen = [np.array(mine, dtype=np.int64) for mine in ranks]
    jobs = [job.of(mine) for mine in chosen]
    packed = pack_together([mine.lengths for mine in jobs], [mine.costs for mine in jobs], job.max_tokens)
    return [costliest_first(renumber(parts, mine), job.costs) for parts, mine in zip(packed, chosen, strict=True)]


def _pack_multiple(job: Job) -> Parts:
    """Pack into a multiple of ``world_size`` microbatches, the smallest at which a packing is found."""
    packer = Packer(job.lengths, job.costs, job.max_tokens)
    low, high = min_microbatches(job.lengths, job.max_tokens), packer.enough
    return smallest(
        -(-low // job.world_size), -(-high // job.world_size), lambda num_each: packer.into(num_each * job.world_size)
    )
