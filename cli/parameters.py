"""Gives a function the parameters of several others. Typer makes options of parameters."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence

Command = Callable[..., None]


def parameters_of(function: Callable[..., object]) -> list[inspect.Parameter]:
    """By keyword, with annotations that need no module to be understood."""
    hints = typing.get_type_hints(function, include_extras=True)
    return [
        parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(function).parameters.values()
    ]


def with_parameters(command: Command, parameters: Sequence[inspect.Parameter], text: str | None) -> Command:
    """Let typer see these parameters, and this help."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = text
    return command
