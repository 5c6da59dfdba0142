"""What has to be there before NVSHMEM can be used: each missing piece by name, with what to do about it."""

from __future__ import annotations

from pathlib import Path

import torch

from odc.config import nvshmem_folder
from odc.cuda import checks
from odc.kernels.nvshmem import find_bitcode


def unavailable(device: torch.device) -> str | None:
    """Why this rank cannot use NVSHMEM on ``device``, or None. Makes no context, initialises nothing."""
    reason = checks.unavailable(device)
    if reason is not None:
        return reason
    reason = checks.missing_module("nvshmem", "is the Python side of NVSHMEM (nvshmem4py)", checks.extra())
    if reason is not None:
        return reason
    try:
        bitcode_for(device)
    except FileNotFoundError as problem:
        return str(problem)
    return None


def bitcode_for(device: torch.device) -> Path:
    """NVSHMEM's device library for a device: that of ``NVSHMEM_LIB_DIR``, or the installed one.

    Raises:
        FileNotFoundError: there is none; says what to install.
    """
    major, minor = torch.cuda.get_device_capability(device)
    return find_bitcode(f"sm_{major}{minor}", nvshmem_folder())


def heap_problem(needed_bytes: int, heap_bytes: int | None) -> str | None:
    """Why a heap of ``heap_bytes`` (None: not set by the user) will not do for ``needed_bytes``, or None."""
    if heap_bytes is None or heap_bytes >= needed_bytes:
        return None
    return (
        f"the NVSHMEM heap is too small: NVSHMEM_SYMMETRIC_SIZE={heap_bytes} ({heap_bytes / 2**20:.0f} MiB), and this "
        f"model on this many ranks needs NVSHMEM_SYMMETRIC_SIZE={needed_bytes} ({needed_bytes / 2**20:.0f} MiB). Set "
        "it to that, or unset it: ODC then asks for what it needs"
    )
