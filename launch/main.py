"""One rank of ``odc run``: ``python -m odc.run [options] script.py args...``, under torchrun or alone."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import multiprocessing.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn

from odc.config import LaunchEnvironment
from odc.errors import OdcError, UnsupportedError, shorten
from odc.fsdp_patch import Session
from odc.fsdp_patch.automatic import AutomaticPatching, Say, is_patching
from odc.fsdp_patch.patching import patch_fsdp
from odc.launch import report
from odc.launch.dry_run import DryRun
from odc.launch.observe import Observation
from odc.launch.options import Parser, check_options, odc_options
from odc.launch.script import last_line, leave_last_words, run_module, run_script, without_launcher

_REPORT_S = 10.0  # for the store to answer
_LAUNCHERS = {
    *("torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed"),
    *("accelerate launch", "accelerate.commands.launch", "odc.run"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a training script with FSDP patched; the script sees itself as ``__main__`` and its own arguments."""
    parser = Parser(
        prog="python -m odc.run",
        parents=[odc_options()],
        description="Run an unmodified FSDP training script with on-demand communication. Start it under torchrun "
        "(torchrun --nproc-per-node 8 -m odc.run script.py args...), or use `odc run`, which does.",
    )
    parser.add_argument("-m", "--module", action="store_true", help="script is a module, as in python -m")
    parser.add_argument("script", help="the training script, followed by its own arguments")
    parser.add_argument("script_args", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    try:
        launch = LaunchEnvironment.from_environment()
        check_options(options)
    except ValueError as error:
        raise SystemExit(f"odc run: {error}") from None
    if not options.module and not Path(options.script).exists():
        raise SystemExit(f"odc run: no such script: {options.script}")
    patched = _begin(options, launch, None)
    ending: BaseException | None = None
    try:
        _run_script(options)
    except BaseException as error:
        ending = error
    ending = patched.end(ending)
    if ending is None:
        return
    if not isinstance(ending, SystemExit):
        shows = sys.excepthook
        sys.excepthook = lambda kind, raised, trace: shows(
            kind, raised.with_traceback(without_launcher(trace)), raised.__traceback__
        )
    raise ending


def begin(arguments: Sequence[str]) -> Callable[[], object]:
    """In a process that has just made its process group, below ``odc exec``: what :func:`main` does around a script.

    Returns what ends this, to be called where the group is destroyed. The end of the process calls it as well, of one
    that ``multiprocessing`` has started for a function, too.
    """
    options = Parser(parents=[odc_options()]).parse_args(arguments)
    if is_patching():
        return lambda: None
    numbers = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    store = dist.distributed_c10d._get_default_store()
    launch = LaunchEnvironment.from_environment({**os.environ, **numbers})
    patched: Patched | None = _begin(options, launch, store)
    shows = sys.excepthook

    def end(error: BaseException | None = None) -> BaseException | None:
        nonlocal patched
        ended, patched = patched, None
        error = error or sys.exc_info()[1]
        if isinstance(error, SystemExit) and error.code:  # by which torch ends a process whose function has raised
            error = error.__context__ or error
        return error if ended is None else ended.end(error)

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ending = end(error)
        if isinstance(ending, SystemExit):
            _print(str(ending.code))
        else:
            shows(kind, error, trace)

    sys.excepthook = show
    atexit.register(end)
    multiprocessing.util.Finalize(None, end, exitpriority=0)
    return end


class Patched(Protocol):
    """What was begun before the code of a script."""

    def end(self, ending: BaseException | None) -> BaseException | None:
        """Behind it, where it has ended with ``ending``. Returns with what the process is to end."""


def _begin(options: argparse.Namespace, launch: LaunchEnvironment, store: report.Store | None) -> Patched:
    say = _on_rank_0(launch)
    return _DryRun(options, launch, say) if options.dry_run else _Run(options, launch, store, say)


class _Run:
    """FSDP patched, trainers balanced where that is asked for, and the run observed.

    Args:
        store: of the process group, for a report where there is none of torchrun's.
    """

    def __init__(
        self, options: argparse.Namespace, launch: LaunchEnvironment, store: report.Store | None, say: Say
    ) -> None:
        self._options, self._launch, self._store, self._say = options, launch, store, say
        patch = functools.partial(
            patch_fsdp,
            transport=options.transport,
            accumulate=options.accumulate,
            deterministic=options.deterministic,
            share_in_host=options.share_in_host,
            timeout_s=options.timeout,
        )
        self._undo = _balance(options, say)
        self._measurements = report.Measurements()
        self._observation = Observation(launch, options.timeline, options.live, say)
        self._patching = AutomaticPatching(patch, say, on_patched=self._on_patched)
        self._process = os.getpid()

    def _on_patched(self, module: nn.Module, session: Session, computes: bool) -> None:
        self._observation.begin(session)
        self._measurements.begin(module, session, computes)

    def end(self, ending: BaseException | None) -> BaseException | None:
        """Give the models back, and report."""
        if os.getpid() != self._process:  # a child that the script forked: sessions and report are its parent's
            return ending
        failed = ending is not None and not (isinstance(ending, SystemExit) and ending.code in (None, 0))
        for bar in _open_bars():  # as at Python's end: lines of other ranks may follow
            bar.close()
        self._observation.close(has_failed=failed)
        is_left = False
        if failed:
            assert ending is not None
            # First: ranks that are told end, and torchrun then ends this one.
            is_left = leave_last_words(self._launch, ending)
            self._patching.abort(ending)
        accounts = self._measurements.accounts()
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(self._undo)
                stack.callback(self._patching.close)
                stack.callback(self._measurements.close)
        except Exception as error:
            if not failed:
                return _shown(error, self._options, leave_last_words(self._launch, error))
            _print(f"odc: closing: {type(error).__name__}: {error}")  # what the script died of matters more
        if failed:
            assert ending is not None
            return _shown(ending, self._options, is_left)
        if accounts:
            _report(self._launch, accounts, self._patching.learned, self._store)
        else:
            self._say("odc: nothing was patched: no FSDP model computed anything in this script")
        return None


class _DryRun:
    """Nothing patched, and the script ended after its first optimizer step."""

    def __init__(self, options: argparse.Namespace, launch: LaunchEnvironment, say: Say) -> None:
        self._options, self._launch, self._say = options, launch, say
        self._dry_run = DryRun(say)

    def end(self, ending: BaseException | None) -> BaseException | None:
        """Say what came of it; the process ends with status 1 where that was no optimizer step, or is refused."""
        self._dry_run.close()
        if isinstance(ending, OdcError):
            self._say(f"odc: would refuse this script: {ending}")
            leave_last_words(self._launch, ending)
            return SystemExit(1)
        if self._dry_run.is_complete:  # said already; an exit handler does not see the SystemExit that has ended it
            if self._dry_run.refused is not None:
                leave_last_words(self._launch, self._dry_run.refused)
            return ending
        if isinstance(ending, Exception):
            return _shown(ending, self._options, leave_last_words(self._launch, ending))
        if ending is not None and not (isinstance(ending, SystemExit) and ending.code in (None, 0)):
            return ending
        self._say("odc: dry run: the script ended without an optimizer step on an FSDP model; nothing was patched")
        return SystemExit(1)


def _shown(error: BaseException, options: argparse.Namespace, is_left: bool) -> BaseException:
    """As Python would end, but for errors of ODC: one line, said by the launcher if it is ``odc run`` and finds it."""
    if not isinstance(error, OdcError):
        return error
    if options.traceback:
        traceback.print_exception(error)
    return SystemExit(1 if is_left and options.launcher_tells else last_line(error, 0))


def _report(
    launch: LaunchEnvironment, accounts: Sequence[report.Account], learned: str, store: report.Store | None = None
) -> None:
    """A training that has succeeded does not fail for want of a report. ``learned``: by loaders, on each rank alike."""
    from odc.balance.data.watched_store import WatchedStore

    try:
        asked = WatchedStore(lambda: report.open_store(launch) or store, "the ranks leave what they have measured")
        lines = asked.ask(lambda there: None if there is None else report.leave(there, launch, accounts), _REPORT_S)
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        _print(f"odc: no report from rank {launch.rank}: {type(error).__name__}: {error}")
        return
    for line in lines or []:
        _print(line)
    if lines and learned:
        _print(f"odc: {learned}")


def _balance(options: argparse.Namespace, say: Say) -> Callable[[], None]:
    """Let the script's trainers run balanced minibatches, if that was asked for. Returns the undo."""
    if options.balance is None and not options.online:
        return lambda: None
    from odc.trainers import install

    way = "--online" if options.online else f"--balance {options.balance}"
    launched = install(
        options.balance,
        options.max_tokens,
        online=options.online,
        pool_size=options.pool_size,
        late_binding=options.late_binding,
    )

    def undo() -> None:
        launched.close()
        if launched.used:
            say(f"odc: balanced {'online' if options.online else f'by {options.balance}'}: {launched.tally}")
        else:
            say(
                f"odc: {way} had no effect: the script trained with no transformers Trainer. A "
                "loop of one's own needs one line: odc.trainers.minibatches"
            )

    return undo


def _refuse_launchers(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: a script that starts ranks would do so once in each rank."""
    words = [str(word) for word in arguments[1]] if event == "subprocess.Popen" and arguments[1] else []
    if starts_ranks(words):
        raise UnsupportedError(
            f"the script starts ranks of its own ({shorten(' '.join(words))}), and so would each rank of odc run: give "
            "the command to odc exec, which lets it start them: odc exec -- command"
        )


def starts_ranks(words: Sequence[str]) -> bool:
    """Whether that is the command line of a launcher.

    >>> starts_ranks(["python", "-u", "-m", "torch.distributed.run", "x.py"]), starts_ranks(["accelerate", "env"])
    (True, False)
    """
    names = [os.path.basename(word) for word in words if not word.startswith("-")]
    names = names[bool(names) and names[0].startswith("python") :]
    return bool(_LAUNCHERS & {*names[:1], " ".join(names[:2])})


def _run_script(options: argparse.Namespace) -> None:
    """As ``python script args`` or ``python -m module args`` would."""
    if options.launcher_tells:  # by `odc run`
        sys.addaudithook(_refuse_launchers)
    (run_module if options.module else run_script)(options.script, options.script_args)


def _on_rank_0(launch: LaunchEnvironment) -> Say:
    def say(text: str) -> None:
        if launch.rank == 0:
            _print(text)

    return say


def _print(text: str) -> None:
    """To stderr, if it is still open: what a script prints on stdout is its own. On a line of its own."""
    with contextlib.suppress(OSError, ValueError):
        print("\n" * bool(_open_bars()) + text, file=sys.stderr, flush=True)


def _open_bars() -> list[Any]:
    """Progress bars of the script's that have left the cursor behind what they have drawn."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return [bar for bar in getattr(tqdm, "_instances", ()) if not bar.disable]
