"""Finds what GPUs of several hosts need: NVSHMEM's library and device bitcode, and a network with RDMA."""

from __future__ import annotations

import importlib.metadata
import mmap
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from odc.cli.doctor.finding import Finding, absent, error, not_needed, ok, warning

_CLASS = Path("/sys/class/infiniband")
_DEVICES = Path("/dev/infiniband")
DOCKER = "docker run --device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1"


@dataclass(frozen=True)
class RdmaPort:
    """One port of an RDMA device."""

    device: str
    port: str
    link: str
    """"InfiniBand" or "Ethernet" (RoCE)."""

    rate: str
    active: bool


def read_ports(folder: Path = _CLASS) -> tuple[RdmaPort, ...]:
    """All ports; none where there is no such hardware."""
    return tuple(_read_port(path) for path in sorted(folder.glob("*/ports/*")))


def _read_port(path: Path) -> RdmaPort:
    return RdmaPort(
        device=path.parents[1].name,
        port=path.name,
        link=_text(path / "link_layer"),
        rate=_text(path / "rate"),
        active="ACTIVE" in _text(path / "state"),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"


def ports(ports: Iterable[RdmaPort], accessible: bool | None = None) -> Finding:
    """The ports, and whether this process may open them (``accessible``; default: /dev/infiniband exists)."""
    listed = list(ports)
    if not listed:
        return not_needed("no InfiniBand or RoCE device: ranks of one host need none")
    found = "\n".join(
        f"{p.device} port {p.port}: {p.link}, {p.rate}, {'active' if p.active else 'down'}" for p in listed
    )
    if not any(port.active for port in listed):
        return warning(found, "No port is active: check cables and the subnet manager (`ibstat`).")
    if not (_DEVICES.exists() if accessible is None else accessible):
        return warning(f"{found}\nbut no {_DEVICES}", f"In a container: {DOCKER}")
    return ok(found)


WHEELS = ("nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13")
_HOST = "libnvshmem_host.so*"
_BITCODE = "libnvshmem_device*.bc"  # one for all, or one per architecture
_OLDEST, _NEWEST_TESTED = (3, 3), (3, 4)
_SYSTEM = (Path("/usr/local/lib"), Path("/usr/lib"), Path("/opt/nvidia/nvshmem/lib"))
_BANNER = re.compile(rb"NVSHMEM v(\d+)\.(\d+)\.(\d+)")  # what the host library prints with NVSHMEM_DEBUG=VERSION
_HEADER = Path("include/non_abi/nvshmem_version.h")
_DEFINES = tuple(re.compile(rf"NVSHMEM_VENDOR_{part}_VERSION (\d+)") for part in ("MAJOR", "MINOR", "PATCH"))

Version = tuple[int, ...]


@dataclass(frozen=True)
class NvshmemFile:
    """One of the two files, with the version that it or its neighbours state (None: none does)."""

    path: Path
    version: Version | None

    def describe(self) -> str:
        return f"{text(self.version) if self.version else 'version unknown'}, {self.path}"


def text(version: Version) -> str:
    return ".".join(map(str, version))


def wheel_folders() -> list[Path]:
    """Where the installed wheels have their libraries."""
    found = []
    for name in WHEELS:
        try:
            found.append(Path(str(importlib.metadata.distribution(name).locate_file("nvidia/nvshmem/lib"))))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def find_host(variables: Mapping[str, str], wheels: Iterable[Path], system: Iterable[Path] = _SYSTEM) -> Path | None:
    """The host library that nvshmem4py would load: the wheel's before any other."""
    return _first(_HOST, [*wheels, *_home(variables), *system])


def find_bitcode(variables: Mapping[str, str], wheels: Iterable[Path], system: Iterable[Path] = _SYSTEM) -> Path | None:
    """The bitcode that torch and Triton would link: that of NVSHMEM_LIB_DIR before the wheel's."""
    chosen = [Path(variables[name]) for name in ("NVSHMEM_LIB_DIR",) if name in variables]
    return _first(_BITCODE, [*chosen, *wheels, *_home(variables), *system])


def _home(variables: Mapping[str, str]) -> list[Path]:
    return [Path(variables[name]) / "lib" for name in ("NVSHMEM_HOME",) if name in variables]


def _first(pattern: str, folders: Iterable[Path]) -> Path | None:
    return next((path for folder in folders for path in sorted(folder.glob(pattern))), None)


def describe_file(path: Path | None) -> NvshmemFile | None:
    """The file with its version: of its own text, else of the header in its installation."""
    return None if path is None else NvshmemFile(path, _version_inside(path) or _version_of_header(path))


def _version_inside(path: Path) -> Version | None:
    if path.suffix == ".bc" or not path.stat().st_size:
        return None  # bitcode has it in binary form only
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        banner = _BANNER.search(content)
        return tuple(int(part) for part in banner.groups()) if banner else None


def _version_of_header(path: Path) -> Version | None:
    header = path.parent.parent / _HEADER
    if not header.is_file():
        return None
    content = header.read_text(errors="replace")
    parts = [define.search(content) for define in _DEFINES]
    return tuple(int(part[1]) for part in parts if part) if all(parts) else None


def library(host: NvshmemFile | None, wheels: Mapping[str, str], *, has_gpu: bool, fix: str) -> Finding:
    """The host library; ``wheels`` are the versions of those installed, ``fix`` is the command that installs one."""
    if host is None:
        return absent(fix, has_gpu=has_gpu, found="not found")
    if len(wheels) > 1:
        # [Note: both wheels unpack into nvidia/nvshmem, so the files are of whichever came last.]
        found = f"{host.describe()}; {' and '.join(wheels)} overwrite each other"
        return warning(found, f"pip uninstall -y {' '.join(wheels)}; {fix}")
    if host.version is None or host.version[:2] < _OLDEST:
        return warning(host.describe(), f"Needs NVSHMEM {text(_OLDEST)} or newer: {fix}")
    return ok(host.describe())


def bitcode(host: NvshmemFile | None, device: NvshmemFile | None, *, has_gpu: bool, fix: str) -> Finding:
    """The device bitcode, whose minor version must not be newer than the host library's."""
    if device is None:
        return absent(fix, has_gpu=has_gpu, found="not found")
    if host is None or host.version is None or device.version is None:
        unknown = "the host library is missing" if host is None else "a version is unknown"
        return warning(f"{device.describe()}; cannot be compared: {unknown}", f"Install both from one package: {fix}")
    if device.version[:2] > host.version[:2]:
        return warning(
            f"{device.describe()} is newer than the host library {text(host.version)}",
            f"Unset NVSHMEM_LIB_DIR, or install both from one package: {fix}",
        )
    if device.version[:2] > _NEWEST_TESTED:
        found = f"{device.describe()} is newer than any tested: it also has code that drives network cards (IBGDA)"
        return warning(found, f"Install NVSHMEM {text(_NEWEST_TESTED)}, with a torch that demands it: {fix}")
    return ok(f"{device.describe()} fits the host library")


def options(variables: Mapping[str, str], refusal: str | None, *, has_gpu: bool) -> Finding:
    """NVSHMEM's own variables; ``refusal`` says why set-up will not have them."""
    named = [f"{name}={value}" for name, value in variables.items() if name.startswith("NVSHMEM_")]
    found = ", ".join(named) or "no variable of NVSHMEM is set"
    if refusal is None:
        return ok(found)
    if not has_gpu:
        return not_needed(f"{found}; no CUDA device")
    return error(refusal, "On all hosts: unset NVSHMEM_IB_ENABLE_IBGDA")
