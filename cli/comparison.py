"""Policies side by side on one dataset, and what to make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from odc.balance import Machine, Scenario, Simulation
from odc.balance.plan import Comm
from odc.balance.simulate import PlannedEpoch
from odc.cli.costs import Training

BASELINE: tuple[str, Comm] = ("lb-micro", "collective")
_COMM_NAMES: dict[Comm, str] = {"collective": "FSDP", "odc": "ODC"}
# A gain below this is within what a cost model can be wrong about.
_NOT_WORTH_IT = 1.02
_GIB = 2**30


@dataclass(frozen=True, eq=False)
class Comparison:
    """All simulations of one dataset, by policy and communication."""

    scenario: Scenario
    planned: Mapping[str, PlannedEpoch]
    simulations: Mapping[tuple[str, Comm], Simulation]
    training: Training

    @property
    def baseline(self) -> Simulation:
        """What speedups refer to: the paper's baseline if it was simulated, else the first."""
        return self.simulations.get(BASELINE) or next(iter(self.simulations.values()))

    def best(self, comm: Comm) -> Simulation | None:
        """The fastest with this kind of communication; of equally fast ones the first."""
        candidates = [simulation for (_, kind), simulation in self.simulations.items() if kind == comm]
        return max(candidates, key=lambda simulation: simulation.samples_per_time, default=None)


def compare(
    scenario: Scenario,
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
    return Comparison(scenario, planned, simulations, training)


def table(comparison: Comparison, title: str) -> Table:
    """One row per policy and communication, at most 80 columns wide."""
    best = max(comparison.simulations.values(), key=lambda simulation: simulation.samples_per_time)
    memory_limit = comparison.training.device.memory_bytes
    result = Table(title=title, title_justify="left", expand=False)
    result.add_column("policy", no_wrap=True)
    result.add_column("with", no_wrap=True)
    for name in ("bubble", "samples/s", "speedup", "planning", "memory"):
        result.add_column(name, justify="right", no_wrap=True)
    for simulation in comparison.simulations.values():
        memory = comparison.training.memory_bytes(simulation.peak_tokens)
        result.add_row(
            simulation.policy,
            _COMM_NAMES[simulation.comm],
            f"{simulation.bubble_rate:.1%}",
            f"{simulation.samples_per_time:.3g}",
            f"{simulation.speedup(comparison.baseline):.2f}x",
            f"{1e3 * simulation.planning_s:.1f} ms",
            f"{memory / _GIB:.0f} GiB" if memory <= memory_limit else f"[red]{memory / _GIB:.0f} GiB[/red]",
            style="bold green" if simulation is best else None,
        )
    return result


def recommend(comparison: Comparison) -> str:
    """What to use and why, in a sentence or two."""
    odc, fsdp = comparison.best("odc"), comparison.best("collective")
    if odc is None or fsdp is None:
        only = odc or fsdp or comparison.baseline
        return f"{_COMM_NAMES[only.comm]} with {only.policy} is the fastest of these."
    gain = odc.speedup(fsdp)
    if gain < _NOT_WORTH_IT:
        return (
            f"Stay with FSDP and {fsdp.policy}: ranks wait for {fsdp.bubble_rate:.1%} of the time, and ODC would "
            f"bring {max(gain - 1, 0):.1%} more samples/s."
        )
    text = (
        f"Use ODC with {odc.policy}: {gain:.2f}x the samples/s of the best plan for FSDP ({fsdp.policy}), waiting "
        f"{fsdp.bubble_rate:.1%} -> {odc.bubble_rate:.1%}."
    )
    fixed = share_fixed_by_largest(comparison.planned[odc.policy])
    if odc.bubble_rate > 0.05 and fixed > 0.5:
        size = comparison.scenario.minibatch_size
        text += (
            f" What is left is the longest sample, which takes longer than a fair share in {fixed:.0%} of the "
            f"minibatches: a minibatch size above {size} would hide it."
        )
    return text


def share_fixed_by_largest(epoch: PlannedEpoch) -> float:
    """Part of the minibatches in which one sample alone costs more than the mean rank."""
    plans = [minibatch.plan for minibatch in epoch.minibatches]
    fixed = [bool(plan.costs.max() > plan.microbatch_times().sum() / plan.world_size) for plan in plans]
    return sum(fixed) / len(fixed)


def memory_note(training: Training, max_tokens: int) -> str:
    """How the limit on tokens compares with what would fit."""
    limit = training.most_tokens()
    memory = f"{training.device.memory_bytes / 1e9:.0f} GB"
    if limit == 0:
        return (
            f"the model's sharded state alone needs {training.state.bytes / 1e9:.0f} GB of {memory}: more ranks needed"
        )
    verdict = "fits" if max_tokens <= limit else "does not fit"
    return f"estimate: {memory} hold a microbatch of {limit:,} tokens; the limit of {max_tokens:,} {verdict}"


def to_json(comparison: Comparison) -> dict[str, object]:
    """Everything in the table, for machines. Times in seconds."""
    rows = [
        {
            "policy": simulation.policy,
            "comm": simulation.comm,
            "bubble_rate": simulation.bubble_rate,
            "samples_per_s": simulation.samples_per_time,
            "tokens_per_s": simulation.num_tokens / simulation.total,
            "speedup": simulation.speedup(comparison.baseline),
            "planning_s_per_minibatch": simulation.planning_s,
            "peak_tokens": simulation.peak_tokens,
            "memory_bytes": comparison.training.memory_bytes(simulation.peak_tokens),
        }
        for simulation in comparison.simulations.values()
    ]
    baseline = comparison.baseline
    scenario = comparison.scenario
    return {
        "world_size": scenario.world_size,
        "minibatch_size": scenario.minibatch_size,
        "max_tokens": scenario.max_tokens,
        "num_minibatches": int(baseline.makespans.size),
        "costs": comparison.training.about,
        "baseline": {"policy": baseline.policy, "comm": baseline.comm},
        "policies": rows,
        "recommendation": recommend(comparison),
    }


def at_minibatch_sizes(comparison: Comparison, sizes: Sequence[int]) -> dict[int, tuple[Simulation, Simulation]]:
    """The paper's baseline and LB-Mini with ODC at other minibatch sizes."""
    found = {}
    for size in sizes:
        scenario = replace(comparison.scenario, minibatch_size=size, batch_size=None)
        found[size] = scenario.plan("lb-micro").run("collective"), scenario.plan("lb-mini").run("odc")
    return found
