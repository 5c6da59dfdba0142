"""The options of ODC in ``odc run`` and ``odc exec``, and the checks of these options before a rank starts."""

from __future__ import annotations

import argparse
import difflib
import os
from pathlib import Path
from typing import NoReturn

from odc.config import RuntimeConfig
from odc.errors import ConfigError, shorten
from odc.liveness.faults import FaultInjector
from odc.transports import registry


class Parser(argparse.ArgumentParser):
    """Errors in one line, without a usage that is longer than a terminal, and with the option that was meant."""

    def error(self, message: str) -> NoReturn:
        kind, _, unknown = message.partition("unrecognized arguments: ")
        if unknown and not kind:
            given = unknown.split()[0].partition("=")[0]
            near = difflib.get_close_matches(given.replace("_", "-"), self._option_string_actions, 1)
            message = f"{message}; did you mean {near[0]}?" if near else message
        self.exit(2, f"{self.prog}: error: {shorten(message, 600)} (odc run -h lists the options)\n")


def odc_options() -> argparse.ArgumentParser:
    """The options of ODC itself, without help and without the script."""
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("on-demand communication")
    group.add_argument(
        "--dry-run", action="store_true", help="show what would be patched, and stop after the first optimizer step"
    )
    group.add_argument(
        "--transport",
        default="auto",
        help="name of a transport, or package.module:Class (default: the first that works)",
    )
    group.add_argument(
        "--accumulate", default="auto", choices=["auto", "direct", "daemon"], help="how gradients are added"
    )
    group.add_argument(
        "--share-in-host",
        default="auto",
        metavar="{auto,on,off,BYTES}",
        help="with several hosts: ranks of a host share parameters and gradients, so that each crosses hosts once per "
        "step; BYTES limits the memory that this takes on a rank (default: half of its free memory)",
    )
    group.add_argument(
        "--deterministic", action="store_true", help="the same gradients in every run, bit for bit; needs more memory"
    )
    group.add_argument(
        "--balance",
        metavar="POLICY",
        help="balance the samples of each optimizer step of a transformers Trainer or TRL SFTTrainer with this policy "
        "of odc.balance (lb-mini, lb-micro, ...)",
    )
    group.add_argument(
        "--online",
        action="store_true",
        help="balance samples whose lengths are known only once they are read, also of iterable datasets: each rank "
        "fills an equal quota of cost from a pool of samples (needs --max-tokens)",
    )
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="with --balance or --online: maximum tokens per microbatch (default with --balance: the longest sample)",
    )
    group.add_argument(
        "--pool-size", type=int, metavar="N", help="with --online: samples in each rank's pool (default: 256)"
    )
    group.add_argument(
        "--late-binding",
        action="store_true",
        help="with --balance lb-mini: ranks that finish early take samples from slower ranks",
    )
    group.add_argument(
        "--timeline",
        type=os.path.abspath,
        metavar="FOLDER",
        help="save what each rank did in the last minibatches, as a picture and as a trace for ui.perfetto.dev",
    )
    group.add_argument(
        "--live", action="store_true", help="show in the terminal which ranks compute and which ones wait"
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds without progress of another rank before a wait fails",
    )
    group.add_argument("--traceback", action="store_true", help="print the traceback of an error of ODC, too")
    group.add_argument("--launcher-tells", action="store_true", help=argparse.SUPPRESS)  # `odc run` says errors last
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Refuse what no rank could use, the ``ODC_*`` variables included; before any rank is started, and on each.

    Raises:
        ConfigError, ValueError: an option or a variable has a value that cannot be used.
    """
    config = RuntimeConfig.from_environment(
        transport=options.transport,
        accumulate=options.accumulate,
        share_in_host=options.share_in_host,
        timeout_s=options.timeout,
    )
    registry.check_name(config.transport)
    if options.timeline is not None and Path(options.timeline).is_file():
        raise ConfigError(f"--timeline {options.timeline}: this is a file; expected a folder")
    FaultInjector(config.fault, rank=0)
    if options.balance is None and not options.online:
        needs = {"max_tokens": "--balance and --online", "pool_size": "--online", "late_binding": "--balance lb-mini"}
        for name, needed in needs.items():
            value = getattr(options, name)
            if value is not None and value is not False:
                raise ConfigError(f"--{name.replace('_', '-')} is of {needed}: give that, too")
        return
    if options.balance is not None and options.online:
        raise ConfigError(f"--online with --balance {options.balance}: give one of them")
    if options.online and options.max_tokens is None:
        raise ConfigError("--online needs --max-tokens, as lengths are not known before samples are read")
    from odc.trainers import BalanceOptions  # the only use of that room here and below, and it is heavy

    try:
        BalanceOptions.choose(
            options.balance,
            online=options.online,
            max_tokens=options.max_tokens,
            pool_size=options.pool_size,
            late_binding=options.late_binding,
        )
    except ValueError as error:
        raise ConfigError(f"--{'online' if options.online else 'balance'}: {error}") from None


def option_arguments(options: argparse.Namespace) -> list[str]:
    """``options`` as arguments again, for the ranks."""
    arguments = list[str]()
    for action in odc_options()._actions:
        value = getattr(options, action.dest)
        if value is not None and value is not False:
            arguments += action.option_strings if value is True else [*action.option_strings, str(value)]
    return arguments
