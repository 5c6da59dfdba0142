"""Layer 1: no processes. Options of an older release do what they did, and a warning says how they are written now."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from cli_calls import call, plan

from odc.cli.app import app
from odc.cli.deprecated import RENAMED, modern
from odc.cli.keys import read_keys
from odc.cli.settings import Settings

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
VALUES = {"--panel": "all", "--modality": "a:linear=1", "--modalities": "a:linear=1"}
"""Of options for which 1 is none."""
SMALL = ("--world-size", "16", "--policy", "lb-mini", "--json")


@pytest.mark.parametrize(("command", "old"), [(command, old) for command, table in RENAMED.items() for old in table])
def test_an_old_option_is_read_as_the_new_one(command: str, old: str) -> None:
    new, value = RENAMED[command][old], VALUES.get(old, "1")
    takes_value = "{}" in new
    written = new.format(value).split()
    mode = "" if new.startswith("--") else f" {written.pop(0)}"
    for words in ([old, value], [f"{old}={value}"]) if takes_value else ([old],):
        name, arguments, warning = modern(command, ["aime", *words, "--json"], COMMANDS)
        assert (name, arguments) == (f"{command}{mode}", ["aime", *written, "--json"])
        assert warning.startswith(f"DeprecationWarning: {old} will go with the next minor release. Write: odc {name} ")
        assert modern(name.split()[0], [*name.split()[1:], *arguments], COMMANDS) == (name, arguments, "")
        with COMMANDS[name].make_context(name, arguments) as context:  # fails where the new option is none
            read_keys(Settings, "--set", context.params["settings"] or (), context.command.callback.keys)


def test_an_old_command_line_prints_what_the_new_one_prints() -> None:
    old = ("aime", "--rollouts", "--hosts", "2", "--samples", "256", "--minibatches", "2", "--noise=0.1", *SMALL)
    result = call("plan", *old)
    keys = ("--set", "samples=256", "--set", "minibatches=2", "--set", "noise=0.1")
    new = ("rollouts", "aime", "--hosts", "2", *keys)
    names = "--rollouts, --hosts, --samples, --minibatches, --noise"
    line = f"odc plan {' '.join((*new, *SMALL))}"
    assert result.stderr.strip() == f"DeprecationWarning: {names} will go with the next minor release. Write: {line}"
    before, after = json.loads(result.stdout), plan(*new, *SMALL[:-1])
    assert {"ways", "moved"} <= before.keys() == after.keys()
    assert before["moved"] == after["moved"]
    assert before["ways"] == after["ways"]


def test_options_of_two_modes_are_refused() -> None:
    result = call("plan", "aime", "--rollouts", "--context-parallel", "2")
    assert result.exit_code == 2
    assert "context-parallel and rollouts are different plans: expected the options of one" in result.stderr
