"""Make a session: first check on all ranks, then allocate memory, then patch the model."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from odc.config import RuntimeConfig
from odc.errors import ConfigError, UnsupportedError
from odc.fsdp_patch.compat import root_mesh, warn_if_untested
from odc.fsdp_patch.fsdp1 import (
    check_fsdp1_model,
    check_fsdp1_units,
    find_fsdp1_roots,
    find_fsdp1_units,
    largest_fsdp1_module,
)
from odc.fsdp_patch.fsdp2 import check_fsdp2, check_fsdp2_meshes, find_fsdp2_units
from odc.fsdp_patch.fsdp2_in_place import Held
from odc.fsdp_patch.session import Connection, Session, close_failed
from odc.fsdp_patch.sharing import num_named_groups, share_among
from odc.fsdp_patch.unit import Unit
from odc.liveness.gloo import end_connections, num_entered
from odc.minibatch.partners import Counts
from odc.minibatch.runtime import Mesh, Runtime
from odc.rank.context import agree
from odc.setup.agreement import (
    Exchange,
    ProcessGroupExchange,
    gather_json,
    raise_together,
    require_agreement,
    setup_timeout_s,
)
from odc.setup.topology import Topology
from odc.timeline import Stats
from odc.transports._memfd import available_bytes

logger = logging.getLogger("odc")

Ranks = tuple[tuple[int, ...], tuple[int, ...]]
"""Of a shard group, and of the replicas of one of them; none without replicas."""


def patch_fsdp(
    model: nn.Module,
    *,
    transport: str = "auto",
    accumulate: str = "auto",
    accumulate_dtype: torch.dtype = torch.float32,
    deterministic: bool = False,
    share_in_host: str | float = "auto",
    timeout_s: float = 600.0,
) -> Session:
    """Replace the collectives of an FSDP model with on-demand communication. Collective over the model's mesh.

    The script keeps its forward, backward, clipping and optimizer, and results change only by rounding (sums have
    another order). A minibatch ends automatically when the script first uses gradients: clipping, unscaling, using the
    data of a ``.grad``, or ``optimizer.step``. Until then each rank may run any number of microbatches, also none.

    Args:
        model: sharded by ``torch.distributed.fsdp.fully_shard`` (FSDP2) or wrapped in ``FullyShardedDataParallel``.
        transport: "auto", the name of a transport, or "package.module:Class".
        accumulate: "direct", "daemon" or "auto"; see :class:`odc.RuntimeConfig`.
        accumulate_dtype: dtype of gradient sums: float32 or float64; always float64 for float64 gradients.
        deterministic: gradients are the same in every run, bit for bit; needs one more full gradient of memory per
            rank.
        share_in_host: "on", "off", "auto" or a number of bytes: with several hosts, whether the ranks of a host share
            parameters and gradients; see :class:`odc.RuntimeConfig`.
        timeout_s: seconds without progress of another rank before a wait fails. ``ODC_TIMEOUT`` overrides it.

    Raises:
        UnsupportedError: the model uses an option that is not supported. Raised on all ranks.
        SetupError: the ranks differ, or a resource is missing. Raised on all ranks.
        ConfigError, ValueError: an argument has an invalid value.

    Example:
        >>> session = odc.patch_fsdp(model)  # behind fully_shard(model)
        >>> for microbatches in minibatches:  # each rank its own, any number of them
        ...     for microbatch in microbatches:
        ...         loss(model, microbatch).backward()
        ...     optimizer.step()  # ends the minibatch, and publishes the new shards
        ...     optimizer.zero_grad()
        >>> session.stats().minibatches
        2
        >>> session.close()  # plain FSDP again
    """
    config, problem = RuntimeConfig(), None
    try:
        config = RuntimeConfig.from_environment(
            transport=transport,
            accumulate=accumulate,
            accumulate_dtype=accumulate_dtype,
            deterministic=deterministic,
            share_in_host=share_in_host,
            timeout_s=timeout_s,
        )
    except ConfigError as error:  # of this host's environment, perhaps
        problem = error
    warn_if_untested()
    close_failed()
    group, device = default_group(model)
    exchange = ProcessGroupExchange(group, device, setup_timeout_s(config.timeout_s))
    try:
        return _patch(model, config, exchange, device, problem)
    except BaseException as error:
        exchange.leave_word(error)
        raise


def _patch(
    model: nn.Module,
    config: RuntimeConfig,
    exchange: ProcessGroupExchange,
    device: torch.device,
    problem: Exception | None,
) -> Session:
    """``problem``: what is wrong at this rank already."""
    connection = _connect(model, config, exchange, device, problem)
    session: Session | None = None
    try:
        session = Session(connection, functools.partial(_connect_again, config))
        session.start(model)
    except BaseException as error:
        connection.runtime.abort(error)  # the other ranks may have set up all theirs
        try:
            (session or connection.runtime).close()
        except Exception as another:  # the first cause is the one to raise
            logger.error("odc: while giving up: %s: %s", type(another).__name__, another)
        raise
    return session


def _connect_again(config: RuntimeConfig, model: nn.Module, stats: Stats) -> Connection:
    """For a session that has left its model. Collective, as :func:`patch_fsdp`; raises as that does."""
    group, device = default_group(model)
    exchange = ProcessGroupExchange(group, device, setup_timeout_s(config.timeout_s))
    try:
        return _connect(model, config, exchange, device, None, stats)
    except BaseException as error:
        exchange.leave_word(error)
        raise


def _connect(
    model: nn.Module,
    config: RuntimeConfig,
    exchange: ProcessGroupExchange,
    device: torch.device,
    problem: Exception | None,
    stats: Stats | None = None,
) -> Connection:
    meshes = list[list[Unit]]()

    def check() -> None:
        if problem is not None:
            raise problem

    try:
        meshes = [] if problem else by_mesh(supported_units(model))
        held = Held()
        for unit in (unit for units in meshes for unit in units) if config.staging == "auto" else ():
            unit.do_without_staging(held)
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        problem = error
    agree(exchange, config, {"meshes": {str(number): _shape(units[0]) for number, units in enumerate(meshes)}}, check)
    exchanges = {tuple(exchange.global_ranks): exchange}

    def over(group: dist.ProcessGroup) -> ProcessGroupExchange:
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in exchanges:
            exchanges[ranks] = ProcessGroupExchange(group, device, setup_timeout_s(config.timeout_s))
        return exchanges[ranks]

    for units in meshes if config.most_shared_bytes != 0 else ():
        _share_in_host(units, over(units[0].shard_group), config)
    meshes = by_mesh([unit for units in meshes for unit in units])
    joined, partners = list[Mesh](), dict[Exchange, Counts]()
    for units in meshes:  # all that ranks have to agree in, before any memory is taken
        copies = units[0].replica_group
        replicas = over(copies) if copies is not None else None
        shards = over(units[0].process_group)
        around = over(units[0].shard_group)
        beside: dict[Exchange, Counts] = {over(group): counts for group, counts in find_partners(around, units)}
        # Of what is shared, all ranks: ranks that differ may be on different hosts.
        for one in (around, replicas if around is shards else None, *beside):
            if one is not None:
                require_agreement(one, _agreement(units))
        partners = {**beside, **partners}
        # FSDP communicates nothing in a shard group of one, and neither do we: it leaves the gradients in .grad itself.
        if shards.world_size > 1:
            _measure(around, units)
            joined.append(Mesh([unit.spec() for unit in units], shards, replicas))
    if any(spec.grad_dtype == torch.float64 for mesh in joined for spec in mesh.units):
        config = replace(config, accumulate_dtype=torch.float64)
    first, *others = joined or [Mesh([], exchange)]
    runtime = Runtime.create(
        first.exchange,
        first.units,
        config,
        replicas=first.replicas,
        others=others,
        device=device,
        partners=list(partners.items()) if joined else (),
        end_collectives=end_connections if joined else None,
        stats=stats,
    )
    return Connection(meshes[: len(joined)], runtime, [unit for units in meshes[len(joined) :] for unit in units])


def _share_in_host(units: Sequence[Unit], exchange: ProcessGroupExchange, config: RuntimeConfig) -> None:
    """Let the ranks of each host share the units of one mesh, if that is over several hosts. Collective over it.

    Raises:
        ConfigError: it was asked for, and cannot be.
    """
    if units[0].sharing is not None:
        return  # the script has said who shares
    topology = Topology.discover(exchange, config.host_id, config.address)
    if topology.num_hosts == 1:
        return
    size, most = topology.ranks_per_host(), config.most_shared_bytes
    here = [_free_bytes(units[0].device, len(topology.ranks_here())), num_named_groups()]
    free, num_groups = zip(*gather_json(exchange, here), strict=True)
    if size is None or size == 1 or len(set(num_groups)) > 1 or units[0].copy_group is not None:
        if config.share_in_host == "on":
            raise ConfigError(
                f"share_in_host='on': the ranks that shard unit {units[0].name!r} are alone on their hosts, not as "
                "many on each, not one host after the other in the order of their mesh, in different numbers of "
                "process groups, or have replicas: use 'auto' or 'off'"
            )
        return
    sharing = share_among(exchange.global_ranks, size, topology.me)
    left = min(free) / 2 if most is None else most
    for unit in units:
        # Parameters and gradients of counterparts, in what they are kept in: a little more than what travels.
        more = 2 * (sharing.num_homes - 1) * sum(shard.nbytes for shard, _ in unit.resident())
        if more <= left:
            unit.sharing, left = sharing, left - more


def _free_bytes(device: torch.device, ranks_here: int) -> float:
    """Of the device; or this rank's part of the host's memory."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    free = available_bytes()
    return math.inf if free is None else free / ranks_here


def _measure(exchange: Exchange, units: Sequence[Unit]) -> None:
    """Find out how much travels of parameters that say so themselves. Ranks have agreed in which these are.

    Raises:
        UnsupportedError: it is not the same on all ranks.
        what such a parameter raises; SetupError: of another rank.
    """
    if not any(unit.is_extended for unit in units):
        return
    measured, problem = dict[str, str](), None
    try:
        for unit in units:
            measured.update(unit.measure())
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        problem = error
    first, *others = raise_together(exchange, problem, measured)
    for rank, other in enumerate(others, 1):
        for name in (name for name in first if first[name] != other[name]):
            ours, theirs = exchange.global_ranks[0], exchange.global_ranks[rank]
            raise UnsupportedError(
                f"parameter {name!r}: fsdp_pre_all_gather returns {first[name]} on rank {ours} and {other[name]} on "
                f"rank {theirs}: let it pad what it returns, or divide the parameter evenly"
            )


def _shape(unit: Unit) -> str:
    ranks, replicas = _ranks(unit)
    return f"{len(ranks)} ranks" + (f", {len(replicas)} replicas" if replicas else "")


def _agreement(units: Sequence[Unit]) -> dict[str, dict[str, str]]:
    """What must be equal on all ranks beyond the runtime's own tables."""
    parameters: dict[str, str] = {}
    options: dict[str, str] = {}
    for unit in units:
        options[unit.name], described = unit.agreement()
        parameters.update(described)
    return {"parameters": parameters, "FSDP options": options}


# The communication units of a model, whichever FSDP sharded it


def default_group(model: nn.Module) -> tuple[dist.ProcessGroup, torch.device]:
    """The group over which the model is sharded (of several meshes, the first of :func:`by_mesh`), and its device:
    enough to tell the other ranks of a problem.

    Raises:
        ValueError: the model was not sharded.
        UnsupportedError: its meshes only replicate; every rank sees that.
    """
    if find_fsdp1_roots(model):
        module = largest_fsdp1_module(model)
        return module.process_group, module.compute_device
    units = find_fsdp2_units(model)
    check_fsdp2_meshes(units)
    if units:
        first = by_mesh(units)[0][0]
        return first.shard_group, first.device
    raise ValueError(
        f"{type(model).__name__} has no FSDP modules: call torch.distributed.fsdp.fully_shard on its layers and on the "
        "model (or wrap it in FullyShardedDataParallel) first, then odc.patch_fsdp(model)"
    )


def supported_units(model: nn.Module) -> list[Unit]:
    """All units of the model, in module order.

    Raises:
        UnsupportedError: the model uses an option that cannot be honoured; names the module and the option.
    """
    if find_fsdp1_roots(model):
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            raise UnsupportedError(
                "FullyShardedDataParallel (FSDP1) and fully_shard (FSDP2) in one model: use one of them"
            )
        check_fsdp1_model(model)
        fsdp1_units = find_fsdp1_units(model)
        check_fsdp1_units(fsdp1_units)
        return list(fsdp1_units)
    fsdp2_units = find_fsdp2_units(model)
    check_fsdp2(fsdp2_units)
    return list(fsdp2_units)


def by_mesh(units: Sequence[Unit]) -> list[list[Unit]]:
    """The units of each mesh: first that of the most ranks, mostly all, else in the order of the model, which all ranks
    have. Shard groups of one rank come last."""
    meshes: dict[Ranks, list[Unit]] = {}
    for unit in units:
        meshes.setdefault(_ranks(unit), []).append(unit)

    def size(ranks: Ranks) -> tuple[bool, int]:
        return len(ranks[0]) > 1, len(ranks[0]) * max(len(ranks[1]), 1)

    return [meshes[ranks] for ranks in sorted(meshes, key=size, reverse=True)]


def _ranks(unit: Unit) -> Ranks:
    replicas = unit.replica_group
    return (
        tuple(dist.get_process_group_ranks(unit.process_group)),
        tuple(dist.get_process_group_ranks(replicas)) if replicas is not None else (),
    )


# Which ranks run their microbatches together (:mod:`odc.minibatch.partners`)

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
    shard_group, found = units[0].shard_group, dict[str, dist.ProcessGroup]()
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
