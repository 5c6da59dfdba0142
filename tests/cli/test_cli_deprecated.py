"""Layer 1: no processes. Options of an older release do what they did, and a warning says how they are written now."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from cli_calls import call, plan

from odc.cli.app import app
from odc.cli.deprecated import NOW_COMMANDS, RENAMED, modern
from odc.cli.keys import read_keys
from odc.cli.settings import Settings

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
VALUES = {"--panel": "all", "--modality": "a:linear=1", "--modalities": "a:linear=1"}
"""Of options for which 1 is none."""
SMALL = ("--world-size", "16", "--policy", "lb-mini", "--json")


OLD = [
    *((command, old, command, new) for command, table in RENAMED.items() for old, new in table.items()),
    *(("plan", old, name, new) for name, table in NOW_COMMANDS.items() for old, new in table.items()),
]
"""Command and option, and what to write now."""


@pytest.mark.parametrize(("command", "old", "name", "new"), OLD)
def test_an_old_option_is_read_as_the_new_one(command: str, old: str, name: str, new: str) -> None:
    value = VALUES.get(old, "1")
    written = ["aime", *new.format(value).split(), "--json"]
    for words in ([old, value], [f"{old}={value}"]) if "{}" in new else ([old],):
        found = modern(command, ["aime", *words, "--json"], COMMANDS)
        assert found[:2] == (name, written)
        assert found[2] == (
            f"DeprecationWarning: {old} will go with the next minor release. Write: odc {name} {' '.join(written)}"
        )
        assert modern(command, [*name.split()[1:], *written], COMMANDS) == (name, written, "")
        with COMMANDS[name].make_context(name, list(written)) as context:  # fails where the new option is none
            read_keys(Settings, "--set", context.params["settings"] or (), context.command.callback.keys)


def test_an_old_command_line_prints_what_the_new_one_prints() -> None:
    old = ("aime", "--rollouts", "--hosts", "2", "--samples", "256", "--minibatches", "2", "--noise=0.1", *SMALL)
    result = call("plan", *old)
    keys = ("--set", "samples=256", "--set", "minibatches=2", "--set", "noise=0.1")
    new = ("rollouts", "aime", "--hosts", "2", *keys)
    names = "--rollouts, --samples, --minibatches, --noise"
    line = f"odc plan {' '.join((*new, *SMALL))}"
    assert result.stderr.strip() == f"DeprecationWarning: {names} will go with the next minor release. Write: {line}"
    before, after = json.loads(result.stdout), plan(*new, *SMALL[:-1])
    assert {"ways", "moved"} <= before.keys() == after.keys()
    assert before["moved"] == after["moved"]
    assert before["ways"] == after["ways"]


def test_options_of_two_commands_are_refused() -> None:
    result = call("plan", "aime", "--rollouts", "--context-parallel", "2")
    assert result.exit_code == 2
    assert "No such option: --rollouts" in result.stderr
