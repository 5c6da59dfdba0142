"""What a check is given and what it returns; each check runs in a process group of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from odc.bench.harness import ranks
from odc.bench.harness.benchmark import Table
from odc.bench.harness.ranks import BenchError, NotRunError, Place, RankFailedError, process_of_fork_server, resolve


class CheckFailedError(BenchError):
    """A check has failed. The text says what was found and what was expected.

    Args:
        data: what was measured all the same, as that of a :class:`Report`.
        tables: what of it is for people.
    """

    def __init__(self, text: str, data: dict[str, Any] | None = None, tables: tuple[Table, ...] = ()) -> None:
        super().__init__(text)
        self.data, self.tables = data or {}, tables


def require(condition: bool, text: str) -> None:
    """Fail the check with ``text`` unless ``condition`` holds."""
    if not condition:
        raise CheckFailedError(text)


@dataclass(frozen=True)
class Setting(Place):
    """Where and how thoroughly to check. It is the same for every check and every rank."""

    transport: str = "cuda_ipc"
    device_type: str = "cuda"
    worlds: tuple[int, ...] = (2, 4)
    """Numbers of ranks to check with."""
    minibatches: int = 1000
    """Minibatches of the soak test."""
    transfer_table: str = ""
    """File for the table of measured transfers, if not empty."""

    def lacks_gpus(self, so: str) -> str | None:
        """A text if even the fewest ranks have no GPU each, ended by ``so``; None if they have."""
        world_size = min(self.worlds)
        if self.owns_gpus(world_size):
            return None
        return f"needs a GPU per rank: {self.num_gpus} for {world_size} ranks{so}"

    @property
    def group_limit_s(self) -> float:
        """How long the ranks of one process group may take."""
        return 90.0 if self.quick else 240.0


def run_ranks(
    setting: Setting,
    world_size: int,
    body: Callable[..., Any],
    *arguments: Any,
    limit_s: float | None = None,
    expendable: Collection[int] = (),
) -> list[Any]:
    """Run ``body(rank, *arguments)`` on every rank. Returns its values; None for the ``expendable`` ranks, which may
    die.

    Raises:
        NotRunError: a rank raised it.
        CheckFailedError: a rank failed, died, or had not ended after ``limit_s`` (default: the setting's).
    """
    try:
        return ranks.run_ranks(
            world_size,
            body,
            *arguments,
            place=setting,
            limit_s=limit_s or setting.group_limit_s,
            expendable=expendable,
            preload=(),  # of the checks, each of which has a fork server for its ranks, few train
        )
    except RankFailedError as failure:
        raise CheckFailedError(str(failure)) from None


@dataclass(frozen=True)
class Report:
    """The result of a check that has passed."""

    figures: str
    """One line for the table."""
    data: dict[str, Any] = field(default_factory=dict)
    """All that was measured, for JSON."""
    tables: tuple[Table, ...] = ()
    """Tables of ``data`` for people. They are made in the check's process, so they have no lambdas."""


Body = Callable[[Setting], Report]
"""A check. It passes by returning. It is a function of a module, because it runs in a process of its own."""


# One check in a process group of its own: it may crash, hang or leave ranks behind, and the next one runs


PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
_LOG_LINES = 30


@dataclass(frozen=True)
class Outcome:
    """How one check has ended."""

    name: str
    status: str
    """:data:`PASSED`, :data:`FAILED` or :data:`NOT_RUN`."""
    figures: str = ""
    """What was measured in one line, or the reason for the status."""
    seconds: float = 0.0
    data: dict[str, Any] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()
    log: str = ""
    """The end of what the processes of a failed check printed."""


def run_isolated(name: str, body: str, setting: Setting, limit_s: float) -> Outcome:
    """Run the check at ``body`` (``"module:function"``) for at most ``limit_s`` seconds. A failure of the check raises
    nothing."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="odc-gpu-check-") as folder:
        log = Path(folder, "log")
        process = process_of_fork_server(_main, body, setting, theirs, str(log))
        process.start()
        theirs.close()
        try:
            status, report = _receive(ours, process, limit_s)
        finally:
            _end(process)
            ours.close()
        seconds = time.monotonic() - started
        end = _tail(log) if status == FAILED else ""
        return Outcome(name, status, report.figures, seconds, report.data, report.tables, end)


def _receive(pipe: Connection, process: Any, limit_s: float) -> tuple[str, Report]:
    """What the check's process has sent: status, and what was measured or the reason."""
    wait([pipe, process.sentinel], limit_s)
    if pipe.poll():
        with contextlib.suppress(EOFError):
            message: tuple[str, Report] = pipe.recv()
            return message
    process.join(1.0)
    if process.exitcode is None:
        return FAILED, Report(f"no result within {limit_s:g} s: it hung, and was killed")
    return FAILED, Report(f"its process ended without a result: {_cause(process.exitcode)}")


def _cause(exitcode: int) -> str:
    """
    >>> _cause(-11), _cause(3)
    ('killed by SIGSEGV', 'exit code 3')
    """
    return f"killed by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"exit code {exitcode}"


def _end(process: Any) -> None:
    """The check's process, and whatever it has started, is gone when this returns."""
    process.join(0.5)  # a check that has answered is about to end
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # it may not have made its group yet
    process.join()


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-_LOG_LINES:])


def _main(body: str, setting: Setting, pipe: Connection, log: str) -> None:
    os.setsid()  # ranks, and the fork server that they come from, belong to this group and are killed with it
    tempfile.tempdir = os.path.dirname(log)  # what is left there when it is killed goes with the log
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        setting.be_prepared()
        report = resolve(body)(setting)
        if not isinstance(report, Report):
            raise CheckFailedError(f"{body} returned {report!r}, not a Report")
        pipe.send((PASSED, report))
    except NotRunError as reason:
        pipe.send((NOT_RUN, Report(str(reason))))
    except CheckFailedError as failure:
        traceback.print_exc()
        pipe.send((FAILED, Report(str(failure), failure.data, failure.tables)))
    except BaseException as error:
        traceback.print_exc()
        pipe.send((FAILED, Report(f"{type(error).__name__}: {error}")))
    sys.stdout.flush()
    sys.stderr.flush()
