"""Layer 1, extended: no ranks, but the package index that pip is configured with. pip resolves what this repository
names against the metadata of torch's CUDA builds; nothing is installed.

What holds for which torch:

- The one that ``constraints.txt`` pins: all of ``constraints.txt``, with what ``make`` installs.
- Every one of ``pins.TORCH``: ``.[dev]`` with ``constraints.txt`` but for its pins of torch and Triton, as
  ``make test-torch-versions`` installs it; and the extra for the CUDA of that torch, with the oldest and with the
  newest allowed versions of cupy and nvshmem4py. NVSHMEM's version is torch's: the oldest is that of 2.9.1.

``torch===2.13.0`` is the build of that very name: ``==`` also takes builds with a local version such as ``+cpu``,
and prefers them.
"""

from __future__ import annotations

from typing import Any

import pytest
from packaging.requirements import Requirement
from pins import TORCH, Wanted, constraints, left_out_for_other_torches, lowest, pins, requirements
from resolving import NotResolvedError, Resolver, make_resolver, reason_to_skip

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def resolver(tmp_path_factory: pytest.TempPathFactory) -> Resolver:
    return make_resolver(tmp_path_factory.mktemp("resolver"))


@pytest.fixture(scope="module")
def demands(resolver: Resolver) -> dict[str, dict[str, str]]:
    """What each torch of the table demands here, by exact version; empty where there is no CUDA build."""
    return {torch: _demands(resolver, torch) for torch in TORCH}


def _demands(resolver: Resolver, torch: str) -> dict[str, str]:
    try:
        metadata = resolver.resolve(f"torch==={torch}", options=["--no-deps"])["torch"]
    except NotResolvedError as problem:
        if reason_to_skip(str(problem)) is None:
            raise
        return {}
    named = [Requirement(line) for line in metadata.get("requires_dist", [])]
    met = [r for r in named if r.marker is None or r.marker.evaluate({"extra": ""})]
    return {r.name: next(iter(r.specifier)).version for r in met if str(r.specifier).startswith("==")}


def need_cuda_build(demands: dict[str, dict[str, str]], torch: str) -> Wanted:
    if not any("nvshmem" in name for name in demands[torch]):
        pytest.skip(f"the package index has no CUDA build of torch {torch} for this platform and this Python")
    return TORCH[torch]


@pytest.mark.parametrize("torch", TORCH)
def test_the_table_is_what_the_metadata_says(demands: dict[str, Any], torch: str) -> None:
    wanted = need_cuda_build(demands, torch)
    found = {n: v for n, v in demands[torch].items() if n == "triton" or "nvshmem" in n}
    assert found == {"triton": wanted.triton, wanted.nvshmem_package: wanted.nvshmem}


def test_constraints_resolve_with_the_cuda_build(resolver: Resolver, demands: dict[str, Any]) -> None:
    torch = pins()["torch"]
    wanted = need_cuda_build(demands, torch)
    file = resolver.folder / "constraints.txt"
    file.write_text("\n".join(map(str, constraints())))
    named = [*requirements(), *requirements("dev"), *requirements("plot"), *requirements("examples")]
    found = resolver.versions(f"torch==={torch}", *named, options=["-c", str(file)])
    assert (found["torch"], found["triton"], found[wanted.nvshmem_package]) == (torch, wanted.triton, wanted.nvshmem)


@pytest.mark.parametrize("torch", TORCH)
def test_other_torches_resolve_with_the_other_constraints(
    resolver: Resolver, demands: dict[str, Any], torch: str
) -> None:
    wanted = need_cuda_build(demands, torch)
    file = resolver.folder / "other_constraints.txt"
    file.write_text("\n".join(map(str, constraints(without=left_out_for_other_torches()))))
    found = resolver.versions(f"torch==={torch}", *requirements(), *requirements("dev"), options=["-c", str(file)])
    assert (found["torch"], found["triton"], found[wanted.nvshmem_package]) == (torch, wanted.triton, wanted.nvshmem)


@pytest.mark.parametrize("torch", TORCH)
@pytest.mark.parametrize("age", ["oldest", "newest"])
def test_the_extra_resolves(resolver: Resolver, demands: dict[str, Any], torch: str, age: str) -> None:
    wanted = need_cuda_build(demands, torch)
    extra = [r for r in requirements(wanted.extra) if r.name != wanted.nvshmem_package]
    named = [f"{r.name}=={lowest(r)}" for r in extra] if age == "oldest" else []
    found = resolver.versions(f"torch==={torch}", *requirements(), *requirements(wanted.extra), *named)
    assert (found["torch"], found["triton"], found[wanted.nvshmem_package]) == (torch, wanted.triton, wanted.nvshmem)
    other = f"cu{25 - wanted.cuda}"
    assert [name for name in found if other in name] == []
