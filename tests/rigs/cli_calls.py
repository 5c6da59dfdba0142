"""``odc`` as users call it, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import Result
from typer.testing import CliRunner

from odc.cli.app import app


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


def printed(*arguments: str) -> str:
    """By a command that ends well."""
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def words(*arguments: str) -> str:
    """The same without its line breaks and borders."""
    return " ".join(printed(*arguments).replace("│", " ").split())


def plan(*arguments: str) -> dict[str, Any]:
    """What ``odc plan --json`` prints."""
    found: dict[str, Any] = json.loads(printed("plan", *arguments, "--json"))
    return found


def refused(*arguments: str) -> str:
    """What a command prints that ends with status 2, as one line."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.stderr.split())


def error(*arguments: str) -> str:
    """The one line that such a command prints."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert not result.stdout
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    return lines[0]


def saved(path: Path, lengths: Iterable[int]) -> str:
    """As .npy."""
    np.save(path, np.array(list(lengths)))
    return str(path)


def timings(path: Path, lengths: Iterable[int], seconds: Callable[[int], float]) -> str:
    """As .csv."""
    path.write_text("".join(f"{length},{seconds(length)}\n" for length in lengths))
    return str(path)
