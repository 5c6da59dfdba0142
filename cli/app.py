"""The ``odc`` command: its options, and where its subcommands live."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from odc._version import __version__
from odc.cli.info import info
from odc.cli.plan import plan
from odc.cli.simulate import simulate

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


def _paragraphs(command: Callable[..., Any]) -> str:
    """The docstring, each paragraph on one line: help keeps the line breaks that it finds. Examples are indented."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(text if text.startswith(" ") else " ".join(text.split()) for text in paragraphs)


for _command in (plan, simulate, info):
    app.command(help=_paragraphs(_command))(_command)


def main() -> None:
    """Entry point of ``odc`` and ``python -m odc``."""
    app()
