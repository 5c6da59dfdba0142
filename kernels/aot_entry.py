"""One kernel to compile ahead of time: what its launcher would have Triton compile at run time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AotEntry:
    """A kernel with the types of its arguments and the values of its constants.

    Nothing else may decide what Triton compiles (see [Note: No argument is specialized] in launching.py), so one entry
    is one binary per architecture.
    """

    name: str
    """Unique, from kernel, dtypes and constants: ``copy_cast[bf16->fp32, aligned]``."""
    kernel: Any
    """The `triton.jit` function."""
    signature: Mapping[str, str]
    """Triton's type of each parameter, in order: ``{"out": "*bf16", "numel": "i64", "BLOCK": "constexpr"}``."""
    constants: Mapping[str, Any]
    num_warps: int
    nvshmem: bool = False
    """Whether the kernel is linked with NVSHMEM's device library."""
    since: tuple[int, int] = (8, 0)
    """The first compute capability on which launchers launch it."""


def entry(
    name: str,
    kernel: Any,
    pointers: Mapping[str, str],
    constants: Mapping[str, Any],
    num_warps: int,
    *,
    nvshmem: bool = False,
    since: tuple[int, int] = (8, 0),
) -> AotEntry:
    """The entry of ``kernel``: integers as annotated, ``pointers`` by parameter, ``{"out": "*bf16"}``.

    Raises ValueError if a parameter has no type, or a constant no value.
    """
    signature: dict[str, str] = {}
    for param in kernel.params:
        if param.is_constexpr:
            signature[param.name] = "constexpr"
        else:
            signature[param.name] = pointers.get(param.name) or param.annotation_type
    given = {n for n, kind in signature.items() if kind == "constexpr"}
    if not all(signature.values()) or given != set(constants) or not set(pointers) <= set(signature):
        raise ValueError(
            f"{name}: types {signature} from pointers {dict(pointers)} and constants {dict(constants)}, "
            f"expected a type for every parameter and a value for every constant"
        )
    return AotEntry(name, kernel, signature, dict(constants), num_warps, nvshmem, since)


def alignment(aligned: bool) -> str:
    """
    >>> alignment(True)
    'aligned'
    """
    return "aligned" if aligned else "unaligned"
