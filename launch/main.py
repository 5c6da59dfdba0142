"""One rank of ``odc run``: ``python -m odc.run [options] script.py args...``, under torchrun or alone."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from odc.config import LaunchEnvironment, RuntimeConfig
from odc.errors import ConfigError, OdcError, UnsupportedError, shorten
from odc.fsdp_patch import Session
from odc.fsdp_patch.automatic import AutomaticPatching, Say
from odc.fsdp_patch.patching import patch_fsdp
from odc.launch import report
from odc.launch.dry_run import DryRun
from odc.launch.entering import starts_ranks
from odc.launch.observe import Observation
from odc.launch.script import last_line, leave_last_words, run_module, run_script, without_launcher
from odc.liveness.faults import FaultInjector
from odc.transports import registry

_REPORT_S = 10.0  # for torchrun's store to answer


class Parser(argparse.ArgumentParser):
    """Errors in one line, without a usage that is longer than a terminal, and with the option that was meant."""

    def error(self, message: str) -> NoReturn:
        kind, _, unknown = message.partition("unrecognized arguments: ")
        if unknown and not kind:
            given = unknown.split()[0].partition("=")[0]
            near = difflib.get_close_matches(given.replace("_", "-"), self._option_string_actions, 1)
            message = f"{message}; did you mean {near[0]}?" if near else message
        self.exit(2, f"{self.prog}: error: {shorten(message, 600)} (odc run -h lists the options)\n")


def odc_options() -> argparse.ArgumentParser:
    """The options of ODC itself, without help and without the script."""
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("on-demand communication")
    group.add_argument(
        "--dry-run", action="store_true", help="say what would be patched, and stop after the first optimizer step"
    )
    group.add_argument(
        "--transport",
        default="auto",
        help="name of a transport, or package.module:Class (default: the first that works)",
    )
    group.add_argument("--accumulate", default="auto", choices=["auto", "direct", "daemon"], help="who adds gradients")
    group.add_argument(
        "--share-in-host",
        default="auto",
        metavar="{auto,on,off,BYTES}",
        help="on several hosts: ranks of a host share parameters and gradients, which then cross once a step; as many "
        "units as take so many bytes of a rank (default: a half of its free memory)",
    )
    group.add_argument(
        "--deterministic", action="store_true", help="bit-equal gradients whatever the timing, for more memory"
    )
    group.add_argument(
        "--balance",
        metavar="POLICY",
        help="share out the samples of each optimizer step of a transformers Trainer or TRL SFTTrainer by this policy "
        "of odc.balance (lb-mini, lb-micro, ...)",
    )
    group.add_argument(
        "--online",
        action="store_true",
        help="the same without a policy, for samples whose lengths are known only once they are read, iterable "
        "datasets too: ranks fill equal quotas of cost from pools of samples (needs --max-tokens)",
    )
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="with --balance or --online: tokens of a microbatch (--balance: by default the longest sample)",
    )
    group.add_argument(
        "--pool-size", type=int, metavar="N", help="with --online: samples of a rank to choose from (default: 256)"
    )
    group.add_argument(
        "--late-binding",
        action="store_true",
        help="with --balance lb-mini: ranks that are through before others take samples from these",
    )
    group.add_argument(
        "--timeline",
        type=os.path.abspath,
        metavar="FOLDER",
        help="save there what each rank did in the last minibatches: a picture, and a trace for ui.perfetto.dev",
    )
    group.add_argument(
        "--live", action="store_true", help="show each minibatch on the terminal: which ranks compute, which ones wait"
    )
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds of silence that are an error")
    group.add_argument(
        "--traceback", action="store_true", help="where an error of ODC ends the script, say it with its traceback, too"
    )
    group.add_argument("--launcher-tells", action="store_true", help=argparse.SUPPRESS)  # `odc run` says errors last
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Refuse what no rank could use, the ``ODC_*`` variables included; before any rank is started, and on each.

    Raises:
        ConfigError, ValueError: an option or a variable has a value that cannot be used.
    """
    config = RuntimeConfig.from_environment(
        transport=options.transport,
        accumulate=options.accumulate,
        share_in_host=options.share_in_host,
        timeout_s=options.timeout,
    )
    registry.check_name(config.transport)
    if options.timeline is not None and Path(options.timeline).is_file():
        raise ConfigError(f"--timeline {options.timeline}: this is a file; expected a folder")
    FaultInjector(config.fault, rank=0)
    if options.balance is None and not options.online:
        needs = {"max_tokens": "--balance and --online", "pool_size": "--online", "late_binding": "--balance lb-mini"}
        for name, needed in needs.items():
            value = getattr(options, name)
            if value is not None and value is not False:
                raise ConfigError(f"--{name.replace('_', '-')} is of {needed}: give that, too")
        return
    if options.balance is not None and options.online:
        raise ConfigError(f"--online with --balance {options.balance}: give one of them")
    if options.online and options.max_tokens is None:
        raise ConfigError("--online needs --max-tokens, as lengths are not known before samples are read")
    from odc.trainers import BalanceOptions  # the only use of that room here and below, and it is heavy

    try:
        BalanceOptions.choose(
            options.balance,
            online=options.online,
            max_tokens=options.max_tokens,
            pool_size=options.pool_size,
            late_binding=options.late_binding,
        )
    except ValueError as error:
        raise ConfigError(f"--{'online' if options.online else 'balance'}: {error}") from None


def option_arguments(options: argparse.Namespace) -> list[str]:
    """``options`` as arguments again, for the ranks."""
    arguments = list[str]()
    for action in odc_options()._actions:
        value = getattr(options, action.dest)
        if value is not None and value is not False:
            arguments += action.option_strings if value is True else [*action.option_strings, str(value)]
    return arguments


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
    say = _on_rank_0(launch)
    if options.dry_run:
        _dry_run(options, launch, say)
    else:
        _run(options, launch, say)


def _run(options: argparse.Namespace, launch: LaunchEnvironment, say: Say) -> None:
    patch = functools.partial(
        patch_fsdp,
        transport=options.transport,
        accumulate=options.accumulate,
        deterministic=options.deterministic,
        share_in_host=options.share_in_host,
        timeout_s=options.timeout,
    )
    undo = _balance(options, say)
    measurements = report.Measurements()
    observation = Observation(launch, options.timeline, options.live, say)

    def on_patched(module: nn.Module, session: Session, computes: bool) -> None:
        observation.begin(session)
        measurements.begin(module, session, computes)

    patching = AutomaticPatching(patch, say, on_patched=on_patched)
    process = os.getpid()
    ending: BaseException | None = None
    try:
        _run_script(options)
    except BaseException as error:
        ending = error
    failed = ending is not None and not (isinstance(ending, SystemExit) and ending.code in (None, 0))
    if os.getpid() != process:  # a child that the script forked: sessions and report are its parent's
        if ending is not None:
            raise ending
        return
    for bar in _open_bars():  # as at Python's end: lines of other ranks may follow
        bar.close()
    observation.close(has_failed=failed)
    is_left = False
    if failed:
        assert ending is not None
        is_left = leave_last_words(launch, ending)  # first: ranks that are told end, and torchrun then ends this one
        patching.abort(ending)
    accounts = measurements.accounts()
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(undo)
            stack.callback(patching.close)
            stack.callback(measurements.close)
    except Exception as error:
        if not failed:
            _end_with(error, options, leave_last_words(launch, error))
        _print(f"odc: closing: {type(error).__name__}: {error}")  # what the script died of matters more
    if failed:
        assert ending is not None
        _end_with(ending, options, is_left)
    if not accounts:
        say("odc: nothing was patched: no FSDP model computed anything in this script")
        return
    _report(launch, accounts, patching.learned)


def _end_with(error: BaseException, options: argparse.Namespace, is_left: bool) -> NoReturn:
    """As Python would end, but for errors of ODC: one line, said by the launcher if it is ``odc run`` and finds it."""
    if not isinstance(error, OdcError):
        shows = sys.excepthook
        sys.excepthook = lambda kind, raised, trace: shows(
            kind, raised.with_traceback(without_launcher(trace)), raised.__traceback__
        )
        raise error
    if options.traceback:
        traceback.print_exception(error)
    raise SystemExit(1 if is_left and options.launcher_tells else last_line(error, 0))


def _report(launch: LaunchEnvironment, accounts: Sequence[report.Account], learned: str) -> None:
    """A training that has succeeded does not fail for want of a report. ``learned``: by loaders, on each rank alike."""
    from odc.balance.data.watched_store import WatchedStore

    try:
        store = WatchedStore(lambda: report.open_store(launch), "the ranks leave what they have measured")
        lines = store.ask(lambda there: None if there is None else report.leave(there, launch, accounts), _REPORT_S)
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


def _dry_run(options: argparse.Namespace, launch: LaunchEnvironment, say: Say) -> None:
    dry_run = DryRun(say)
    try:
        _run_script(options)
    except OdcError as error:
        say(f"odc: would refuse this script: {error}")
        leave_last_words(launch, error)
        raise SystemExit(1) from None
    except SystemExit as error:
        if dry_run.is_complete and dry_run.refused is not None:
            leave_last_words(launch, dry_run.refused)
        if dry_run.is_complete or error.code not in (None, 0):
            raise
    except Exception as error:
        _end_with(error, options, leave_last_words(launch, error))
    finally:
        dry_run.close()
    say("odc: dry run: the script ended without an optimizer step on an FSDP model; nothing was patched")
    raise SystemExit(1)


def _refuse_launchers(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: a script that starts ranks would do so once in each rank."""
    words = [str(word) for word in arguments[1]] if event == "subprocess.Popen" and arguments[1] else [""]
    if starts_ranks(words):
        raise UnsupportedError(
            f"the script starts ranks of its own ({shorten(' '.join(words))}), and so would each rank of odc run: give "
            "the command to odc exec, which lets it start them: odc exec -- command"
        )


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
