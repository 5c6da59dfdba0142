"""Layer 1: that mutants fit the code as it is. ``python mutants/run.py`` runs them, and takes an hour."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run() -> Iterator[ModuleType]:
    """The command, as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "mutants"))
        import run as command

        yield command
        for name in ("run", "table"):
            del sys.modules[name]


def test_there_are_a_hundred_or_more_of_different_names(run: ModuleType) -> None:
    assert len({mutant.name for mutant in run.MUTANTS}) == len(run.MUTANTS) >= 100


def test_a_mutant_changes_what_stands_there_once_in_the_copy_only(run: ModuleType, tmp_path: Path) -> None:
    for mutant in run.MUTANTS:
        ours, copy = ROOT / mutant.file, tmp_path / mutant.file
        copy.parent.mkdir(parents=True, exist_ok=True)
        before = ours.read_text()
        shutil.copy(ours, copy)
        run.apply(mutant, tmp_path)
        compile(copy.read_text(), mutant.name, "exec")
        assert copy.read_text() != before == ours.read_text(), mutant.name
    with pytest.raises(ValueError, match="has 'what was there before' 0 times"):
        run.apply(replace(mutant, changes=(("what was there before", ""),)), tmp_path)


def test_a_mutant_names_tests_that_exist(run: ModuleType) -> None:
    for mutant in run.MUTANTS:
        assert mutant.tests
        for test in mutant.tests:
            file, *names = test.partition("[")[0].split("::")
            source = (ROOT / file).read_text()
            assert all(re.search(rf"^ *(def|class) {name}\b", source, re.MULTILINE) for name in names), test
