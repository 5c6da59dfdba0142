"""Layer 1: no processes. What crosses between hosts, against a count message by message."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from odc.balance import LinearCost, Machine, Plan
from odc.balance.plan import Comm
from odc.balance.simulate.hosts import Network, Sharding
from odc.balance.simulate.machine import Stopwatch

PARAMETERS, GRADIENTS = 2.0, 4.0  # bytes of the model
WAYS: list[tuple[Comm, Sharding]] = [
    ("collective", "full"), ("collective", "hybrid"), ("odc", "shared"), ("odc", "hybrid"), ("odc", "full")
]  # fmt: skip


def plan_of(counts: list[int]) -> Plan:
    """Each microbatch has a sample of cost 1."""
    samples = iter(range(sum(counts)))
    microbatches = [[[next(samples)] for _ in range(count)] for count in counts]
    ones = np.ones(sum(counts), np.int64)
    return Plan(microbatches, ones, ones.astype(float), max_tokens=1, policy="by hand")


def messages(comm: Comm, sharding: Sharding, counts: list[int], hosts: int) -> list[tuple[int, int, float]]:
    """Source, target and bytes of each, in a step."""
    everyone = list(range(len(counts)))
    world_size, per_host = len(counts), len(counts) // hosts
    counterparts = [everyone[place::per_host] for place in range(per_host)]

    def ring(ranks: list[int], part: float, rounds: int) -> list[tuple[int, int, float]]:
        once = [(source, target, part) for source, target in itertools.pairwise([*ranks, ranks[0]])]
        return once * (rounds * (len(ranks) - 1))

    if sharding == "hybrid":  # a reduce-scatter and an all-gather of each rank's shard
        return [one for ranks in counterparts for one in ring(ranks, GRADIENTS / world_size, 2)]
    if sharding == "shared":
        part = (PARAMETERS + GRADIENTS) / world_size
        return [(*pair, part) for ranks in counterparts for pair in itertools.permutations(ranks, 2)]
    if comm == "collective":
        return max(counts) * (ring(everyone, PARAMETERS / world_size, 2) + ring(everyone, GRADIENTS / world_size, 1))
    pairs = list(itertools.product(everyone, everyone))
    reads = [(owner, rank, 2 * counts[rank] * PARAMETERS / world_size) for rank, owner in pairs]
    return reads + [(rank, owner, counts[rank] * GRADIENTS / world_size) for rank, owner in pairs]


@pytest.mark.parametrize(("comm", "sharding"), WAYS)
@pytest.mark.parametrize("hosts", [2, 3])
def test_bytes_are_those_of_each_message(comm: Comm, sharding: Sharding, hosts: int) -> None:
    counts = [3] * 6 if comm == "collective" else [4, 0, 1, 2, 3, 5]
    sent = messages(comm, sharding, counts, hosts)
    crossed = sum(size for source, target, size in sent if source * hosts // 6 != target * hosts // 6)
    crossing = Network(hosts, 6 // hosts, 1.0).crossing(comm, sharding, PARAMETERS, GRADIENTS)
    assert crossing.num_bytes(plan_of(counts), comm, hosts) == pytest.approx(crossed / hosts)


def test_what_crosses_once_a_step_takes_all_ranks_time_and_nothing_hides_it() -> None:
    plan = plan_of([2, 1])
    crossing = Network(2, 1, 2.0).crossing("odc", "shared", PARAMETERS, GRADIENTS)
    machine = Network(2, 1, 2.0).machine(Machine(), crossing, "odc", num_layers=1)
    elapsed = Stopwatch(LinearCost(), plan.lengths, machine).time(plan, np.arange(3), "odc")
    assert (elapsed.makespan, elapsed.busy) == (2 + 1.5, 3 + 2 * 1.5)  # half of 6 bytes, at 2 a second


def test_ranks_of_a_host_share_its_link_where_each_reads_for_itself() -> None:
    network = Network(2, 4, 3.0)
    for comm, expected in (("collective", 7 / 8 * 2 / 3 / 5), ("odc", 4 * 1 / 2 * 2 / 3 / 5)):
        crossing = network.crossing(comm, "full", PARAMETERS, GRADIENTS)
        assert network.machine(Machine(), crossing, comm, num_layers=5).gather == pytest.approx(expected)
    assert network.machine(Machine(gather=9.0), crossing, "odc", num_layers=5).gather == 9.0  # the slower of the two


@pytest.mark.parametrize("compute", [0.0, 0.5, 20.0])
def test_the_link_is_shared_with_those_that_do_not_compute(compute: float) -> None:
    network = Network(2, 4, 1.0)
    crossing = network.crossing("odc", "full", PARAMETERS, GRADIENTS)
    machine = network.machine(Machine(overlap=0.0), crossing, "odc", 1, compute)
    alone, taken = 4.0, 2 * machine.gather + machine.scatter  # of 8 bytes a half is elsewhere
    assert taken == pytest.approx(alone * (1 + 3 * taken / (taken + compute)))
    assert network.machine(Machine(), crossing, "odc", 1, compute).gather == pytest.approx(4 * 1.0)
