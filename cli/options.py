"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from odc.balance import law_names, policy_names

_TRUTH: dict[str, Any] = {"rich_help_panel": "What plans do not know"}

Lengths = Annotated[
    str,
    typer.Argument(
        help="Lengths in tokens: text (one integer per line; - is standard input), .npy, samples (.jsonl, .json, .csv, "
        ".tsv, .parquet, or a folder of datasets' save_to_disk, with a length, tokens, text or a chat each), or a law: "
        f"{', '.join(law_names())}.",
        show_default=False,
    ),
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        help="A preset, e.g. qwen2.5-7b (an unknown name lists them all), or the path of a model's config.json.",
    ),
]
DeviceName = Annotated[
    Literal["a100", "h100", "h200", "b200"], typer.Option("--device", help="For seconds and memory.")
]
Mfu = Annotated[float, typer.Option("--mfu", min=0.01, max=1.0, help="Achieved over peak FLOPs.")]
Recompute = Annotated[
    bool, typer.Option("--recompute/--no-recompute", help="Whether the backward computes activations anew.")
]
Timings = Annotated[
    Path | None,
    typer.Option("--timings", help="CSV of measured 'length,seconds' to fit the costs to, instead of FLOPs."),
]
MicrobatchCost = Annotated[
    float | None,
    typer.Option(
        "--microbatch-cost",
        min=0.0,
        help="Seconds that a microbatch takes beside its samples; default: what --timings show, else 0.",
        show_default=False,
    ),
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
        "completion. Default: the first known, and what a chat template shows beside them.",
        show_default=False,
    ),
]
Tokenizer = Annotated[Path | None, typer.Option("--tokenizer", help="A tokenizer.json, to count tokens of text.")]
CharsPerToken = Annotated[
    float, typer.Option("--chars-per-token", min=0.1, help="To estimate tokens of text without a tokenizer.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of the shuffle.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw pictures into this file (.png, .svg, .pdf).")]

Noise = Annotated[
    float, typer.Option("--noise", min=0.0, help="Relative error of the cost estimates, e.g. 0.2.", **_TRUTH)
]
GatherMs = Annotated[
    float | None,
    typer.Option(
        "--gather-ms",
        min=0.0,
        help="Time to gather one layer with collectives; default: that of its bytes over NVLink, for up to 8 ranks "
        "without --timings, else 0.",
        show_default=False,
        **_TRUTH,
    ),
]
ScatterMs = Annotated[
    float | None,
    typer.Option(
        "--scatter-ms",
        min=0.0,
        help="Time to reduce-scatter one layer; default: as for --gather-ms.",
        show_default=False,
        **_TRUTH,
    ),
]
OdcSlower = Annotated[
    float,
    typer.Option("--odc-slower", min=0.0, help="ODC's transfers in a host take so many times as long.", **_TRUTH),
]
Overlap = Annotated[
    float, typer.Option("--overlap", min=0.0, max=1.0, help="Part of transfers that compute can hide.", **_TRUTH)
]

_HOSTS: dict[str, Any] = {"rich_help_panel": "Several hosts"}

Hosts = Annotated[
    int,
    typer.Option(
        "--hosts",
        min=1,
        help="The ranks are on so many hosts. Policies are compared for what FSDP and ODC do there by themselves: full "
        "sharding, and parameters and gradients shared in each host. Then the best ones, for each way to shard; with "
        "HSDP, FSDP all-reduces in the last microbatch only (set_requires_all_reduce), and nothing hides that.",
        **_HOSTS,
    ),
]
Between = Annotated[
    str | None,
    typer.Option(
        "--between",
        metavar="BANDWIDTH",
        help="What a host receives from the others while it sends as much, per second: 100Gb (bits) or 12.5GB (bytes). "
        "Default: an InfiniBand port for each device.",
        show_default=False,
        **_HOSTS,
    ),
]

_MODALITIES: dict[str, Any] = {"rich_help_panel": "Samples of several modalities"}

Modalities = Annotated[
    list[str] | None,
    typer.Option(
        "--modality",
        "--modalities",
        metavar="NAME:KEY=VALUE,...",
        help="An encoder; NAME is the field of the samples that lists its items. Repeatable. "
        "Its cost: layers=, hidden=, ffn= and gated (three matrices in an MLP); or FLOPs linear= and quadratic=, per "
        "token and per squared token, forward and backward; or timings=FILE, a CSV of measured 'length,seconds'. "
        "Besides: rate= (tokens per row, for items of which only the length in the encoder is there), layout= (packed, "
        "padded or padded-attention), max-tokens= (of a microbatch), frozen, bytes= (of an item per token; default: "
        "588, 14 x 14 pixels).",
        show_default=False,
        **_MODALITIES,
    ),
]
RanksPerNode = Annotated[
    int | None,
    typer.Option(
        "--ranks-per-node",
        min=1,
        help="Keep what moves within nodes of so many ranks, and count the rest. Also of --rollouts.",
        **_MODALITIES,
    ),
]
Rollouts = Annotated[
    bool,
    typer.Option(
        "--rollouts",
        help="Samples are rollouts: each is on some rank before lengths are known. Plans keep them there as far as the "
        "policy can, and what moves is counted.",
    ),
]

_GROUPS: dict[str, Any] = {"rich_help_panel": "Groups of devices that compute together"}

ContextParallel = Annotated[
    str | None,
    typer.Option(
        "--context-parallel",
        metavar="SIZES",
        help="Compare groups of so many devices, e.g. 1,2,4,8, which run the same microbatches, each a slice of every "
        "sample. A group gets as many samples per step as its devices together (--minibatch-size is per device), and "
        "microbatches as large as they hold together. Attention is taken to be divided evenly; keys and values are "
        "exchanged by an all-gather in each layer, and nothing hides that.",
        show_default=False,
        **_GROUPS,
    ),
]
Link = Annotated[
    str,
    typer.Option(
        "--link",
        help="What keys and values cross: nvlink, pcie or infiniband at the speed of the data sheet, or what you have "
        "measured, in GB/s that a device receives. One for all groups, or with commas one for each.",
        **_GROUPS,
    ),
]
