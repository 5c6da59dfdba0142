"""Facts that several checks need, each collected when first asked for."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from odc.doctor.cuda import CudaDriver, read_driver
from odc.doctor.rdma import RdmaPort, read_ports

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
    def rdma(self) -> tuple[RdmaPort, ...]:
        return read_ports()

    @functools.cached_property
    def variables(self) -> Mapping[str, str]:
        from odc.config import foreign_variables  # not at the top: it imports torch, which may be what is broken

        return foreign_variables()

    @property
    def has_gpu(self) -> bool:
        return bool(self.cuda.devices)

    @property
    def cuda_major(self) -> int:
        """The CUDA generation that libraries have to match: torch's, else the newest that the driver runs."""
        text = self.torch.cuda or self.cuda.cuda_version
        return 12 if text.startswith("12.") else 13
