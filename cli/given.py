"""What all plans and studies are given: the options that they share, and what is read of these.

A command is written as a function of :class:`Given` and of options of its own; :func:`takes` makes it one for typer.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from odc.cli import options
from odc.cli.costs import Training, make_training
from odc.cli.lengths import Lengths, read_lengths
from odc.cli.output import check_plot, errors_in_one_line
from odc.cli.records import TokenCounter
from odc.cli.settings import Settings, read_settings

Command = Callable[..., None]
_HELP = "A setting that is rarely changed; repeatable. Its keys are below."


@dataclass(frozen=True, kw_only=True)
class Given:
    """Options that every plan and every study has."""

    lengths: options.Lengths
    world_size: options.WorldSize = 8
    minibatch_size: options.MinibatchSize = 4
    model: options.Model = "qwen2.5-7b"
    device: options.DeviceName = "h100"
    field: options.Field = None
    tokenizer: options.Tokenizer = None
    as_json: options.AsJson = False
    plot: options.Plot = None
    settings: Settings

    @property
    def fields(self) -> Sequence[str]:
        """Columns of the samples, that are counted."""
        return self.field or ()

    def token_counter(self) -> TokenCounter:
        """For text."""
        return TokenCounter(self.tokenizer, self.settings.chars_per_token)

    def read_lengths(self, num_samples: int) -> Lengths:
        """The lengths of all samples; of a law, of so many."""
        counter = self.token_counter()
        return read_lengths(self.lengths, num_samples=num_samples, fields=self.fields, count_tokens=counter)

    def training(self, *, hosts: int = 1, with_transfers: bool = False) -> Training:
        """What is trained, on what, and what that costs."""
        settings = self.settings
        return make_training(
            self.model,
            self.device,
            settings.mfu,
            self.world_size,
            recompute=settings.recompute,
            timings=settings.timings,
            microbatch_cost=settings.microbatch_cost,
            transfers_ms=(settings.gather_ms, settings.scatter_ms) if with_transfers else (0.0, 0.0),
            hosts=hosts,
        )


def takes(*keys: str, **defaults: object) -> Callable[[Command], Command]:
    """Make a command of a function of :class:`Given`, and of options of its own.

    Args:
        keys: of ``--set``, those that the command looks at.
        defaults: of options that it shares, where they are not those of plans.
    """
    hints = typing.get_type_hints(Given, include_extras=True)
    hints["settings"] = Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_HELP, show_default=False)
    ]
    values = {"settings": None, **defaults}
    first, *others = (
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hint,
            default=values.get(name, getattr(Given, name, inspect.Parameter.empty)),
        )
        for name, hint in hints.items()
    )

    def decorate(function: Command) -> Command:
        def command(**values: Any) -> None:
            with errors_in_one_line():
                shared = {each.name: values.pop(each.name) for each in (first, *others)}
                check_plot(shared["plot"])
                settings = read_settings(shared["settings"] or (), keys)
                function(Given(**{**shared, "settings": settings}), **values)

        command.keys = keys  # type: ignore[attr-defined]
        return with_options(command, [first, *own_options(function), *others], function.__doc__)

    return decorate


def own_options(function: Command) -> list[inspect.Parameter]:
    """The parameters of a function but the first, as typer wants them."""
    hints = typing.get_type_hints(function, include_extras=True)
    return [
        parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in list(inspect.signature(function).parameters.values())[1:]
    ]


def with_options(command: Command, parameters: Sequence[inspect.Parameter], text: str | None) -> Command:
    """Let typer see these parameters, and this help."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = text
    return command
