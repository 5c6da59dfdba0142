"""What makes a cell pass: the same losses, gradients and parameters as FSDP's own, and ODC really at work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import odc
from odc.bench.proof.conformance.cells import Cell
from odc.bench.proof.conformance.training import STEPS, Run, train
from odc.setup.agreement import ProcessGroupExchange, gather_json
from odc.timeline import Stats

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


def measure(cell: Cell, mesh: DeviceMesh) -> Outcome:
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
