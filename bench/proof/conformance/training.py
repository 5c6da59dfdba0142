"""The cells, every combination of options; the training script of both runs of a cell; and what makes a cell pass.

The two runs differ in one line of the script, which is as a user would write it: ``patch_fsdp``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import odc
from odc.bench.proof.sharding import (
    LanguageModel,
    as_if_trained,
    by_unit,
    clip,
    full_parameters,
    local_gradients,
    synchronized,
    tokens_of,
    wrap_of,
)
from odc.setup.agreement import ProcessGroupExchange, gather_json
from odc.timeline import Stats

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


# The training script


STEPS = 10
NUM_BLOCKS = 2
WIDTH = 13  # odd sizes: no shard is without padding
VOCABULARY = 17
LARGEST_NORM = 0.1  # below the gradients' norm in every step, so that clipping always clips
# About the size of the gradients. With torch's 1e-8 Adam makes a whole step of any gradient, also of one that is mere
# rounding (plain FSDP2 in bf16 then differs by 7 % between reduction in bf16 and in fp32), and hides a wrong factor.
EPSILON = 1e-3


class Block(nn.Module):
    """Attention with one head and an MLP. No bias in front of a softmax: its gradient is nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.query_key_value(self.attention_norm(x)).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: torch.Tensor = x + self.down(torch.tanh(self.up(self.mlp_norm(x))))
        return y


def network() -> LanguageModel:
    return LanguageModel(VOCABULARY, WIDTH, (Block() for _ in range(NUM_BLOCKS)))


@dataclass
class Run:
    """What one training leaves behind on one rank."""

    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    stats: Stats | None = None


def train(cell: Cell, mesh: DeviceMesh, *, patch: bool) -> Run:
    """Train a new model the way of ``cell``. Collective.

    Args:
        mesh: of one dimension; for a hybrid cell of two, replicas first.
        patch: communicate on demand instead of by FSDP's collectives.

    Returns:
        The mean loss of every step over all ranks; the norm of every step's gradients where the cell clips; this
        rank's part of the gradients that the first ``optimizer.step`` sees; the full parameters at the end.

    Raises:
        UnsupportedError: the cell is refused, on all ranks.
    """
    model = sharded_model(cell, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, eps=EPSILON)
    session = odc.patch_fsdp(model) if patch else None
    run = Run()
    for step in range(STEPS):
        run.losses.append(_accumulate(cell, model, step))
        if cell.clipping == "clip":
            run.norms.append(clip(model, LARGEST_NORM))
        elif session is not None and step == 0:
            session.finish()  # only because the gradients are looked at; the step would do it
        if step == 0:
            run.gradients = local_gradients((name, p.grad) for name, p in model.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
    if session is not None:
        run.stats = session.stats()
        session.close()
    run.parameters = full_parameters(model)
    return run


def sharded_model(cell: Cell, mesh: DeviceMesh) -> nn.Module:
    """The same weights for every cell and on every rank, one unit per block and one for the rest."""
    dtypes = (torch.bfloat16, torch.bfloat16) if cell.precision == "bf16" else None
    torch.manual_seed(0)
    model = network()
    as_if_trained(model)
    return by_unit(model, wrap_of(cell.fsdp, mesh, reshard=cell.sharding != "grad-op", dtypes=dtypes))


def _accumulate(cell: Cell, model: nn.Module, step: int) -> torch.Tensor:
    """Forward and backward of all microbatches of one step; the mean loss over microbatches and ranks."""
    total = torch.zeros(())
    for microbatch in range(cell.num_microbatches):
        tokens = tokens_of(step, dist.get_rank(), microbatch, VOCABULARY, (2, 6 + microbatch))
        with synchronized(model, microbatch >= cell.num_unsynchronized):
            logits = model(tokens[:, :-1]).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / cell.num_microbatches
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    dist.all_reduce(total)
    return total / dist.get_world_size()


# What makes a cell pass: the same losses, gradients and parameters as FSDP's own, and ODC really at work


TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2}


@dataclass(frozen=True)
class Outcome:
    """How a cell ended. Errors are relative to the largest absolute value of each tensor (or of all losses)."""

    cell: Cell
    status: str
    """"passed", "refused" (by ``odc.UnsupportedError`` when patching) or "failed"."""

    reason: str = ""
    """Why, unless it passed."""

    losses: float | None = None
    """Largest error of a step's mean loss."""

    gradients: float | None = None
    """Largest error of a gradient of the first step, and of the norm that clipping found in any step."""

    parameters: float | None = None
    """Largest error of a parameter after the last step."""


def compare(cell: Cell, mesh: DeviceMesh) -> Outcome:
    """Train twice and compare. Collective; every rank returns the same."""
    expected = train(cell, mesh, patch=False)
    try:
        found = train(cell, mesh, patch=True)
    except odc.UnsupportedError as error:
        return Outcome(cell, "refused", str(error))
    errors = {
        "losses": largest_error({"": torch.stack(found.losses)}, {"": torch.stack(expected.losses)}),
        "gradients": largest_error(_gradients_and_norms(found), _gradients_and_norms(expected)),
        "parameters": largest_error(found.parameters, expected.parameters),
    }
    tolerance = TOLERANCES[cell.precision]
    reasons = [f"{what} differ by {error:.1e}" for what, error in errors.items() if not error <= tolerance]
    reasons += _idle(found.stats)
    return Outcome(cell, "failed" if reasons else "passed", "; ".join(reasons), **errors)


def largest_error(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Largest difference, over the ranks' parts of all tensors, relative to the largest value of each whole tensor.

    Collective: the ranks may hold different tensors. A tensor that is missing or has another shape, and a value that
    is not finite, make the error infinite.
    """
    rows = {name: (difference(found.get(name), tensor), largest(tensor)) for name, tensor in expected.items()}
    rows.update({name: (math.inf, 0.0) for name in found if name not in expected})
    ranks = gather_json(ProcessGroupExchange(), rows)
    worst = 0.0
    for name in {name for rank in ranks for name in rank}:
        differences, sizes = zip(*(rank[name] for rank in ranks if name in rank), strict=True)
        worst = max(worst, _ratio(max(differences), max(sizes)))
    return worst


def _ratio(error: float, size: float) -> float:
    if error == 0.0:
        return 0.0
    return error / size if size else math.inf


def difference(found: torch.Tensor | None, expected: torch.Tensor) -> float:
    """The largest; infinite where there is nothing to compare, or a value is not finite."""
    if found is None or found.shape != expected.shape:
        return math.inf
    differences = (found.double() - expected.double()).abs()
    return largest(differences.nan_to_num(nan=math.inf, posinf=math.inf))


def largest(tensor: torch.Tensor) -> float:
    """Absolute value."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _gradients_and_norms(run: Run) -> dict[str, torch.Tensor]:
    """Clipped gradients do not show a wrong factor, their norm before clipping does."""
    return {**run.gradients, **({"norms": torch.stack(run.norms)} if run.norms else {})}


def _idle(stats: Stats | None) -> list[str]:
    """What ODC should have done and did not, on any rank."""
    counts = torch.tensor([stats.gathers, stats.pushes, stats.minibatches] if stats else [0, 0, 0])
    dist.all_reduce(counts, dist.ReduceOp.MIN)
    gathers, pushes, minibatches = counts.tolist()
    if gathers and pushes and minibatches == STEPS:
        return []
    return [f"a rank has {gathers} gathers and {pushes} pushes in {minibatches} of {STEPS} minibatches"]
