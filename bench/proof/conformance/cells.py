"""The cells: every combination of FSDP, precision, sharding, gradient accumulation and clipping."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from fnmatch import fnmatchcase

AXES = {
    "FSDP": ("fsdp1-flat", "fsdp1-orig", "fsdp2"),
    "precision": ("fp32", "bf16"),
    "sharding": ("full", "grad-op", "hybrid"),
    "accumulation": ("1", "4", "4-no-sync"),
    "clipping": ("clip", "no-clip"),
}
MEANINGS = {
    "fsdp1-flat": "`FullyShardedDataParallel(use_orig_params=False)`",
    "fsdp1-orig": "`FullyShardedDataParallel(use_orig_params=True)`",
    "fsdp2": "`fully_shard`",
    "fp32": "no mixed precision",
    "bf16": "`param_dtype` and `reduce_dtype` bfloat16",
    "full": "`FULL_SHARD`, `reshard_after_forward=True`; 2 ranks",
    "grad-op": "`SHARD_GRAD_OP`, `reshard_after_forward=False`; 2 ranks",
    "hybrid": "`HYBRID_SHARD`, a 2-D mesh; 4 ranks that act as 2 hosts: 2 replicas of 2 shards",
    "1": "one microbatch per optimizer step",
    "4": "four microbatches, each of them synchronized",
    "4-no-sync": "four microbatches, the first three under `no_sync()` or `set_requires_gradient_sync(False)`",
    "clip": "`model.clip_grad_norm_` of FSDP1, `torch.nn.utils.clip_grad_norm_` for FSDP2",
    "no-clip": "no clipping",
}


@dataclass(frozen=True)
class Cell:
    """One way to train; each field is a value of the axis of the same name in ``AXES``."""

    fsdp: str
    precision: str
    sharding: str
    accumulation: str
    clipping: str

    @property
    def name(self) -> str:
        """All values, for example ``fsdp2/bf16/hybrid/4-no-sync/clip``."""
        return "/".join(self.values)

    @property
    def values(self) -> tuple[str, ...]:
        return astuple(self)

    @property
    def world_size(self) -> int:
        return 4 if self.sharding == "hybrid" else 2

    @property
    def num_microbatches(self) -> int:
        return int(self.accumulation.partition("-")[0])

    @property
    def num_unsynchronized(self) -> int:
        """How many microbatches of each step run without synchronization of gradients: the first ones."""
        return self.num_microbatches - 1 if self.accumulation.endswith("no-sync") else 0


def all_cells() -> list[Cell]:
    """Every combination, in the order of the table."""
    return [Cell(*values) for values in itertools.product(*AXES.values())]


def select(cells: Iterable[Cell], words: Sequence[str]) -> list[Cell]:
    """The cells of which every word matches a value; a word may be a pattern such as ``fsdp1-*``.

    Raises:
        ValueError: a word matches no value of any axis, or no cell has them all.
    """
    values = [value for axis in AXES.values() for value in axis]
    for word in words:
        if not any(fnmatchcase(value, word) for value in values):
            raise ValueError(f"{word!r} is no value of an axis; there are {', '.join(values)}")
    selected = [cell for cell in cells if all(any(fnmatchcase(v, word) for v in cell.values) for word in words)]
    if not selected:
        raise ValueError(f"no cell has all of {' '.join(words)}: give at most one value of each axis, or a pattern")
    return selected
