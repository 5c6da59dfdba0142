"""Layer 1: no processes. Pages that scripts write are what these write.

docs/options.md has every option of the command, every environment variable, and no other; docs/loops.md every loop that
is run plain and patched.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from odc import config

ROOT = Path(__file__).parents[2]
_ROOMS = ("odc", "balance", "cli", "fsdp_patch", "kernels", "launch", "trainers")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    return load("write_options")


def test_the_page_of_loops_is_what_the_tests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    loops = load("write_loops")
    assert loops.PAGE.read_text() == loops.page()  # python docs/write_loops.py writes it


def test_the_page_is_what_the_code_says(writer: ModuleType) -> None:
    assert writer.PAGE.read_text() == writer.page()  # python docs/write_options.py writes it


def test_every_variable_has_a_row(writer: ModuleType) -> None:
    known = {
        value for value in vars(config).values() if isinstance(value, str) and re.fullmatch(r"[A-Z]+(_[A-Z]+)+", value)
    }
    assert known == {*writer.VARIABLES, config.NVSHMEM_HEAP, config.NVSHMEM_IBGDA, config.CONNECTIONS}
    source = "".join(path.read_text() for room in _ROOMS for path in (ROOT / room).rglob("*.py"))
    named = set(re.findall(r"\bODC_[A-Z_]+\b", source))
    assert named == set(writer.VARIABLES)
    read = set(re.findall(r'env(?:iron)?\)?\.get\("([A-Z_]+)"', Path(config.__file__).read_text()))
    launch = {name for name in read if name not in writer.OTHERS_VARIABLES}
    assert all(name.startswith(("MASTER_", "TORCHELASTIC_")) for name in launch)


def test_every_option_of_every_command_has_a_row(writer: ModuleType) -> None:
    text = writer.page()
    assert set(re.findall(r"^## `odc (\w+)`", text, re.MULTILINE)) == {"run", "plan", "simulate", "doctor", "bench"}
    rows = re.findall(r"^\| (`--[^|]+) \|", text, re.MULTILINE)
    assert len(rows) >= 50
    assert len([row for row in rows if "`--plot`" in row]) == 7
