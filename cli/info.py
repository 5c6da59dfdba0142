"""``odc info``: what this machine has."""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from odc._version import __version__


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show versions and which transports this machine can use, and why not the others."""
    import torch

    from odc.topology import Topology
    from odc.transports import registry

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
