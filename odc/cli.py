"""The ``odc`` command."""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from odc._version import __version__
from odc.topology import Topology
from odc.transports import registry

app = typer.Typer(
    name="odc",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="On-demand communication for sharded LLM training.\n\n"
    "In a training script: [bold]session = odc.patch_fsdp(model)[/bold], then "
    "[bold]with session.minibatch():[/bold] around the microbatches of one optimizer step.",
    epilog="Benchmark: torchrun --nproc-per-node 2 -m odc.bench.primitives --json FILE. "
    "Environment: ODC_TIMEOUT (seconds of silence after which a wait fails), ODC_TRANSPORT, ODC_ACCUMULATE, ODC_FAULT.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"odc {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show versions and which transports this machine can use, and why not the others."""
    topology = Topology(0, (os.uname().nodename,), (os.uname().nodename,), (os.getpid(),))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    transports = {
        name: registry.load(name).unavailable(topology, torch.device("cpu")) or "available" for name in registry.names()
    }
    facts = {
        "odc": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "device": str(device),
        "open files limit": str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        **{f"transport {name}": state for name, state in transports.items()},
    }
    if as_json:
        typer.echo(json.dumps(facts))
        return
    table = Table(title="odc on this machine", show_header=False)
    for name, value in facts.items():
        table.add_row(name, value)
    Console().print(table)


def main() -> None:
    """Entry point of ``odc`` and ``python -m odc``."""
    app()
