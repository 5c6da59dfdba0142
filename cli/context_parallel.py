"""``odc plan context-parallel`` compares groups of devices by their size. A group computes the same microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from odc.balance import Simulation
from odc.balance.costs.devices import DEVICES, LINKS
from odc.cli.comparison import (
    COMM_NAMES,
    NOT_WORTH_IT,
    Comparison,
    Study,
    cells,
    compare,
    memory_cell,
    rows,
    unless_too_large,
    what_it_brings,
)
from odc.cli.lengths import describe
from odc.cli.output import new_table, show_report, significant
from odc.errors import shown

POLICIES = ("lb-micro", "lb-micro-global", "lb-mini")
"""Compared unless others are named: for each of several sizes, the rows of :data:`~odc.cli.plan.DEFAULT_POLICIES` would
be many."""

BySize = Mapping[int, Comparison]
"""Comparisons of the same minibatches, by the number of devices of a group, rising; its plans have groups as ranks."""


def parse_groups(sizes: str, link: str, world_size: int, device: str) -> dict[int, float]:
    """Size of the groups -> bytes per second of the link that they cross, rising.

    Raises:
        ValueError: a size does not divide the number of devices, a link is not known, or there are not as many.
    """
    try:
        numbers = [int(word) for word in sizes.split(",")]
    except ValueError:
        numbers = [0]
    if any(number < 1 or world_size % number for number in numbers):
        divisors = [number for number in range(1, min(world_size, 64) + 1) if world_size % number == 0]
        raise ValueError(
            f"--sizes {shown(sizes)}: expected sizes of groups, separated by commas, that divide "
            f"--world-size {world_size}: {', '.join(map(str, divisors))}"
        )
    links = [_parse_link(word.strip(), device) for word in link.split(",")]
    if len(links) not in (1, len(numbers)):
        raise ValueError(f"--link {shown(link)}: expected one for all groups, or one for each of the {len(numbers)}")
    return dict(sorted(zip(numbers, links * len(numbers) if len(links) == 1 else links, strict=True)))


def _parse_link(word: str, device: str) -> float:
    known = DEVICES[device].links
    try:
        found = known[word] if word in known else 1e9 * float(word)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise ValueError(f"--link {shown(word)} is not known: expected {', '.join(LINKS)}, or a number of GB/s")
    return found


def compare_sizes(
    study: Study,
    policies: Sequence[str],
    links: Mapping[int, float],
    on_minibatch: Callable[[], object] | None = None,
) -> BySize:
    """Plan and simulate every policy for every size of groups.

    ``study`` is that of devices by themselves. Where its microbatches hold so many tokens, those of a group hold as
    many times that as it has devices, or as many as fit into memory; at least the longest sample.
    """
    found = {}
    longest = int(study.lengths.max())
    most = int(study.scenario.max_tokens or longest)
    for size, bytes_per_s in links.items():
        split = study.training.on_groups(size, bytes_per_s)
        limit = max(longest, min(size * most, split.most_tokens())) if size > 1 else most
        groups = study.scenario.on_groups(size, split.cost, limit)
        found[size] = compare(replace(study, scenario=groups, training=split), policies, on_minibatch)
    return found


def baseline_of(found: BySize) -> Simulation:
    """What speedups refer to: that of the smallest groups."""
    return next(iter(found.values())).baseline


def table(found: BySize) -> Table:
    """One row per size, policy and communication, at most 80 columns wide."""
    baseline, smallest = baseline_of(found), next(iter(found))
    best = max(_candidates(found), key=lambda each: each.rate)
    title = (
        "Bubble rate and throughput by devices of a group; speedup over "
        f"{baseline.policy} with {COMM_NAMES[baseline.comm]}{_on_groups(smallest)}"
    )
    result = new_table(title, ">group", "policy", "with", ">bubble\nrate", ">samples/s", ">speedup", ">memory")
    for size, comparison in found.items():
        for simulation in comparison.simulations.values():
            result.add_row(
                str(size),
                *cells(simulation, baseline),
                memory_cell(comparison.memory_bytes(simulation), fits=comparison.fits(simulation)),
                style="bold green" if simulation is best.simulation else None,
            )
        result.add_section()
    return result


def table_of_groups(found: BySize) -> Table:
    """What a group of each size can hold, and what it exchanges."""
    result = new_table(
        "What a group can hold, and what it exchanges",
        ">group",
        ">largest\nmicrobatch",
        ">longest sample\nthat would fit",
        ">link",
        ">part of the time\nthat is exchange",
    )
    for size, comparison in found.items():
        link = comparison.training.group
        result.add_row(
            str(size),
            f"{comparison.scenario.max_tokens:,}",
            f"{comparison.training.most_tokens():,}",
            f"{significant(link.bytes_per_s / 1e9)} GB/s" if link and size > 1 else "",
            f"{exchange_share(comparison):.1%}" if size > 1 else "",
        )
    return result


def exchange_share(comparison: Comparison) -> float:
    """Part of all devices' time that is exchange of keys and values, in the fastest plan of a size."""
    best = max(comparison.simulations.values(), key=lambda simulation: simulation.samples_per_time)
    return comparison.training.exchange_s * best.num_tokens / (best.world_size * best.total)


def to_json(found: BySize, recommendation: str) -> dict[str, object]:
    """Everything in the tables, for machines. Times in seconds."""
    smallest, first = next(iter(found.items()))
    baseline = baseline_of(found)
    return {
        "lengths": first.about,
        "world_size": smallest * first.scenario.world_size,
        "minibatch_size": first.scenario.minibatch_size // smallest,
        "num_minibatches": int(baseline.makespans.size),
        "costs": first.training.about,
        "baseline": {"context_parallel": smallest, "policy": baseline.policy, "comm": baseline.comm},
        "groups": [
            {
                "context_parallel": size,
                "num_groups": comparison.scenario.world_size,
                "max_tokens": comparison.scenario.max_tokens,
                "longest_sample_that_fits": comparison.training.most_tokens(),
                "link_bytes_per_s": comparison.training.group.bytes_per_s if comparison.training.group else None,
                "exchange_s_per_token": comparison.training.exchange_s,
                "policies": rows(comparison, baseline),
            }
            for size, comparison in found.items()
        ],
        "recommendation": recommendation,
    }


def report_groups(found: BySize, *, as_json: bool, plot: Path | None) -> None:
    """Print the tables and the recommendation, or JSON; draw the picture."""
    recommendation = recommend(found)
    if plot is not None:
        from odc.cli.plots import plot_groups  # matplotlib takes a while to import

        plot_groups(plot, found)
    smallest, first = next(iter(found.items()))
    header = (
        f"{describe(first.lengths)}. {smallest * first.scenario.world_size} devices, "
        f"{first.scenario.minibatch_size // smallest} samples per device and minibatch, "
        f"{first.baseline.makespans.size} minibatches planned."
    )
    costs = (
        f"{first.training.about}. Attention is divided evenly; keys and values are exchanged by an all-gather that "
        "nothing hides. Memory per device is an estimate."
    )
    tables = [table(found), table_of_groups(found)]
    document = to_json(found, recommendation)
    show_report(document, [header], first.about, tables, costs, as_json=as_json, plot=plot, advice=recommendation)


# What to make of it


@dataclass(frozen=True, eq=False)
class _Candidate:
    size: int
    comparison: Comparison
    simulation: Simulation

    @property
    def rate(self) -> float:
        return self.simulation.samples_per_time

    @property
    def name(self) -> str:
        return f"{self.simulation.policy}{_on_groups(self.size)}"


def _on_groups(size: int) -> str:
    return f" on groups of {size}" if size > 1 else ""


def _candidates(found: BySize) -> list[_Candidate]:
    return [
        _Candidate(size, comparison, simulation)
        for size, comparison in found.items()
        for simulation in comparison.simulations.values()
    ]


def _fastest(candidates: Iterable[_Candidate]) -> _Candidate | None:
    return max(candidates, key=lambda each: each.rate, default=None)


def _simplest(candidates: Sequence[_Candidate], best: float) -> _Candidate | None:
    """Of those that are nearly as fast as that: of the smallest groups the fastest."""
    near = [each for each in candidates if each.rate * (1 + NOT_WORTH_IT) >= best]
    smallest = min((each.size for each in near), default=0)
    return _fastest(each for each in near if each.size == smallest)


def recommend(found: BySize) -> str:
    """What to use and why, in a few sentences: FSDP before ODC and small groups before large ones, where the gain is
    nothing to speak of."""
    everything = _candidates(found)
    fitting = [each for each in everything if each.comparison.fits(each.simulation)] or everything
    kinds = {comm: [each for each in fitting if each.simulation.comm == comm] for comm in COMM_NAMES}
    best = max(each.rate for each in fitting)
    near = {comm: _simplest(mine, best) for comm, mine in kinds.items()}
    own_best = {comm: _simplest(mine, max((each.rate for each in mine), default=0.0)) for comm, mine in kinds.items()}
    if (fsdp := near["collective"]) is not None:
        chosen, text = fsdp, _stay(fsdp, own_best["odc"])
    else:
        odc = near["odc"]
        assert odc is not None
        chosen, text = odc, _use_odc(odc, own_best["collective"])
    text += _about_groups(chosen, found, fitting)
    machine = chosen.comparison.machines[chosen.simulation.comm]
    if chosen.simulation.comm == "collective" and not machine.noise and chosen.comparison.scenario.speeds is None:
        text += (
            " Costs are taken as exact and devices as equal: noise= and speeds= (--set) show what else ODC evens out."
        )
    return unless_too_large(chosen.comparison, chosen.simulation, text)


def _stay(fsdp: _Candidate, odc: _Candidate | None) -> str:
    text = f"Stay with FSDP and {fsdp.name}: ranks wait for {fsdp.simulation.bubble_rate:.1%} of the time"
    return f"{text}, and ODC with {odc.name} would {_brings(odc, fsdp)}." if odc is not None else f"{text}."


def _use_odc(odc: _Candidate, fsdp: _Candidate | None) -> str:
    if fsdp is None:
        return f"The fastest of these is ODC with {odc.name}."
    text = f"Use ODC with {odc.name}: {odc.rate / fsdp.rate:.2f}x speedup over the best FSDP plan ({fsdp.name})"
    if odc.size == fsdp.size:
        return f"{text}, bubble rate {fsdp.simulation.bubble_rate:.1%} -> {odc.simulation.bubble_rate:.1%}."
    # Groups of another size wait less, but exchange more: their rates say little side by side.
    return f"{text}; ranks wait for {odc.simulation.bubble_rate:.1%} of the time."


def _about_groups(chosen: _Candidate, found: BySize, fitting: Sequence[_Candidate]) -> str:
    """A sentence about what groups bring, or would."""
    if chosen.size == 1:
        groups = _fastest(each for each in fitting if each.size > 1)
        return f" Groups of {groups.size} would {_brings(groups, chosen)}." if groups is not None else ""
    alone = _fastest(each for each in fitting if each.size == 1)
    if alone is not None:
        which = f"{COMM_NAMES[alone.simulation.comm]} with {alone.name}"
        return f" Groups bring {chosen.rate / alone.rate:.2f}x over the best without them ({which})."
    return " Without groups it does not fit into memory." if 1 in found else ""


def _brings(one: _Candidate, other: _Candidate) -> str:
    return what_it_brings(one.rate / other.rate - 1)
