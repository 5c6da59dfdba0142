"""Layer 1: the package that the top-level rooms make, as Python, an installer and type checkers see it."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("balance", "bench", "cli", "fsdp_patch", "kernels", "launch", "trainers")


def modules() -> set[str]:
    """Files of the package, as paths in an installed copy."""
    here = {path.relative_to(ROOT).as_posix() for path in (ROOT / "odc").rglob("*.py")}  # rglob follows no links
    return here.union(*({f"odc/{path.relative_to(ROOT)}" for path in (ROOT / room).rglob("*.py")} for room in ROOMS))


def test_each_room_has_its_link() -> None:
    links = {path.name: os.readlink(path) for path in (ROOT / "odc").iterdir() if path.is_symlink()}
    assert links == {room: f"../{room}" for room in ROOMS}


def test_every_folder_with_modules_is_a_package() -> None:
    """A folder without it would be left out of what is installed."""
    folders = {os.path.dirname(name) for name in modules()}
    assert folders == {os.path.dirname(name) for name in modules() if name.endswith("/__init__.py")}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_one_name(room: str) -> None:
    stranger = importlib.util.find_spec(room)  # another project's, if any
    assert stranger is None or not str(stranger.origin).startswith(str(ROOT / room))
    spec = importlib.util.find_spec(f"odc.{room}")
    assert spec is not None
    assert spec.origin == str(ROOT / "odc" / room / "__init__.py")


def imports_of(room: str) -> dict[str, set[str]]:
    """Module -> what it imports, also for type checkers and inside functions."""
    found = {}
    files = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in modules()}
    for path in (ROOT / room).rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts if parts[0] == "odc" else ("odc", *parts)).removesuffix(".__init__")
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= inside if inside <= files else {node.module, *inside}  # the package stands for its modules
        found[name] = names
    return found


@pytest.mark.parametrize("room", ["odc", "fsdp_patch", "launch"])
def test_the_modules_of_a_room_do_not_import_each_other_in_a_circle(room: str) -> None:
    imports = imports_of(room)
    left = {name: {other for other in names if other in imports and other != name} for name, names in imports.items()}
    assert any(left.values())
    while first := {name for name, names in left.items() if not names}:
        left = {name: names - first for name, names in left.items() if name not in first}
    assert left == {}


def test_the_launcher_stands_above_all_but_the_command_line_and_benchmarks() -> None:
    assert any("odc.launch.options" in names for names in imports_of("cli").values())
    for room in ("fsdp_patch", "trainers", "balance", "kernels"):
        for name, names in imports_of(room).items():
            assert not any(other.startswith(("odc.launch", "odc.bench")) for other in names), name
    for name, names in imports_of("fsdp_patch").items():
        assert not any(other.startswith(("odc.trainers", "odc.balance")) for other in names), name


def test_ranks_hand_each_other_no_pickles() -> None:
    """But for the results of a benchmark's own ranks. Where torch takes objects, it pickles them."""
    takes_objects = re.compile(r"\b(all_gather|gather|scatter|broadcast|send|recv)_object(_list)?\b")
    product = {name for name in modules() if not name.startswith("odc/bench/")}
    assert {name for name in product if takes_objects.search((ROOT / name).read_text())} == set()


def test_no_module_is_loaded_under_two_names() -> None:
    """By any test before this one."""
    names: dict[str, list[str]] = {}
    for name, module in list(sys.modules.items()):
        file = os.path.realpath(getattr(module, "__file__", None) or "")
        is_ours = file.startswith(tuple(f"{ROOT}/{folder}/" for folder in ("odc", "tests", *ROOMS)))
        if is_ours and not name.startswith("__"):  # what was started as a script
            names.setdefault(file, []).append(name)
    assert names
    assert [twice for twice in names.values() if len(twice) > 1] == []


def test_a_checkout_needs_no_installed_copy() -> None:
    """Python started in a checkout finds its folder `odc` before whatever is installed."""
    script = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import odc.bench.gpu.gpu, odc.cli, odc.kernels.chunked
print(odc.bench.__file__)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(ROOT / "odc" / "bench" / "__init__.py")


def build(what: str, source: Path, into: Path) -> Path:
    """A wheel or sdist of ``source``."""
    script = f"import sys; from setuptools import build_meta; build_meta.build_{what}(sys.argv[1])"
    into.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", script, str(into)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = into.iterdir()
    return built


def test_wheel_and_sdist_hold_each_module_once(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for folder in ("odc", *ROOMS):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    wheels = [build("wheel", source, tmp_path / "wheel")]
    with tarfile.open(build("sdist", source, tmp_path / "sdist")) as archive:
        assert not any(member.issym() or member.islnk() for member in archive)  # read where links are unknown
        archive.extractall(tmp_path / "unpacked")
    wheels.append(build("wheel", next((tmp_path / "unpacked").iterdir()), tmp_path / "wheel_of_sdist"))
    expected = modules() | {
        "odc/py.typed",
        "odc/minibatch/PROTOCOL.md",
        "odc/items/PROTOCOL.md",
        "odc/bench/planning/bubble_rates.csv",
    }
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as file:
            names = [name for name in file.namelist() if ".dist-info/" not in name]
        assert sorted(names) == sorted(expected)


def test_each_file_of_tests_says_its_layer_and_has_a_name_of_its_own() -> None:
    files = sorted((ROOT / "tests").glob("*/test_*.py"))
    assert len(files) > 100
    header = re.compile(r'"""Layers? [1-4]\b')
    assert [path.name for path in files if not header.match(path.read_text())] == []
    names = Counter(
        path.name for path in (ROOT / "tests").rglob("*.py") if path.name not in ("__init__.py", "conftest.py")
    )
    assert [name for name, count in names.items() if count > 1] == []
