"""``odc plan hosts`` counts what crosses between hosts in a step, for each way to train, and how long that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.table import Table

from odc.balance import Machine, Simulation
from odc.balance.costs import ShardedState
from odc.balance.plan import Comm
from odc.balance.simulate.hosts import Crossing, Network, Sharding, mean_compute
from odc.cli.comparison import COMM_NAMES, NOT_WORTH_IT, Comparison, cells, memory_cell
from odc.cli.costs import PARAM_BYTES, REDUCED_BYTES, Training
from odc.cli.output import new_table, significant

_NAMES: dict[tuple[Comm, Sharding], str] = {
    ("collective", "full"): "full sharding",
    ("collective", "hybrid"): "HSDP",
    ("odc", "shared"): "shared in host",
    ("odc", "hybrid"): "HSDP",
    ("odc", "full"): "not shared",
}


@dataclass(frozen=True)
class Way:
    """What a way to train takes over hosts."""

    comm: Comm
    sharding: Sharding
    simulation: Simulation
    crosses_bytes: float
    """Into a host in a step, on average."""
    hidden: float
    """Of the time of all transfers, the part that compute hides."""
    memory_bytes: int
    fits: bool

    @property
    def name(self) -> str:
        return f"{COMM_NAMES[self.comm]}, {_NAMES[self.comm, self.sharding]}"


def usual(inside: Mapping[Comm, Machine], network: Network, training: Training) -> dict[Comm, Machine]:
    """What FSDP and ODC meet over these hosts as they are by themselves; ``inside`` is what they meet on one."""
    return {
        "collective": _over(inside["collective"], network, training, "collective", "full")[0],
        "odc": _over(inside["odc"], network, training, "odc", "shared")[0],
    }


def _over(
    inside: Machine, network: Network, training: Training, comm: Comm, sharding: Sharding, compute: float = 0.0
) -> tuple[Machine, Crossing]:
    size = training.shape.num_parameters
    crossing = network.crossing(comm, sharding, size * PARAM_BYTES, size * REDUCED_BYTES)
    return network.machine(inside, crossing, comm, training.shape.num_layers, compute), crossing


def compare_ways(network: Network, comparison: Comparison, inside: Mapping[Comm, Machine]) -> list[Way]:
    """Each way to train, with the best plans for its kind of communication."""
    found = []
    for comm, sharding in _NAMES:
        best = comparison.best(comm)
        if best is None:
            continue
        epoch, training = comparison.planned[best.policy], _sharded(comparison.training, network, sharding)
        plans = [each.plan for each in epoch.minibatches]
        machine, crossing = _over(inside[comm], network, training, comm, sharding, mean_compute(plans))
        simulation = epoch.run(comm, machine)
        free = epoch.run(comm, replace(machine, gather=0.0, scatter=0.0, synchronization=0.0)).total
        unhidden = epoch.run(comm, replace(machine, overlap=0.0)).total
        memory = training.memory_bytes(simulation.peak_tokens, comm)
        found.append(
            Way(
                comm,
                sharding,
                simulation,
                float(np.mean([crossing.num_bytes(plan, comm, network.num_hosts) for plan in plans])),
                1 - (simulation.total - free) / (unhidden - free) if unhidden > free else 0.0,
                memory,
                memory <= training.device.memory_bytes,
            )
        )
    return found


def _sharded(training: Training, network: Network, sharding: Sharding) -> Training:
    """The same, sharded so."""
    per_host = network.ranks_per_host
    over = per_host if sharding == "hybrid" else per_host * network.num_hosts
    sharing = over if sharding == "full" else per_host
    return replace(training, state=ShardedState.from_config(training.shape, over, num_sharing=sharing))


def describe_ways(ways: Sequence[Way], network: Network) -> list[str | Table]:
    """For people, behind what policies do."""
    return ["", table(ways, network), f"[bold]{advice(ways)}[/bold]"]


def table(ways: Sequence[Way], network: Network) -> Table:
    """At most 80 columns wide."""
    best, baseline = fastest(ways), ways[0].simulation
    title = f"Over {network.num_hosts} hosts with {significant(network.bytes_per_s / 1e9)} GB/s into each, a step"
    result = new_table(title, "", ">into a\nhost", ">transfers\nhidden", ">samples/s", ">speedup", ">memory")
    for way in ways:
        result.add_row(
            way.name,
            f"{significant(way.crosses_bytes / 1e9)} GB",
            f"{way.hidden:.0%}",
            *cells(way.simulation, baseline)[-2:],
            memory_cell(way.memory_bytes, fits=way.fits),
            style="bold green" if way is best else None,
        )
    return result


def fastest(ways: Sequence[Way]) -> Way:
    """Of those that fit, if any does; of about equally fast ones the first."""
    candidates = [way for way in ways if way.fits] or ways
    most = max(way.simulation.samples_per_time for way in candidates)
    return next(way for way in candidates if way.simulation.samples_per_time * (1 + NOT_WORTH_IT) >= most)


def advice(ways: Sequence[Way]) -> str:
    """A sentence or two."""
    best, first = fastest(ways), ways[0]
    if not best.fits:
        return "Over these hosts, none of these ways fits."
    text = f"Over these hosts, take {best.name}"
    if best is not first:
        text += f": {best.simulation.speedup(first.simulation):.2f}x the samples/s of {first.name}"
    if best.sharding == "shared":
        text += ". That is what odc run and odc.patch_fsdp do by themselves"
    return f"{text}."


def to_json(ways: Sequence[Way]) -> list[dict[str, object]]:
    """Of each: bytes into a host in a step, and what comes of it."""
    return [
        {
            "comm": way.comm,
            "sharding": way.sharding,
            "policy": way.simulation.policy,
            "bytes_into_a_host": way.crosses_bytes,
            "hidden": way.hidden,
            "bubble_rate": way.simulation.bubble_rate,
            "samples_per_s": way.simulation.samples_per_time,
            "memory_bytes": way.memory_bytes,
            "fits": way.fits,
        }
        for way in ways
    ]
