"""Layer 1: no processes. What ``odc doctor`` says of Python, the system and installed packages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from doctor_rows import DRIVER, ERROR, FIX, MISSING, NO_DRIVER, NOT_NEEDED, OK, WARNING, says

from odc.cli.doctor import software
from odc.cli.doctor.cuda import CudaDriver
from odc.cli.doctor.finding import Status
from odc.cli.doctor.software import Facts, TorchBuild, installed


@pytest.mark.parametrize(
    ("version", "status", "advice"), [((3, 10, 0), OK, ""), ((3, 14, 1), OK, ""), ((3, 9, 20), ERROR, "3.10")]
)
def test_python(version: tuple[int, ...], status: Status, advice: str) -> None:
    says(software.python(version, "/bin/python"), status, "/bin/python", advice)


@pytest.mark.parametrize(
    ("name", "kernel", "machine", "status", "advice"),
    [
        ("Linux", "6.8.0-31-generic", "x86_64", OK, ""),
        ("Linux", "5.3.0", "aarch64", OK, ""),
        ("Linux", "5.2.21", "x86_64", ERROR, "Linux 5.3"),
        ("Linux", "4.18.0-553.el8", "x86_64", ERROR, "Linux 5.3"),
        ("Linux", "6.8.0", "riscv64", WARNING, "Not tested"),
        ("Darwin", "24.0.0", "arm64", ERROR, "ODC needs Linux"),
    ],
)
def test_system(name: str, kernel: str, machine: str, status: Status, advice: str) -> None:
    says(software.system(name, kernel, machine), status, machine, advice)


@pytest.mark.parametrize(
    ("build", "has_gpu", "status", "found", "advice"),
    [
        (TorchBuild("2.9.0+cpu"), False, OK, "CPU only", ""),
        (TorchBuild("2.13.1+cu130", "13.0"), True, OK, "built for CUDA 13.0", ""),
        (TorchBuild("2.8.0", "12.8"), True, ERROR, "2.8.0", "pip install 'torch>=2.9'"),
        (TorchBuild("1.13.1"), False, ERROR, "1.13.1", "pip install 'torch>=2.9'"),
        (TorchBuild("2.14.0a0+git1"), False, WARNING, "2.14.0a0", "pip install 'torch==2.13.*'"),
        (TorchBuild("2.13.0+cpu"), True, WARNING, "CPU only", "CUDA build"),
        (TorchBuild("2.12.0", hip="6.4"), False, OK, "built for ROCm 6.4", ""),
        (TorchBuild("2.13.0", distributed=False), False, ERROR, "without torch.distributed", "pip install"),
        (TorchBuild(problem="OSError: libcudart"), False, ERROR, "OSError: libcudart", "pip install --force-reinstall"),
    ],
)
def test_torch(build: TorchBuild, has_gpu: bool, status: Status, found: str, advice: str) -> None:
    says(software.torch(build, has_gpu=has_gpu), status, found, advice)


@pytest.mark.parametrize(
    ("versions", "has_gpu", "status", "found", "advice"),
    [
        ({}, False, NOT_NEEDED, "not installed", ""),
        ({}, True, MISSING, "not installed", FIX),
        ({"cupy-cuda13x": "14.0.1"}, True, OK, "cupy-cuda13x 14.0.1", ""),
        ({"cupy": "13.6.0"}, True, OK, "cupy 13.6.0", ""),
        ({"cupy-cuda12x": "13.6.0"}, True, WARNING, "another CUDA than 13", "pip uninstall -y cupy-cuda12x; " + FIX),
        ({"cupy-cuda12x": "13.6.0"}, False, OK, "cupy-cuda12x 13.6.0", ""),
        ({"cupy-cuda13x": "12.9"}, True, WARNING, "too old", FIX),
        (
            {"cupy-cuda13x": "14.0", "cupy-cuda12x": "14.0"},
            True,
            WARNING,
            "overwrite each other",
            "pip uninstall -y cupy-cuda12x cupy-cuda13x",
        ),
    ],
)
def test_cupy(versions: dict[str, str], has_gpu: bool, status: Status, found: str, advice: str) -> None:
    says(software.cupy(versions, 13, has_gpu=has_gpu), status, found, advice)


@pytest.mark.parametrize(
    ("versions", "cuda_major", "has_gpu", "status", "found", "advice"),
    [
        ({"nvshmem4py-cu12": "0.4.1"}, 12, True, OK, "nvshmem4py-cu12 0.4.1", ""),
        ({"nvshmem4py-cu12": "0.4.1"}, 13, True, WARNING, "another CUDA", FIX),
        ({}, 12, True, MISSING, "not installed", "pip install 'odc-fsdp[cuda12]'"),
        ({}, 12, False, NOT_NEEDED, "not installed", ""),
    ],
)
def test_nvshmem4py(
    versions: dict[str, str], cuda_major: int, has_gpu: bool, status: Status, found: str, advice: str
) -> None:
    says(software.nvshmem4py(versions, cuda_major, has_gpu=has_gpu), status, found, advice)


@pytest.mark.parametrize(
    ("versions", "problem", "has_gpu", "status", "found", "advice"),
    [
        ({"triton": "3.5.0"}, "no gcc", False, OK, "3.5.0", ""),
        ({"triton": "3.5.0"}, None, True, OK, "3.5.0", ""),
        ({"triton": "3.5.0"}, "no gcc", True, MISSING, "in C, but no gcc", "gcc python3-dev"),
        ({}, None, False, NOT_NEEDED, "not installed", ""),
        ({}, None, True, MISSING, "not installed", "pip install triton"),
    ],
)
def test_triton(
    versions: dict[str, str], problem: str | None, has_gpu: bool, status: Status, found: str, advice: str
) -> None:
    says(software.triton(versions, problem, has_gpu=has_gpu), status, found, advice)


@pytest.mark.parametrize(
    ("name", "versions", "status", "found", "advice"),
    [
        ("transformers", {"transformers": "5.20.0"}, OK, "5.20.0", ""),
        ("transformers", {"transformers": "5.17.0"}, WARNING, "5.17.0", "odc-fsdp[examples]"),
        ("transformers", {}, NOT_NEEDED, "not installed", "odc-fsdp[examples]"),
        ("trl", {}, NOT_NEEDED, "not installed", "pip install trl"),
        ("trl", {"trl": "1.9.2"}, WARNING, "1.9.2", "1.10 or newer"),
    ],
)
def test_trainers(name: str, versions: dict[str, str], status: Status, found: str, advice: str) -> None:
    says(software.trainer(name, versions), status, found, advice)


def test_trainers_are_warned_about_below_what_the_extra_installs() -> None:
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    for name, oldest in software._OLDEST_TRAINERS.items():
        assert f'"{name}>={".".join(map(str, oldest))}' in text


@pytest.mark.parametrize(
    ("found", "variables", "problem"),
    [
        (["gcc"], {}, None),
        (["clang"], {}, None),
        (["cc"], {"CC": "cc -O2"}, None),
        ([], {}, "there is neither gcc nor clang"),
        (["gcc"], {"CC": "icc"}, "CC=icc is not found"),
        (["gcc"], {"CC": ""}, "CC= is not found"),
    ],
)
def test_what_triton_compiles_with(
    found: list[str], variables: dict[str, str], problem: str | None, tmp_path: Path
) -> None:
    """A slim container has a GPU, and no compiler: the first kernel would say so, an hour later."""
    (tmp_path / "Python.h").touch()
    assert software.compiler_problem(variables, lambda name: name if name in found else None, tmp_path) == problem


def test_what_triton_includes(tmp_path: Path) -> None:
    assert software.compiler_problem({}, str, tmp_path) == f"there is no Python.h in {tmp_path}"


def test_versions_come_from_metadata() -> None:
    found = installed(["torch", "no-such-package"])
    assert found.keys() == {"torch"}
    assert software.release(found["torch"]) == software.release(torch.__version__)


@pytest.mark.parametrize(
    ("build", "driver", "major"),
    [
        (TorchBuild("2.9", "12.8"), DRIVER, 12),
        (TorchBuild("2.9"), CudaDriver("570", "12.8"), 12),
        (TorchBuild("2.9"), DRIVER, 13),
        (TorchBuild("2.9"), NO_DRIVER, 13),
    ],
)
def test_the_extra_is_that_of_torch_then_of_the_driver(build: TorchBuild, driver: CudaDriver, major: int) -> None:
    facts = Facts()
    facts.torch, facts.cuda = build, driver
    assert facts.cuda_major == major
