"""Layer 1: no processes; extended: none but pip's. The names of CUDA's libraries that are used exist in every version
that ``pyproject.toml`` allows, as far as a machine without a GPU can tell: wheels are imported, and headers read.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from cuda_names import NAMES, Names, used
from pins import lowest, requirements
from resolving import Resolver, make_resolver, reason_to_skip

from odc.cli.doctor import nvshmem, software
from odc.cli.doctor.software import release

EXTRAS = ("cuda12", "cuda13")


def test_the_table_is_what_the_source_uses() -> None:
    found = used()
    assert sorted(set(found) - set(NAMES)) == [], "not in cuda_names.NAMES"
    assert sorted(set(NAMES) - set(found)) == [], "in cuda_names.NAMES, but nobody uses it"
    assert {n: calls for n, calls in found.items() if NAMES[n] is not None and calls != {NAMES[n]}} == {}


@pytest.mark.parametrize(
    ("source", "name", "calls"),
    [
        ("import cupy\ncupy.cuda.runtime.f(1, 2)", "cupy.cuda.runtime.f", {2}),
        ("import cupy\nself._cupy: Any = cupy\nr = self._cupy.cuda.runtime\nr.f", "cupy.cuda.runtime.f", {None}),
        ("import cupy\ng = cupy.f\nself._call(g, 1)", "cupy.f", {1, None}),
        ("import nvshmem.core\na, b = 1, nvshmem.core\nb.init(x=1)", "nvshmem.core.init", {("x",)}),
        ("import nvshmem.core as c\nu = together(e, lambda: c.get())\nu.value", "nvshmem.core.get.value", {None}),
        ("from cuda.core import Device\nd = Device(0)\ntogether(e, d.f)", "cuda.core.Device.f", {None}),
        ("def lib():\n    x = ctypes.CDLL('libcuda.so.1')\n    return x\ny = lib()\ny.cuF(1)", "libcuda.cuF", {1}),
        ("_L = 'libnvshmem_host.so.3'\nx = ctypes.CDLL(_L)\nx.calloc(1)", "libnvshmem_host.calloc", {1}),
        ("_call_driver('cuF', 1, 2)", "libcuda.cuF", {2}),
    ],
)
def test_names_are_followed(source: str, name: str, calls: set[Any]) -> None:
    assert (
        Names(source.replace("import nvshmem.core as c", "import nvshmem.core\nc = nvshmem.core")).found[name] == calls
    )


def test_the_doctor_knows_the_same_oldest_versions() -> None:
    named = {r.name: release(lowest(r)) for extra in EXTRAS for r in requirements(extra)}
    assert named["cupy-cuda12x"][:1] == software._OLDEST_CUPY
    assert {named["nvshmem4py-cu12"], named["nvshmem4py-cu13"]} == {software._OLDEST_NVSHMEM4PY}
    assert named["nvidia-nvshmem-cu12"] == nvshmem._OLDEST


# With an index

PROBE = """
import ctypes, importlib, inspect, json, sys

def look(name):
    parts, thing = name.split("."), None
    if parts[0] == "libnvshmem_host":
        import nvshmem.core
        nvshmem.core.get_version()  # loads it
        return "" if hasattr(ctypes.CDLL("libnvshmem_host.so.3"), parts[1]) else None
    for number, part in enumerate(parts):
        if isinstance(thing, type(json)) and not hasattr(thing, part) or thing is None:
            thing = importlib.import_module(".".join(parts[: number + 1]))
            continue
        if parts[number - 1] == "get_unique_id":
            thing = thing(empty=True)
        if not hasattr(thing, part):
            return None
        thing = getattr(thing, part)
    try:
        signature = str(inspect.signature(thing))
    except (TypeError, ValueError):
        signature = ""
    return f"{thing.__doc__ or ''} {signature}" if callable(thing) else ""

def describe(name):
    try:
        return look(name)
    except Exception as problem:
        return None if isinstance(problem, ModuleNotFoundError) else f"!{type(problem).__name__}: {problem}"

print(json.dumps({name: describe(name) for name in sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def resolver(tmp_path_factory: pytest.TempPathFactory) -> Resolver:
    return make_resolver(tmp_path_factory.mktemp("resolver"))


def install(resolver: Resolver, extra: str, age: str, folder: Path) -> None:
    exact = [f"{r.name}=={lowest(r)}.*" for r in requirements(extra)] if age == "oldest" else []
    named = [str(r) for r in requirements(extra)]
    done = resolver.run(
        "install", "-q", "--no-cache-dir", "--only-binary=:all:", "--target", str(folder), *named, *exact
    )
    if done.returncode != 0:
        reason = reason_to_skip(done.stderr)
        assert reason is not None, done.stderr
        pytest.skip(f"{extra}, {age}: {reason}")


def parameters(text: str, name: str) -> tuple[int, int]:
    """How many arguments a function takes at least and at most, by the first line of its documentation."""
    match = re.search(rf"\b(?:{name}|__init__)\((.*?)\)(?: ->|\s|$)", text) or re.search(r"\((.*?)\)", text)
    assert match is not None, text
    listed = [p for p in match[1].split(",") if p.strip() not in ("", "self", "/", "*")]
    return sum("=" not in p for p in listed), len(listed)


@pytest.mark.extended
@pytest.mark.parametrize("age", ["oldest", "newest"])
@pytest.mark.parametrize("extra", EXTRAS)
def test_wheels_have_the_names(resolver: Resolver, extra: str, age: str, tmp_path: Path) -> None:
    install(resolver, extra, age, tmp_path)
    names = [name for name in NAMES if not name.startswith(("libcuda", "libnvidia-ml"))]
    command = [sys.executable, "-c", PROBE, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: text for name, text in found.items() if text is None or text.startswith("!")} == {}
    for name, how in NAMES.items():
        if isinstance(how, int) and found.get(name):
            least, most = parameters(found[name], name.rpartition(".")[2])
            assert least <= how <= most, found[name]
        elif isinstance(how, tuple):
            assert [word for word in how if not re.search(rf"\b{word}\b", found[name])] == [], found[name]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("library", "header", "wheel"),
    [
        ("libcuda", "cuda.h", "nvidia-cuda-runtime-cu12==12.0.*"),
        ("libcuda", "cuda.h", "nvidia-cuda-runtime"),
        ("libnvidia-ml", "nvml.h", "nvidia-nvml-dev-cu12==12.0.*"),
        ("libnvidia-ml", "nvml.h", "nvidia-nvml-dev"),
    ],
)
def test_headers_declare_the_functions(resolver: Resolver, library: str, header: str, wheel: str) -> None:
    """Of the oldest CUDA that is supported, and of the newest."""
    with zipfile.ZipFile(resolver.download(wheel)) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith(f"include/{header}")]
        text = archive.read(path).decode(errors="replace")
    for name in (n.partition(".")[2] for n in NAMES if n.startswith(library)):
        plain = re.sub(r"_v\d$", "", name)
        renamed = re.search(rf"^#\s*define {plain} +(?:__CUDA_API_PTSZ\()?{name}\b", text, re.MULTILINE)
        declared = plain if renamed else name  # a library has what the declared name is replaced by
        # Behind all others stands what is exported by names that have come to mean something else.
        prototypes = re.findall(rf"^ *\w+ \w+ {declared}\(([^)]*)\);", text, re.MULTILINE)
        if name == "cuMemcpyBatchAsync" and not prototypes:
            continue  # of CUDA 12.8; without it copies are asked for one by one
        counts = {0 if arguments.strip() == "void" else arguments.count(",") + 1 for arguments in prototypes}
        assert NAMES[f"{library}.{name}"] in counts, (name, prototypes)
