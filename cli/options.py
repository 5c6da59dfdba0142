"""Options that several commands have, and how a command gets the options of several functions."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from odc.balance import law_names, policy_names

Lengths = Annotated[
    str,
    typer.Argument(
        help="Lengths in tokens: text (one integer per line; - is standard input), .npy, samples (.jsonl, .json, .csv, "
        ".tsv, .parquet, or a folder of datasets' save_to_disk, with a length, tokens, text or a chat each), or a law: "
        f"{', '.join(law_names())}.",
        show_default=False,
    ),
]
WorldSize = Annotated[int, typer.Option("--world-size", min=1, help="Number of ranks, one device each.")]
MinibatchSize = Annotated[int, typer.Option("--minibatch-size", min=1, help="Samples per rank and step.")]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", min=1, help="Maximum tokens per microbatch on a device; default: longest sample."),
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        help="A preset, e.g. qwen2.5-7b (an unknown name lists them all), or the path of a model's config.json.",
    ),
]
DeviceName = Annotated[
    Literal["a100", "h100", "h200", "b200"],
    typer.Option("--device", help="The device whose speed and memory are used for estimates."),
]
Policies = Annotated[
    list[str] | None,
    typer.Option("--policy", help=f"Repeatable; 'all', or of: {', '.join(policy_names())}.", show_default=False),
]
Field = Annotated[
    list[str] | None,
    typer.Option(
        "--field",
        help="Field (column) of the samples: length, tokens, text or a chat; repeatable, e.g. for a prompt and its "
        "completion. Default: the first known field, and further fields that a chat template renders.",
        show_default=False,
    ),
]
Tokenizer = Annotated[Path | None, typer.Option("--tokenizer", help="A tokenizer.json, to count tokens of text.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw pictures into this file (.png, .svg, .pdf).")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting that is rarely changed; repeatable. Its keys are below.",
        show_default=False,
    ),
]

Hosts = Annotated[
    int,
    typer.Option(
        "--hosts",
        min=1,
        help="Number of hosts.",
    ),
]
Between = Annotated[
    str | None,
    typer.Option(
        "--between",
        metavar="BANDWIDTH",
        help="Bandwidth per host and direction, per second: 100Gb (bits) or 12.5GB (bytes). Default: one InfiniBand "
        "port per device.",
        show_default=False,
    ),
]

Modalities = Annotated[
    list[str],
    typer.Option(
        "--modality",
        metavar="NAME:KEY=VALUE,...",
        help="An encoder; NAME is the field of the samples that lists its items. Repeatable. "
        "Its cost: layers=, hidden=, ffn= and gated (three matrices in an MLP); or FLOPs linear= and quadratic=, per "
        "token and per squared token, forward and backward; or timings=FILE, a CSV of measured 'length,seconds'. "
        "Further keys: rate= (encoder tokens per row, for items without a number of rows), layout= (packed, padded or "
        "padded-attention), max-tokens= (per microbatch), frozen, bytes= (of an item per token; default: 588, 14 x 14 "
        "pixels).",
        show_default=False,
    ),
]
RanksPerNode = Annotated[
    int | None,
    typer.Option(
        "--ranks-per-node",
        min=1,
        help="Ranks per node. Data moves within nodes if possible; traffic between nodes is counted.",
    ),
]
Sizes = Annotated[
    str,
    typer.Option(
        "--sizes",
        metavar="SIZES",
        help="Compare groups of these sizes, e.g. 1,2,4,8. The devices of a group run the same microbatches, each a "
        "slice of every sample. --minibatch-size and the memory for a microbatch are per device, so they grow with the "
        "group. The estimate divides attention evenly and all-gathers keys and values in each layer, not hidden.",
        show_default=False,
    ),
]
Link = Annotated[
    str,
    typer.Option(
        "--link",
        help="Link that carries keys and values: nvlink, pcie or infiniband (speed of the data sheet), or the measured "
        "GB/s that a device receives. One for all groups, or one for each, separated by commas.",
    ),
]

Command = Callable[..., None]


def parameters_of(function: Callable[..., object]) -> list[inspect.Parameter]:
    """By keyword, with annotations that need no module to be understood."""
    hints = typing.get_type_hints(function, include_extras=True)
    return [
        parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(function).parameters.values()
    ]


def with_parameters(command: Command, parameters: Sequence[inspect.Parameter], text: str | None) -> Command:
    """Let typer see these parameters, and this help."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = text
    return command
