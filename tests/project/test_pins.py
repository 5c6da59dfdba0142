"""Layer 1: no processes. The versions that this repository names can be had together, by the facts of ``pins.py``."""

from __future__ import annotations

import re

import pytest
from packaging.version import Version
from pins import ROOT, TORCH, constraints, left_out_for_other_torches, pins, requirements

from odc.fsdp_patch.compat import COMPARED_WITH


def test_constraints_pin_what_the_cuda_build_of_their_torch_demands() -> None:
    """Otherwise pip has no solution where it finds CUDA builds, which CPU builds hide."""
    pinned = pins()
    wanted = TORCH[pinned["torch"]]
    assert pinned["triton"] == wanted.triton
    assert pinned[wanted.nvshmem_package] == wanted.nvshmem


def test_the_table_has_every_supported_torch() -> None:
    minors = [(Version(version).major, Version(version).minor) for version in TORCH]
    first, last = COMPARED_WITH
    assert minors == [(2, minor) for minor in range(first[1], last[1] + 1)]
    tested = re.findall(r"^readonly DEFAULT_VERSIONS=\((.+)\)$", (ROOT / "tests/torch_versions.sh").read_text(), re.M)
    made = re.findall(r"^TORCH_VERSIONS \?= (.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert tested == made == [" ".join(TORCH)]
    (torch,) = (requirement for requirement in requirements() if requirement.name == "torch")
    assert all(torch.specifier.contains(version) for version in TORCH)


def test_the_commands_of_the_first_hour_fit_their_extras() -> None:
    """As docs/gpu.md has them: torch by its version, then the extra for the CUDA which that one is built for."""
    text = (ROOT / "docs/gpu.md").read_text()
    commands = re.findall(
        r"pip install (-c constraints\.txt )?torch==(\S+) && pip install (?:-c \S+ )?'\.\[(\w+)\]'", text
    )
    assert [(version, extra) for _, version, extra in commands] == [
        (version, TORCH[version].extra) for version in (pins()["torch"], "2.10.0")
    ]
    assert [bool(constrained) for constrained, _, _ in commands] == [True, False]
    last_of_cuda_12 = [version for version, wanted in TORCH.items() if wanted.cuda == 12][-1]
    assert last_of_cuda_12 == "2.10.0"


@pytest.mark.parametrize("torch", TORCH)
@pytest.mark.parametrize("group", ["extra", "dev"])
def test_ranges_allow_what_each_torch_demands(torch: str, group: str) -> None:
    wanted = TORCH[torch]
    versions = {"triton": wanted.triton, wanted.nvshmem_package: wanted.nvshmem}
    named = requirements(wanted.extra if group == "extra" else group)
    met = [requirement for requirement in named if requirement.name in versions]
    assert met, "one of them is named"
    assert [r for r in met if not r.specifier.contains(versions[r.name])] == []


@pytest.mark.parametrize("torch", TORCH)
def test_the_pins_of_other_torches_hold_none_that_they_contradict(torch: str) -> None:
    wanted = TORCH[torch]
    versions = {"torch": torch, "triton": wanted.triton, wanted.nvshmem_package: wanted.nvshmem}
    kept = constraints(without=left_out_for_other_torches())
    assert len(kept) == len(constraints()) - 2
    assert [r for r in kept if r.name in versions and not r.specifier.contains(versions[r.name])] == []
