"""Layer 1: no processes. docs/options.md has every option of the command, every environment variable, and no other."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from odc import config

ROOT = Path(__file__).parents[2]
_ROOMS = ("odc", "balance", "cli", "fsdp_patch", "kernels", "launch", "trainers")


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_options", ROOT / "docs" / "write_options.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_code_says(writer: ModuleType) -> None:
    assert writer.PAGE.read_text() == writer.page()  # python docs/write_options.py writes it


def test_every_variable_has_a_row(writer: ModuleType) -> None:
    known = {
        value for value in vars(config).values() if isinstance(value, str) and re.fullmatch(r"[A-Z]+(_[A-Z]+)+", value)
    }
    assert known == {*writer.VARIABLES, config.NVSHMEM_HEAP, config.NVSHMEM_IBGDA}
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
    assert len([row for row in rows if "`--plot`" in row]) == 3
