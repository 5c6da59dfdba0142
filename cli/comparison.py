"""Policies side by side on one dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from odc.balance import Machine, Scenario, Simulation
from odc.balance.checks import IntArray
from odc.balance.plan import Comm
from odc.balance.simulate import PlannedEpoch
from odc.cli.costs import Training
from odc.cli.output import gigabytes, significant

BASELINE: tuple[str, Comm] = ("lb-micro", "collective")
COMM_NAMES: dict[Comm, str] = {"collective": "FSDP", "odc": "ODC"}


@dataclass(frozen=True, eq=False)
class Comparison:
    """All simulations of one dataset, by policy and communication."""

    scenario: Scenario
    lengths: IntArray
    """Of the whole dataset, of which the scenario may have a part."""

    training: Training
    machines: Mapping[Comm, Machine]
    planned: Mapping[str, PlannedEpoch]
    simulations: Mapping[tuple[str, Comm], Simulation]

    @property
    def baseline(self) -> Simulation:
        """What speedups refer to: the paper's baseline if it was simulated, else the first."""
        return self.simulations.get(BASELINE) or next(iter(self.simulations.values()))

    def best(self, comm: Comm) -> Simulation | None:
        """The fastest with this kind of communication; of equally fast ones the first."""
        candidates = [simulation for (_, kind), simulation in self.simulations.items() if kind == comm]
        return max(candidates, key=lambda simulation: simulation.samples_per_time, default=None)

    def memory_bytes(self, simulation: Simulation) -> int:
        """Peak per device, in the largest microbatch."""
        return self.training.memory_bytes(simulation.peak_tokens)

    def fits(self, simulation: Simulation) -> bool:
        """Whether the device has that much memory."""
        return self.memory_bytes(simulation) <= self.training.device.memory_bytes


def compare(
    scenario: Scenario,
    lengths: IntArray,
    policies: Sequence[str],
    training: Training,
    machines: Mapping[Comm, Machine],
    on_minibatch: Callable[[], object] | None = None,
) -> Comparison:
    """Plan and simulate every policy, under collectives (where it has equal counts) and under ODC."""
    planned, simulations = {}, {}
    for name in policies:
        epoch = planned[name] = scenario.plan(name, on_minibatch)
        kinds: tuple[Comm, ...] = ("collective", "odc") if epoch.policy.equal_counts else ("odc",)
        for comm in kinds:
            simulations[name, comm] = epoch.run(comm, machines[comm])
    return Comparison(scenario, lengths, training, machines, planned, simulations)


def table(comparison: Comparison) -> Table:
    """One row per policy and communication, at most 80 columns wide."""
    best = max(comparison.simulations.values(), key=lambda simulation: simulation.samples_per_time)
    baseline = comparison.baseline
    title = f"Waiting and throughput; speedup over {baseline.policy} with {COMM_NAMES[baseline.comm]}"
    result = Table(title=title, title_justify="left", expand=False)
    result.add_column("policy", no_wrap=True)
    result.add_column("with", no_wrap=True)
    for name in ("bubble", "samples/s", "speedup", "planning", "memory"):
        result.add_column(name, justify="right", no_wrap=True)
    for simulation in comparison.simulations.values():
        memory = gigabytes(comparison.memory_bytes(simulation))
        result.add_row(
            simulation.policy,
            COMM_NAMES[simulation.comm],
            f"{simulation.bubble_rate:.1%}",
            significant(simulation.samples_per_time),
            f"{simulation.speedup(baseline):.2f}x",
            duration(simulation.planning_s),
            memory if comparison.fits(simulation) else f"[red]{memory}[/red]",
            style="bold green" if simulation is best else None,
        )
    return result


def duration(seconds: float) -> str:
    """Of planning, for people."""
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"


def to_json(comparison: Comparison, recommendation: str) -> dict[str, object]:
    """Everything in the table, for machines. Times in seconds."""
    baseline = comparison.baseline
    scenario = comparison.scenario
    return {
        "world_size": scenario.world_size,
        "minibatch_size": scenario.minibatch_size,
        "max_tokens": scenario.max_tokens,
        "num_minibatches": int(baseline.makespans.size),
        "costs": comparison.training.about,
        "baseline": {"policy": baseline.policy, "comm": baseline.comm},
        "policies": [_row(comparison, simulation) for simulation in comparison.simulations.values()],
        "recommendation": recommendation,
    }


def _row(comparison: Comparison, simulation: Simulation) -> dict[str, object]:
    return {
        "policy": simulation.policy,
        "comm": simulation.comm,
        "bubble_rate": simulation.bubble_rate,
        "samples_per_s": simulation.samples_per_time,
        "tokens_per_s": simulation.num_tokens / simulation.total,
        "speedup": simulation.speedup(comparison.baseline),
        "planning_s_per_minibatch": simulation.planning_s,
        "peak_tokens": simulation.peak_tokens,
        "memory_bytes": comparison.memory_bytes(simulation),
        "fits": comparison.fits(simulation),
    }


def at_minibatch_sizes(comparison: Comparison, sizes: Sequence[int]) -> dict[int, tuple[Simulation, Simulation]]:
    """The paper's baseline and LB-Mini with ODC at other minibatch sizes, on the same machines."""
    found = {}
    machines = comparison.machines
    for size in sizes:
        scenario = replace(comparison.scenario, minibatch_size=size, batch_size=None)
        baseline = scenario.plan("lb-micro").run("collective", machines["collective"])
        found[size] = baseline, scenario.plan("lb-mini").run("odc", machines["odc"])
    return found
