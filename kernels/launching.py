"""The common part of launchers: Triton's names of dtypes, the grid, the device of a launch, and operations of programs
on a block of elements.
"""

# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from odc.kernels.peers import VECTOR_BYTES

DTYPES: dict[torch.dtype, Any] = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}

NUM_WARPS = 8
"""Of a program that only touches local memory."""
WARP_BLOCK = 512
"""Elements per turn of a warp: 16 of each thread."""
BLOCK = NUM_WARPS * WARP_BLOCK
"""Elements per turn of a program."""
LOCAL_PROGRAMS = 1024
"""Programs of a kernel that only touches local memory: enough to fill any GPU, few enough to start in microseconds."""
REMOTE_PROGRAMS, REMOTE_WARPS = 16, 32
"""Of a kernel that reads or writes peers. A link needs bytes under way, here up to 1 MiB, and no multiprocessors; a
program holds one, since Hopper's matmul kernels take all its registers. So few programs of many warps: those
multiprocessors that stay free go on computing."""


def grid(items: int, limit: int) -> tuple[int]:
    """One program per item, at most ``limit``: each then walks every ``limit``-th item.

    >>> grid(3, 64), grid(1000, 64)
    ((3,), (64,))
    """
    return (max(1, min(items, limit)),)


def blocks(numel: int, block: int = BLOCK) -> int:
    """
    >>> blocks(4096), blocks(4097), blocks(4097, 8192)
    (1, 2, 1)
    """
    return -(-numel // block)


# [Note: No argument is specialized]
# Triton would compile another kernel for integers that are 1 or multiples of 16, and for integers that need 64 bits.
# All are declared 64-bit and unspecialized, and alignment is the constexpr VECTOR: one kernel per pair of dtypes and
# alignment, which `aot_list` compiles beforehand, and no compilation in the middle of a training step.
#
# [Note: Contiguous lanes]
# An access is 16 bytes of the widest of a kernel's element types, and every operand is accessed by as many elements:
# VECTOR. Then one layout, VECTOR elements per thread, suits all operands: nothing is exchanged between threads through
# shared memory, and the lanes of a warp touch adjacent bytes with each instruction, 128 bits of fp32 beside 64 bits of
# bf16. Eight bf16 in 128 bits would leave gaps of 16 bytes between the lanes' fp32.
# Each block has a part of whole vectors, whose mask is the same for all elements of a vector (`max_constancy`, or the
# mask would forbid wide accesses), and the last block of a row up to VECTOR - 1 elements more, one per thread.
def vector(*places: tuple[int, torch.dtype]) -> int:
    """Elements that a thread may access at once, given the byte addresses and distances of operands, with their dtypes.

    16 bytes of the widest dtype if every place is a multiple of that many of its own elements, else 1.

    >>> vector((4096, torch.float32), (8200, torch.bfloat16)), vector((4096, torch.float32), (8194, torch.bfloat16))
    (4, 1)
    """
    elements = VECTOR_BYTES // max(dtype.itemsize for _, dtype in places)
    return elements if all(place % (elements * dtype.itemsize) == 0 for place, dtype in places) else 1


@triton.jit
def _put(target: tl.tensor, values: tl.tensor, mask: tl.tensor, HOW: tl.constexpr) -> None:
    if HOW == "atomic":
        # Relaxed: the additions need no order among themselves, and the kernel's end publishes them. System scope: the
        # other clients of this owner are other GPUs.
        tl.atomic_add(target, values, mask=mask, sem="relaxed", scope="sys")
    else:
        if HOW == "add":
            values += tl.load(target, mask=mask)
        tl.store(target, values, mask=mask)


@triton.jit
def move_block(
    target: tl.tensor,
    source: tl.tensor,
    numel: tl.tensor,
    HOW: tl.constexpr,
    CACHE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """What a program does with ``numel`` elements, at most ``BLOCK``, cast to ``target``'s dtype. ``HOW``: "copy",
    "add", or "atomic" additions. ``CACHE``: how ``source`` is loaded. See [Note: Contiguous lanes]."""
    DTYPE: tl.constexpr = target.dtype.element_ty
    lanes = tl.arange(0, BLOCK)
    whole = numel // VECTOR * VECTOR
    targets = tl.multiple_of(target + lanes, VECTOR * DTYPE.primitive_bitwidth // 8)
    origins = tl.multiple_of(source + lanes, VECTOR * source.dtype.element_ty.primitive_bitwidth // 8)
    inside = tl.max_constancy(lanes < whole, VECTOR)
    _put(targets, tl.load(origins, mask=inside, cache_modifier=CACHE).to(DTYPE), inside, HOW)
    if VECTOR > 1 and whole < numel:
        rest = whole + tl.arange(0, VECTOR)
        last = tl.load(source + rest, mask=rest < numel, cache_modifier=CACHE)
        _put(target + rest, last.to(DTYPE), rest < numel, HOW)


VECTOR_ATOMICS = (9, 0)
"""The first compute capability that adds several elements by one instruction."""


@functools.cache
def has_vector_atomics(device: torch.device) -> bool:
    """Host memory, where kernels are interpreted, is taken for a device that has them."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= VECTOR_ATOMICS


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
