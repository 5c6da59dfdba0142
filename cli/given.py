"""The options that all plans and studies share, and what is read from these options.

A command is written as a function of :class:`Given` and of options of its own. :func:`takes` makes it one for typer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from odc.cli import options
from odc.cli.costs import Training, make_training
from odc.cli.keys import read_keys
from odc.cli.lengths import Lengths, read_lengths
from odc.cli.options import Command, parameters_of, with_parameters
from odc.cli.output import check_plot, errors_in_one_line
from odc.cli.records import RecordReader, TokenCounter
from odc.cli.settings import Settings


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

    def reader(self) -> RecordReader:
        """What counts the tokens of samples."""
        return RecordReader(self.field or (), TokenCounter(self.tokenizer, self.settings.chars_per_token))

    def read_lengths(self, num_samples: int) -> Lengths:
        """The lengths of all samples; of a law, of so many."""
        return read_lengths(self.lengths, self.reader(), num_samples=num_samples)

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
    shared = [
        parameter.replace(default=defaults.get(parameter.name, parameter.default)) for parameter in parameters_of(Given)
    ]
    shared[-1] = shared[-1].replace(annotation=options.Set, default=None)

    def decorate(function: Command) -> Command:
        def command(**values: Any) -> None:
            with errors_in_one_line():
                given = {parameter.name: values.pop(parameter.name) for parameter in shared}
                check_plot(given["plot"])
                settings = read_keys(Settings, "--set", given.pop("settings") or (), keys)
                function(Given(**given, settings=settings), **values)

        command.keys = keys  # type: ignore[attr-defined]
        first, *others = shared
        return with_parameters(command, [first, *parameters_of(function)[1:], *others], function.__doc__)

    return decorate
