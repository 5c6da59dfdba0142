"""What each supported torch demands of the packages that ODC names too, and what this repository says of them.

A torch that is built for CUDA demands exact versions of Triton and NVSHMEM; one for CPUs demands neither, so a pin that
no CUDA build can live with is not seen where CPU builds are tested. :data:`TORCH` holds what the metadata of the CUDA
builds says; ``test_pins_resolved.py`` compares it with an index.

- ``constraints.txt`` pins one torch, with the Triton and the NVSHMEM that its CUDA build demands.
- With any torch of the table, the project's requirements, the extra for that torch's CUDA and ``dev`` can be installed
  together. The pins of ``constraints.txt`` other than torch's and Triton's hold there too.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Wanted:
    """What the CUDA build of one torch for Linux on x86-64 demands, by exact version."""

    cuda: int
    """Major version of the CUDA that it is built for."""
    triton: str
    nvshmem: str
    """Of ``nvidia-nvshmem-cu<cuda>``."""

    @property
    def extra(self) -> str:
        """The extra of this project that fits."""
        return f"cuda{self.cuda}"

    @property
    def nvshmem_package(self) -> str:
        return f"nvidia-nvshmem-cu{self.cuda}"


TORCH = {
    "2.9.1": Wanted(12, "3.5.1", "3.3.20"),
    "2.10.0": Wanted(12, "3.6.0", "3.4.5"),
    "2.11.0": Wanted(13, "3.6.0", "3.4.5"),
    "2.12.1": Wanted(13, "3.7.1", "3.4.5"),
    "2.13.0": Wanted(13, "3.7.1", "3.4.5"),
    "2.14.1": Wanted(13, "3.8.0", "3.4.5"),
}
"""The builds that a package index gives out under these versions (other CUDA builds have indexes of their own)."""


def constraints(without: str = "") -> list[Requirement]:
    """The pins of ``constraints.txt``, but for lines that match the regular expression ``without``."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return [Requirement(line) for line in lines if not without or not re.search(without, line)]


def pins() -> dict[str, str]:
    """Version by name of those pins that depend on nothing."""
    found = {}
    for requirement in constraints():
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", requirement
        if requirement.marker is None:
            found[requirement.name] = specifier.version
    return found


def left_out_for_other_torches() -> str:
    """Which lines of ``constraints.txt`` ``torch_versions.sh`` leaves out, as a regular expression."""
    (pattern,) = re.findall(r"grep -vE '(\S+ \S+)' constraints\.txt", (ROOT / "tests/torch_versions.sh").read_text())
    return str(pattern)


def requirements(extra: str = "") -> list[Requirement]:
    """What ``pyproject.toml`` requires, of the project itself or for an extra. (Python 3.10 has no parser for it.)"""
    name = re.escape(extra or "dependencies")
    (text,) = re.findall(rf"^{name} = (\[.*?\]$)", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    return [Requirement(line) for line in ast.literal_eval(text)]


def lowest(requirement: Requirement) -> str:
    """The oldest version that a requirement allows by its ``>=``."""
    (version,) = (specifier.version for specifier in requirement.specifier if specifier.operator == ">=")
    return str(version)
