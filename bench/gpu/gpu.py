"""Does ODC work on the GPUs of this machine? What cannot be checked on a machine without a GPU.

    odc bench gpu
    odc bench gpu --quick                          a first look, a few minutes
    odc bench gpu --only kernels --only transport  some checks only

Every check runs in processes of its own, under a time limit: a check that fails, crashes or hangs does not stop the
others. Ranks share a GPU if there are fewer GPUs than ranks (the process group is gloo then). With enough GPUs each
rank has its own, and NCCL is the baseline. A check that cannot run here is listed as "not run" with the reason, never
as passed. The file of --json is written after each check.

Nothing is downloaded, and nothing outside of the given files is written. Give it an idle machine: on a busy one the
checks of speed fail.

Not covered: more than one host (bench/slurm has scripts for that), large models, other accelerators.

Exit code: 0 if all checks passed, 1 if one failed, 2 without a GPU or for a wrong command line, 3 if none failed but
some could not run here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from odc.bench.communication.primitives import size_text
from odc.bench.gpu.bandwidth import PUSHES
from odc.bench.gpu.device import why_no_gpu
from odc.bench.gpu.setting import FAILED, NOT_RUN, PASSED, Outcome, Setting, run_isolated
from odc.bench.gpu.transport import why_no_nvshmem
from odc.bench.harness.benchmark import Benchmark, Entries, Figures, Numbers, Run, check_known, numbers
from odc.bench.harness.ranks import NotRunError
from odc.bench.harness.results import shown
from odc.engines.base import COPY_ENGINE, KERNEL


def _no_peers(setting: Setting) -> str | None:
    return setting.lacks_gpus(", so there is no link to measure")


def _none_shared(setting: Setting) -> str | None:
    if any(not setting.owns_gpus(world) for world in setting.worlds):
        return None
    return "every rank has a GPU of its own: see peer_bandwidth"


@dataclass(frozen=True)
class Check:
    """A check, which is one row of the table."""

    name: str
    proves: str
    body: str
    """``"module:function"``, a :data:`~odc.bench.gpu.setting.Body`."""
    limit_s: float
    why_not: Callable[[Setting], str | None] = lambda setting: None
    """Why it cannot run here, or None."""
    optional: bool = False
    """Whether nothing stays unproven if this check does not run: another check shows more."""


CHECKS = (
    Check("kernels", "kernels equal their plain-torch twins", "odc.bench.gpu.kernels:check", 900),
    Check("kernel_speed", "kernels move bytes as fast as copies", "odc.bench.gpu.speed:check_kernels", 600),
    Check("host_time", "what asking costs a host, with real layers", "odc.bench.gpu.speed:check_host_time", 300),
    Check("overlap", "what transfers take from a matmul", "odc.bench.gpu.speed:check_overlap", 300),
    Check("transport", "memory and order between processes", "odc.bench.gpu.transport:check", 600),
    Check("protocol", "random minibatches on real streams", "odc.bench.gpu.protocol:check_protocol", 1200),
    Check("soak", "no push is lost under uneven load", "odc.bench.gpu.protocol:check_soak", 1800),
    Check("uneven", "no device waits for a slower one", "odc.bench.gpu.uneven:check_uneven", 600),
    Check("items", "outputs of encoders move on real streams", "odc.bench.gpu.protocol:check_items", 600),
    Check("sft", "losses of FSDP1 and FSDP2 training", "odc.bench.gpu.training:check_sft", 900),
    Check("forms", "losses of further models and loops", "odc.bench.gpu.training:check_forms", 900),
    Check("late_binding", "microbatches bound by events of devices", "odc.bench.gpu.uneven:check_late_binding", 600),
    Check("no_host_sync", "hosts run ahead of their devices", "odc.bench.gpu.waiting:check_no_host_sync", 600),
    Check("synchronize_does_not_hang", "waiting for a device ends", "odc.bench.gpu.waiting:check_hangs", 600),
    Check(
        "bandwidth",
        "throughput of ranks that share a GPU",
        "odc.bench.gpu.bandwidth:check_shared",
        1200,
        _none_shared,
        optional=True,
    ),
    Check(
        "peer_bandwidth", "throughput between GPUs, NCCL beside", "odc.bench.gpu.bandwidth:check_peers", 1200, _no_peers
    ),
    Check("nvshmem", "the same over NVSHMEM", "odc.bench.gpu.transport:check_nvshmem", 1800, why_no_nvshmem),
)


def select(names: Sequence[str] | None, checks: Sequence[Check] = CHECKS) -> list[Check]:
    """The named checks in the order of the list, or all of them.

    Raises:
        ValueError: a name is unknown.
    """
    check_known(only=(names, [check.name for check in checks]))
    return [check for check in checks if not names or check.name in names]


# The results for people and for programs


_LONGEST_TEXT = 400
_STYLES = {PASSED: "green", FAILED: "bold red", NOT_RUN: "yellow"}


def console() -> Console:
    """A console as wide as the terminal, or 140 columns for a file."""
    return Console(width=None if sys.stdout.isatty() else 140)


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Print the output of failed checks, the tables of what was measured, and last a line per check."""
    for outcome in outcomes:
        if outcome.log:
            console().print(
                f"--- {outcome.name}: the end of its output\n{outcome.log}\n", markup=False, highlight=False
            )
        for measured in outcome.tables:
            console().print(shown(measured, outcome.data[measured.rows], outcome.data))
    table = Table(title=summary(outcomes))
    for column in ("check", "result", "figures, or why", "s"):
        table.add_column(column, justify="right" if column == "s" else "left")
    for outcome in outcomes:
        style = _STYLES[outcome.status]
        seconds = f"{outcome.seconds:.0f}" if outcome.status != NOT_RUN else ""
        table.add_row(outcome.name, f"[{style}]{outcome.status}[/]", _plain(outcome.figures), seconds)
    console().print(table)


def _plain(text: str) -> str:
    """One line, not too long, and no markup."""
    line = " ".join(text.split())
    return escape(line if len(line) <= _LONGEST_TEXT else line[:_LONGEST_TEXT] + " ...")


def summary(outcomes: Sequence[Outcome]) -> str:
    """Numbers of checks by status, in one line."""
    counts = {status: sum(outcome.status == status for outcome in outcomes) for status in _STYLES}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)


def rows_of(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """All outcomes, for JSON."""
    return [
        {
            "name": outcome.name,
            "status": outcome.status,
            "figures": outcome.figures,
            "seconds": round(outcome.seconds, 1),
            "data": outcome.data,
        }
        for outcome in outcomes
    ]


# What README.md and docs/gpu.md say of a committed result


KERNEL_BYTES = (1 << 26, 1 << 30)
TRANSFER_BYTES = (1 << 20, 1 << 23, 1 << 26, 1 << 28)
RANKS = 2


def passed(*results: Entries) -> Figures:
    """The figure of how many checks have passed in one of the results."""
    rows = [check for result in results for check in result["checks"]]
    names = {check["name"] for check in rows if check["status"] == PASSED}
    yield "", f"passes {len(names)} of {len({check['name'] for check in rows})} checks"


def measured(result: Entries, *others: Entries) -> Figures:
    """Figures for rows of tables: kernels, operations of ranks that share a GPU, the two ways of a gather."""
    *more, of_bandwidth = others
    yield from passed(result, *more)
    for kernel, by_size in _ratios(result).items():
        yield f"| {kernel} |", " " + " | ".join(f"{by_size[num_bytes]:.2f}" for num_bytes in KERNEL_BYTES) + " |"
    cells = _data(result)["uneven"]["cells"]
    own, longest = (max(cell[key] for cell in cells) for key in ("of_own", "of_longest"))
    yield "", f"at most {own:.2f} times its own computation to its last push, and a minibatch {longest:.2f} times"
    data = _data(of_bandwidth)
    rows = {(r["operation"], r["num_bytes"]): r for r in data["bandwidth"]["rows"] if r["ranks"] == RANKS}
    transfers = data["bandwidth"]["transfers"]
    for num_bytes in TRANSFER_BYTES:
        cells = [rows[name, num_bytes] for name in ("gather", *PUSHES.values())]
        texts = [f"{1e3 * cell['time_s']['median']:.2f} ms, {cell['busbw']:.1f} GB/s" for cell in cells]
        yield f"| {size_text(num_bytes)} |", " " + " | ".join(texts) + " |"
    for num_bytes in TRANSFER_BYTES:
        at = transfers["sizes"].index(num_bytes)
        times = [f"{1e3 * transfers['seconds'][way][at]:.2f} ms" for way in (KERNEL, COPY_ENGINE)]
        yield f"| {size_text(num_bytes)} |", " " + " | ".join(times) + " |"


def _data(result: Entries) -> dict[str, Any]:
    """What each check has measured."""
    return {check["name"]: check["data"] for check in result["checks"]}


def _ratios(result: Entries) -> dict[str, dict[int, float]]:
    """Time over floor, by kernel and size."""
    ratios: dict[str, dict[int, float]] = {}
    for row in _data(result)["kernel_speed"]["rows"]:
        ratios.setdefault(row["kernel"], {})[row["num_bytes"]] = row["ratio"]
    return ratios


# The command


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
    missing = why_no_gpu()
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
    """Run ``checks`` and show their outcomes. ``run.status`` becomes the exit code."""
    run.environment |= run_isolated("environment", "odc.bench.gpu.device:describe", setting, _DESCRIBE_LIMIT_S).data
    outcomes: list[Outcome] = []
    found: Entries = {}
    for number, check in enumerate(run.each(checks), start=1):
        run.note(f"({number}/{len(checks)}) {check.name}: {check.proves} ...")
        outcomes.append(_run(check, setting))
        run.note(f"    {outcomes[-1].status} after {outcomes[-1].seconds:.0f} s")
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
    """The exit code; 0 only if all checks that are not optional have run and passed."""
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
        ("README.md", passed, _ON_H100),
        ("docs/gpu.md", measured, [*_ON_H100, "gpu_check_h200"]),
    ),
)
