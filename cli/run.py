"""``odc run``: torchrun, with FSDP patched before the script starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import typer


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

    options = rank_options(arguments)
    try:
        torchrun(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:  # the rank has printed its own traceback
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    except SignalException as error:  # the ranks have been ended
        typer.echo(f"odc run: ended by {error.sigval.name}", err=True)
        raise typer.Exit(128 + error.sigval) from None


def rank_options(arguments: Sequence[str]) -> argparse.Namespace:
    """torchrun's options for ranks that patch FSDP and then run the script."""
    from torch.distributed.run import get_args_parser

    from odc.fsdp_patch.launch.main import odc_options, option_arguments

    of_torchrun = get_args_parser()
    of_torchrun._optionals.title = "torchrun"  # else argparse lists them before ODC's
    for action in of_torchrun._actions:
        if len(action.option_strings) > 1 and action.nargs != 0 and action.metavar is None:
            action.metavar = "X"  # the name again, for each spelling of the option, is wider than a terminal
    parser = argparse.ArgumentParser(
        prog="odc run",
        usage="odc run [options] [-m] script.py [arguments of the script]",
        parents=[odc_options(), of_torchrun],
        add_help=False,  # torchrun has it
        description="torchrun with on-demand communication: the script needs no edit. All options but those of the "
        "first group are torchrun's.",
        epilog="Example: odc run --nproc-per-node 8 train.py --config my.yaml",
    )
    options = parser.parse_args(list(arguments))
    if options.no_python or options.run_path:
        parser.error("--no-python and --run-path cannot be used: ODC patches FSDP in a Python process of each rank")
    if not options.module and not os.path.exists(options.training_script):
        parser.error(f"no such script: {options.training_script}")
    unset = all(getattr(options, name) == parser.get_default(name) for name in ("rdzv_endpoint", "master_port"))
    if options.rdzv_backend == "static" and unset and options.nnodes in ("1", "1:1"):
        options.standalone = True  # a free port, where older versions of torchrun take 29500 for every launch
    script = ["--module"] * options.module + [options.training_script, *options.training_script_args]
    options.training_script, options.module = "odc.run", True
    options.training_script_args = [*option_arguments(options), *script]
    return options
