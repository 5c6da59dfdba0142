"""The ``odc`` command: its own options, its subcommands, and the help of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from odc._version import __version__
from odc.cli.bench import bench
from odc.cli.deprecated import modern
from odc.cli.doctor.command import doctor
from odc.cli.exec import exec_
from odc.cli.plan import context_parallel, hosts, modalities, plan, rollouts
from odc.cli.run import run
from odc.cli.settings import describe
from odc.cli.simulate import simulate

_HELP = {"help_option_names": ["-h", "--help"]}  # of subcommands too


class _Commands(TyperGroup):
    """A command may have two words, as ``odc plan hosts``; old options are understood for one more release."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, arguments, warning = modern(args[0], args[1:], self.commands)
        if warning:
            typer.echo(warning, err=True)
        return super().resolve_command(ctx, [name, *arguments])


app = typer.Typer(
    name="odc",
    cls=_Commands,
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


for _name, _command in {
    "plan": plan,
    "plan context-parallel": context_parallel,
    "plan hosts": hosts,
    "plan rollouts": rollouts,
    "plan modalities": modalities,
    "simulate": simulate,
    "doctor": doctor,
}.items():
    app.command(_name, help=_paragraphs(_command), epilog=describe(getattr(_command, "keys", ())))(_command)


# The options are torchrun's and the script's own, or a benchmark's: typer hands them on as they are.
_HANDS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
for _name, _hands_on in (("run", run), ("exec", exec_), ("bench", bench)):
    app.command(_name, help=_paragraphs(_hands_on), add_help_option=False, context_settings=_HANDS_ON)(_hands_on)


def main() -> None:
    """Entry point of ``odc`` and ``python -m odc``."""
    app()
