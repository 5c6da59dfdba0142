"""Collects what is installed, each fact once for the checks that need it, and says what is too old."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from odc._version import install_command
from odc.cli.doctor import nvshmem
from odc.cli.doctor.cuda import CudaDriver, read_driver
from odc.cli.doctor.finding import Finding, absent, error, missing, not_needed, ok, warning

PACKAGES = (
    "torch",
    "triton",
    "cupy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvshmem4py-cu12",
    "nvshmem4py-cu13",
    "nvidia-nvshmem-cu12",
    "nvidia-nvshmem-cu13",
    "transformers",
    "accelerate",
    "trl",
)


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch. ``problem`` says why it could not be imported."""

    version: str = ""
    cuda: str | None = None
    """The CUDA version that it was built for, e.g. "13.0"."""

    hip: str | None = None
    distributed: bool = True
    problem: str = ""


def installed(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of those packages that are installed, from their metadata: nothing is imported."""
    found = {}
    for name in names:
        try:
            found[name] = str(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def read_torch() -> TorchBuild:
    """Import torch, which makes no CUDA context, and see how it was built."""
    try:
        import torch
    except Exception as problem:  # a broken installation raises OSError, RuntimeError and others
        return TorchBuild(problem=f"{type(problem).__name__}: {problem}")
    return TorchBuild(torch.__version__, torch.version.cuda, torch.version.hip, torch.distributed.is_available())


class Facts:
    """What this machine and this environment have."""

    @functools.cached_property
    def versions(self) -> Mapping[str, str]:
        return installed()

    @functools.cached_property
    def torch(self) -> TorchBuild:
        return read_torch()

    @functools.cached_property
    def cuda(self) -> CudaDriver:
        return read_driver()

    @functools.cached_property
    def rdma(self) -> tuple[nvshmem.RdmaPort, ...]:
        return nvshmem.read_ports()

    @functools.cached_property
    def variables(self) -> Mapping[str, str]:
        from odc.config import foreign_variables  # not at the top: it imports torch, which may be what is broken

        return foreign_variables()

    @functools.cached_property
    def nvshmem_host(self) -> nvshmem.NvshmemFile | None:
        return nvshmem.describe_file(nvshmem.find_host(self.variables, nvshmem.wheel_folders()))

    @functools.cached_property
    def nvshmem_device(self) -> nvshmem.NvshmemFile | None:
        return nvshmem.describe_file(nvshmem.find_bitcode(self.variables, nvshmem.wheel_folders()))

    @property
    def has_gpu(self) -> bool:
        return bool(self.cuda.devices)

    @property
    def cuda_major(self) -> int:
        """The CUDA generation that libraries have to match: torch's, else the newest that the driver runs."""
        text = self.torch.cuda or self.cuda.cuda_version
        return 12 if text.startswith("12.") else 13

    @property
    def fix(self) -> str:
        """The command that installs the CUDA libraries."""
        return fix(self.cuda_major)


_OLDEST_PYTHON = (3, 10)
_OLDEST_TORCH, _NEWEST_TORCH = (2, 9), (2, 13)
_OLDEST_CUPY = (13,)
_OLDEST_NVSHMEM4PY = (0, 3)
_OLDEST_TRAINERS = {"transformers": (5, 20), "accelerate": (1, 12), "trl": (1, 10)}
_OLDEST_KERNEL = (5, 3)  # pidfd_open
_TESTED_MACHINES = ("x86_64", "aarch64")
_CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
_NVSHMEM4PY = ("nvshmem4py-cu12", "nvshmem4py-cu13")


def release(version: str, length: int = 2) -> tuple[int, ...]:
    """The first numbers of a version: (2, 13) of "2.13.0+cpu"."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:length])


def fix(cuda_major: int) -> str:
    """The command that installs the CUDA libraries."""
    return install_command(f"cuda{cuda_major}")


def python(version: tuple[int, ...], executable: str) -> Finding:
    """The interpreter."""
    found = f"{'.'.join(map(str, version[:3]))}, {executable}"
    if version < _OLDEST_PYTHON:
        return error(found, "Use Python 3.10 or newer.")
    return ok(found)


def system(name: str, kernel: str, machine: str) -> Finding:
    """Operating system, kernel and architecture."""
    found = f"{name} {kernel}, {machine}"
    if name != "Linux":
        return error(found, "ODC needs Linux (memfd, eventfd, pidfd); in docker or a virtual machine it works too.")
    if release(kernel) < _OLDEST_KERNEL:
        return error(found, "Use Linux 5.3 or newer: older ones have no pidfd, which tells when a rank dies.")
    if machine not in _TESTED_MACHINES:
        return warning(found, f"Not tested here: ODC is for 64-bit Linux on {' or '.join(_TESTED_MACHINES)}.")
    return ok(found)


def torch(build: TorchBuild, *, has_gpu: bool) -> Finding:
    """Version and build of torch."""
    if build.problem:
        advice = "Install it anew: pip install --force-reinstall 'torch>=2.9'"
        return error(f"cannot be imported: {build.problem}", advice)
    kind = f"CUDA {build.cuda}" if build.cuda else f"ROCm {build.hip}" if build.hip else "CPU only"
    found = f"{build.version}, built for {kind}" if build.cuda or build.hip else f"{build.version}, {kind}"
    if release(build.version) < _OLDEST_TORCH:
        return error(found, "pip install 'torch>=2.9'")
    if not build.distributed:
        return error(f"{found}, without torch.distributed", "Install a build that has it: pip install 'torch>=2.9'")
    if release(build.version) > _NEWEST_TORCH:
        newest = ".".join(map(str, _NEWEST_TORCH))
        return warning(found, f"Newer than any tested version. If something breaks: pip install 'torch=={newest}.*'")
    if has_gpu and not build.cuda:
        return warning(found, "This machine has a GPU: install a CUDA build (https://pytorch.org/get-started/locally).")
    return ok(found)


def triton(versions: Mapping[str, str], no_compiler: str | None, *, has_gpu: bool) -> Finding:
    """The kernel compiler that torch's CUDA builds bring along; ``no_compiler``: what :func:`compiler_problem` says."""
    if "triton" in versions:
        if has_gpu and no_compiler is not None:
            advice = "apt install gcc python3-dev, or what your system calls them; CC names another compiler"
            return missing(f"{versions['triton']}, which compiles its launchers in C, but {no_compiler}", advice)
        return ok(versions["triton"])
    return absent("pip install triton", has_gpu=has_gpu)


def compiler_problem(
    variables: Mapping[str, str], which: Callable[[str], str | None] = shutil.which, headers: Path | None = None
) -> str | None:
    """What Triton lacks to compile C: a compiler (the one of ``CC``, gcc or clang), or Python's headers."""
    named = variables.get("CC")
    if named is not None and which(named.split()[0] if named.split() else "") is None:
        return f"CC={named} is not found"
    if named is None and not any(map(which, ("gcc", "clang"))):
        return "there is neither gcc nor clang"
    folder = headers or Path(sysconfig.get_paths()["include"])
    return None if (folder / "Python.h").exists() else f"there is no Python.h in {folder}"


def cupy(versions: Mapping[str, str], cuda_major: int, *, has_gpu: bool) -> Finding:
    """What allocates CUDA memory that can be exported."""
    return _cuda_library(versions, _CUPY, cuda_major, _OLDEST_CUPY, has_gpu=has_gpu)


def nvshmem4py(versions: Mapping[str, str], cuda_major: int, *, has_gpu: bool) -> Finding:
    """The Python side of NVSHMEM."""
    return _cuda_library(versions, _NVSHMEM4PY, cuda_major, _OLDEST_NVSHMEM4PY, has_gpu=has_gpu)


def cupy_version(versions: Mapping[str, str]) -> str | None:
    """The installed cupy, under whichever of its names."""
    return next((versions[name] for name in _CUPY if name in versions), None)


def _cuda_library(
    versions: Mapping[str, str], names: tuple[str, ...], cuda_major: int, oldest: tuple[int, ...], *, has_gpu: bool
) -> Finding:
    """A library that comes as one package per CUDA generation: one of them, the right one, new enough."""
    here = [name for name in names if name in versions]
    found = ", ".join(f"{name} {versions[name]}" for name in here)
    install = fix(cuda_major)
    if not here:
        return absent(install, has_gpu=has_gpu)
    if len(here) > 1:
        return warning(f"{found}: they overwrite each other", f"pip uninstall -y {' '.join(here)}; {install}")
    if has_gpu and re.search(r"cu(?:da)?1\d", here[0]) and f"{cuda_major}" not in here[0]:
        return warning(f"{found}, for another CUDA than {cuda_major}", f"pip uninstall -y {here[0]}; {install}")
    if release(versions[here[0]]) < oldest:
        return warning(f"{found}: too old", install)
    return ok(found)


def trainer(name: str, versions: Mapping[str, str]) -> Finding:
    """A library to train with; ODC works with plain FSDP2 alone."""
    if name not in versions:
        how = install_command("examples") if name == "transformers" else f"pip install {name}"
        return not_needed("not installed", f"To train with it: {how}")
    found = versions[name]
    oldest = _OLDEST_TRAINERS[name]
    if release(found) < oldest:
        newer = f"Older than any tested. {'.'.join(map(str, oldest))} or newer: {install_command('examples')}"
        return warning(found, newer)
    return ok(found)
