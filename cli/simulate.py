"""``odc simulate`` shows how the gain of ODC depends on one factor at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated

import typer
from rich.table import Table

from odc.balance import Scenario
from odc.balance.checks import IntArray
from odc.balance.simulate.studies import FACTORS, Point, Setting, study
from odc.cli.given import Given, takes
from odc.cli.keys import chosen
from odc.cli.lengths import Lengths, check_enough, describe, some_of
from odc.cli.output import new_table, progress, show_report
from odc.cli.settings import OF_COSTS

PAPER_FACTORS = ("minibatch_size", "max_length", "packing_ratio", "devices")
_LARGEST_VALUE = 10**12


@takes(*OF_COSTS, lengths="longalign", model="qwen2.5-1.5b", device="a100")
def simulate(
    given: Given,
    factor: Annotated[
        list[str] | None,
        typer.Option("--factor", help=f"Repeatable; of: {', '.join(FACTORS)}. Default: the paper's four."),
    ] = None,
    values: Annotated[
        str | None, typer.Option("--values", help="Comma-separated values, for a single --factor.")
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            "--samples",
            min=1,
            help="Most samples to use, of a length law or of a file. More take longer: 4096 a minute.",
        ),
    ] = 1024,
) -> None:
    """Vary one factor at a time and show how much faster ODC with LB-Mini is than FSDP with LB-Micro.

    The fixed setting is the paper's: LongAlign, 1.5B, 8 devices, 4 samples per device and minibatch, microbatches
    as large as the longest sample. Figure 10 of the paper varies minibatch_size, max_length, packing_ratio and
    devices; noise is the error of the cost estimates, slowdown makes one device slower than plans assume. --world-size
    and --minibatch-size are those of the settings in which they do not vary.

    Examples:

        odc simulate --plot figure10.png

        odc simulate lengths.txt --factor minibatch_size --values 2,4,8
    """
    named = [name.replace("-", "_") for name in factor or ()]
    factors = chosen("--factor", named, PAPER_FACTORS, FACTORS)
    numbers = _numbers(values, factors)
    dataset = given.read_lengths(samples)
    used = some_of(dataset.tokens, samples, given.settings.seed)
    golden = Setting(minibatch_size=given.minibatch_size, devices=given.world_size)
    _check_all_enough(used.size, given.lengths, factors, numbers, golden)
    training = given.training()
    scenario = Scenario(
        used,
        training.cost,
        given.world_size,
        given.minibatch_size,
        microbatch_cost=training.microbatch_s,
        seed=given.settings.seed,
    )
    found = {}
    for name in factors:
        with progress(name, len(numbers or FACTORS[name])) as update:
            found[name] = study(scenario, name, numbers, golden=golden, on_point=partial(update, advance=1))
    if given.plot is not None:
        from odc.cli.plots import plot_studies  # matplotlib takes a while to import

        plot_studies(given.plot, found)
    sizes = {"lengths": dataset.about, "samples_read": dataset.tokens.size, "samples_used": used.size}
    show_report(
        {**sizes, **_to_json(found, training.about)},
        [_header(dataset, used)],
        dataset.about,
        [_table(name, points) for name, points in found.items()],
        f"{training.about}.",
        as_json=given.as_json,
        plot=given.plot,
    )


def _header(read: Lengths, used: IntArray) -> str:
    which = f"{used.size:,} samples with {used.sum():,} tokens are used (--samples)"
    if used.size == read.tokens.size:
        which = "all are used"
    return f"{describe(read.tokens)}; {which}."


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


def _table(factor: str, points: Sequence[Point]) -> Table:
    table = new_table(f"By {factor}", f">{factor}", ">FSDP bubble rate", ">ODC bubble rate", ">speedup", "")
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
