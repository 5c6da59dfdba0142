"""What all launchers share: Triton's names of dtypes, the grid, and the device a launch goes to."""

# mypy: disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

DTYPES: dict[torch.dtype, Any] = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}

NUM_WARPS = 8
"""256 threads: with 16 elements each a program has 8 to 16 KiB on the way, enough to cover a peer's latency."""
BLOCK = 4096
"""Elements per turn of a program."""
LOCAL_PROGRAMS = 1024
"""Programs of a kernel that only touches local memory: enough to fill any GPU, few enough to start in microseconds."""
REMOTE_PROGRAMS = 64
"""Programs of a kernel that reads or writes peers: the link is full long before all multiprocessors are taken, and
those that stay free go on computing."""


def grid(items: int, limit: int) -> tuple[int]:
    """One program per item, at most ``limit``: each then walks every ``limit``-th item.

    >>> grid(3, 64), grid(1000, 64)
    ((3,), (64,))
    """
    return (max(1, min(items, limit)),)


def blocks(numel: int) -> int:
    """
    >>> blocks(4096), blocks(4097)
    (1, 2)
    """
    return -(-numel // BLOCK)


def device_of(kernel: object, tensor: torch.Tensor, advice: str) -> contextlib.AbstractContextManager[object]:
    """The context in which to launch ``kernel``: Triton launches on the current device and its current stream.

    Raises ValueError for host memory, unless Triton interprets kernels (``TRITON_INTERPRET=1`` when the kernel's module
    was imported).
    """
    if tensor.device.type == "cuda":
        return torch.cuda.device(tensor.device)
    if isinstance(kernel, JITFunction):
        raise ValueError(f"tensors are on {tensor.device}, expected a CUDA device: {advice}")
    return contextlib.nullcontext()
