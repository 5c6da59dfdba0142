"""What has to be there before device memory can be shared: each missing piece by name, with what to do about it."""

from __future__ import annotations

import importlib.util

import torch

from odc._version import DISTRIBUTION
from odc.cuda import driver


def unavailable(device: torch.device) -> str | None:
    """Why this rank cannot use CUDA IPC on ``device``, or None. Makes no context."""
    if device.type != "cuda":
        return f"it serves CUDA tensors, the model is on {device.type}"
    return missing_module("cupy", "allocates the memory that is shared", extra()) or (
        missing_module("triton", "compiles the kernels", "triton") or driver.problem() or _cupy_problem()
    )


def missing_module(name: str, purpose: str, package: str) -> str | None:
    """What to say if a module is not installed; it is not imported."""
    if importlib.util.find_spec(name) is None:
        return f"{name}, which {purpose}, is not installed: pip install {package}"
    return None


def extra() -> str:
    """This project with the extra that fits the CUDA which torch was built for, quoted for ``pip install``."""
    version = torch.version.cuda
    return f"'{DISTRIBUTION}[{'cuda12' if version and version.startswith('12') else 'cuda13'}]'"


def _cupy_problem() -> str | None:
    import cupy

    try:
        cupy.cuda.runtime.driverGetVersion()
        cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        return f"cupy cannot use the driver ({error}): update the driver, or install the cupy for its CUDA version"
    return None
