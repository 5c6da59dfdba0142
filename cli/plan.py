"""``odc plan``: what each balancing policy would do to a dataset."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer
from rich.markup import escape

from odc.balance import Machine, Scenario, get_policy, policy_names
from odc.balance.costs.devices import DEVICES
from odc.balance.plan import Comm
from odc.balance.rearrange.from_home import FromHome
from odc.cli import hosts as over_hosts
from odc.cli import options
from odc.cli.comparison import ByOrder, compare, memory_note, recommend, reordered, table, to_json
from odc.cli.context_parallel import POLICIES, compare_sizes, parse_groups, report_groups
from odc.cli.costs import Training, make_training
from odc.cli.lengths import check_enough, cut, describe, read_lengths, some_of
from odc.cli.modalities import parse_modalities, read_dataset
from odc.cli.output import check_finite, check_plot, errors_in_one_line, output, progress_bar
from odc.cli.phase_report import report_phases
from odc.cli.phases import compare_phases
from odc.cli.records import TokenCounter
from odc.cli.rollouts import LINK, Moved, describe_moved, moved

DEFAULT_POLICIES = ("none", "local-sort", "lb-micro", "lb-micro-global", "lb-mini")
_GROUPED_POLICIES = ("none", "lb-micro-global", "lb-mini")
"""Compared for grouped lengths unless others are named: plain FSDP, and the best of each kind of communication."""
_TEXT_ONLY = (
    *("truncate", "policy", "batch_size", "speeds", "noise", "gather_ms", "scatter_ms", "odc_slower", "overlap"),
    *("samples", "panel", "context_parallel", "link", "rollouts", "reorder", "hosts", "between"),
)
"""Options that plans of several modalities do not look at."""


def plan(
    context: typer.Context,
    lengths: options.Lengths,
    world_size: Annotated[int, typer.Option("--world-size", min=1, help="Number of ranks, one device each.")] = 8,
    minibatch_size: Annotated[int, typer.Option("--minibatch-size", min=1, help="Samples per rank and step.")] = 4,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=1, help="Maximum tokens per microbatch on a device; default: longest sample."),
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut samples longer than --max-tokens.")] = False,
    model: options.Model = "qwen2.5-7b",
    device: options.DeviceName = "h100",
    mfu: options.Mfu = 0.4,
    recompute: options.Recompute = True,
    timings: options.Timings = None,
    microbatch_cost: options.MicrobatchCost = None,
    policy: options.Policies = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="Samples per rank that verl-native balances together.")
    ] = None,
    speeds: Annotated[
        str | None, typer.Option("--speeds", help="Comma-separated speed of each rank, e.g. 1,1,1,0.8.")
    ] = None,
    noise: options.Noise = 0.0,
    gather_ms: options.GatherMs = None,
    scatter_ms: options.ScatterMs = None,
    odc_slower: options.OdcSlower = 1.0,
    overlap: options.Overlap = 1.0,
    hosts: options.Hosts = 1,
    between: options.Between = None,
    minibatches: Annotated[
        int, typer.Option("--minibatches", min=1, help="Maximum number of minibatches to plan.")
    ] = 200,
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="Samples to draw from a length law. Files are read completely.")
    ] = 10_000,
    field: options.Field = None,
    tokenizer: options.Tokenizer = None,
    chars_per_token: options.CharsPerToken = 4.0,
    reorder: Annotated[
        bool,
        typer.Option(
            "--reorder/--no-reorder",
            help="Also compare orders that change which samples share a step: similar lengths grouped "
            "(group_by_length of transformers), and TRL's packing (bfd).",
        ),
    ] = True,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    plot: options.Plot = None,
    panel: Annotated[
        Literal["all", "minibatch"],
        typer.Option("--panel", help="All pictures, or only what ranks do in one minibatch."),
    ] = "all",
    modality: options.Modalities = None,
    ranks_per_node: options.RanksPerNode = None,
    context_parallel: options.ContextParallel = None,
    link: options.Link = "nvlink",
    rollouts: options.Rollouts = False,
) -> None:
    """Show what each balancing policy would do to a dataset: bubble rate, samples/s, planning time, memory.

    Ranks wait for each other at every layer with FSDP's collectives, once per optimizer step with ODC. Nothing
    is trained and no GPU is needed: plans are simulated on a cost model of the transformer.

    Samples of several modalities, with one --modality per encoder: {"length": 812, "vision": [[1024, 256], [576, 144]]}
    has the length of the whole sequence, and of each item its length in the encoder and the rows that come out of it.
    Compared is what balancing nothing, the language model, whole samples, all phases, or their sum would do.

    --context-parallel 1,2,4,8 compares groups of devices, each of which computes its microbatches together: what the
    longest samples hold up, groups divide. All sizes are given the same samples in each step.

    --hosts 2 --between 100Gb also shows what crosses between hosts, how much of that compute hides, and how to shard.

    Examples:

        odc plan lengths.txt --world-size 16 --hosts 2 --between 100Gb

        odc plan data.jsonl --field text --plot plan.png

        odc plan longalign --context-parallel 1,2,4,8 --link infiniband

        odc plan aime --rollouts --ranks-per-node 8

        odc plan mix.jsonl --modality audio:layers=6,hidden=512,ffn=2048
    """
    with errors_in_one_line():
        check_plot(plot)
        if panel != "all" and plot is None:
            raise ValueError(f"--panel {panel} is drawn into a file: expected --plot too, e.g. --plot {panel}.png")
        check_finite(mfu=mfu, noise=noise, gather_ms=gather_ms or 0, scatter_ms=scatter_ms or 0, odc_slower=odc_slower)
        check_finite(overlap=overlap, chars_per_token=chars_per_token, microbatch_cost=microbatch_cost or 0.0)
        check_options(
            context, with_modalities=bool(modality), with_groups=context_parallel is not None, with_rollouts=rollouts
        )
        network = over_hosts.parse_network(hosts, between, world_size, device)
        training = make_training(
            model,
            device,
            mfu,
            world_size,
            recompute=recompute,
            timings=timings,
            microbatch_cost=microbatch_cost,
            transfers_ms=(0.0, 0.0) if modality else (gather_ms, scatter_ms),
            hosts=hosts,
        )
        count_tokens = TokenCounter(tokenizer, chars_per_token)
        if modality:
            modalities = parse_modalities(modality, mfu * DEVICES[device].flops_per_s)
            items = read_dataset(lengths, modalities, fields=field or (), count_tokens=count_tokens)
            check_enough(items.tokens.size, lengths, minibatch_size, world_size)
            with progress_bar() as progress:
                bar = progress.add_task("planning", total=None)
                phases = compare_phases(
                    items,
                    modalities,
                    training,
                    model,
                    num_ranks=world_size,
                    minibatch_size=minibatch_size,
                    max_tokens=max_tokens,
                    ranks_per_node=ranks_per_node,
                    num_minibatches=minibatches,
                    seed=seed,
                    on_plan=lambda done, total: progress.update(bar, completed=done, total=total),
                )
            report_phases(phases, as_json=as_json, plot=plot)
            return
        groups = None if context_parallel is None else parse_groups(context_parallel, link, world_size, device)
        policies = chosen_policies(policy, DEFAULT_POLICIES if groups is None else POLICIES)
        dataset = read_lengths(lengths, num_samples=samples, fields=field or (), count_tokens=count_tokens)
        tokens = cut(dataset.tokens, max_tokens, truncate=truncate, devices=min(groups or [1]))
        check_enough(tokens.size, lengths, minibatch_size, world_size)
        scenario = Scenario(
            some_of(tokens, minibatches * world_size * minibatch_size, seed),
            training.cost,
            world_size,
            minibatch_size,
            max_tokens=int(tokens.max()) if max_tokens is None else max_tokens,
            batch_size=batch_size,
            microbatch_cost=training.microbatch_s,
            speeds=_speeds(speeds),
            seed=seed,
        )
        inside = _machines(training, odc_slower, overlap, noise, seed)
        machines = inside if network is None else over_hosts.usual(inside, network, training)
        if groups is not None:
            with progress_bar() as progress:
                num_minibatches = np.size(scenario.lengths) // (world_size * minibatch_size)
                bar = progress.add_task("planning", total=num_minibatches * len(policies) * len(groups))
                by_size = compare_sizes(
                    scenario, tokens, policies, training, machines, groups, lambda: progress.advance(bar)
                )
            report_groups(by_size, dataset.about, as_json=as_json, plot=plot)
            return
        plans = [FromHome(get_policy(name), ranks_per_node) if rollouts else get_policy(name) for name in policies]
        grouped = chosen_policies(policy, _GROUPED_POLICIES) if reorder and not rollouts else []
        with progress_bar() as progress:
            bar = progress.add_task("planning", total=len(scenario.sampler("none")) * (len(plans) + len(grouped)))
            on_minibatch = partial(progress.advance, bar)
            comparison = compare(scenario, tokens, plans, training, machines, on_minibatch)
            found = reordered(comparison, grouped, on_minibatch)
        recommendation = recommend(found)
        ways = [] if network is None else over_hosts.compare_ways(network, comparison, inside)
        moves: dict[str, Moved] = {}
        if rollouts:
            bytes_per_s = DEVICES[device].links[LINK]
            moves = {name: moved(epoch, ranks_per_node, bytes_per_s) for name, epoch in comparison.planned.items()}
        if plot is not None:
            from odc.cli.plots import plot_plan  # matplotlib takes a while to import

            with progress_bar() as progress:
                progress.add_task("drawing", total=None)
                plot_plan(plot, comparison, minibatch_only=panel == "minibatch")
    if as_json:
        about: dict[str, object] = {"ways": over_hosts.to_json(ways)} if ways else {}
        if rollouts:
            about["moved"] = {name: asdict(each) for name, each in moves.items()}
        typer.echo(json.dumps({"lengths": dataset.about, **to_json(found, recommendation), **about}))
        return
    notes = describe_moved(moves, with_nodes=ranks_per_node is not None) if rollouts else None
    _show(found, dataset.about, recommendation, plot, notes)
    if network is not None:
        output().print("", over_hosts.table(ways, network), f"[bold]{over_hosts.advice(ways)}[/bold]", sep="\n")


def check_options(
    context: typer.Context, *, with_modalities: bool, with_groups: bool, with_rollouts: bool = False
) -> None:
    """Refuse options that the kind of plan asked for does not look at.

    Raises:
        ValueError: one of them was given.
    """
    problems: dict[str, str] = {}
    if with_modalities:
        problem = "is not for samples of several modalities: leave it out, or leave out --modality"
        problems = dict.fromkeys(_TEXT_ONLY, problem)
    elif with_rollouts:
        problem = "is not for rollouts, each of which is on some rank: leave it out, or leave out --rollouts"
        problems["reorder"] = problem
    else:
        problem = "is for samples of several modalities, or rollouts: expected --modality or --rollouts too"
        problems["ranks_per_node"] = problem
    if with_groups:
        problem = "is not for groups: leave it out, or leave out --context-parallel"
        problems |= dict.fromkeys(("panel", "rollouts", "reorder", "hosts", "between"), problem)
    elif not with_modalities:
        problem = "is between devices of a group: expected --context-parallel too"
        problems["link"] = problem
    for name, problem in problems.items():
        # By name: the enumeration is click's or typer's own, by the version of typer.
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE":
            raise ValueError(f"--{name.replace('_', '-')} {problem}")


def chosen_policies(given: list[str] | None, default: Sequence[str]) -> list[str]:
    """The policies to compare, each once.

    Raises:
        ValueError: a name is not known.
    """
    names = list(dict.fromkeys(given or default))
    if "all" in names:
        return policy_names()
    if unknown := [name for name in names if name not in policy_names()]:
        raise ValueError(f"--policy {unknown[0]!r} is not known: expected all, or of {', '.join(policy_names())}")
    return names


def _speeds(given: str | None) -> tuple[float, ...] | None:
    if given is None:
        return None
    try:
        speeds = tuple(float(speed) for speed in given.split(","))
    except ValueError:
        raise ValueError(f"--speeds {given!r}: expected one number per rank, separated by commas") from None
    if not all(0 < speed < math.inf for speed in speeds):
        raise ValueError(f"--speeds {given!r}: expected every speed to be finite and greater than 0")
    return speeds


def _machines(training: Training, odc_slower: float, overlap: float, noise: float, seed: int) -> dict[Comm, Machine]:
    """What each kind of communication meets."""
    share, (gather, scatter) = 1 / 4 if training.recompute else 1 / 3, training.transfers_s
    layers = training.shape.num_layers
    common = Machine(noise=noise, seed=seed, overlap=overlap, forward_share=share, num_layers=layers)
    return {
        "collective": replace(common, gather=gather, scatter=scatter),
        "odc": replace(common, gather=gather * odc_slower, scatter=scatter * odc_slower),
    }


def _show(found: ByOrder, lengths: str, recommendation: str, plot: Path | None, notes: str | None) -> None:
    console, comparison = output(), found["shuffled"]
    scenario, training = comparison.scenario, comparison.training
    longest = int(comparison.lengths.max())
    console.print(
        f"{describe(comparison.lengths)}. {scenario.world_size} ranks, {scenario.minibatch_size} samples each per "
        f"minibatch, {comparison.baseline.makespans.size} minibatches planned.",
        highlight=False,
    )
    console.print(f"Lengths: {escape(lengths)}.", style="dim", highlight=False)
    console.print(table(found))
    note = memory_note(training, int(scenario.max_tokens or longest))
    console.print(
        f"Costs: {escape(training.about)}. Memory per device is an estimate: {note}.", style="dim", highlight=False
    )
    if notes is not None:
        console.print(escape(notes), highlight=False)
    console.print(f"\n[bold]{escape(recommendation)}[/bold]", highlight=False)
    if plot is not None:
        console.print(f"Pictures: {escape(str(plot))}", highlight=False)
