"""What the checks ran on, and what is missing on a machine without a usable GPU."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import torch

from odc.bench.gpu.setting import Report, Setting
from odc.bench.harness.environment import describe_environment

_DRIVER = Path("/proc/driver/nvidia/version")
_PACKAGES = (
    "triton",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-nvshmem-cu12",
    "nvidia-nvshmem-cu13",
    "nvshmem4py-cu12",
    "nvshmem4py-cu13",
    "transformers",
)


def why_no_gpu() -> str | None:
    """What this machine lacks for any check, with what to do about it; None if there is a GPU."""
    if torch.cuda.is_available() and torch.cuda.device_count():
        return None
    if torch.version.cuda is None:
        cause = f"torch {torch.__version__} is built without CUDA: install one that is built with it"
    else:
        cause = (
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds none: is the NVIDIA driver there (odc doctor)"
        )
    return f"odc bench gpu needs at least one NVIDIA GPU, with the extra cuda12 or cuda13 installed. {cause}."


def describe(setting: Setting) -> Report:
    """Hardware, driver, versions and date, as a check of its own process: asking CUDA may make a context."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    environment = {
        **describe_environment(),
        "gpus": [_gpu(index) for index in range(count)],
        "peer_access": [
            [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)
        ],
        "driver": _driver(),
        "cuda_of_torch": torch.version.cuda,
        "nccl": _nccl() if count else None,
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }
    return Report("", environment)


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
    }


def _driver() -> str | None:
    """The version in the driver's own file."""
    found = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", _DRIVER.read_text()) if _DRIVER.exists() else None
    return found[1] if found else None


def _nccl() -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
