"""The keys of ``--set``: settings of plans and studies that are rarely changed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from odc.cli.keys import COUNT, NOT_NEGATIVE, YES_OR_NO, keys_of, number, one_of


def _speeds(text: str) -> tuple[float, ...]:
    with contextlib.suppress(ValueError):
        speeds = tuple(map(float, text.split(",")))
        if all(0 < speed < math.inf for speed in speeds):
            return speeds
    raise ValueError("expected a number for each rank, separated by commas, all finite and greater than 0")


_PANELS = one_of({name: name for name in ("all", "minibatch")})


@dataclass(frozen=True)
class Settings:
    """What ``--set`` says."""

    timings: Annotated[Path | None, Path, "CSV of measured 'length,seconds' to fit the costs to, not FLOPs"] = None
    mfu: Annotated[float, number(0.01, 1), "Model FLOPs utilization: achieved over peak FLOPs"] = 0.4
    microbatch_cost: Annotated[
        float | None, NOT_NEGATIVE, "Fixed seconds per microbatch, besides its samples; default: from timings, else 0"
    ] = None
    chars_per_token: Annotated[float, number(0.1), "Characters of a token, in text without --tokenizer"] = 4.0
    seed: Annotated[int, number(0, as_type=int), "Of the shuffle"] = 0
    minibatches: Annotated[int, COUNT, "Maximum number of minibatches to plan"] = 200
    recompute: Annotated[bool, YES_OR_NO, "Whether activations are recomputed in the backward"] = True
    samples: Annotated[int, COUNT, "How many to draw from a length law; files are read completely"] = 10_000
    truncate: Annotated[bool, YES_OR_NO, "Whether samples longer than --max-tokens are cut"] = False
    batch_size: Annotated[int | None, COUNT, "Samples per rank that verl-native balances together"] = None
    noise: Annotated[float, NOT_NEGATIVE, "Relative error of the cost estimates, e.g. 0.2"] = 0.0
    speeds: Annotated[tuple[float, ...] | None, _speeds, "Of each rank, e.g. 1,1,1,0.8"] = None
    gather_ms: Annotated[
        float | None,
        NOT_NEGATIVE,
        "Time to gather one layer with collectives; default: computed from its bytes over NVLink, for up to 8 ranks "
        "without timings, else 0",
    ] = None
    scatter_ms: Annotated[float | None, NOT_NEGATIVE, "Time to reduce-scatter one layer; default: likewise"] = None
    odc_slower: Annotated[float, NOT_NEGATIVE, "Factor by which ODC's transfers within a host take longer"] = 1.0
    overlap: Annotated[float, number(0, 1), "Fraction of transfer time that compute can hide"] = 1.0
    panel: Annotated[str, _PANELS, "What --plot draws: all pictures, or what ranks do in one minibatch"] = "all"
    reorder: Annotated[
        bool,
        YES_OR_NO,
        "Also compare orders that change which samples share a step: similar lengths grouped (group_by_length of "
        "transformers), and TRL's packing (bfd)",
    ] = True


KEYS = keys_of(Settings)

OF_COSTS = ("timings", "mfu", "microbatch-cost", "chars-per-token", "seed")
"""What every plan and every study looks at."""


def all_but(*names: str) -> tuple[str, ...]:
    """The other keys."""
    return tuple(name for name in KEYS if name not in names)


def describe(names: Iterable[str]) -> str:
    """For the end of a command's help: a line for each key."""
    return "\n".join(f"--set {name}=...: {KEYS[name][1]}" for name in names)
