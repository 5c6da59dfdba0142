"""``odc simulate``: how the gain of ODC depends on one factor at a time."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from odc.balance import Scenario
from odc.balance.checks import IntArray
from odc.balance.simulate.studies import FACTORS, Point, Setting, study
from odc.cli import options
from odc.cli.costs import make_training
from odc.cli.lengths import Lengths, check_enough, describe, read_lengths, some_of
from odc.cli.output import check_finite, check_plot, errors_in_one_line, output, progress_bar
from odc.cli.records import TokenCounter

PAPER_FACTORS = ("minibatch_size", "max_length", "packing_ratio", "devices")
_LARGEST_VALUE = 10**12


def simulate(
    lengths: options.Lengths = "longalign",
    factor: Annotated[
        list[str] | None,
        typer.Option("--factor", help=f"Repeatable; of: {', '.join(FACTORS)}. Default: the paper's four."),
    ] = None,
    values: Annotated[
        str | None, typer.Option("--values", help="Comma-separated values, for a single --factor.")
    ] = None,
    world_size: Annotated[int, typer.Option("--world-size", min=1, help="Devices where they do not vary.")] = 8,
    minibatch_size: Annotated[
        int, typer.Option("--minibatch-size", min=1, help="Samples per device and step where they do not vary.")
    ] = 4,
    model: options.Model = "qwen2.5-1.5b",
    device: options.DeviceName = "a100",
    mfu: options.Mfu = 0.4,
    timings: options.Timings = None,
    microbatch_cost: options.MicrobatchCost = None,
    samples: Annotated[
        int,
        typer.Option(
            "--samples",
            min=1,
            help="Most samples to use, of a length law or of a file. More take longer: 4096 a minute.",
        ),
    ] = 1024,
    field: options.Field = None,
    tokenizer: options.Tokenizer = None,
    chars_per_token: options.CharsPerToken = 4.0,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    plot: options.Plot = None,
) -> None:
    """Vary one factor at a time and show how much faster ODC with LB-Mini is than FSDP with LB-Micro.

    The fixed setting is the paper's: LongAlign, 1.5B, 8 devices, 4 samples per device and minibatch, microbatches
    as large as the longest sample. Figure 10 of the paper varies minibatch_size, max_length, packing_ratio and
    devices; noise is the error of the cost estimates, slowdown makes one device slower than plans assume.

    Examples:

        odc simulate --plot figure10.png

        odc simulate lengths.txt --factor minibatch_size --values 2,4,8
    """
    with errors_in_one_line():
        check_plot(plot)
        check_finite(mfu=mfu, chars_per_token=chars_per_token, microbatch_cost=microbatch_cost or 0.0)
        factors = _chosen(factor)
        numbers = _numbers(values, factors)
        count_tokens = TokenCounter(tokenizer, chars_per_token)
        dataset = read_lengths(lengths, num_samples=samples, fields=field or (), count_tokens=count_tokens)
        used = some_of(dataset.tokens, samples, seed)
        golden = Setting(minibatch_size=minibatch_size, devices=world_size)
        _check_all_enough(used.size, lengths, factors, numbers, golden)
        training = make_training(
            model, device, mfu, world_size, recompute=True, timings=timings, microbatch_cost=microbatch_cost
        )
        scenario = Scenario(
            used, training.cost, world_size, minibatch_size, microbatch_cost=training.microbatch_s, seed=seed
        )
        found = _run(scenario, factors, numbers, golden)
        if plot is not None:
            _draw(plot, found)
    if as_json:
        sizes = {"lengths": dataset.about, "samples_read": dataset.tokens.size, "samples_used": used.size}
        typer.echo(json.dumps({**sizes, **_to_json(found, training.about)}))
        return
    _show(found, _header(dataset, used), training.about, plot)


def _header(read: Lengths, used: IntArray) -> str:
    which = f"{used.size:,} samples with {used.sum():,} tokens are used (--samples)"
    if used.size == read.tokens.size:
        which = "all are used"
    return f"{describe(read.tokens)}; {which}. Lengths: {read.about}."


def _show(found: Mapping[str, Sequence[Point]], header: str, about: str, plot: Path | None) -> None:
    console = output()
    console.print(header, highlight=False, markup=False)
    for name, points in found.items():
        console.print(_table(name, points))
    console.print(f"Costs: {escape(about)}.", style="dim", highlight=False)
    if plot is not None:
        console.print(f"Pictures: {escape(str(plot))}", highlight=False)


def _chosen(given: list[str] | None) -> list[str]:
    names = [name.replace("-", "_") for name in given or PAPER_FACTORS]
    if unknown := [name for name in names if name not in FACTORS]:
        raise ValueError(f"--factor {unknown[0]!r} is not known: expected one of {', '.join(FACTORS)}")
    return list(dict.fromkeys(names))


def _numbers(values: str | None, factors: Sequence[str]) -> list[float] | None:
    if values is None:
        return None
    if len(factors) != 1:
        raise ValueError("--values is for a single factor: name it with --factor")
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError:
        raise ValueError(f"--values {values!r}: expected numbers separated by commas") from None
    if not all(abs(number) <= _LARGEST_VALUE for number in numbers):
        raise ValueError(f"--values {values!r}: expected finite numbers, at most {_LARGEST_VALUE:,}")
    return numbers


def _check_all_enough(
    num_samples: int, source: str, factors: Sequence[str], values: Sequence[float] | None, golden: Setting
) -> None:
    """Before the first study, not after minutes of it."""
    for name in factors:
        for value in values or FACTORS[name]:
            setting = golden.at(name, value)
            wanted_by = f" at {name}={value:g}" if name in ("minibatch_size", "devices") else ""
            check_enough(num_samples, source, setting.minibatch_size, setting.devices, wanted_by)


def _run(
    scenario: Scenario, factors: Sequence[str], values: Sequence[float] | None, golden: Setting
) -> dict[str, list[Point]]:
    found = {}
    with progress_bar() as progress:
        for name in factors:
            bar = progress.add_task(name, total=len(values or FACTORS[name]))
            on_point = functools.partial(progress.advance, bar)
            found[name] = study(scenario, name, values, golden=golden, on_point=on_point)
    return found


def _draw(path: Path, found: Mapping[str, Sequence[Point]]) -> None:
    from odc.cli.plots import plot_studies  # matplotlib takes a while to import

    plot_studies(path, found)


def _table(factor: str, points: Sequence[Point]) -> Table:
    table = Table(title=f"By {factor}", title_justify="left")
    for name in (factor, "FSDP bubble rate", "ODC bubble rate", "speedup"):
        table.add_column(name, justify="right")
    table.add_column("")
    largest = max(*(point.speedup - 1 for point in points), 0.01)
    for point in points:
        bar = "█" * round(14 * max(point.speedup - 1, 0) / largest)
        table.add_row(
            f"{point.value:g}",
            f"{point.baseline.bubble_rate:.1%}",
            f"{point.candidate.bubble_rate:.1%}",
            f"{point.speedup:.2f}x",
            bar,
        )
    return table


def _to_json(found: Mapping[str, Sequence[Point]], about: str) -> dict[str, object]:
    return {
        "costs": about,
        "studies": {
            name: [
                {
                    "value": point.value,
                    "collective_lb_micro_bubble_rate": point.baseline.bubble_rate,
                    "odc_lb_mini_bubble_rate": point.candidate.bubble_rate,
                    "speedup": point.speedup,
                }
                for point in points
            ]
            for name, points in found.items()
        },
    }
