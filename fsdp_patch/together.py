"""Which ranks run their microbatches together (:mod:`odc.minibatch.partners`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from odc.fsdp_patch.compat import root_mesh
from odc.fsdp_patch.unit import Unit
from odc.liveness.gloo import num_entered
from odc.minibatch.partners import Counts
from odc.setup.agreement import Exchange

CONTEXT = ("cp", "sp", "context", "context_parallel", "sequence", "sequence_parallel")
"""What dimensions of a mesh are called whose ranks share the tokens of a sample: torch's, torchtitan's, accelerate's,
verl's and DeepSpeed's names. Nothing else tells them from data parallel ones, if both are in the dimension that FSDP
shards over, as (dp, cp) flattened to one."""
EXPERTS = ("ep", "expert", "expert_parallel")
"""And those whose ranks exchange rows of experts, which a script may have placed by hand."""


def find_partners(exchange: Exchange, units: Sequence[Unit]) -> list[tuple[dist.ProcessGroup, Counts]]:
    """Each group of such ranks, and how many collectives this rank has entered there, and in each other group of which
    all of them are members. Collective, as patching is."""
    groups = [group for unit in units for group in unit.partner_groups]
    groups += _named_groups(exchange, units)
    once = {tuple(dist.get_process_group_ranks(group)): group for group in groups}
    return [(group, _counter([group, *_around(group)])) for group in once.values()]


def _around(inner: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """In the same order on all ranks of ``inner``."""
    ranks = set(dist.get_process_group_ranks(inner))
    groups = [group for group in dist.distributed_c10d._world.pg_map if group.group_name != inner.group_name]
    found = [group for group in groups if ranks.issubset(dist.get_process_group_ranks(group))]
    return sorted(found, key=lambda group: group.group_name)


def _named_groups(exchange: Exchange, units: Sequence[Unit]) -> list[dist.ProcessGroup]:
    """Those inside the shard group, of whatever mesh; of several of one name and size the last one."""
    shard_group, found = units[0].process_group, dict[str, dist.ProcessGroup]()
    ranks = set(dist.get_process_group_ranks(shard_group))
    for name, group in (*_described(), *_dimensions(units)):
        is_named = name in CONTEXT or (name in EXPERTS and group.group_name != shard_group.group_name)
        if is_named and group.size() > 1 and ranks.issuperset(dist.get_process_group_ranks(group)):
            found[f"{name} {group.size()}"] = group
    known = [json.loads(names) for names in exchange.all_gather(json.dumps(list(found)).encode())]
    return [group for name, group in sorted(found.items()) if all(name in names for names in known)]


def _described() -> Iterator[tuple[str, dist.ProcessGroup]]:
    """All groups, as their meshes have named them."""
    for group in dist.distributed_c10d._world.pg_map:
        yield group.group_desc.removeprefix("mesh_"), group


def _dimensions(units: Sequence[Unit]) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Those of the meshes of which FSDP2's are parts. For a dimension that has all ranks of the job torch takes the
    default group, which does not tell what the dimension is called."""
    parameters = [parameter for unit in units for parameter in unit.trainable_parameters()]
    roots = [root_mesh(parameter.device_mesh) for parameter in parameters if isinstance(parameter, DTensor)]
    for root in {id(root): root for root in roots}.values():
        for name in root.mesh_dim_names or ():
            yield name, root.get_group(name)


def _counter(groups: Sequence[dist.ProcessGroup]) -> Counts:
    return lambda: [num_entered(group) for group in groups]
