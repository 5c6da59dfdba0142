"""Ranks with uneven work: what a fast rank's device needs beyond its own computation, and the whole minibatch.

    python -m odc.bench.communication.uneven                                 4 ranks
    python -m odc.bench.communication.uneven --repetitions 15 --json runs/uneven.json

On this machine's GPUs, or without one on streams that pose as a GPU's (threads that lag behind their host); all else is
the real code. Two minibatches: one rank computes ten times as slowly as the others; one has a single long microbatch
where the others have four short ones of the same total.

    fast ranks   seconds from the first gather to the last push, on the device, of the slowest of all ranks but rank 0
    of own       the same over what the computation alone takes, beside it in the same run: aim 1.3
    minibatch    seconds to the moment when gradients are final everywhere
    of longest   the same over the longest computation alone of any rank: aim 1.15
    lockstep     what the minibatch would take if ranks waited for each other at every unit
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from odc.bench.gpu.setting import CheckFailedError, Setting
from odc.bench.gpu.uneven import MODES, MOST_OF_LONGEST, MOST_OF_OWN, measure, plans, table
from odc.bench.harness.environment import describe_environment
from odc.bench.harness.progress import progress_bar


def _setting() -> Setting:
    if torch.cuda.is_available():
        return Setting(num_gpus=torch.cuda.device_count())
    return Setting("fake_cuda_streams", "cpu", prepare="odc.bench.fake.cuda:register_prompt_fakes")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 if an aim is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m odc.bench.communication.uneven",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="number of ranks (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=7, metavar="N", help="minibatches of a kind (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    options = parser.parse_args(argv)
    if options.ranks < 2 or options.repetitions < 1:
        parser.error("--ranks: at least 2, --repetitions: at least 1")
    setting, cells = _setting(), []
    jobs = [(plan, mode) for plan in plans(options.ranks) for mode in MODES]
    with progress_bar(Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(jobs))
        for plan, mode in jobs:
            progress.update(bar, description=f"{plan.name}, {mode}")
            try:
                cells.append(measure(setting, plan, mode, options.repetitions))
            except CheckFailedError as error:
                print(error, file=sys.stderr)
                return 2
            progress.advance(bar)
    data = table(cells)
    shown = Table(title=data.title)
    for index, column in enumerate(data.columns):
        shown.add_column(column, justify="left" if index < 2 else "right")
    for row in data.rows:
        shown.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(shown)
    if options.json:
        document = {"environment": describe_environment(), "transport": setting.transport, "cells": cells}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    missed = [cell for cell in cells if cell["of_own"] > MOST_OF_OWN or cell["of_longest"] > MOST_OF_LONGEST]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
