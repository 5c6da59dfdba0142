"""``odc plan``: what each balancing policy would do to a dataset."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from odc.balance import Machine, Scenario, policy_names
from odc.balance.checks import IntArray
from odc.balance.plan import Comm
from odc.balance.streams import random_stream
from odc.cli.comparison import Comparison, compare, memory_note, recommend, table, to_json
from odc.cli.costs import Training, make_training
from odc.cli.lengths import read_lengths, token_counter

DEFAULT_POLICIES = ("none", "local-sort", "lb-micro", "lb-micro-global", "lb-mini")
_TRUTH: dict[str, Any] = {"rich_help_panel": "What plans do not know"}
WIDTH = 80  # columns where there is no terminal

Model = Annotated[str, typer.Option("--model", help="A preset, e.g. qwen2.5-7b, or the path of a model's config.json.")]
DeviceName = Annotated[
    Literal["a100", "h100", "h200", "b200"], typer.Option("--device", help="For seconds and memory.")
]
Mfu = Annotated[float, typer.Option("--mfu", min=0.01, max=1.0, help="Achieved over peak FLOPs.")]
Recompute = Annotated[
    bool, typer.Option("--recompute/--keep-activations", help="Whether the backward computes activations anew.")
]
Timings = Annotated[
    Path | None,
    typer.Option("--timings", help="CSV of measured 'length,seconds' to fit the costs to, instead of FLOPs."),
]
Samples = Annotated[int, typer.Option("--samples", min=1, help="How many samples to take of a length law.")]
Field = Annotated[str | None, typer.Option("--field", help="Field of the JSONL objects: length, tokens or text.")]
Tokenizer = Annotated[Path | None, typer.Option("--tokenizer", help="A tokenizer.json, to count tokens of text.")]
CharsPerToken = Annotated[
    float, typer.Option("--chars-per-token", min=0.1, help="To estimate tokens of text without a tokenizer.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw pictures into this file (.png, .svg, .pdf).")]
Lengths = Annotated[
    str,
    typer.Argument(
        help="Lengths in tokens: text (one integer per line; - is standard input), .jsonl (a length, tokens or "
        "text per object), .npy, or a law: longalign, swesmith, aime.",
        show_default=False,
    ),
]


def plan(
    lengths: Lengths,
    world_size: Annotated[int, typer.Option("--world-size", min=1, help="Number of ranks.")] = 8,
    minibatch_size: Annotated[int, typer.Option("--minibatch-size", min=1, help="Samples per rank and step.")] = 4,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Most tokens in a microbatch; default: longest sample.")
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut samples longer than --max-tokens.")] = False,
    model: Model = "qwen2.5-7b",
    device: DeviceName = "h100",
    mfu: Mfu = 0.4,
    recompute: Recompute = True,
    timings: Timings = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help=f"Repeatable; 'all', or of: {', '.join(policy_names())}.", show_default=False),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="Samples per rank that verl-native balances together.")
    ] = None,
    speeds: Annotated[
        str | None, typer.Option("--speeds", help="Comma-separated speed of each rank, e.g. 1,1,1,0.8.")
    ] = None,
    noise: Annotated[
        float, typer.Option("--noise", min=0.0, help="Relative error of the cost estimates, e.g. 0.2.", **_TRUTH)
    ] = 0.0,
    gather_ms: Annotated[
        float, typer.Option("--gather-ms", min=0.0, help="Time to gather one layer with collectives.", **_TRUTH)
    ] = 0.0,
    scatter_ms: Annotated[
        float, typer.Option("--scatter-ms", min=0.0, help="Time to reduce-scatter one layer.", **_TRUTH)
    ] = 0.0,
    odc_slower: Annotated[
        float, typer.Option("--odc-slower", min=0.0, help="ODC's transfers take so many times as long.", **_TRUTH)
    ] = 1.0,
    overlap: Annotated[
        float, typer.Option("--overlap", min=0.0, max=1.0, help="Part of transfers that compute can hide.", **_TRUTH)
    ] = 1.0,
    minibatches: Annotated[int, typer.Option("--minibatches", min=1, help="Plan at most so many.")] = 200,
    samples: Samples = 10_000,
    field: Field = None,
    tokenizer: Tokenizer = None,
    chars_per_token: CharsPerToken = 4.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the shuffle.")] = 0,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Show what each balancing policy would do to a dataset: waiting, samples/s, planning time, memory.

    Ranks wait for each other at every layer with FSDP's collectives, once per optimizer step with ODC. Nothing
    is trained and no GPU is needed: plans are simulated on a cost model of the transformer.

    Examples:

        odc plan lengths.txt --world-size 16 --minibatch-size 8 --max-tokens 65536

        odc plan data.jsonl --field text --model path/to/config.json --plot plan.png
    """
    try:
        tokens = read_lengths(
            lengths, num_samples=samples, field=field, count_tokens=token_counter(tokenizer, chars_per_token)
        )
        if truncate and max_tokens is not None:
            tokens = np.minimum(tokens, max_tokens)
        training = make_training(model, device, mfu, world_size, recompute=recompute, timings=timings)
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
        machines = _machines(gather_ms / 1e3, scatter_ms / 1e3, odc_slower, overlap, noise, seed, recompute=recompute)
        comparison = _compare_all(scenario, chosen_policies(policy), training, machines)
        if plot is not None:
            _draw(plot, comparison)
    except ValueError as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(to_json(comparison)))
        return
    _show(comparison, tokens, plot)


def fail(error: Exception) -> None:
    """Print what is wrong and exit with 2, as for a wrong option."""
    Console(stderr=True).print("[red]error:[/red]", str(error), highlight=False, soft_wrap=True)
    raise typer.Exit(2) from None


def some_of(lengths: IntArray, most: int, seed: int) -> IntArray:
    """At most so many of the samples, drawn at random."""
    if lengths.size <= most:
        return lengths
    order = np.argsort(random_stream("some", seed).random_raw(lengths.size), kind="stable")
    return lengths[np.sort(order[:most])]


def chosen_policies(given: list[str] | None) -> list[str]:
    """The policies to compare, each once.

    Raises:
        ValueError: a name is not known.
    """
    names = list(dict.fromkeys(given or DEFAULT_POLICIES))
    if "all" in names:
        return policy_names()
    if unknown := [name for name in names if name not in policy_names()]:
        raise ValueError(f"--policy {unknown[0]!r} is not known: expected all, or of {', '.join(policy_names())}")
    return names


def _speeds(given: str | None) -> tuple[float, ...] | None:
    if given is None:
        return None
    try:
        return tuple(float(speed) for speed in given.split(","))
    except ValueError:
        raise ValueError(f"--speeds {given!r}: expected one number per rank, separated by commas") from None


def _machines(
    gather_s: float, scatter_s: float, odc_slower: float, overlap: float, noise: float, seed: int, *, recompute: bool
) -> dict[Comm, Machine]:
    """What each kind of communication meets."""
    common = Machine(noise=noise, seed=seed, overlap=overlap, forward_share=1 / 4 if recompute else 1 / 3)
    return {
        "collective": replace(common, gather=gather_s, scatter=scatter_s),
        "odc": replace(common, gather=gather_s * odc_slower, scatter=scatter_s * odc_slower),
    }


def progress_bar() -> Progress:
    """On standard error, gone when done, so that standard output holds the result alone."""
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _compare_all(
    scenario: Scenario, policies: list[str], training: Training, machines: dict[Comm, Machine]
) -> Comparison:
    with progress_bar() as progress:
        bar = progress.add_task("planning", total=len(scenario.sampler("none")) * len(policies))
        return compare(scenario, policies, training, machines, lambda: progress.advance(bar))


def _draw(path: Path, comparison: Comparison) -> None:
    try:
        from odc.cli.plots import plot_plan
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'odc[plot]'") from None
    with progress_bar() as progress:
        progress.add_task("drawing", total=None)
        plot_plan(path, comparison)


def _show(comparison: Comparison, tokens: IntArray, plot: Path | None) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    scenario, training = comparison.scenario, comparison.training
    shortest, median, longest = np.percentile(tokens, [0, 50, 100]).astype(int)
    console.print(
        f"{tokens.size:,} samples, {tokens.sum():,} tokens; shortest {shortest:,}, median {median:,}, longest "
        f"{longest:,}. {scenario.world_size} ranks, {scenario.minibatch_size} samples each per minibatch, "
        f"{comparison.baseline.makespans.size} minibatches planned.",
        highlight=False,
    )
    console.print(table(comparison, "Waiting and throughput by policy"))
    baseline = comparison.baseline
    console.print(
        f"Speedup over {baseline.policy} with {'FSDP' if baseline.comm == 'collective' else 'ODC'}. Costs: "
        f"{training.about}. Memory per device: {memory_note(training, int(scenario.max_tokens or longest))}.",
        style="dim",
        highlight=False,
    )
    console.print(f"\n[bold]{recommend(comparison)}[/bold]", highlight=False)
    if plot is not None:
        console.print(f"Pictures: {plot}", highlight=False)
