"""Compares policies on one dataset, and recommends one: with which communication, whether it fits into memory, and what
holds it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from rich.table import Table

from odc.balance import Machine, Policy, Scenario, Simulation
from odc.balance.checks import FloatArray, IntArray
from odc.balance.costs import evaluate
from odc.balance.plan import Comm
from odc.balance.simulate import PlannedEpoch
from odc.balance.simulate.simulator import BestFitRows
from odc.cli.costs import Training
from odc.cli.lengths import describe, larger_sizes, shuffled
from odc.cli.output import gigabytes, new_table, show_report, significant

BASELINE: tuple[str, Comm] = ("lb-micro", "collective")
COMM_NAMES: dict[Comm, str] = {"collective": "FSDP", "odc": "ODC"}

Order = Literal["shuffled", "grouped", "packed"]
"""What decides which samples share a step: chance alone; chance and like lengths, as with ``group_by_length`` of
transformers; TRL's packing, of whose rows some are drawn."""

_HEADINGS: dict[Order, str] = {"shuffled": "", "grouped": "lengths grouped", "packed": "packed by TRL"}


@dataclass(frozen=True, eq=False)
class Study:
    """What policies are compared on."""

    scenario: Scenario
    lengths: IntArray
    """Of the whole dataset, of which the scenario may have a part."""

    about: str
    """Where the lengths come from, for people."""

    training: Training
    machines: Mapping[Comm, Machine]


@dataclass(frozen=True, eq=False)
class Comparison(Study):
    """All simulations of one study, by policy and communication."""

    planned: Mapping[str, PlannedEpoch]
    simulations: Mapping[tuple[str, Comm], Simulation]

    @property
    def baseline(self) -> Simulation:
        """What speedups refer to: the paper's baseline if it was simulated, else the first."""
        return self.simulations.get(BASELINE) or next(iter(self.simulations.values()))

    def best(self, comm: Comm) -> Simulation | None:
        """The fastest that fits with this kind of communication, else the fastest; of equally fast ones the first."""
        candidates = [simulation for (_, kind), simulation in self.simulations.items() if kind == comm]
        return max(candidates, key=lambda each: (self.fits(each), each.samples_per_time), default=None)

    @property
    def variation(self) -> float:
        """How much the lengths of a step differ: standard deviation over mean, the average over steps."""
        steps = [minibatch.plan.lengths for minibatch in next(iter(self.planned.values())).minibatches]
        return float(np.mean([lengths.std() / lengths.mean() for lengths in steps]))

    def memory_bytes(self, simulation: Simulation) -> int:
        """Peak per device, in the largest microbatch."""
        return self.training.memory_bytes(simulation.peak_tokens, simulation.comm)

    def fits(self, simulation: Simulation) -> bool:
        """Whether the device has that much memory."""
        return self.memory_bytes(simulation) <= self.training.device.memory_bytes


ByOrder = Mapping[Order, Comparison]
"""Comparisons of the same samples, first of all "shuffled"."""


def compare(
    study: Study,
    policies: Sequence[str | Policy],
    on_minibatch: Callable[[], object] | None = None,
    *,
    also_odc: bool = True,
) -> Comparison:
    """Plan and simulate every policy, under collectives where it has equal counts, and under ODC: without ``also_odc``
    only where it has not."""
    planned, simulations = {}, {}
    for policy in policies:
        epoch = study.scenario.plan(policy, on_minibatch)
        planned[epoch.policy.name] = epoch
        equal = epoch.policy.equal_counts
        kinds: dict[Comm, bool] = {"collective": equal, "odc": also_odc or not equal}
        for comm in [comm for comm, wanted in kinds.items() if wanted]:
            simulations[epoch.policy.name, comm] = epoch.run(comm, study.machines[comm])
    return Comparison(study.scenario, study.lengths, study.about, study.training, study.machines, planned, simulations)


def reordered(
    shuffled: Comparison, policies: Sequence[str], on_minibatch: Callable[[], object] | None = None
) -> ByOrder:
    """Beside ``shuffled`` the same samples in other orders, if there are ``policies`` to group lengths for, each with
    the communication that it is made for; packed for plain FSDP."""
    found: dict[Order, Comparison] = {"shuffled": shuffled}
    if not policies:
        return found
    grouped = replace(shuffled.scenario, group_by_length=True)
    packed = replace(shuffled.scenario, batch_size=None)
    others: dict[Order, tuple[Scenario, Sequence[str | Policy]]]
    others = {"grouped": (grouped, policies), "packed": (packed, [BestFitRows()])}
    for order, (scenario, chosen) in others.items():
        found[order] = compare(replace(shuffled, scenario=scenario), chosen, on_minibatch, also_odc=False)
    return found


def table(found: ByOrder) -> Table:
    """One row per policy and communication, at most 80 columns wide."""
    everything = [simulation for comparison in found.values() for simulation in comparison.simulations.values()]
    best = max(everything, key=lambda simulation: simulation.samples_per_time)
    baseline = found["shuffled"].baseline
    title = f"Bubble rate and throughput; speedup over {baseline.policy} with {COMM_NAMES[baseline.comm]}"
    result = new_table(title, "policy", "with", ">bubble\nrate", ">samples/s", ">speedup", ">planning", ">memory")
    for order, comparison in found.items():
        if order != "shuffled":
            result.add_section()
            result.add_row(_HEADINGS[order], style="italic")
        for simulation in comparison.simulations.values():
            result.add_row(
                *cells(simulation, baseline),
                duration(simulation.planning_s),
                memory_cell(comparison.memory_bytes(simulation), fits=comparison.fits(simulation)),
                style="bold green" if simulation is best else None,
            )
    return result


def cells(simulation: Simulation, baseline: Simulation) -> tuple[str, str, str, str, str]:
    """Policy, communication, bubble rate, samples/s and speedup."""
    return (
        simulation.policy,
        COMM_NAMES[simulation.comm],
        f"{simulation.bubble_rate:.1%}",
        significant(simulation.samples_per_time),
        f"{simulation.speedup(baseline):.2f}x",
    )


def memory_cell(num_bytes: float, *, fits: bool) -> str:
    """Red where it is more than there is."""
    return gigabytes(num_bytes) if fits else f"[red]{gigabytes(num_bytes)}[/red]"


def report(
    found: ByOrder,
    further: Mapping[str, object],
    *,
    as_json: bool,
    plot: Path | None,
    notes: Iterable[str],
    behind: Iterable[str | Table],
) -> None:
    """Print the table, and what it is of; or JSON, with ``further`` entries."""
    recommendation = recommend(found)
    comparison = found["shuffled"]
    scenario, longest = comparison.scenario, int(comparison.lengths.max())
    header = (
        f"{describe(comparison.lengths)}. {scenario.world_size} ranks, {scenario.minibatch_size} samples each per "
        f"minibatch, {comparison.baseline.makespans.size} minibatches planned."
    )
    memory = memory_note(comparison.training, int(scenario.max_tokens or longest))
    costs = f"{comparison.training.about}. Memory per device is an estimate: {memory}."
    show_report(
        {**to_json(found, recommendation), **further},
        [header],
        comparison.about,
        [table(found)],
        costs,
        as_json=as_json,
        plot=plot,
        notes=notes,
        advice=recommendation,
        behind=behind,
    )


def duration(seconds: float) -> str:
    """Of planning, for people."""
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"


def to_json(found: ByOrder, recommendation: str) -> dict[str, object]:
    """Everything in the table, for machines. Times in seconds."""
    comparison = found["shuffled"]
    baseline, scenario = comparison.baseline, comparison.scenario
    return {
        "lengths": comparison.about,
        "world_size": scenario.world_size,
        "minibatch_size": scenario.minibatch_size,
        "max_tokens": scenario.max_tokens,
        "num_minibatches": int(baseline.makespans.size),
        "costs": comparison.training.about,
        "baseline": {"policy": baseline.policy, "comm": baseline.comm},
        "policies": rows(comparison, baseline),
        "orders": {
            order: {"variation_of_lengths": each.variation, "policies": rows(each, baseline)}
            for order, each in found.items()
        },
        "recommendation": recommendation,
    }


def rows(comparison: Comparison, baseline: Simulation) -> list[dict[str, object]]:
    """One for each simulation, as JSON has them."""
    return [_row(comparison, simulation, baseline) for simulation in comparison.simulations.values()]


def _row(comparison: Comparison, simulation: Simulation, baseline: Simulation) -> dict[str, object]:
    return {
        "policy": simulation.policy,
        "comm": simulation.comm,
        "bubble_rate": simulation.bubble_rate,
        "samples_per_s": simulation.samples_per_time,
        "tokens_per_s": simulation.num_tokens / simulation.total,
        "speedup": simulation.speedup(baseline),
        "planning_s_per_minibatch": simulation.planning_s,
        "peak_tokens": simulation.peak_tokens,
        "memory_bytes": comparison.memory_bytes(simulation),
        "fits": comparison.fits(simulation),
    }


def at_minibatch_sizes(
    comparison: Comparison, fsdp: str, odc: str, sizes: Sequence[int]
) -> dict[int, tuple[Simulation, Simulation]]:
    """A policy with FSDP and one with ODC at other minibatch sizes, on the same machines."""
    found = {}
    machines = comparison.machines
    for size in sizes:
        scenario = replace(comparison.scenario, minibatch_size=size, batch_size=None)
        baseline = scenario.plan(fsdp).run("collective", machines["collective"])
        found[size] = baseline, scenario.plan(odc).run("odc", machines["odc"])
    return found


# What to make of it


# A gain below this is within what a cost model can be wrong about.
NOT_WORTH_IT = 0.02
# A difference below this is shown as none.
NOTHING = 0.0005
_FEW_MINIBATCHES = 16


def recommend(found: ByOrder) -> str:
    """What to use and why, in a few sentences: for samples that stay shuffled, then what another order would bring."""
    comparison = found["shuffled"]
    odc, fsdp = comparison.best("odc"), comparison.best("collective")
    if odc is None or fsdp is None:
        chosen = odc or fsdp or comparison.baseline
        text = f"The fastest of these is {COMM_NAMES[chosen.comm]} with {chosen.policy}."
    elif comparison.fits(fsdp) and not comparison.fits(odc):
        chosen, text = fsdp, f"Stay with FSDP and {fsdp.policy}: with ODC {misfit(comparison, odc)}"
    elif odc.speedup(fsdp) - 1 < NOT_WORTH_IT:
        chosen, text = fsdp, _stay(comparison, fsdp, odc)
    else:
        chosen, text = odc, _use_odc(fsdp, odc)
    if odc is not None:
        text += _about_longest(comparison, odc)
    if "grouped" in found:
        text = f"With samples shuffled, {text[0].lower()}{text[1:]}{_about_orders(found, chosen)}"
    if (number := chosen.makespans.size) < _FEW_MINIBATCHES:
        text += f" This is rough: {number} minibatches only; plan more samples."
    return unless_too_large(comparison, chosen, text)


def unless_too_large(comparison: Comparison, chosen: Simulation, text: str) -> str:
    """A recommendation, behind what is to be done where that does not fit."""
    if comparison.fits(chosen):
        return text
    return f"Does not fit: {misfit(comparison, chosen)} Memory aside: {text}"


def _use_odc(fsdp: Simulation, odc: Simulation) -> str:
    return (
        f"Use ODC with {odc.policy}: {odc.speedup(fsdp):.2f}x speedup over the best FSDP plan ({fsdp.policy}), "
        f"bubble rate {fsdp.bubble_rate:.1%} -> {odc.bubble_rate:.1%}."
    )


def _stay(comparison: Comparison, fsdp: Simulation, odc: Simulation) -> str:
    gain = odc.speedup(fsdp) - 1
    text = f"Stay with FSDP and {fsdp.policy}: ranks wait for {fsdp.bubble_rate:.1%} of the time, and ODC would "
    share = _share_of_transfers(comparison, odc) if gain <= -NOTHING else 0.0
    because = f": its transfers take {share:.1%} of its time" if share >= NOTHING else ""
    return f"{text}{what_it_brings(gain)}{because}."


def what_it_brings(gain: float) -> str:
    """A gain in throughput, behind "would"."""
    if gain >= NOTHING:
        return f"bring {gain:.1%} more samples/s"
    return "be no faster" if gain > -NOTHING else f"be {-gain:.1%} slower"


def _about_orders(found: ByOrder, chosen: Simulation) -> str:
    """What other orders would bring, and their price."""
    grouped, packed = found["grouped"], found["packed"].best("collective")
    assert packed is not None
    best = [each for comm in COMM_NAMES if (each := grouped.best(comm)) is not None]
    text = f" Steps of similar lengths (group_by_length) would bring less than {NOT_WORTH_IT:.0%} more."
    if max(each.speedup(chosen) for each in best) >= 1 + NOT_WORTH_IT:
        speedups = [f"{COMM_NAMES[each.comm]} with {each.policy} {each.speedup(chosen):.2f}x" for each in best]
        text = (
            f" If your training allows steps of similar lengths (group_by_length; they vary by "
            f"{grouped.variation:.0%} of their mean, not {found['shuffled'].variation:.0%}): {', '.join(speedups)} as "
            "fast as this plan."
        )
    num_samples = packed.num_samples / packed.makespans.size
    return f"{text} FSDP with TRL's packing ({num_samples:.0f} samples a step): {packed.speedup(chosen):.2f}x."


def _share_of_transfers(comparison: Comparison, simulation: Simulation) -> float:
    """Part of the time that would not pass if transfers took none."""
    free = replace(comparison.machines[simulation.comm], gather=0.0, scatter=0.0)
    return 1 - comparison.planned[simulation.policy].run(simulation.comm, free).total / simulation.total


def misfit(comparison: Comparison, simulation: Simulation) -> str:
    """What needs how much memory, and what to do."""
    training, longest, comm = comparison.training, int(comparison.lengths.max()), simulation.comm
    memory = training.device.memory_bytes
    limit = training.most_tokens(comm)
    tokens = simulation.peak_tokens if limit else 1
    needed = training.memory_bytes(tokens, comm)
    if limit:
        what = f"the largest microbatch, {tokens:,} tokens, needs {gigabytes(needed)}"
    elif training.state_bytes(comm) > memory:
        what = f"the model's sharded state alone needs {gigabytes(training.state_bytes(comm))}"
    else:
        what = f"even a microbatch of one token needs {gigabytes(needed)}"
    ways = []
    if needed - training.state_bytes(comm) + training.state.unsharded_bytes < memory:
        ways.append("more ranks")
    if not training.recompute:
        ways.append("--set recompute=yes")
    if limit and limit < longest and training.group is None:
        ways.append("odc plan context-parallel")
    if limit:
        ways.append(f"--max-tokens {limit // training.group_size}{' --set truncate=yes' if limit < longest else ''}")
    return f"{what} of {gigabytes(memory)}. Use {', or '.join([*ways, 'a device with more memory'])}."


def _about_longest(comparison: Comparison, odc: Simulation) -> str:
    """A sentence about long samples, if they are what ranks wait for."""
    fixed = share_fixed_by_longest(comparison.planned[odc.policy])
    if odc.bubble_rate <= 0.05 or fixed < 0.5:
        return ""
    size = size_that_hides_longest(comparison)
    way_out = f"with --minibatch-size {size}, in fewer than half" if size else "a larger minibatch would hide them"
    return (
        f" The longest samples hold ODC back: one alone takes longer than a rank's fair share in {fixed:.0%} of "
        f"the minibatches; {way_out}. odc plan context-parallel divides them."
    )


def share_fixed_by_longest(epoch: PlannedEpoch) -> float:
    """Part of the minibatches in which one sample alone costs more than the mean rank."""
    plans = [minibatch.plan for minibatch in epoch.minibatches]
    return sum(_is_fixed(epoch.scenario, plan.lengths, plan.costs) for plan in plans) / len(plans)


def size_that_hides_longest(comparison: Comparison) -> int | None:
    """The smallest of a few larger minibatch sizes at which samples longer than a fair share are rare.

    None: there is none up to 64, or as far as the samples go. Nothing is planned: bounds suffice.
    """
    scenario, order = comparison.scenario, shuffled(comparison.lengths.size, comparison.scenario.seed)
    for size in larger_sizes(scenario.minibatch_size, scenario.world_size, order.size):
        per_minibatch = size * scenario.world_size
        num_minibatches = min(_FEW_MINIBATCHES, order.size // per_minibatch)
        lengths = comparison.lengths[order[: num_minibatches * per_minibatch]].reshape(num_minibatches, -1)
        if sum(_is_fixed(scenario, row, evaluate(scenario.cost, row)) for row in lengths) < num_minibatches / 2:
            return size
    return None


def _is_fixed(scenario: Scenario, lengths: IntArray, costs: FloatArray) -> bool:
    """Whether one sample alone takes longer than an even division of all work over the ranks."""
    speeds = np.ones(scenario.world_size) if scenario.speeds is None else np.asarray(scenario.speeds)
    least = max(scenario.world_size, -(-int(lengths.sum()) // (scenario.max_tokens or int(lengths.max()))))
    even = (costs.sum() + least * scenario.microbatch_cost) / speeds.sum()
    alone = (costs.max() + scenario.microbatch_cost) / speeds.max()
    return bool(alone > even * (1 + 1e-9))


def memory_note(training: Training, max_tokens: int) -> str:
    """How the limit on tokens compares with what would fit."""
    limit = training.most_tokens()
    memory = gigabytes(training.device.memory_bytes)
    if limit == 0:
        return f"with ODC the sharded state needs {gigabytes(training.state_bytes())}, which leaves nothing of {memory}"
    verdict = "fits" if max_tokens <= limit else "does not fit"
    own = gigabytes(training.state.on_demand_bytes)
    more = gigabytes(training.state.whole_bytes - training.state.unsharded_bytes)
    return (
        f"{memory} would hold a microbatch of {limit:,} tokens beside {own} of ODC's own, so --max-tokens {max_tokens} "
        f"{verdict}; to communicate once a step, FSDP would take {more} more"
    )
