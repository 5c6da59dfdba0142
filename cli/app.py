"""The ``odc`` command: its options, and where its subcommands live."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from odc._version import __version__
from odc.cli.bench import bench
from odc.cli.doctor.command import doctor
from odc.cli.exec import exec_
from odc.cli.plan import plan
from odc.cli.run import run
from odc.cli.simulate import simulate

_HELP = {"help_option_names": ["-h", "--help"]}  # of subcommands too

app = typer.Typer(
    name="odc",
    context_settings=_HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="On-demand communication for sharded LLM training.\n\n"
    "Without an edit: [bold]odc run --nproc-per-node 8 train.py[/bold]. In a training script: "
    "[bold]session = odc.patch_fsdp(model)[/bold] after sharding the model.",
    epilog="Benchmarks: odc bench list. "
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


for _command in (plan, simulate, doctor):
    app.command(help=_paragraphs(_command))(_command)


# The options are torchrun's and the script's own, or a benchmark's: typer hands them on as they are.
_HANDS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
for _name, _hands_on in (("run", run), ("exec", exec_), ("bench", bench)):
    app.command(_name, help=_paragraphs(_hands_on), add_help_option=False, context_settings=_HANDS_ON)(_hands_on)


def main() -> None:
    """Entry point of ``odc`` and ``python -m odc``."""
    app()
