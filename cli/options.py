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
    Literal["a100", "h100", "h200", "b200"],
    typer.Option("--device", help="The device whose speed and memory are used for estimates."),
]
Mfu = Annotated[
    float, typer.Option("--mfu", min=0.01, max=1.0, help="Model FLOPs utilization: achieved over peak FLOPs.")
]
Recompute = Annotated[
    bool, typer.Option("--recompute/--no-recompute", help="Whether activations are recomputed in the backward.")
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
        help="Fixed seconds per microbatch, in addition to its samples; default: from --timings, else 0.",
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
        "completion. Default: the first known field, and further fields that a chat template renders.",
        show_default=False,
    ),
]
Tokenizer = Annotated[Path | None, typer.Option("--tokenizer", help="A tokenizer.json, to count tokens of text.")]
CharsPerToken = Annotated[
    float, typer.Option("--chars-per-token", min=0.1, help="Used to estimate the tokens of text without a tokenizer.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the shuffle.")]
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
        help="Time to gather one layer with collectives; default: computed from its bytes over NVLink, for up to 8 "
        "ranks without --timings, else 0.",
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
    typer.Option("--odc-slower", min=0.0, help="Factor by which ODC's transfers within a host take longer.", **_TRUTH),
]
Overlap = Annotated[
    float,
    typer.Option("--overlap", min=0.0, max=1.0, help="Fraction of transfer time that compute can hide.", **_TRUTH),
]

_HOSTS: dict[str, Any] = {"rich_help_panel": "Several hosts"}

Hosts = Annotated[
    int,
    typer.Option(
        "--hosts",
        min=1,
        help="Number of hosts. Policies are compared with what FSDP and ODC do by default: full sharding, and "
        "parameters and gradients shared in each host. Then the best policies are compared for each way to shard. With "
        "HSDP, FSDP all-reduces in the last microbatch only (set_requires_all_reduce), and nothing hides that.",
        **_HOSTS,
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
        "Further keys: rate= (encoder tokens per row, for items without a number of rows), layout= (packed, padded or "
        "padded-attention), max-tokens= (per microbatch), frozen, bytes= (of an item per token; default: 588, 14 x 14 "
        "pixels).",
        show_default=False,
        **_MODALITIES,
    ),
]
RanksPerNode = Annotated[
    int | None,
    typer.Option(
        "--ranks-per-node",
        min=1,
        help="Ranks per node. Data moves within nodes if possible; traffic between nodes is counted. Also for "
        "--rollouts.",
        **_MODALITIES,
    ),
]
Rollouts = Annotated[
    bool,
    typer.Option(
        "--rollouts",
        help="Samples are rollouts: each is on a rank before its length is known. Plans keep samples on their ranks as "
        "far as the policy can; the samples that move are counted.",
    ),
]

_GROUPS: dict[str, Any] = {"rich_help_panel": "Groups of devices that compute together"}

ContextParallel = Annotated[
    str | None,
    typer.Option(
        "--context-parallel",
        metavar="SIZES",
        help="Compare groups of these sizes, e.g. 1,2,4,8. The devices of a group run the same microbatches, each a "
        "slice of every sample. --minibatch-size and the memory for a microbatch are per device, so they grow with the "
        "group. The estimate divides attention evenly and all-gathers keys and values in each layer, not hidden.",
        show_default=False,
        **_GROUPS,
    ),
]
Link = Annotated[
    str,
    typer.Option(
        "--link",
        help="Link that carries keys and values: nvlink, pcie or infiniband (speed of the data sheet), or the measured "
        "GB/s that a device receives. One for all groups, or one for each, separated by commas.",
        **_GROUPS,
    ),
]
