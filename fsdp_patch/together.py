"""Which ranks run their microbatches together (:mod:`odc.minibatch.partners`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from odc.fsdp_patch.unit import Unit
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
    groups += _named_groups(exchange, units[0].process_group)
    once = {tuple(dist.get_process_group_ranks(group)): group for group in groups}
    return [(group, _counter([group, *_around(group)])) for group in once.values()]


def _around(inner: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """In the same order on all ranks of ``inner``."""
    ranks = set(dist.get_process_group_ranks(inner))
    groups = [group for group in dist.distributed_c10d._world.pg_map if group.group_name != inner.group_name]
    found = [group for group in groups if ranks.issubset(dist.get_process_group_ranks(group))]
    return sorted(found, key=lambda group: group.group_name)


def _named_groups(exchange: Exchange, shard_group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """Those inside the shard group, of whatever mesh; of several of one name and size the last one."""
    ranks, found = set(dist.get_process_group_ranks(shard_group)), dict[str, dist.ProcessGroup]()
    for group in dist.distributed_c10d._world.pg_map:
        is_named = group.group_desc.removeprefix("mesh_") in (*CONTEXT, *EXPERTS)
        if (
            is_named
            and group.group_name != shard_group.group_name
            and group.size() > 1
            and ranks.issuperset(dist.get_process_group_ranks(group))
        ):
            found[f"{group.group_desc} {group.size()}"] = group
    known = [json.loads(names) for names in exchange.all_gather(json.dumps(list(found)).encode())]
    return [group for name, group in sorted(found.items()) if all(name in names for names in known)]


def _counter(groups: Sequence[Any]) -> Counts:
    def count(group: Any) -> int:
        try:
            number: int = group._get_sequence_number_for_group()
        except RuntimeError:  # this backend does not count, so nobody is seen to compute together
            return 0
        return number

    return lambda: [count(group) for group in groups]
