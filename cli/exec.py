"""``odc exec`` runs any command that starts ranks. Each of these ranks is then a rank of ``odc run``."""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import typer

from odc.cli.run import drawn_timeline
from odc.launch import entering

_PR_SET_PDEATHSIG = 1
_HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_NOBODY = (
    "odc exec: the command ran without ODC: no Python process that it started has called "
    "torch.distributed.init_process_group"
)


def exec_(context: typer.Context) -> None:
    """Run a command that starts ranks by itself, each of them with on-demand communication.

    For launchers and command lines that call torchrun: what they start as ranks goes on as under odc run, unedited.
    Before -- stand ODC's own options, as of odc run.

      odc exec -- llamafactory-cli train config.yaml
      odc exec --dry-run -- accelerate launch --config_file fsdp.yaml train.py
    """
    from odc.launch.options import Parser, check_options, odc_options, option_arguments

    parser = Parser(
        prog="odc exec",
        usage="odc exec [options] -- command [arguments]",
        parents=[odc_options()],
        description="Run a command that starts ranks by itself. ODC starts in each of these ranks.",
        epilog="Example: odc exec -- llamafactory-cli train config.yaml",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the one that starts ranks, then its arguments")
    options = parser.parse_args(context.args)
    command = options.command[options.command[:1] == ["--"] :]
    del options.command
    if not command or shutil.which(command[0]) is None:
        given = f"there is no command {command[0]!r}" if command else "no command"
        parser.error(f"{given}: expected one that starts ranks, as in odc exec -- llamafactory-cli train config.yaml")
    try:
        check_options(options)
    except ValueError as error:
        parser.error(str(error))
    with drawn_timeline(options.timeline):
        status = _run(command, shlex.join(option_arguments(options)))
    raise typer.Exit(status)


def _run(command: Sequence[str], options: str) -> int:
    """Returns the command's exit status, as a shell has it."""
    with tempfile.TemporaryDirectory(prefix="odc-exec-") as folder:
        shutil.copyfile(entering.__file__, Path(folder, "sitecustomize.py"))
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path, entering.OPTIONS: options},
            preexec_fn=functools.partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGTERM),
            start_new_session=True,
        )
        for number in _HANDED_ON:  # to what the command has started in its turn, too
            signal.signal(number, lambda number, frame: os.killpg(process.pid, number))
        status = process.wait()
        if not any(Path(folder).glob("rank*")):
            typer.echo(_NOBODY, err=True)
    return status if status >= 0 else 128 - status
