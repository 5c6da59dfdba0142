"""``reshard_after_forward=<int>``: parameters and gradients shared within a group of ranks, optimizer state by all.

FSDP2 gathers the forward over all N ranks and keeps, between forward and backward, a shard over a smaller group of S
ranks (typically one host) to gather the backward from. On demand, the small groups serve the forward too (ZeRO++'s
hybrid sharding; paper section 6.1 and appendix E): each rank publishes to its group not its own N-th of a unit but the
N/S shards of its replicas, one from each group, fetched once per minibatch; its sums are as wide, and are reduced over
the replicas at the end of the minibatch. Nothing crosses hosts within a minibatch.

[Note: Three orders of rows] Global rank r is place ``s = r % S`` in group ``i = r // S``. A *row* is one rank's shard
of the whole unit, parameter after parameter. FSDP's forward wants rows by r. What place s publishes is its replicas'
rows, by i. FSDP's backward wants, for each place, parameter after parameter, the N/S consecutive rows
``r = s * N/S ...`` (it cuts the gathered parameter anew).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from odc.fsdp_patch.fsdp2_unit import Fsdp2Unit, OdcAllGather, OdcReduceScatter
from odc.fsdp_patch.replicas import Replicas
from odc.units import ParamSlice, UnitSpec


def smaller_mesh(group: Any) -> Any | None:
    """The mesh that ``reshard_after_forward=<int>`` made for a parameter group; None without such an option."""
    mesh = group.post_forward_mesh_info
    return mesh if mesh is not None and mesh != group.mesh_info else None


class SubgroupAllGather(OdcAllGather):
    """See [Note: Three orders of rows]."""

    _unit: SubgroupUnit

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._unit.begin_gather()
        published = torch.empty_like(output_tensor)
        self._communication.gather(self._index, published, own_in_place=False)
        self._unit.arrange(published, output_tensor, is_forward=group.size() == self._unit.num_ranks)
        return None


class SubgroupReduceScatter(OdcReduceScatter):
    """See [Note: Three orders of rows]."""

    _unit: SubgroupUnit

    def _as_pushed(self, grads: torch.Tensor, present: Sequence[bool]) -> torch.Tensor:
        return self._unit.by_place(grads, present)


class SubgroupUnit(Fsdp2Unit):
    """A unit whose shard group is one of several smaller groups."""

    all_gather_type = SubgroupAllGather
    reduce_scatter_type = SubgroupReduceScatter

    def __init__(self, module: FSDPModule, group: Any, name: str, param_names: dict[int, str], smaller: Any) -> None:
        super().__init__(module, group, name, param_names)
        self.smaller = smaller
        self._places = int(smaller.shard_mesh_size)
        self._groups = int(smaller.replicate_mesh_size)

    @property
    def is_on_another_mesh(self) -> bool:
        """Whether it is not over the ranks that the smaller groups have together."""
        own = dist.get_process_group_ranks(super().process_group)
        return sorted(own) != sorted(self.smaller.mesh.mesh.flatten().tolist())

    @property
    def process_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self.smaller.shard_process_group
        return group

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        group: dist.ProcessGroup = self.smaller.replicate_process_group
        return group

    def spec(self) -> UnitSpec:
        row = super().spec()
        return UnitSpec(
            name=row.name,
            shard_numel=row.shard_numel * self._groups,
            dtype=row.dtype,
            params=tuple(ParamSlice(p.name, p.numel * self._groups) for p in row.params),
            grad_dtype=row.grad_dtype,
        )

    def why_staged(self) -> str:
        return "with reshard_after_forward=<int>"  # what is published is not what FSDP gathers

    keeps_full_parameters = False

    def full_parameters(self) -> list[tuple[torch.Tensor, nn.Parameter]] | None:
        fewer = [(p.shared_by_fewer, p.sharded) for p in self.trainable if p.shared_by_fewer is not None]
        return (super().full_parameters() or []) + fewer

    # Publishing: the rows of all replicas

    def fill_shard(self, out: torch.Tensor) -> None:
        assert self.replicas is not None
        rows = out.view(self._groups, -1)
        super().fill_shard(rows[self.replicas.rank])
        self.replicas.all_gather(rows, f"parameters of {self.name!r}")

    def beside(self, published: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        assert self.replicas is not None
        return super().beside(published.view(self._groups, -1)[self.replicas.rank])

    # See [Note: Three orders of rows].

    def arrange(self, published: torch.Tensor, out: torch.Tensor, *, is_forward: bool) -> None:
        """Fill ``out`` as FSDP wants it from what the places have published."""
        by_rank = published.view(self._places, self._groups, -1).transpose(0, 1)
        if is_forward:
            out.view(self._groups, self._places, -1).copy_(by_rank)
            return
        rows = by_rank.reshape(self._places, self._groups, -1)  # consecutive ranks, as the backward cuts them
        target = out.view(self._places, -1)
        for start, numel in _spans(self._numels):
            part = target[:, start * self._groups : (start + numel) * self._groups]
            part.view(self._places, self._groups, numel).copy_(rows[:, :, start : start + numel])

    def by_place(self, grads: torch.Tensor, present: Sequence[bool]) -> torch.Tensor:
        """Gradients, one row per rank, as they are pushed to the places of this subgroup."""
        by_place = grads.view(self._groups, self._places, -1).transpose(0, 1)
        pushed = torch.empty(self._places, grads.numel() // self._places, dtype=grads.dtype, device=grads.device)
        numels = [p.numel for p, here in zip(self.trainable, present, strict=True) if here]
        for start, numel in _spans(numels):
            part = pushed[:, start * self._groups : (start + numel) * self._groups]
            part.view(self._places, self._groups, numel).copy_(by_place[:, :, start : start + numel])
        return pushed.view(-1)

    def _sum_over(self, replicas: Replicas, total: torch.Tensor) -> torch.Tensor:
        rows = torch.empty(self._groups, total.numel() // self._groups, dtype=total.dtype, device=total.device)
        for start, numel in _spans([p.numel for p in self.trainable]):
            part = total[start * self._groups : (start + numel) * self._groups]
            rows[:, start : start + numel] = part.view(self._groups, numel)
        return replicas.reduce_scatter(rows, f"gradient of {self.name!r}")


def _spans(numels: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, length) of each part of a row."""
    start = 0
    for numel in numels:
        yield start, numel
        start += numel
