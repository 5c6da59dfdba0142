"""How a comparison of phases is printed: a table, a few sentences, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import typer
from rich.markup import escape
from rich.table import Table

from odc.cli.comparison import COMM_NAMES, duration
from odc.cli.modalities import LANGUAGE
from odc.cli.output import output, progress_bar, significant
from odc.cli.phase_advice import recommend_phases
from odc.cli.phases import Moved, Outcome, PhaseComparison
from odc.cli.samples import describe


def report_phases(found: PhaseComparison, *, as_json: bool, plot: Path | None) -> None:
    """Print a comparison, and save its picture."""
    recommendation = recommend_phases(found)
    if plot is not None:
        from odc.cli.phase_plots import plot_phases  # matplotlib takes a while to import

        with progress_bar() as progress:
            progress.add_task("drawing", total=None)
            plot_phases(plot, found)
    if as_json:
        typer.echo(json.dumps(phases_to_json(found, recommendation)))
        return
    console = output()
    console.print(
        f"{describe(found.dataset.tokens)}. {found.num_ranks} ranks, {found.minibatch_size} samples each per "
        f"minibatch, {found.num_minibatches} minibatches planned.",
        highlight=False,
    )
    for line in describe_items(found):
        console.print(escape(line), highlight=False)
    console.print(f"Lengths: {escape(found.dataset.about)}.", style="dim", highlight=False)
    console.print(phase_table(found))
    costs = "; ".join((found.training.about, *(f"{each.name}: {each.about}" for each in found.modalities)))
    item_bytes = ", ".join(f"{each.name} {each.token_bytes:g} bytes a token" for each in found.modalities)
    console.print(
        f"Costs: {escape(costs)}. Moved, by all ranks per minibatch: items ({escape(item_bytes)}), what encoders make "
        "of them (bf16) and its gradients, text. Moving takes no time here.",
        style="dim",
        highlight=False,
    )
    console.print(f"\n[bold]{escape(recommendation)}[/bold]", highlight=False)
    if plot is not None:
        console.print(f"Picture: {escape(str(plot))}", highlight=False)


def phase_table(found: PhaseComparison) -> Table:
    """One row per choice and communication, at most 80 columns wide."""
    best = max(found.outcomes, key=lambda outcome: outcome.samples_per_s)
    result = Table(title="Waiting and throughput; speedup over none with FSDP", title_justify="left", expand=False)
    result.add_column("balanced", no_wrap=True)
    result.add_column("with", no_wrap=True)
    nodes = ("between\nnodes",) if found.ranks_per_node else ()
    for name in ("bubble", "samples/s", "speedup", "planning", "MB\nmoved", *nodes):
        result.add_column(name, justify="right", no_wrap=True)
    for outcome in found.outcomes:
        moved = [outcome.moved, *([outcome.between_nodes] if nodes else [])]
        result.add_row(
            outcome.balanced,
            COMM_NAMES[outcome.comm],
            f"{outcome.bubble_rate:.1%}",
            significant(outcome.samples_per_s),
            f"{outcome.speedup(found.baseline):.2f}x",
            duration(outcome.planning_s),
            *(significant(each.total / 1e6 / found.num_minibatches) for each in moved),
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
    return {
        "bytes": moved.total / num_minibatches,
        "item_bytes": moved.items / num_minibatches,
        "output_bytes": moved.outputs / num_minibatches,
        "text_bytes": moved.text / num_minibatches,
    }
