"""Does ODC work on the GPUs of this machine? What no machine without a GPU can check.

    odc bench gpu
    odc bench gpu --quick                          a first look, a few minutes
    odc bench gpu --only kernels --only transport  some checks only

Every check runs in processes of its own, under a time limit: one that fails, crashes or hangs does not stop the others.
Ranks share a GPU if there are fewer GPUs than ranks (the process group is gloo then); with enough GPUs each rank has
its own, and NCCL is the baseline. What cannot be checked here is listed as "not run" with the reason, never as passed.
The file of --json is written after each check.

Nothing is downloaded, and nothing outside of the given files is written. Give it an idle machine: a busy one fails the
checks of speed.

Not covered: more than one host (bench/slurm has scripts for that), large models, other accelerators.

Exit code: 0 if all checks passed, 1 if one failed, 2 without a GPU or for a wrong command line, 3 if none failed but
some could not run here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
import typer

from odc.bench.gpu import documents, machine
from odc.bench.gpu.catalogue import CHECKS, Check, select
from odc.bench.gpu.isolation import FAILED, NOT_RUN, PASSED, Outcome, run_isolated
from odc.bench.gpu.setting import Setting
from odc.bench.gpu.show import print_outcomes, rows_of, summary
from odc.bench.harness.benchmark import Benchmark, Entries, Numbers, Run, numbers
from odc.bench.harness.ranks import NotRunError

ALL_GREEN, SOME_FAILED, UNUSABLE, SOME_NOT_RUN = 0, 1, 2, 3
WORLDS = Numbers(2, 4)
_DESCRIBE_LIMIT_S = 120.0
_QUICK_LIMIT_S = 180.0
_NAMES = ", ".join(check.name for check in CHECKS)


def measure(
    run: Run,
    ranks: Annotated[Numbers, typer.Option(parser=numbers, help="Numbers of ranks.")] = WORLDS,
    only: Annotated[list[str] | None, typer.Option(help=f"Only this check; repeatable. They are: {_NAMES}.")] = None,
    minibatches: Annotated[int, typer.Option(min=1, help="Of the soak test.")] = 1000,
    transfer_table: Annotated[str, typer.Option(help="Save the measured table of transfers to this file.")] = "",
) -> Entries:
    if min(ranks) < 2:
        raise ValueError(f"--ranks {ranks}: expected numbers of at least 2")
    checks = select(only)
    missing = machine.why_no_gpu()
    if missing is not None:
        raise NotRunError(missing)
    setting = Setting(
        num_gpus=torch.cuda.device_count(),
        worlds=tuple(sorted(set(ranks))),
        minibatches=minibatches,
        quick=run.quick,
        transfer_table=transfer_table,
    )
    return run_checks(run, checks, setting)


def run_checks(run: Run, checks: Sequence[Check], setting: Setting) -> Entries:
    """Run ``checks`` and show what became of them; ``run.status`` becomes the exit code."""
    run.environment |= run_isolated("environment", "odc.bench.gpu.machine:describe", setting, _DESCRIBE_LIMIT_S).data
    outcomes: list[Outcome] = []
    found: Entries = {}
    run.begin(len(checks), "checks")
    for number, check in enumerate(checks, start=1):
        run.note(f"({number}/{len(checks)}) {check.name}: {check.proves} ...")
        outcomes.append(_run(check, setting))
        run.note(f"    {outcomes[-1].status} after {outcomes[-1].seconds:.0f} s")
        run.advance()
        found = {"summary": summary(outcomes), "checks": rows_of(outcomes)}
        run.keep(found)
    print_outcomes(outcomes)
    run.status = exit_code(checks, outcomes)
    return found


def _run(check: Check, setting: Setting) -> Outcome:
    reason = check.why_not(setting)
    if reason is not None:
        return Outcome(check.name, NOT_RUN, reason)
    limit_s = min(check.limit_s, _QUICK_LIMIT_S) if setting.quick else check.limit_s
    return run_isolated(check.name, check.body, setting, limit_s)


def exit_code(checks: Sequence[Check], outcomes: Sequence[Outcome]) -> int:
    """Green only if everything has run and passed."""
    optional = {check.name for check in checks if check.optional}
    if any(outcome.status == FAILED for outcome in outcomes):
        return SOME_FAILED
    left = [o for o in outcomes if o.status != PASSED and not (o.status == NOT_RUN and o.name in optional)]
    return SOME_NOT_RUN if left or not outcomes else ALL_GREEN


_ON_H100 = ["gpu_check_h100", "gpu_check_h100_forms", "gpu_check_h100_sync"]

BENCHMARK = Benchmark(
    measure,
    quick={"minibatches": 50},
    figures=(
        ("README.md", documents.passed, _ON_H100),
        ("docs/gpu.md", documents.measured, [*_ON_H100, "gpu_check_h200"]),
    ),
)
