"""All kernels of the product, in every combination of dtypes and alignment that it launches."""

from __future__ import annotations

from odc.kernels import accumulate, fill, parts, slots
from odc.kernels.aot_entry import AotEntry
from odc.kernels.nvshmem import signals, transfer


def entries() -> list[AotEntry]:
    """The slow ones (linked with NVSHMEM) first, so that no worker begins one of them when the others are done."""
    rows = [*transfer.aot_entries(), *signals.aot_entries()]
    return [
        *rows,
        *accumulate.aot_entries(),
        *slots.aot_entries(),
        *parts.aot_entries(),
        *fill.aot_entries(),
    ]
