"""Prints a comparison of phases as a table or JSON, and recommends what to balance, with which communication. A
sentence says what holds that back.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.table import Table

from odc.balance.plan import Comm
from odc.cli.comparison import COMM_NAMES, NOT_WORTH_IT, duration, what_it_brings
from odc.cli.lengths import describe
from odc.cli.modalities import LANGUAGE
from odc.cli.output import new_table, progress, show_report, significant
from odc.cli.phases import BALANCES_ENCODERS, Balanced, Moved, Outcome, PhaseComparison, Pieces

# What to make of it


# What balancing a phase must gain to be worth moving its items.
_LITTLE = 0.01
# Waiting and padding below this are not what holds anything back.
_WORTH_A_WORD = 0.05
_WHAT: dict[Balanced, str] = {
    "none": "nothing",
    "language": "the language model only",
    "whole": "whole samples over all phases",
    "all": "all phases",
    "joint": "the sum of all phases",
}

# What is shared out so that the sum of all phases is even.
_PIECES: dict[Balanced, tuple[str, str]] = {
    "whole": ("whole sample", "whole samples"),
    "joint": ("item or sample", "items and samples"),
}


def recommend_phases(found: PhaseComparison) -> str:
    """What to balance and why, in a few sentences."""
    fsdp, odc = _simplest(found, "collective"), _simplest(found, "odc")
    chosen = odc if odc.speedup(fsdp) - 1 >= NOT_WORTH_IT else fsdp
    gain = chosen.speedup(found.baseline) - 1
    if gain < NOT_WORTH_IT:
        best = max(found.outcomes, key=lambda outcome: outcome.samples_per_s)
        would = what_it_brings(best.speedup(found.baseline) - 1)
        what = _WHAT[best.balanced if best.balanced != "none" else "all"]
        text = (
            f"Leave minibatches as they are: ranks wait for {found.baseline.bubble_rate:.1%} of the time, and "
            f"balancing {what} with {COMM_NAMES[best.comm]} would {would}."
        )
        return text + _what_is_left(found, best)
    choice = f"Balance {_WHAT[chosen.balanced]}, with" if chosen.balanced != "none" else "Use"
    text = (
        f"{choice} {COMM_NAMES[chosen.comm]}: {1 + gain:.2f}x speedup over none with FSDP, bubble rate "
        f"{found.baseline.bubble_rate:.1%} -> {chosen.bubble_rate:.1%}"
    )
    if chosen.balanced not in ("none", "language"):
        part = found.of("language", chosen.comm).speedup(found.baseline)
        text += f" (the language model only: {part:.2f}x)"
    return f"{text}.{_about_small_encoders(found, chosen)}{_about_other(odc, chosen)}{_what_is_left(found, chosen)}"


def _simplest(found: PhaseComparison, comm: Comm) -> Outcome:
    """The choice that moves least, of those that are nearly as fast as the fastest with this communication."""
    candidates = [outcome for outcome in found.outcomes if outcome.comm == comm]
    best = max(candidates, key=lambda outcome: outcome.samples_per_s)
    fast = [outcome for outcome in candidates if best.speedup(outcome) - 1 < _LITTLE]
    return min(fast, key=lambda outcome: sum(outcome.moved.values()))  # of equals the first


def _about_other(odc: Outcome, chosen: Outcome) -> str:
    """What ODC would add where FSDP is recommended."""
    if chosen is odc:
        return ""
    return f" ODC would {what_it_brings(odc.speedup(chosen) - 1)}."


def _about_small_encoders(found: PhaseComparison, chosen: Outcome) -> str:
    """Encoders that need no balancing."""
    if chosen.balanced == "none":
        return ""
    apart, balanced = found.of("language", chosen.comm), found.of("all", chosen.comm)
    gains = (np.array(apart.spans) - np.array(balanced.spans)).sum(axis=0)[:-1] / apart.total
    shares = (apart.work / apart.work.sum())[:-1]
    small = [
        f"{name} ({share:.1%} of the work)"
        for name, gain, share in zip(found.phases, gains.tolist(), shares.tolist(), strict=False)
        if gain < _LITTLE
    ]
    if chosen.balanced != "language" and len(small) == len(gains):
        return ""  # they gain by what they add up to
    return f" Balancing {' and '.join(small)} gains under 1%." if small else ""


def _what_is_left(found: PhaseComparison, outcome: Outcome) -> str:
    """A sentence about what is still waited for, and one about padding, if it is much."""
    text = ""
    if outcome.bubble_rate > _WORTH_A_WORD and outcome.waiting.any():
        text += f" {_what_is_awaited(found, outcome)}"
    padding = outcome.padding / (found.num_ranks * outcome.total)
    if padding.max() > _WORTH_A_WORD:
        worst = int(padding.argmax())
        text += f" Padding of {found.phases[worst]} takes {padding[worst]:.0%} of the time."
    return text


def _what_is_awaited(found: PhaseComparison, outcome: Outcome) -> str:
    worst = int(outcome.waiting.argmax())
    name = found.phases[worst]
    what = "the language model" if name == LANGUAGE else name
    pieces = Pieces(found, outcome.balanced, worst)
    held = pieces.held_by_one(found.minibatch_size)
    if held >= 0.5:
        size = pieces.size_that_hides_one()
        way_out = f"with --minibatch-size {size}, in fewer than half" if size else "a larger minibatch would hide it"
        unit, where = _PIECES.get(outcome.balanced, ("sample" if name == LANGUAGE else "item", what))
        share = "all phases" if outcome.balanced in _PIECES else "that phase"
        return (
            f"What holds it back is {where}: one {unit} alone takes longer than a rank's fair share of {share} in "
            f"{held:.0%} of the minibatches; {way_out}."
        )
    own = np.array([loads.sum(axis=0).max() for loads in outcome.loads]).sum()
    mean = float(outcome.work.sum()) / found.num_ranks
    if outcome.comm == "odc" and outcome.total - own > own - mean:
        return "Most of the waiting that is left is for what other ranks' encoders make."
    if outcome.balanced in _PIECES:  # which leave each phase uneven, and that is not what is waited for
        stay = ", whose items stay with them," if outcome.balanced == "whole" else ""
        return (
            f"Most of the waiting that is left is what {_PIECES[outcome.balanced][1]}{stay} do not even out; a larger "
            "minibatch has more of them."
        )
    stays = name != LANGUAGE and outcome.balanced not in BALANCES_ENCODERS
    return f"Most of the waiting that is left is in {what}{', whose items stay with their samples' if stays else ''}."


# How it is printed


def report_phases(found: PhaseComparison, *, as_json: bool, plot: Path | None) -> None:
    """Print a comparison, and save its picture."""
    recommendation = recommend_phases(found)
    if plot is not None:
        from odc.cli.plots import plot_phases  # matplotlib takes a while to import

        with progress("drawing"):
            plot_phases(plot, found)
    header = (
        f"{describe(found.dataset.tokens)}. {found.num_ranks} ranks, {found.minibatch_size} samples each per "
        f"minibatch, {found.num_minibatches} minibatches planned."
    )
    costs = "; ".join((found.training.about, *(f"{each.name}: {each.about}" for each in found.modalities)))
    item_bytes = ", ".join(f"{each.name} {each.token_bytes:g} bytes a token" for each in found.modalities)
    costs += (
        f". Moved, by all ranks per minibatch: items ({item_bytes}), what encoders make of them (bf16) and its "
        "gradients, text. Moving takes no time here."
    )
    show_report(
        phases_to_json(found, recommendation),
        [header, *describe_items(found)],
        found.dataset.about,
        [phase_table(found)],
        costs,
        as_json=as_json,
        plot=plot,
        advice=recommendation,
    )


def phase_table(found: PhaseComparison) -> Table:
    """One row per choice and communication, at most 80 columns wide."""
    best = max(found.outcomes, key=lambda outcome: outcome.samples_per_s)
    title = "Bubble rate and throughput; speedup over none with FSDP"
    numbers = (">bubble\nrate", ">samples/s", ">speedup", ">planning", ">MB\nmoved")
    nodes = (">between\nnodes",) if found.ranks_per_node else ()
    result = new_table(title, "balanced", "with", *numbers, *nodes)
    for outcome in found.outcomes:
        moved = [outcome.moved, *([outcome.between_nodes] if nodes else [])]
        result.add_row(
            outcome.balanced,
            COMM_NAMES[outcome.comm],
            f"{outcome.bubble_rate:.1%}",
            significant(outcome.samples_per_s),
            f"{outcome.speedup(found.baseline):.2f}x",
            duration(outcome.planning_s),
            *(significant(sum(each.values()) / 1e6 / found.num_minibatches) for each in moved),
            style="bold green" if outcome is best else None,
        )
    return result


def describe_items(found: PhaseComparison) -> list[str]:
    """A line per modality: how many items, how long, and what part of the work."""
    work = found.of("none", "collective").work
    lines = []
    for number, (name, items) in enumerate(found.dataset.items.items()):
        median, longest = np.percentile(items.encoder, [50, 100]).astype(int)
        rows = int(items.output.sum()) / int(found.dataset.tokens.sum())
        lines.append(
            f"{name}: {items.number:,} items, encoder length median {median:,}, longest {longest:,}; {rows:.0%} of the "
            f"sequences, {work[number] / work.sum():.1%} of the work"
        )
    return lines


def phases_to_json(found: PhaseComparison, recommendation: str) -> dict[str, object]:
    """Everything in the table, for machines. Times in seconds, amounts per minibatch."""
    return {
        "lengths": found.dataset.about,
        "world_size": found.num_ranks,
        "minibatch_size": found.minibatch_size,
        "max_tokens": found.max_tokens,
        "ranks_per_node": found.ranks_per_node,
        "num_minibatches": found.num_minibatches,
        "costs": {LANGUAGE: found.training.about, **{each.name: each.about for each in found.modalities}},
        "num_items": {name: items.number for name, items in found.dataset.items.items()},
        "baseline": {"balanced": found.baseline.balanced, "comm": found.baseline.comm},
        "choices": [_row(found, outcome) for outcome in found.outcomes],
        "recommendation": recommendation,
    }


def _row(found: PhaseComparison, outcome: Outcome) -> dict[str, object]:
    total = outcome.total * found.num_ranks
    phases = {
        name: {
            "share_of_time": float(outcome.work[number]) / total,
            "waiting_alone": float(outcome.waiting[number]) / total,
            "padding": float(outcome.padding[number]) / total,
        }
        for number, name in enumerate(found.phases)
    }
    return {
        "balanced": outcome.balanced,
        "comm": outcome.comm,
        "policy": outcome.policy,
        "bubble_rate": outcome.bubble_rate,
        "samples_per_s": outcome.samples_per_s,
        "tokens_per_s": int(found.dataset.tokens[found.order].sum()) / outcome.total,
        "speedup": outcome.speedup(found.baseline),
        "planning_s_per_minibatch": outcome.planning_s,
        "moved": _per_minibatch(outcome.moved, found.num_minibatches),
        **(
            {"moved_between_nodes": _per_minibatch(outcome.between_nodes, found.num_minibatches)}
            if found.ranks_per_node
            else {}
        ),
        "phases": phases,
    }


def _per_minibatch(moved: Moved, num_minibatches: int) -> dict[str, float]:
    parts = {f"{what}_bytes": num_bytes / num_minibatches for what, num_bytes in moved.items()}
    return {"bytes": sum(moved.values()) / num_minibatches, **parts}
