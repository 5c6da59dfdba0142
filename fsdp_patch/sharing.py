"""Parameters and gradients shared by a few ranks of the many over which FSDP shards: typically those of one host.

FSDP shards parameters, optimizer state and checkpoints over N ranks. But within a minibatch parameters do not change
and gradients only add up, so each needs to cross hosts only once per step, for any number of microbatches. A rank
publishes its own shard of a unit and those of its counterparts in the other homes to the S ranks of its *home* (usually
its host); its sums cover the same shards. Counterparts exchange both in collectives at points where all ranks meet
anyway: after the step, and at the end of the minibatch. (ZeRO++'s hybrid sharding; section 6.1 and appendix E of the
paper.)

[Note: Rows of a home] Global rank r is place ``s = r % S`` in home ``h = r // S``. A *row* is one rank's shard of the
whole unit, parameter after parameter. Place s publishes the rows of its counterparts one after the other, by h. So for
gathers and pushes each parameter has one part per home, whose rows are those of S consecutive ranks, by place. Nothing
else of a unit or of FSDP differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from odc.units import Destination, ParamSlice, Rows, UnitSpec

_DESCRIPTION = "odc_shared_in_host"


@dataclass(frozen=True)
class Sharing:
    """Who shares the units of one mesh. See [Note: Rows of a home]."""

    home: dist.ProcessGroup
    """This rank and those with which it shares parameters and gradients, by place."""
    counterparts: dist.ProcessGroup
    """The ranks with this one's place, by home."""
    where: str = "host"
    """What a home is, for people."""

    @property
    def num_homes(self) -> int:
        return self.counterparts.size()

    @property
    def _homes(self) -> list[slice]:
        """Of the rows of all ranks, those of each home."""
        size = self.home.size()
        return [slice(home * size, (home + 1) * size) for home in range(self.num_homes)]

    def spec(self, own: UnitSpec) -> UnitSpec:
        """What a rank publishes and sums of a unit of which it has ``own``."""
        params = [ParamSlice(f"{p.name} (home {home})", p.numel) for home in range(self.num_homes) for p in own.params]
        return replace(own, shard_numel=own.shard_numel * self.num_homes, params=tuple(params))

    def destination(self, whole: Destination) -> Destination:
        """Where a gather of the home puts what goes to ``whole``, which has rows for all ranks."""
        return Destination([out[home] for home in self._homes for out in whole.outs])

    def rows(self, whole: Sequence[Rows]) -> list[Rows]:
        """What is pushed to the home of ``whole``, which has rows for all ranks."""
        return [Rows(_of_home(part, home), part.numel) for home in self._homes for part in whole]

    def describe(self, units: Sequence[UnitSpec]) -> str:
        """What it takes, and what crosses, of ``units`` as one rank has them; for people.

        In the collectives of a step a rank gets a row from each counterpart. Without sharing each rank would read the
        rows of all other homes, twice in a microbatch, and be pushed to from each of their ranks, once.
        """
        size, others = self.home.size(), self.num_homes - 1
        shards = sum(unit.shard_bytes for unit in units)
        sums = sum(unit.grad_numel * unit.grad_dtype.itemsize for unit in units)
        return (
            f"shared by the {size} of each {self.where}: {_amount(others * (shards + sums))} more a rank, and "
            f"{_amount(size * others * (shards + sums))} from other {self.where}s in a step in place of "
            f"{_amount(size * size * others * (2 * shards + sums))} in a microbatch"
        )


def _amount(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


def _of_home(part: Rows, home: slice) -> torch.Tensor:
    if part.grads.dim() > 1:
        return part.grads[home]
    flat, num_rows = part.grads[home.start * part.numel : home.stop * part.numel], home.stop - home.start
    return flat.view(num_rows, -1) if flat.numel() == num_rows * part.numel else flat  # of the last homes too short


def share_among(ranks: Sequence[int], size: int, me: int) -> Sharing:
    """Homes of ``size`` consecutive ones of ``ranks``. Collective over these.

    Args:
        ranks: numbers in the job of those over which FSDP shards, in its order.
        me: the number of this one.
    """
    place = ranks.index(me) % size
    first = ranks.index(me) - place
    return Sharing(_group(ranks[first : first + size]), _group(ranks[place::size]))


def num_named_groups() -> int:
    """Of this process. Torch makes the name of a group of some ranks out of it, so it must be the same on these."""
    return len(dist.distributed_c10d._world.pg_names)


def _group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """The group of these ranks that an earlier session has made, or else another one, which belongs to torch from then
    on: a name that torch has given and taken back would find what its last bearer has left in the store."""
    for group in dist.distributed_c10d._world.pg_map:
        if group.group_desc == _DESCRIPTION and dist.get_process_group_ranks(group) == list(ranks):
            return group
    made: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=_DESCRIPTION)
    return made
