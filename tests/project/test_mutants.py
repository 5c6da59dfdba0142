"""Layer 1: that mutants fit the code as it is. ``python mutants/run.py`` runs them, and takes an hour."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = sorted((ROOT / "mutants").glob("*.patch"))


@pytest.fixture(scope="module")
def run() -> Iterator[ModuleType]:
    """The command, as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "mutants"))
        import run as command

        yield command
        del sys.modules["run"]


def test_there_are_sixty_or_more() -> None:
    assert len(PATCHES) >= 60


def hunks(text: str) -> list[tuple[str, str, str]]:
    """File, the lines as they are, and as the mutant has them."""
    found = []
    for name, body in re.findall(r"^\+\+\+ b/(.+)\n((?:[@ +-].*\n)+)", text, re.MULTILINE):
        for hunk in re.split(r"^@@.*\n", body, flags=re.MULTILINE)[1:]:
            lines = hunk.splitlines(keepends=True)
            sides = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
            found.append((name, *sides))
    return found


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_mutant_changes_lines_that_are_there_once(path: Path) -> None:
    """With one line of context it could else be applied somewhere else."""
    found = hunks(path.read_text())
    assert found
    for name, before, after in found:
        assert before != after
        count = (ROOT / name).read_text().count(before)
        assert count == 1, f"{name} has these lines {count} times; make the same fault in the code as it is:\n{before}"


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_mutant_names_tests_that_exist(path: Path, run: ModuleType) -> None:
    tests = run.Mutant(path.stem, path.read_text()).tests
    assert tests
    for test in tests:
        file, *names = test.partition("[")[0].split("::")
        source = (ROOT / file).read_text()
        assert all(re.search(rf"^ *(def|class) {name}\b", source, re.MULTILINE) for name in names), test


def test_mutants_are_applied_to_the_copy_only(run: ModuleType, tmp_path: Path) -> None:
    """By git, which counts lines."""
    mutants = run.mutants()
    for name in {name for mutant in mutants for name in mutant.files}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for mutant in mutants:
        run.apply(mutant, tmp_path)
        for name in mutant.files:
            assert (tmp_path / name).read_text() != (ROOT / name).read_text()
            shutil.copy(ROOT / name, tmp_path / name)
    stale = run.Mutant("stale", mutants[0].text.replace("\n-  ", "\n-what was there before  "))
    with pytest.raises(ValueError, match="patch does not apply"):
        run.apply(stale, tmp_path)
