"""Traffic between hosts in a step and its time, for each way to train."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from odc.balance.costs.devices import DEVICES
from odc.balance.plan import Comm, Plan
from odc.balance.simulate.machine import Machine
from odc.errors import shown

Sharding = Literal["full", "hybrid", "shared"]
"""Over all ranks; inside of each host, with replicas over hosts; over all ranks, where those of a host share parameters
and gradients."""


_UNITS = {"Mb": 1e6 / 8, "Gb": 1e9 / 8, "MB": 1e6, "GB": 1e9}


@dataclass(frozen=True)
class Crossing:
    """Bytes that come into a host."""

    gather: float
    """With each gather of the whole model: by collectives for all ranks together, with ODC for each rank."""
    scatter: float
    """With each reduction or push of the gradients of the whole model, likewise."""
    per_step: float
    """Once a step, when all ranks have come to its end."""

    def num_bytes(self, plan: Plan, comm: Comm, num_hosts: int) -> float:
        """In the step of ``plan``: each microbatch gathers twice, and reduces once."""
        counts = plan.num_microbatches
        times = max(counts) if comm == "collective" else sum(counts) / num_hosts
        return times * (2 * self.gather + self.scatter) + self.per_step


@dataclass(frozen=True)
class Network:
    """Hosts with as many ranks each, and what connects them.

    Example:
        >>> network = Network(num_hosts=2, ranks_per_host=8, bytes_per_s=12.5e9)
        >>> a_7b = 15.2e9, 30.5e9  # bytes of its parameters and of its gradients
        >>> f"{network.crossing('odc', 'shared', *a_7b).per_step / 1e9:.0f} GB"
        '23 GB'
    """

    num_hosts: int
    ranks_per_host: int
    bytes_per_s: float
    """That a host receives, while it sends as many."""
    passes: float = 1.0
    """How often the process group sends what it reduce-scatters: gloo does twice."""

    def crossing(self, comm: Comm, sharding: Sharding, parameters: float, gradients: float) -> Crossing:
        """Of a model with so many bytes of parameters, as they are gathered, and of gradients, as they are reduced."""
        elsewhere = 1 - 1 / self.num_hosts
        if sharding == "hybrid":  # an all-reduce, of each rank's shard
            return Crossing(0.0, 0.0, 2 * elsewhere * gradients)
        if sharding == "shared":
            return Crossing(0.0, 0.0, elsewhere * (parameters + gradients))
        if comm == "odc":
            return Crossing(elsewhere * parameters, elsewhere * gradients, 0.0)
        ring = 1 - 1 / (self.num_hosts * self.ranks_per_host)  # each of its links carries all parts but one
        return Crossing(ring * parameters, self.passes * ring * gradients, 0.0)

    def machine(
        self, inside: Machine, crossing: Crossing, comm: Comm, num_layers: int, compute: float = 0.0
    ) -> Machine:
        """``inside`` is that of one host; ``compute``: what a microbatch computes, on average.

        With ODC each rank of a host shares its link with those that transfer at the same time. A rank does for T of
        T + c, where c is the compute that does not hide transfers, on average, and T what it would take alone, times
        1 + (ranks - 1) T / (T + c): a quadratic equation. If compute hides all, c is 0, and the link has all ranks.
        """
        sharing = 1.0
        if alone := (2 * crossing.gather + crossing.scatter) / self.bytes_per_s if comm == "odc" else 0.0:
            rest = (1 - inside.overlap) * compute
            half = (self.ranks_per_host * alone - rest) / 2
            sharing = (half + math.sqrt(half**2 + alone * rest)) / alone
        gather, scatter = (
            sharing * num_bytes / (num_layers * self.bytes_per_s) for num_bytes in (crossing.gather, crossing.scatter)
        )
        return replace(
            inside,
            gather=max(inside.gather, gather),
            scatter=max(inside.scatter, scatter),
            synchronization=crossing.per_step / self.bytes_per_s,
        )


def parse_network(hosts: int, between: str | None, world_size: int, device: str) -> Network | None:
    """What options ``--hosts`` and ``--between`` of a command say; None for one host.

    Raises:
        ValueError: ranks cannot be shared out evenly, or ``between`` is no bandwidth.
    """
    if hosts == 1:
        if between is not None:
            raise ValueError(f"--between {shown(between)} is between hosts: expected --hosts of 2 or more, too")
        return None
    if world_size % hosts or world_size == hosts:
        raise ValueError(f"--hosts {hosts}: expected as many of {world_size} ranks on each, 2 or more")
    per_host = world_size // hosts
    if between is None:
        return Network(hosts, per_host, per_host * DEVICES[device].links["infiniband"])
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MG](?:B|b(?:it)?))(?:/s|ps)?", between.strip())
    if not found or not float(found[1]):
        raise ValueError(
            f"--between {shown(between)}: expected what a host receives per second, in bits or bytes: 100Gb, 12.5GB"
        )
    return Network(hosts, per_host, float(found[1]) * _UNITS[found[2][:2]])


def mean_compute(plans: Sequence[Plan]) -> float:
    """Of a microbatch of these plans."""
    return sum(float(plan.microbatch_times().sum()) for plan in plans) / sum(
        sum(plan.num_microbatches) for plan in plans
    )
