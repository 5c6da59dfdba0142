"""Compile and load the kernels of a step in advance, since a compilation within a step delays all ranks.

Loading counts too: the driver may wait for running kernels when it loads a module, and one of them may be waiting for
this rank.
"""

# mypy: disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from odc.kernels import accumulate, fill, parts, slots
from odc.kernels.aot_entry import AotEntry
from odc.kernels.arguments import FLOATS
from odc.kernels.launching import DTYPES


@dataclass(frozen=True)
class UnitDtypes:
    """The dtypes of one unit's data; those that are not bf16, fp16, fp32 or fp64 are no kernel's business."""

    published: torch.dtype
    """Of the shards that peers read, and of what is gathered."""
    grads: torch.dtype
    """Of the gradients as they are pushed, or of those of a narrower ``published``, which are pushed as they are."""
    sums: torch.dtype
    """Of the accumulators."""


def needed_entries(units: Iterable[UnitDtypes]) -> list[AotEntry]:
    """Everything that launchers may launch for ``units``, each once: every pair of dtypes, aligned and not.

    Where a unit lies and how large it is do not matter: the next unit's offsets, or the part of a push that holds some
    parameters only, may be aligned otherwise. Additions in the sum's own dtype, and atomic ones of fp32, are there for
    gradients that are cast first.

    >>> bf16, fp32 = torch.bfloat16, torch.float32
    >>> [e.name for e in needed_entries([UnitDtypes(bf16, bf16, fp32)])][:2]
    ['accumulate[bf16->fp32, aligned]', 'accumulate[bf16->fp32, unaligned]']
    """
    found: dict[str, AotEntry] = {}
    for unit in units:
        known = [d for d in (unit.published, unit.grads, unit.sums) if d in FLOATS]
        casts = [(s, out) for s in known for out in known if s != torch.float64 or out.itemsize > 2]
        narrow = [d for d in known if d is unit.published and d.itemsize < unit.grads.itemsize]
        pushed = (unit.grads, *narrow)
        sums = [(unit.sums, d) for d in dict.fromkeys((*pushed, unit.sums)) if (unit.sums, d) in accumulate.PAIRS]
        adding = dict.fromkeys((*pushed, torch.float32)) if unit.sums == torch.float32 else ()
        atomic = [d for d in adding if d in parts.GRADIENTS]
        entries = (
            accumulate.aot_entries(sums),
            slots.aot_entries(sums),
            parts.aot_entries(atomic),
            fill.aot_entries(known, casts),
        )
        found |= {entry.name: entry for group in entries for entry in group}
    return list(found.values())


def prepare_kernels(device: torch.device, units: Iterable[UnitDtypes]) -> int:
    """Compile for ``device`` and load on it all kernels that may be launched for ``units``; how many there are.

    Nothing is launched. What has been compiled is kept on disk by Triton (TRITON_CACHE_DIR), so that only the first
    process of a machine takes the time: about 0.2 s per kernel, 16 to 42 kernels for one set of dtypes. Call it before
    the first step, and again for units with other dtypes; what is loaded already costs microseconds.

    Raises whatever Triton or the driver raises, such as for a missing C compiler.
    """
    capability = torch.cuda.get_device_capability(device)
    entries = [entry for entry in needed_entries(units) if entry.since <= capability]
    with torch.cuda.device(device):
        for entry in entries:
            load_entry(entry)
    return len(entries)


_EXAMPLES: dict[str, object] = {f"*{short}": dtype for dtype, short in DTYPES.items()} | {
    "*u8": torch.uint8,
    "*i16": torch.int16,
    "*i32": torch.int32,
    "*i64": torch.int64,
    "i32": 0,
    "i64": 0,
    "fp32": 0.0,
}
"""An argument of each type, of which Triton looks at the type only; a dtype stands for a tensor."""


def load_entry(entry: AotEntry, **options: Any) -> Any:
    """Compile ``entry`` for the current device as its launcher would, and load it, without a launch; what Triton keeps.

    ``options``: what the launcher passes before ``num_warps``. Triton tells kernels apart by the order too.
    """
    examples = [_EXAMPLES[kind] for kind in entry.signature.values() if kind != "constexpr"]
    options |= {"num_warps": entry.num_warps, **entry.constants}
    compiled = entry.kernel.warmup(*examples, grid=(1,), **options)
    if compiled is not None:  # None: somebody's hook (`jit_cache_hook`) has refused
        _ = compiled.run  # loads the module at the first use
    return compiled
