"""This process's part of the data, given by rank and world size or by the data-parallel dimensions of a mesh."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from odc.balance.checks import as_count
from odc.errors import shown

_SHARING = frozenset(("tp", "cp", "sp", "pp", "tensor", "context", "sequence", "pipeline"))
"""Words in names of dimensions whose ranks run the same microbatches. (Not "ep": ranks that share out experts mostly
have samples of their own.)"""


@dataclass(frozen=True)
class Place:
    """This process among those that have different samples."""

    rank: int
    world_size: int

    ranks: list[int] | None = None
    """All of them, by their numbers in ``torch.distributed``; None: not told."""

    @classmethod
    def of(cls, rank: int | None, world_size: int | None, mesh: DeviceMesh | None, group: object = None) -> Place:
        """As a user gives it: ``rank`` and ``world_size``, or ``mesh``.

        Ranks that differ in other dimensions only (tensor parallelism) are at the same place. Several dimensions count
        in row-major order.

        Raises:
            ValueError: neither or both are given, a number is out of range, this process is not in the mesh, or a
                dimension of it is one whose ranks share samples.
            TypeError: ``mesh`` is something else.
        """
        if mesh is None:
            if rank is None or world_size is None:
                missing = "rank and world_size" if world_size is None else "rank"
                raise ValueError(
                    f"rank={rank}, world_size={world_size}, mesh=None: give {missing}, or mesh, the data-parallel "
                    "dimensions of the device mesh"
                )
            size, mine = as_count(world_size, "world_size"), as_count(rank, "rank", minimum=0)
            if mine >= size:
                raise ValueError(f"rank={rank}: expected less than world_size={world_size}")
            return cls(mine, size)
        if rank is not None or world_size is not None or group is not None:
            raise ValueError("mesh beside rank, world_size or group, which it tells: give one or the others")
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh={shown(mesh)}: expected a DeviceMesh, such as mesh['dp']")
        for name in mesh.mesh_dim_names or ():
            if _SHARING & set(re.split(r"[^a-z]+", name.lower())):
                raise ValueError(
                    f"the mesh has the dimension {name!r}, whose ranks run the same microbatches together, so they "
                    "have the same samples: give its data-parallel dimensions alone, such as mesh['dp']"
                )
        ranks, me = mesh.mesh.flatten().tolist(), dist.get_rank()
        if me not in ranks:
            raise ValueError(f"rank {me} is not in the mesh of ranks {ranks}: give each rank the mesh that it is in")
        return cls(ranks.index(me), len(ranks), ranks)

    def global_ranks(self, group: dist.ProcessGroup | None) -> list[int]:
        """Those that have different samples: of the mesh, else of the group, else all.

        Raises:
            RuntimeError: there is no process group.
            ValueError: this process is not at this place among them.
        """
        if self.ranks is not None:
            return self.ranks
        if not dist.is_initialized():
            raise RuntimeError(
                f"{self.world_size} ranks exchange a vector per round: call torch.distributed.init_process_group "
                "first, or use Unaligned()"
            )
        whole = group or dist.GroupMember.WORLD
        ranks: list[int] = dist.get_process_group_ranks(whole) if isinstance(whole, dist.ProcessGroup) else []
        mine = dist.get_rank()
        if len(ranks) != self.world_size or mine not in ranks or ranks.index(mine) != self.rank:
            found = f"rank {ranks.index(mine)} of {len(ranks)}" if mine in ranks else "none of the ranks"
            raise ValueError(
                f"rank={self.rank}, world_size={self.world_size}: this process is {found} in the process group; pass "
                "as mesh= or group= the ranks that have different samples"
            )
        return ranks


@dataclass(frozen=True)
class Together:
    """The ranks that compute the same microbatches, this one among them."""

    ranks: list[int]
    """By their numbers in ``torch.distributed``."""

    index: int
    """Of this one; the first one leads."""

    whole: str
    """What the ranks of all places have in common."""

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Together | None:
        """Those that differ from this rank in other dimensions of the whole mesh only, which ``mesh`` is a part of;
        None: that has not all ranks, so others may compute together with these."""
        whole = _whole(mesh).mesh
        mine, me = mesh.mesh.flatten().tolist(), dist.get_rank()
        places = [(whole == rank).nonzero()[0].tolist() for rank in mine]
        fixed = [d for d in range(whole.ndim) if len({place[d] for place in places}) == 1]
        if (
            whole.numel() < dist.get_world_size()
            or len(mine) * math.prod(whole.shape[d] for d in fixed) != whole.numel()
        ):
            return None
        here = places[mine.index(me)]
        ranks = whole[tuple(slice(None) if d in fixed else at for d, at in enumerate(here))].flatten().tolist()
        return cls(ranks, ranks.index(me), f"{fixed} of {whole.tolist()}")


def _whole(mesh: DeviceMesh) -> DeviceMesh:
    own = getattr(mesh, "_get_root_mesh", None)  # from torch 2.10 on
    return device_mesh._mesh_resources.get_root_mesh(mesh) if own is None else own()
