"""``odc run`` is torchrun, and patches FSDP before the script starts."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

import typer

from odc.errors import shorten, shown

_MOST_RANKS = 1024  # on one host: more are a mistake, and would take its memory before anybody sees it
_DRAWN = 4  # minibatches, in the picture of a timeline
_NOT_A_SCRIPTS = r"--(nproc-per-node|nnodes|node-rank|standalone|rdzv-.+|master-.+|dry-run|balance|late-binding)"


def run(context: typer.Context) -> None:
    """Run an unmodified FSDP training script with on-demand communication.

    Takes the options of torchrun. FSDP1 and FSDP2 models are patched at their first forward; a minibatch ends where the
    script first clips gradients, unscales them or steps its optimizer. At the end one line tells the waiting saved.

      odc run --nproc-per-node 8 train.py --config my.yaml
      odc run --nproc-per-node 8 --dry-run train.py --config my.yaml
      torchrun --nproc-per-node 8 -m odc.run train.py --config my.yaml
    """
    launch(context.args)


def launch(arguments: Sequence[str]) -> None:
    """Start the ranks. Heavy imports happen here, not when the command line is built."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run as torchrun

    from odc.launch.script import last_words

    options = rank_options(arguments)
    try:
        with drawn_timeline(options.timeline):
            torchrun(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _end(last_words(error.failures), 1)
    except SignalException as error:  # the ranks have been ended
        _end(f"odc run: ended by {error.sigval.name}", 128 + error.sigval)
    except Exception as error:  # of torchrun's own making: an option, the rendezvous, a limit
        what = f"{type(error).__name__}: {shorten(' '.join(str(error).split()))}".removesuffix(": ")
        _end(f"odc run: torchrun could not start the ranks: {what}", 2)


@contextmanager
def drawn_timeline(folder: str | None) -> Iterator[None]:
    """Behind the block, draw what the ranks of this host have left there in it (``--timeline``), however it ends."""
    if folder is None:
        yield
        return
    places = (Path(folder, socket.gethostname()), Path(folder))
    for path in (path for place in places for path in place.glob("timeline-rank*.json")):
        path.unlink()
    try:
        yield
    finally:
        found = [place for place in places if any(place.glob("timeline-rank*.json"))]
        try:
            _draw_timeline(found[0] if found else places[1])
        except OSError as error:  # the run has ended as it has
            typer.echo(f"odc: --timeline: {error}", err=True)


def _draw_timeline(folder: Path) -> None:
    from odc.bench.training.bubble import Recording, write_trace

    recording = Recording.read(folder)
    numbers = recording.minibatches
    if not numbers:
        typer.echo(f"odc: --timeline {folder}: no rank of this host has ended a minibatch", err=True)
        return
    write_trace(folder / "trace.json", {"odc run": recording})
    made = "trace.json (open it at ui.perfetto.dev)"
    if importlib.util.find_spec("matplotlib") is not None:
        from odc.bench.training.plots import plot_timelines

        shown_ones = {f"minibatch {number}": recording.segments([number]) for number in numbers[-_DRAWN:]}
        plot_timelines(folder / "timeline.png", shown_ones, "The last minibatches")
        made = f"timeline.png and {made}"
    typer.echo(f"odc: {folder}: {made}, of the last {len(numbers)} minibatches", err=True)


def _end(text: str, code: int) -> NoReturn:
    typer.echo(text, err=True)
    raise typer.Exit(code) from None


def rank_options(arguments: Sequence[str]) -> argparse.Namespace:
    """torchrun's options for ranks that patch FSDP and then run the script; exits where one cannot be used."""
    from torch.distributed.run import get_args_parser

    from odc.launch.options import Parser, check_options, odc_options, option_arguments

    of_torchrun = get_args_parser()
    of_torchrun._optionals.title = "torchrun"  # else argparse lists them before ODC's
    for action in of_torchrun._actions:
        if len(action.option_strings) > 1 and action.nargs != 0 and action.metavar is None:
            action.metavar = "X"  # the name again, for each spelling of the option, is wider than a terminal
    parser = Parser(
        prog="odc run",
        usage="odc run [options] [-m] script.py [arguments of the script]",
        parents=[odc_options(), of_torchrun],
        add_help=False,  # torchrun has it
        description="torchrun with on-demand communication: the script needs no edit. All options but those of the "
        "first group are torchrun's.",
        epilog="Example: odc run --nproc-per-node 8 train.py --config my.yaml",
    )
    options = parser.parse_args(list(arguments))
    try:
        check_options(options)
        check_launch(options)
    except ValueError as error:
        parser.error(str(error))
    _say_what_the_script_gets(options)
    unset = all(getattr(options, name) == parser.get_default(name) for name in ("rdzv_endpoint", "master_port"))
    if options.rdzv_backend == "static" and unset and options.nnodes in ("1", "1:1"):
        options.standalone = True  # a free port, where older versions of torchrun take 29500 for every launch
    script = ["--module"] * options.module + [options.training_script, *options.training_script_args]
    options.launcher_tells = True
    options.training_script, options.module = "odc.run", True
    options.training_script_args = [*option_arguments(options), *script]
    return options


def _say_what_the_script_gets(options: argparse.Namespace) -> None:
    """Of options that scripts hardly have, and that change nothing behind the script."""
    for argument in options.training_script_args:
        if re.fullmatch(_NOT_A_SCRIPTS, argument.partition("=")[0].replace("_", "-")):
            typer.echo(
                f"odc run: {argument} stands behind the script, which gets it; options of odc run stand before "
                f"{shorten(options.training_script)}",
                err=True,
            )
            return


def check_launch(options: argparse.Namespace) -> None:
    """Refuse options of torchrun that it would answer with a traceback without a reason, or not at all.

    Raises:
        ValueError: says which option, what was given and what was expected.
    """
    if options.no_python or options.run_path:
        raise ValueError("--no-python and --run-path cannot be used: ODC patches FSDP in a Python process of each rank")
    _check_script(options.training_script, is_module=options.module)
    _check_sizes(options)
    for name in filter(None, (getattr(options, "signals_to_handle", None) or "").split(",")):
        if name.strip() not in signal.Signals.__members__:
            raise ValueError(f"--signals-to-handle {shown(name)}: expected names of signals, as in SIGTERM,SIGINT")
    if options.local_addr:
        try:
            socket.getaddrinfo(options.local_addr, None)
        except (OSError, UnicodeError) as error:
            raise ValueError(f"--local-addr {shown(options.local_addr)} is no address of this host: {error}") from None


def _check_script(script: str, *, is_module: bool) -> None:
    if not is_module:
        if not os.path.exists(script):
            raise ValueError(f"no such script: {shorten(script)}")
        if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
            raise ValueError(f"{shown(script)} is a folder without a __main__.py: expected a script")
        if not os.access(script, os.R_OK):
            raise ValueError(f"{shown(script)} may not be read by this user")
        return
    package = script.partition(".")[0]  # nothing is imported here
    found = package in sys.modules or PathFinder.find_spec(package, [os.getcwd()]) is not None
    if not package or not (found or importlib.util.find_spec(package) is not None):
        raise ValueError(f"-m {shown(script)}: there is no module {shown(package)} in this folder or installed")


def _check_sizes(options: argparse.Namespace) -> None:
    from torch.distributed.run import determine_local_world_size

    given = options.nproc_per_node
    if not 1 <= determine_local_world_size(given) <= _MOST_RANKS:  # raises ValueError where it is no number
        raise ValueError(f"--nproc-per-node {shown(given)}: expected 1 to {_MOST_RANKS} ranks on a host")
    if re.fullmatch(r"\d{1,6}(:\d{1,6})?", options.nnodes) is None:
        raise ValueError(f"--nnodes {shown(options.nnodes)}: expected a number of hosts, or MIN:MAX")
    least, most = (int(number) for number in (options.nnodes.split(":") * 2)[:2])
    if not 1 <= least <= most:
        raise ValueError(f"--nnodes {options.nnodes}: expected at least 1 host, and MIN not above MAX")
    if options.standalone and most > 1:
        raise ValueError(f"--standalone is for one host: leave it out, or --nnodes {options.nnodes}")
    if not 0 < options.monitor_interval < math.inf:
        raise ValueError(f"--monitor-interval {options.monitor_interval}: expected a number of seconds above 0")
    if options.rdzv_backend == "static" and not 0 <= options.node_rank < most:
        raise ValueError(f"--node-rank {options.node_rank}: expected 0 to {most - 1}, as there are {most} hosts")
