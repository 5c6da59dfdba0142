"""Where NVSHMEM's device library is: LLVM bitcode that Triton links into a kernel."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

WHEELS = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
SYSTEM_FOLDERS = ("/opt/nvidia/nvshmem/lib", "/usr/local/nvshmem/lib", "/usr/local/cuda/lib64", "/usr/lib/nvshmem")
READABLE = "nvidia-nvshmem-cu13==3.4.5"
"""What to install: the release that torch's CUDA build demands, whose bitcode every supported Triton reads."""


def architecture(name: str) -> int:
    """
    >>> architecture("sm_90")
    90
    """
    match = re.fullmatch(r"sm_(\d{2,3})", name)
    if match is None:
        raise ValueError(f"architecture {name!r}, expected sm_ and two or three digits, such as sm_80, sm_90 or sm_100")
    return int(match[1])


def find_bitcode(arch: str, folder: Path | str | None = None) -> Path:
    """The device library for ``arch``: in ``folder`` or its ``lib`` if given, else in the wheels, else in the system.

    One library per architecture (``libnvshmem_device_sm_90.bc``: the newest not above ``arch``) is preferred to one for
    all (``libnvshmem_device.bc``). Raises FileNotFoundError that names what to install, ValueError for a bad ``arch``.
    """
    target = architecture(arch)
    places = list(_given(Path(folder)) if folder is not None else _installed())
    for place in places:
        found = _newest(place, target)
        if found is not None:
            return found
    looked = ", ".join(map(str, places)) or "no wheel and no system folder"
    raise FileNotFoundError(
        f"no NVSHMEM device library (libnvshmem_device*.bc) for {arch}; looked in: {looked}. "
        f"Install it (pip install {READABLE}) or name the folder that holds it"
    )


def _newest(folder: Path, target: int) -> Path | None:
    versions = {}
    for path in folder.glob("libnvshmem_device_sm_*.bc"):
        match = re.fullmatch(r"libnvshmem_device_sm_(\d+)", path.stem)
        if match and int(match[1]) <= target:
            versions[int(match[1])] = path
    if versions:
        return versions[max(versions)]
    generic = folder / "libnvshmem_device.bc"
    return generic if generic.is_file() else None


def _given(folder: Path) -> Iterator[Path]:
    yield folder
    yield folder / "lib"


def _installed() -> Iterator[Path]:
    for wheel in WHEELS:
        try:
            distribution = importlib.metadata.distribution(wheel)
        except importlib.metadata.PackageNotFoundError:
            continue
        yield Path(str(distribution.locate_file("nvidia/nvshmem/lib")))
    for folder in SYSTEM_FOLDERS:
        if Path(folder).is_dir():
            yield Path(folder)
