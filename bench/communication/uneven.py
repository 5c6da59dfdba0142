"""Ranks with uneven work: what a fast rank's device needs beyond its own computation, and the whole minibatch.

The benchmark runs on this machine's GPUs; without one, on streams that pose as a GPU's (threads that lag behind their
host). All other code is the real one. There are two minibatches. In the first, one rank computes ten times as slowly as
the others. In the second, one rank has a single long microbatch where the others have four short ones of the same
total.

    fast ranks   seconds from the first gather to the last push, on the device, of the slowest rank except rank 0
    of own       this time over that of the rank's computation alone, which is measured beside it in the same run, with
                 the same gathers and pushes on the rank's own memory: the aim is 1.3
    minibatch    seconds to the moment when gradients are final on all ranks
    of longest   this time over the longest computation alone of any rank: the aim is 1.15
    lockstep     what the minibatch would take if ranks waited for each other at every unit
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
import typer

from odc.bench.gpu.setting import Setting
from odc.bench.gpu.uneven import MODES, MOST_OF_LONGEST, MOST_OF_OWN, TABLE, measure_plan, plans
from odc.bench.harness.benchmark import Benchmark, Entries, Figures, Run


def measure(
    run: Run,
    ranks: Annotated[int, typer.Option(min=2, help="Number of ranks.")] = 4,
    repetitions: Annotated[int, typer.Option(min=1, help="Minibatches of a kind.")] = 7,
) -> Entries:
    setting = Setting("fake_cuda_streams", "cpu", prepare="odc.bench.fake.cuda:register_prompt_fakes")
    if torch.cuda.is_available():
        setting = Setting(num_gpus=torch.cuda.device_count())
    jobs = [(plan, mode) for plan in plans(ranks) for mode in MODES]
    cells = []
    for plan, mode in run.each(jobs, lambda job: f"{job[0].name}, {job[1]}"):
        cells.append(measure_plan(setting, plan, mode, repetitions))
        if cells[-1]["of_own"] > MOST_OF_OWN or cells[-1]["of_longest"] > MOST_OF_LONGEST:
            run.miss(f"{plan.name}, {mode}: aims are {MOST_OF_OWN} of own and {MOST_OF_LONGEST} of the longest")
    return {"transport": setting.transport, "cells": cells}


def _halves(result: Entries) -> list[dict[str, Entries]]:
    """By the way to accumulate: those of the first plan, those of the second one."""
    first = result["cells"][0]["plan"]
    return [
        {cell["accumulate"]: cell for cell in result["cells"] if (cell["plan"] == first) is is_first}
        for is_first in (True, False)
    ]


def figures(result: Entries) -> Figures:
    slower, longer = _halves(result)
    yield (
        "",
        f"the others need {slower['direct']['of_own']:.2f} times their own computation to their last push where "
        f"clients add, {slower['daemon']['of_own']:.2f} times where daemons do",
    )
    yield (
        "",
        f"takes {longer['direct']['of_longest']:.2f} and {longer['daemon']['of_longest']:.2f} times the longest "
        f"computation, and would take {longer['direct']['lockstep_s'] / longer['direct']['longest_s']:.2f} times in "
        "lockstep",
    )


BENCHMARK = Benchmark(
    measure,
    (replace(TABLE, title="uneven minibatches over {transport}: medians (20th-80th percentile)"),),
    quick={"ranks": 2, "repetitions": 2},
    figures=(("docs/gpu.md", figures, ["uneven"]),),
)
