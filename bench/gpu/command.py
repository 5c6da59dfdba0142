"""Does ODC work on the GPUs of this machine? One command that checks what no machine without a GPU can.

    python -m odc.bench.gpu_check
    python -m odc.bench.gpu_check --quick                       a first look, a few minutes
    python -m odc.bench.gpu_check --only kernels transport      some checks only
    python -m odc.bench.gpu_check --json runs/gpu_check.json    with hardware, driver, versions, date

Every check runs in processes of its own, under a time limit: one that fails, crashes or hangs does not stop the others.
Ranks share a GPU if there are fewer GPUs than ranks (the process group is gloo then); with enough GPUs each rank has
its own, and NCCL is the baseline. What cannot be checked here is listed as "not run" with the reason, never as passed.

Nothing is downloaded, and nothing outside of the given files is written. Give it an idle machine: a busy one fails the
checks of speed.

Not covered: more than one host (bench/slurm has scripts for that), large models, other accelerators.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from odc.bench.gpu import machine
from odc.bench.gpu.catalogue import CHECKS, Check, select
from odc.bench.gpu.isolation import FAILED, NOT_RUN, PASSED, Outcome, run_isolated
from odc.bench.gpu.setting import Setting
from odc.bench.gpu.show import print_outcomes, write_json

ALL_GREEN, SOME_FAILED, UNUSABLE, SOME_NOT_RUN = 0, 1, 2, 3
_DESCRIBE_LIMIT_S = 120.0
_QUICK_LIMIT_S = 180.0


def _parser() -> argparse.ArgumentParser:
    width = max(len(check.name) for check in CHECKS)
    rows = "\n".join(f"  {check.name:{width}}  {check.proves}" for check in CHECKS)
    codes = (
        f"exit code: {ALL_GREEN} if all checks passed, {SOME_FAILED} if one failed, {UNUSABLE} without a GPU or for a "
        f"wrong command line,\n{SOME_NOT_RUN} if none failed but some could not run here"
    )
    parser = argparse.ArgumentParser(
        prog="python -m odc.bench.gpu_check",
        description=__doc__,
        epilog=f"checks:\n{rows}\n\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N", help="numbers of ranks (2 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, after each check")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these checks")
    parser.add_argument("--minibatches", type=int, default=1000, metavar="N", help="of the soak test (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer cases, sizes, repetitions: no proof")
    parser.add_argument("--transfer-table", default="", metavar="FILE", help="save the measured table of transfers")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if min(arguments.ranks) < 2 or arguments.minibatches < 1:
        parser.error("--ranks: expected numbers of at least 2, --minibatches: at least 1")
    try:
        checks = select(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    missing = machine.why_no_gpu()
    if missing is not None:
        print(missing, file=sys.stderr)
        return UNUSABLE
    setting = Setting(
        num_gpus=torch.cuda.device_count(),
        worlds=tuple(sorted(set(arguments.ranks))),
        minibatches=min(arguments.minibatches, 50) if arguments.quick else arguments.minibatches,
        quick=arguments.quick,
        transfer_table=arguments.transfer_table,
    )
    return run_checks(checks, setting, arguments.json)


def run_checks(checks: Sequence[Check], setting: Setting, json_file: Path | None = None) -> int:
    """Run ``checks``, show what became of them, and return the exit code."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no rank outlives us
    progress = Console(stderr=True, highlight=False)
    environment = run_isolated("environment", "odc.bench.gpu.machine:describe", setting, _DESCRIBE_LIMIT_S).data
    outcomes = []
    for number, check in enumerate(checks, start=1):
        progress.print(f"({number}/{len(checks)}) {check.name}: {check.proves} ...", markup=False)
        outcomes.append(_run(check, setting))
        progress.print(f"    {outcomes[-1].status} after {outcomes[-1].seconds:.0f} s", markup=False)
        if json_file is not None:  # after each: whoever ends this command early keeps what is known
            write_json(json_file, outcomes, environment, asdict(setting))
    print_outcomes(outcomes)
    return exit_code(checks, outcomes)


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
