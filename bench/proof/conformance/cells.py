"""The cells of the conformance table, every combination of options; the script of each; and what makes a cell pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from fnmatch import fnmatchcase

import odc
from odc.bench.proof.parity import comparison, jobs
from odc.bench.proof.parity.cases import FACTORS, Case

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
    def case(self) -> Case:
        """The script that trains this way, without anything else that a generated script may do."""
        plain = {name: next(iter(values)) for name, values in FACTORS.items()}
        chosen = {
            "fsdp": self.fsdp,
            "staging": "in-place" if self.fsdp == "fsdp2" else "none",
            "precision": "fp32" if self.precision == "fp32" else "bf16-reduced",
            "ranks": "2x2" if self.sharding == "hybrid" else "2",
            "reshard": "no" if self.sharding == "grad-op" else "yes",
            "counts": "one" if self.accumulation == "1" else "four",
            "sync": "last" if self.accumulation == "4-no-sync" else "all",
            "gradients": "norm" if self.clipping == "clip" else "untouched",
            "units": "3",
            "shapes": "odd",
            "optimizer": "adamw",
            "reduction": "before",
        }
        return Case(**{**plain, **chosen})


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


# What makes a cell pass: the same losses, gradients and parameters as FSDP's own, and ODC really at work


TOLERANCES = {"fp32": comparison.TOLERANCES["fp32"], "bf16": comparison.REDUCED_TOLERANCE}
QUANTITIES = ("losses", "gradients", "parameters")


@dataclass(frozen=True)
class Outcome:
    """How a cell ended. Errors are those of :func:`odc.bench.proof.parity.comparison.compare`."""

    cell: Cell
    status: str
    """"passed", "refused" (by ``odc.UnsupportedError``) or "failed"."""

    reason: str = ""
    """The reason, unless the cell passed."""

    losses: float | None = None
    """Largest error of a loss, or of the norm that clipping found in any step."""

    gradients: float | None = None
    """Largest error of a gradient of any step."""

    parameters: float | None = None
    """Largest error of a parameter after the last step."""


def outcome_of(cell: Cell, found: jobs.Outcome) -> Outcome:
    """The outcome of a cell, made of that of its script."""
    refusal = f"{odc.UnsupportedError.__name__}: "
    if found.status == "refused" and found.reason.startswith(refusal):
        return Outcome(cell, "refused", found.reason.removeprefix(refusal))
    errors = {quantity: (found.errors or {}).get(quantity) for quantity in QUANTITIES}
    return Outcome(cell, "passed" if found.status == "equal" else "failed", found.reason, **errors)


def run_cells(
    cells: Sequence[Cell], on_outcome: Callable[[Outcome], None] = lambda _: None, prepare: jobs.Prepare | None = None
) -> list[Outcome]:
    """Measure cells on CPU processes of this machine; the outcomes, in the order of ``cells``."""

    def show(found: jobs.Outcome) -> None:
        on_outcome(outcome_of(cells[found.number], found))

    cases = {number: cell.case for number, cell in enumerate(cells)}
    return [outcome_of(cells[found.number], found) for found in jobs.run_cases(cases, show, prepare)]
