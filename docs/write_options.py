"""Writes docs/options.md: all environment variables and all options of the ``odc`` command, from the code.

Run ``.venv/bin/python docs/write_options.py``. A test fails if the page differs from its output.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from odc import config
from odc.cli.app import app
from odc.cli.bench import command_of
from odc.cli.settings import KEYS, Settings, all_but
from odc.launch.options import odc_options

PAGE = Path(__file__).with_name("options.md")

VARIABLES = {
    config.TRANSPORT: ('"auto"', "Name of a transport; overrides `transport=` and `--transport`."),
    config.STAGING: (
        '"auto"',
        "`on`: FSDP2 copies parameters and gradients through flat buffers, as for collectives. For comparisons and to "
        "rule out a fault.",
    ),
    config.SHARE: (
        '"auto"',
        "`on`, `off`, `auto` or a number of bytes per rank: whether [the ranks of a host share]"
        "(hosts.md#two-hosts-without-infiniband) parameters and gradients; overrides `share_in_host=` and "
        "`--share-in-host`.",
    ),
    config.ACCUMULATE: ('"auto"', "`direct`, `daemon` or `auto`; overrides `accumulate=` and `--accumulate`."),
    config.TIMEOUT: (
        "600",
        "Seconds without progress of another rank before a wait fails; overrides `timeout_s=` and `--timeout`.",
    ),
    config.ADDRESS: (
        "detected",
        "This host's IP address in the network that all hosts share. Needed if a host has several networks. Differs "
        "between hosts.",
    ),
    config.TRANSFERS: (
        "none",
        "A file written by `odc bench gpu`: the sizes at which a kernel copies faster than copy engines.",
    ),
    config.HOST_ID: ("detected", "Lets ranks of one machine act as several hosts. For tests."),
    config.FAULT: (
        "none",
        "A fault to inject, e.g. `rank=1,point=scatter.after_chunk,at=3,do=kill`. For tests "
        "([reliability](reliability.md)).",
    ),
}
OTHERS_VARIABLES = {
    "MASTER_ADDR": "torchrun's first host. ODC uses the network that leads to it.",
    "NVSHMEM_LIB_DIR": "The folder of NVSHMEM's libraries, if it is not in the Python package.",
    config.NVSHMEM_HEAP: "Size of NVSHMEM's heap. If it is not set, ODC sets the size that the model needs.",
    config.NVSHMEM_IBGDA: "ODC refuses to run if this is on: gradients would be lost without an error.",
}

_HEAD = """\
# Options and environment variables

A variable overrides an argument or an option. Set variables identically on all ranks unless a row says otherwise.
"""


def page() -> str:
    """The text of docs/options.md."""
    return "\n".join([_HEAD, *_variables(), *_run(), *_commands(), *_bench()])


def _variables() -> Iterator[str]:
    yield "## Variables of ODC\n"
    yield from _table(
        ("variable", "default", "what it does"),
        ((f"`{name}`", default, text) for name, (default, text) in VARIABLES.items()),
    )
    yield "## Variables of others that ODC reads\n"
    yield from _table(("variable", "what it does"), ((f"`{name}`", text) for name, text in OTHERS_VARIABLES.items()))
    yield (
        "`odc run` also reads `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and the others that torchrun sets. `odc doctor` "
        "explains these variables if they are set: "
        + ", ".join(f"`{name}`" for name in config.FOREIGN if name not in OTHERS_VARIABLES)
        + ".\n"
    )


def _run() -> Iterator[str]:
    yield "## `odc run`\n"
    yield (
        "`odc run [options] [-m] script.py [arguments of the script]`. All other options are torchrun's "
        "(`odc run -h` lists them). `torchrun ... -m odc.run` and `odc exec` take these, too.\n"
    )
    actions = (action for action in odc_options()._actions if action.help != "==SUPPRESS==")
    yield from _table(
        ("option", "default", "what it does"),
        (
            (
                _code(action.option_strings, action.metavar),
                _default(action.default),
                _sentence((action.help or "") + (f": {', '.join(action.choices)}" if action.choices else "")),
            )
            for action in actions
        ),
    )


def _commands() -> Iterator[str]:
    group: Any = typer.main.get_command(app)
    of_plan = _options(group.commands["plan"])
    for name in (name for name in group.commands if name.startswith("plan") or name in ("simulate", "doctor")):
        command = group.commands[name]
        arguments = [param for param in command.params if param.param_type_name == "argument"]
        words = " ".join(["odc", name, *(param.name.upper() for param in arguments), "[options]"])
        yield f"## `odc {name}`\n\n`{words}`\n"
        for param in arguments if name in ("plan", "simulate") else ():
            default = f" Default: {_default(param.default)}." if param.default is not None else ""
            yield f"`{param.name.upper()}`: {_sentence(param.help)}{default}\n"
        rows = _options(command)
        again = [row for row in rows if row in of_plan and name != "plan"]
        own = [row for row in rows if row not in again]
        if again:
            own.append((", ".join(names for names, _, _ in again), "", "As of `odc plan`."))
        yield from _table(("option", "default", "what it does"), own)
        keys = getattr(command.callback, "keys", ())
        if name == "plan":
            defaults = {key: getattr(Settings, key.replace("-", "_")) for key in keys}
            rows = [(f"`{key}=`", _value(default), _sentence(KEYS[key][1])) for key, default in defaults.items()]
            yield from _table(("`--set`", "default", "what it does"), rows)
        elif keys and keys != all_but():
            yield f"Keys of `--set`: {', '.join(f'`{key}`' for key in keys)}.\n"


def _bench() -> Iterator[str]:
    yield "## `odc bench`\n"
    yield (
        "`odc bench list` shows for each benchmark what it measures, how long it takes and what it needs. "
        "`odc bench NAME -h` lists its options. All benchmarks have these (`--plot` only if there is a picture):\n"
    )
    shared = ("quick", "json", "plot")
    parameters = inspect.signature(command_of("primitives")).parameters
    told = ((name, typing.get_args(parameters[name].annotation)[1]) for name in shared)
    yield from _table(
        ("option", "what it does"),
        ((_code([f"--{name}"], "" if name == "quick" else "FILE"), _sentence(info.help or "")) for name, info in told),
    )
    yield (
        "`odc bench compare BEFORE.json AFTER.json` shows two results side by side; `odc bench figures [--check]` "
        "writes the figures of committed results into the documents.\n"
    )


def _value(default: object) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return _default(default)


def _options(command: Any) -> list[tuple[str, str, str]]:
    return [
        (_code([*param.opts, *param.secondary_opts], param.metavar), _default(param.default), _sentence(param.help))
        for param in command.params
        if param.param_type_name == "option" and not param.hidden
    ]


def _code(names: Iterable[str], metavar: object) -> str:
    words = ", ".join(f"`{name}`" for name in names)
    return f"{words} `{metavar}`" if metavar else words


def _default(value: object) -> str:
    if value is None or value is False:
        return ""
    return "on" if value is True else f"`{value}`"


def _sentence(text: str) -> str:
    """``text`` for a cell, with a capital at the beginning and a full stop at the end."""
    words = " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")
    words = re.sub(r"(?<![\w`-])(--[a-z][a-z-]*)", r"`\1`", words)
    return words[:1].upper() + words[1:] + ("" if words.endswith((".", ")")) else ".")


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    lines = [heads, ("---",) * len(heads), *rows]
    yield "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
